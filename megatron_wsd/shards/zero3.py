"""The fp32 shards that DeepSpeed ZeRO-3 holds on this rank: what they are, reading and writing them.

ZeRO-3 cuts every parameter into equal flat parts, one a rank, the last one padded. A rank holds a part
twice: the fp32 master inside the optimizer, and the working shard (bf16 or fp32) that is gathered for
forward and backward. Whole parameters may also stay gathered on every rank. Whoever writes a master
must see to all three, else the island goes on with stale weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_wsd.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """This rank's part of one parameter.

    Attributes:
        name: of the parameter in the model.
        shape: of the whole parameter.
        start: index of the shard's first element, in the flat parameter; where tensor parallelism cuts the
            parameter into pieces, in the flat piece.
        numel: elements of the shard, padding not counted; may be 0.
        piece: which piece that is, from 0; None for a parameter that is in one piece, be there tensor
            parallelism or not.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    piece: int | None = None

    @property
    def key_name(self) -> str:
        """A name that tells the pieces of a parameter apart; that of the parameter if it is in one."""
        return self.name if self.piece is None else f"{self.name}/piece {self.piece}"

    @property
    def global_numel(self) -> int:
        """Elements of the whole parameter."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Shards(Protocol):
    """What the outer loop needs of whatever shards a model: here `Zero3Shards`."""

    shards: list[Shard]

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Copy this rank's fp32 parameters into ``out``."""

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Make the island hold ``values``; all ranks must call it."""


def _finish_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


class Zero3Shards:
    """Reads and writes the fp32 shards of a DeepSpeed engine's trainable parameters.

    Args:
        engine: what `deepspeed.initialize` returned, with ZeRO stage 3.

    Raises:
        ConfigError: the engine does not run ZeRO-3, or keeps shards in a way this class cannot write.
    """

    def __init__(self, engine: Any) -> None:
        stage = engine.zero_optimization_stage()
        if stage != 3:
            raise ConfigError("zero_optimization.stage", "3", stage, 'Set "stage": 3 in the DeepSpeed json.')
        self._optimizer: Any = engine.optimizer
        mpu: Any = getattr(engine, "mpu", None)  # that of DeepSpeed's sequence parallelism knows of no pieces
        pieces = int(mpu.get_model_parallel_world_size()) if hasattr(mpu, "get_model_parallel_rank") else 1
        self._params: list[torch.nn.Parameter] = []
        self.shards: list[Shard] = []
        for name, param in engine.module.named_parameters():
            if not param.requires_grad:
                continue
            p: Any = param
            part = p.ds_tensor.ds_numel
            start = min(part * self._partition_rank(p), p.ds_numel)
            shape, piece = tuple(p.ds_shape), None
            if pieces > 1 and getattr(p, "tensor_model_parallel", False):  # a mark of megatron-core's
                piece, cut = int(mpu.get_model_parallel_rank()), p.partition_dim
                shape = (*shape[:cut], shape[cut] * pieces, *shape[cut + 1 :])
            self._params.append(param)
            self.shards.append(Shard(name, shape, start, min(part, p.ds_numel - start), piece))

    def _partition_rank(self, param: Any) -> int:
        group = param.ds_process_group
        return int(torch.distributed.get_rank(group=group))

    def _master(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The fp32 master of this rank's part, padding included: 1-D, a live view."""
        master, _ = self._optimizer._get_fp32_opt_state_partition(param, release_swap_buffers=False)
        return torch.as_tensor(master.detach()).view(-1)

    @torch.no_grad()
    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Copy fp32 masters into ``out``.

        Args:
            out: per shard, in order, a 1-D tensor [shard.numel].
            members: which of `shards`; all by default.
        """
        for i, target in zip(self._which(members), out, strict=True):
            # On a device and into pinned memory without a wait for each; anywhere else this waits.
            target.copy_(self._master(self._params[i])[: self.shards[i].numel], non_blocking=True)
        _finish_copies()

    def _working(self, i: int) -> Any:
        return self._params[i]

    def _which(self, members: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.shards)) if members is None else members

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Make the island hold ``values``, in masters, working shards and gathered copies.

        Must be called by all ranks of the island, between two inner steps.

        Args:
            values: per shard, in order, a 1-D fp32 tensor [shard.numel]; any device.
            members: which of `shards`; all by default.
        """
        for i, value in zip(self._which(members), values, strict=True):
            numel, working = self.shards[i].numel, self._working(i)
            master = self._master(self._params[i])[:numel]
            master.copy_(value, non_blocking=True)
            # not from the master: a copy into pinned memory may be under way still
            working.ds_tensor.data.view(-1)[:numel].copy_(value, non_blocking=True)
        _finish_copies()  # the caller may overwrite its values
        # Gathered copies predate the write. ZeRO-3 keeps small parameters gathered at all times, and others
        # after a forward pass that had no backward, such as a validation: drop them all, and gather anew
        # those that must be. (The small ones first and by hand: the coordinator does not count them.)
        kept = self._optimizer.persistent_parameters
        if kept:
            kept[0].partition(kept)
        self._optimizer.empty_partition_cache()
        if kept:
            kept[0].all_gather(kept)
        self._optimizer.invalidate_secondary_tensor()


@torch.no_grad()
def is_finite(engine: Any) -> bool:
    """Whether the fp32 masters of this rank and all moments of its inner optimizer hold no NaN and no Inf.

    One pass over them, 12 bytes a parameter of the shard with Adam, that needs no memory.
    """
    moments = [t for state in engine.optimizer.optimizer.state.values() for t in state.values()]
    for t in (*engine.optimizer.fp32_partitioned_groups_flat, *moments):
        if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.numel() == 0:
            continue
        if not all(map(math.isfinite, torch.stack(torch.aminmax(t)).tolist())):
            return False
    return True
