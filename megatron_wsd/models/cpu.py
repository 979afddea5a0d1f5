"""What megatron-core's GPTModel needs on a machine without CUDA.

Two things stand in its way there: it asks `torch.cuda.current_device()` where to put buffers, and its
random-state tracker saves and restores the CUDA generator. Both are answered with the CPU. Where CUDA
is, nothing is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def prepare_for_cpu() -> None:
    """Let megatron-core build and run on the CPU; does nothing where CUDA is. Safe to call twice."""
    if torch.cuda.is_available():
        return
    import megatron.core.tensor_parallel.random as mcore_random

    current_device: Any = torch.cuda
    current_device.current_device = lambda: torch.device("cpu")

    class CPURNGStatesTracker(mcore_random.CudaRNGStatesTracker):  # type: ignore[misc]
        """Named random states of the CPU generator, behind the interface of the CUDA tracker."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_:
                raise RuntimeError(f"random seed {seed} is already in use")
            if name in self.states_:
                raise RuntimeError(f"random state {name!r} already exists")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = mcore_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise RuntimeError(f"random state {name!r} was never added")
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    module: Any = mcore_random
    if not isinstance(module._CUDA_RNG_STATE_TRACKER, mcore_random.CudaRNGStatesTracker) or not hasattr(
        module._CUDA_RNG_STATE_TRACKER, "megatron_wsd_cpu"
    ):
        tracker = CPURNGStatesTracker()
        tracker.megatron_wsd_cpu = True
        module._CUDA_RNG_STATE_TRACKER = tracker
        module._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # Activation recompute saves and restores "the CUDA state" around its second forward pass.
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def without_shm_comm() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives (only inference uses them).

    To be called before `deepspeed.init_distributed`; saves minutes and a compiler at run time.
    """
    import deepspeed.ops

    ops: Any = deepspeed.ops
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
