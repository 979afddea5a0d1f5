"""WSD: the pure schedule, and its torch, DeepSpeed and Megatron fronts.

Importing this package loads no framework; the fronts load theirs when they are first asked for. Megatron's is
``megatron_wsd.schedule.megatron.OptimizerParamScheduler``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_wsd.schedule.decay import Decay, Then
from megatron_wsd.schedule.lengths import Batch, Length, Unit, parse_length
from megatron_wsd.schedule.params import plan_from_params, schedule_from_params
from megatron_wsd.schedule.plan import OVERRIDABLE, Plan, apply_overrides
from megatron_wsd.schedule.shapes import ALIASES, SHAPES, register_shape
from megatron_wsd.schedule.wsd import Change, Phase, Schedule

if TYPE_CHECKING:
    from megatron_wsd.schedule.deepspeed import WSD, register
    from megatron_wsd.schedule.torch import WarmupStableDecayLR

__all__ = [
    "ALIASES",
    "OVERRIDABLE",
    "SHAPES",
    "WSD",
    "Batch",
    "Change",
    "Decay",
    "Length",
    "Phase",
    "Plan",
    "Schedule",
    "Then",
    "Unit",
    "WarmupStableDecayLR",
    "apply_overrides",
    "parse_length",
    "plan_from_params",
    "register",
    "register_shape",
    "schedule_from_params",
]

_FRONTS = {"WSD": "deepspeed", "register": "deepspeed", "WarmupStableDecayLR": "torch"}


def __getattr__(name: str) -> Any:
    if name not in _FRONTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FRONTS[name]}"), name)
