"""Decay shapes: how much of the way from the minimum to the peak is left, as a pure function.

A shape is a weight ``w(x, r)`` that falls from 1 at x = 0 to 0 at x = 1, where x is the share of the decay
that is done and r the minimum as a share of the rate at which the decay began. The rate is then

    lr = lr_min + (lr_start - lr_min) * w(x, r),   r = lr_min / lr_start.

Most shapes do not look at r. Those that are defined by the rate itself (``geometric``, ``inverse_sqrt``) do,
and need r > 0, since neither a geometric series nor 1/sqrt(n) ever arrives at 0.

To add a shape, write its formula for 0 < x < 1 and put ``@_shape(...)`` above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import nearest


@dataclass(frozen=True)
class Shape:
    """One entry of the registry; call it as ``shape(x, r)``.

    Attributes:
        name: the canonical name, as states carry it.
        formula: weight for 0 < x < 1 and 0 <= r <= 1.
        needs_minimum: whether r = 0 is refused.
    """

    name: str
    formula: Callable[[float, float], float]
    needs_minimum: bool

    def __call__(self, x: float, min_ratio: float) -> float:
        """Weight left at progress ``x``: exactly 1 for x <= 0, exactly 0 for x >= 1.

        The ends are pinned here, for every shape, so that no rounding inside a formula can make the rate miss
        the peak or the minimum.
        """
        if x <= 0.0:
            return 1.0
        if x >= 1.0:
            return 0.0
        return self.formula(x, min_ratio)


SHAPES: dict[str, Shape] = {}
"""Canonical name -> shape."""

ALIASES: dict[str, str] = {}
"""Other accepted name -> canonical name."""

_Formula = Callable[[float, float], float]


def _shape(*aliases: str, needs_minimum: bool = False) -> Callable[[_Formula], _Formula]:
    def register(formula: _Formula) -> _Formula:
        name = formula.__name__
        SHAPES[name] = Shape(name, formula, needs_minimum)
        ALIASES.update(dict.fromkeys(aliases, name))
        return formula

    return register


def find_shape(name: object) -> Shape:
    """The shape called ``name`` (canonical or alias).

    Raises:
        ScheduleError: no such shape; the nearest name is suggested.
    """
    canonical = ALIASES.get(name, name) if isinstance(name, str) else None
    if canonical not in SHAPES:
        raise ScheduleError(
            "decay_shape", "a known shape", name, nearest(name, SHAPES.keys() | ALIASES.keys())
        )
    return SHAPES[canonical]


@_shape()
def linear(x: float, _: float) -> float:
    """w = 1 - x."""
    return 1.0 - x


@_shape()
def cosine(x: float, _: float) -> float:
    """w = (1 + cos(pi x)) / 2 (SGDR, arXiv:1608.03983)."""
    return 0.5 * (math.cos(math.pi * x) + 1.0)


@_shape("sqrt", "minus_sqrt")
def one_minus_sqrt(x: float, _: float) -> float:
    """w = 1 - sqrt(x) (Hägele et al., arXiv:2405.18392)."""
    return 1.0 - math.sqrt(x)


@_shape("exponential", needs_minimum=True)
def geometric(x: float, r: float) -> float:
    """The true exponential: lr = lr_start * r^x, the same factor in every step. w = (r^x - r) / (1 - r)."""
    if r == 1.0:
        return 1.0 - x  # no way to go, so any weight gives the same rate; this one is the limit for r -> 1
    return (max(r**x, r) - r) / (1.0 - r)


@_shape(needs_minimum=True)
def inverse_sqrt(x: float, r: float) -> float:
    """1/lr^2 grows linearly, from 1/lr_start^2 to 1/lr_min^2: lr = lr_start / sqrt(1 + x (1/r^2 - 1)).

    With k = length / (1/r^2 - 1) that is lr(n) = lr_start * sqrt(k / (k + n - start)): 1/sqrt(n) counted
    from the start of the decay, with the one time constant for which it meets the minimum exactly at the
    end. (sqrt(start / n), counted from the first update, hardly falls during a decay that is short against
    the run, and would need a second, unrelated bend to arrive.) w = (lr / lr_start - r) / (1 - r).
    """
    if r == 1.0:
        return 1.0 - x
    return (max(r / math.sqrt(r * r + (1.0 - r * r) * x), r) - r) / (1.0 - r)


@_shape()
def megatron_exponential(x: float, _: float) -> float:
    """w = 2 * 0.5^x - 1, what Megatron-LM calls ``exponential``; it is no exponential towards lr_min."""
    return (2.0 * math.pow(0.5, x)) - 1.0
