"""Tensor parallelism inside an island: megatron-core's groups, under the names that DeepSpeed asks for.

With T = ``model.tensor_parallel``, rank r of an island has the coordinates (r mod T, r div T). The ranks of
one tensor parallel group are neighbours and hold the pieces of one model; the ranks with equal first
coordinate are a data parallel group, over which ZeRO-3 shards these pieces. T is the same on all islands, so
that equal ranks have equal coordinates.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class TensorParallelUnit:
    """DeepSpeed's ``mpu`` over `megatron.core.parallel_state`, which must be initialised.

    DeepSpeed calls the tensor parallel group the model parallel one, as there is nothing else here.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._state = parallel_state

    def get_model_parallel_world_size(self) -> int:
        """T."""
        return int(self._state.get_tensor_model_parallel_world_size())

    def get_model_parallel_rank(self) -> int:
        """Which piece this rank holds."""
        return int(self._state.get_tensor_model_parallel_rank())

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold the pieces of one model."""
        return self._state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_world_size(self) -> int:
        """The same as `get_model_parallel_world_size`."""
        return self.get_model_parallel_world_size()

    def get_tensor_model_parallel_rank(self) -> int:
        """The same as `get_model_parallel_rank`."""
        return self.get_model_parallel_rank()

    def get_tensor_model_parallel_group(self) -> Any:
        """The same as `get_model_parallel_group`."""
        return self.get_model_parallel_group()

    def get_tensor_model_parallel_src_rank(self) -> int:
        """The first rank of this group, in the island."""
        return int(self._state.get_tensor_model_parallel_src_rank())

    def get_data_parallel_world_size(self) -> int:
        """Ranks of the island over T."""
        return int(self._state.get_data_parallel_world_size())

    def get_data_parallel_rank(self) -> int:
        """Which samples this rank reads, and which shard it holds."""
        return int(self._state.get_data_parallel_rank())

    def get_data_parallel_group(self) -> Any:
        """The ranks that hold the shards of one piece."""
        return self._state.get_data_parallel_group()

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The same, by rank in the island."""
        return list(dist.get_process_group_ranks(self.get_data_parallel_group()))
