"""Decay shapes: how much of the way from the minimum to the peak is left, as a pure function.

A shape is a weight ``w(x, r)`` that falls from 1 at x = 0 to 0 at x = 1, where x is the share of the decay
that is done and r the minimum as a share of the rate at which the decay began. The rate is then

    lr = lr_min + (lr_start - lr_min) * w(x, r),   r = lr_min / lr_start.

Most shapes do not look at r. Those that are defined by the rate itself (``geometric``, ``inverse``,
``inverse_sqrt``) do, and need r > 0, since neither a geometric series nor 1/n ever arrives at 0.

To add a shape here, write its formula for 0 < x < 1 and put ``@_shape(...)`` above it; to add one from
outside, call ``register_shape``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import nearest


@dataclass(frozen=True)
class Shape:
    """One entry of the registry; call it as ``shape(x, r)``.

    Attributes:
        name: the canonical name, as states carry it.
        formula: weight for 0 < x < 1 and 0 <= r <= 1; takes the power as well if it needs one.
        needs_minimum: whether r = 0 is refused.
        needs_power: whether the shape is a family with a power.
        registered: whether it came through ``register_shape``, so that a state must recognise it.
    """

    name: str
    formula: Callable[..., float]
    needs_minimum: bool = False
    needs_power: bool = False
    registered: bool = False

    def __call__(self, x: float, min_ratio: float, power: float | None = None) -> float:
        """Weight left at progress ``x``: exactly 1 for x <= 0, exactly 0 for x >= 1.

        The ends are pinned here, for every shape, so that no rounding inside a formula can make the rate miss
        the peak or the minimum.
        """
        if x <= 0.0:
            return 1.0
        if x >= 1.0:
            return 0.0
        return self.formula(x, min_ratio, power) if self.needs_power else self.formula(x, min_ratio)


SHAPES: dict[str, Shape] = {}
"""Canonical name -> shape."""

ALIASES: dict[str, str] = {}
"""Other accepted name -> canonical name."""

_Formula = TypeVar("_Formula", bound=Callable[..., float])


def _shape(
    *aliases: str, needs_minimum: bool = False, needs_power: bool = False
) -> Callable[[_Formula], _Formula]:
    def register(formula: _Formula) -> _Formula:
        name = formula.__name__
        SHAPES[name] = Shape(name, formula, needs_minimum, needs_power)
        ALIASES.update(dict.fromkeys(aliases, name))
        return formula

    return register


def register_shape(
    name: str, formula: Callable[[float, float], float], *, needs_minimum: bool = False
) -> None:
    """Make ``name`` a decay shape, for every front and every json.

    A state carries the name and three of its weights: a process that resumes must register the same function
    under the same name before it loads. Repeating the very same registration is harmless.

    Args:
        name: lower-case letters, digits and underscores.
        formula: ``formula(x, r)``, the weight at progress x for a minimum of r times the starting rate; falls
            from 1 at x = 0 to 0 at x = 1 and must not rise. Pure: every rank and every resume calls it anew.
        needs_minimum: refuse r = 0.

    Raises:
        ScheduleError: the name is taken or unusable, or the function does not fall from 1 to 0.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ScheduleError("shape name", "lower-case letters, digits and underscores", name)
    known = SHAPES.get(ALIASES.get(name, name))
    if known is not None and known != Shape(name, formula, needs_minimum, registered=True):
        raise ScheduleError("shape name", "a name that is free", name, "Choose another one.")
    for r in (1e-3, 0.1, 0.5) if needs_minimum else (0.0, 1e-3, 0.1, 0.5):
        weights = [formula(k / 128, r) for k in range(129)]
        # 1e-6: far below what a rate shows, far above the rounding of any formula
        ends = abs(weights[0] - 1.0) <= 1e-6 and abs(weights[-1]) <= 1e-6
        if not ends or not all(-1e-6 <= b <= a + 1e-6 for a, b in pairwise(weights)):
            raise ScheduleError(
                f"shape {name}",
                "a weight that falls from 1 at x = 0 to 0 at x = 1 and never rises",
                f"{weights[0]:g} at 0, {weights[64]:g} at 1/2, {weights[-1]:g} at 1 (r = {r:g})",
            )
    SHAPES[name] = Shape(name, formula, needs_minimum, registered=True)


def find_shape(name: object) -> Shape:
    """The shape called ``name`` (canonical or alias).

    Raises:
        ScheduleError: no such shape; the nearest name is suggested.
    """
    canonical = ALIASES.get(name, name) if isinstance(name, str) else None
    if canonical not in SHAPES:
        known = nearest(name, SHAPES.keys() | ALIASES.keys())
        own = "One of your own comes first through megatron_wsd.schedule.register_shape."
        raise ScheduleError("decay_shape", "a known shape", name, f"{known} {own}")
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


@_shape()
def one_minus_square(x: float, _: float) -> float:
    """w = 1 - x^2: late and steep, the mirror image of one_minus_sqrt."""
    return 1.0 - x * x


@_shape(needs_power=True)
def polynomial(x: float, _: float, power: float) -> float:
    """w = (1 - x)^p: linear for p = 1, flatter towards the end for p > 1, steeper for p < 1."""
    return math.pow(1.0 - x, power)


@_shape("exponential", needs_minimum=True)
def geometric(x: float, r: float) -> float:
    """The true exponential: lr = lr_start * r^x, the same factor in every step. w = (r^x - r) / (1 - r)."""
    if r == 1.0:
        return 1.0 - x  # no way to go, so any weight gives the same rate; this one is the limit for r -> 1
    return (max(r**x, r) - r) / (1.0 - r)


@_shape(needs_minimum=True)
def inverse(x: float, r: float) -> float:
    """1/lr grows linearly, from 1/lr_start to 1/lr_min: lr = lr_start / (1 + x (1/r - 1)).

    w = (lr / lr_start - r) / (1 - r), which is r (1 - x) / (r + (1 - r) x).
    """
    return r * (1.0 - x) / (r + (1.0 - r) * x)


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
