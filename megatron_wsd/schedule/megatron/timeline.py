"""From Megatron's settings and the decisions made while running to the pure schedule of a param group."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.decay import Decay
from megatron_wsd.schedule.fields import naming, real
from megatron_wsd.schedule.wsd import Schedule

WORDS = {
    "warmup_steps": "lr_warmup_steps",
    "decay_start": "lr_decay_steps - wsd_decay_steps",
    "decay_steps": "wsd_decay_steps",
    "decay_shape": "lr_wsd_decay_style",
    "decay_power": "wsd_decay_power",
    "min_lr_ratio": "min_lr / max_lr",
}

Planned = tuple[object, object, object, object]  # start, length, style, power; checked where it is built
Decisions = tuple[tuple[Decay, ...], tuple[Decay, ...]]  # in effect, cancelled


def shape_name(style: Any) -> Any:
    """Upstream's name for its own formula; the true exponential is "geometric" in this front."""
    return "megatron_exponential" if style == "exponential" else style


def read_decisions(state: Any) -> Decisions:
    if state is None:
        return (), ()
    try:
        decided, cancelled = (
            tuple(Decay.from_state(decay) for decay in state[key]) for key in ("decided", "cancelled")
        )
    except (TypeError, KeyError) as error:
        raise ScheduleError("wsd_decisions", "what state_dict() writes", state, f"({error})") from error
    return decided, cancelled


@lru_cache(maxsize=256, typed=True)
def schedule_of(
    lr_warmup_steps: float,
    planned: Planned | None,
    decided: tuple[Decay, ...],
    max_lr: float,
    min_lr: float,
) -> Schedule:
    """The pure schedule behind one param group; cached, since it is asked for in every step.

    Warm-up may be fractional, since Megatron computes it as lr_warmup_fraction * lr_decay_steps; its rates
    are upstream's, and here only its end matters.
    """
    with naming(WORDS):
        warmup = math.ceil(real("warmup_steps", lr_warmup_steps))
        peak, low = real("max_lr", max_lr), real("min_lr", min_lr)
        if low > peak:
            raise ScheduleError("min_lr", f"at most max_lr = {peak:g}", low)
        ratio = low / peak if peak else 1.0  # a peak of 0 never moves, so any ratio will do
        decays = [d if d.min_lr is None else replace(d, min_lr=low, min_lr_ratio=ratio) for d in decided]
        if planned is not None:
            start, length, style, power = planned
            first: Any = {"start": start, "length": length, "shape": shape_name(style), "power": power}
            decays.append(Decay(**first, min_lr=low, min_lr_ratio=ratio))
        decays.sort(key=lambda decay: decay.start)
        return Schedule(warmup, tuple(decays), unit="samples")
