"""Many islands in one process: the arithmetic of the real loop, with a virtual clock for its network."""

from megatron_wsd.simulator.clock import Timing, simulate
from megatron_wsd.simulator.islands import ModuleIsland, ModuleShards, TrainableIsland

__all__ = ["ModuleIsland", "ModuleShards", "Timing", "TrainableIsland", "simulate"]
