"""Every decay shape: the properties all share, and its values against a second way of writing the formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wsd.schedule import SHAPES, Schedule

# Rates are shares of the peak, so every value is at most 1 and one rounding costs at most 2^-53.
ROUNDING = 2.0**-53

POWER = 1.7
POWERS = {"polynomial": POWER}

# The same rates as shares of the peak, from other formulas than the package uses.
REFERENCE: dict[str, Callable[[float, float], float]] = {
    "linear": lambda x, r: (1 - x) + r * x,
    "cosine": lambda x, r: math.cos(math.pi * x / 2) ** 2 + r * math.sin(math.pi * x / 2) ** 2,
    "one_minus_sqrt": lambda x, r: 1 - (1 - r) * x**0.5,
    "one_minus_square": lambda x, r: (1 - x) * (1 + x) * (1 - r) + r,
    "polynomial": lambda x, r: r + (1 - r) * math.exp(POWER * math.log1p(-x)) if x < 1 else r,
    "geometric": lambda x, r: math.exp(x * math.log(r)),
    "inverse": lambda x, r: 1 / ((1 - x) + x / r),
    "inverse_sqrt": lambda x, r: ((1 - x) + x * r**-2) ** -0.5,
    "megatron_exponential": lambda x, r: (1 - r) * math.exp2(1 - x) + (2 * r - 1),
}

ratios = st.floats(1e-6, 1.0)


def test_reference_covers_every_shape() -> None:
    assert REFERENCE.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
@given(ratio=ratios, x=st.floats(0.0, 1.0))
def test_value(name: str, ratio: float, x: float) -> None:
    rate = ratio + (1.0 - ratio) * SHAPES[name](x, ratio, POWERS.get(name))
    # Either side takes about ten roundings; the argument of the exponential, up to ln(1e6) = 13.8, multiplies
    # its own rounding by at most k * exp(-k) < 0.4. The package takes 1 - x before it takes the power, which
    # rounds by 2^-54 and is multiplied by p (1 - x)^(p - 1) <= 1.7. 32 covers all with some to spare.
    assert rate == pytest.approx(REFERENCE[name](x, ratio), rel=0, abs=32 * ROUNDING)


@pytest.mark.parametrize("name", SHAPES)
@given(
    warmup=st.integers(0, 50),
    stable=st.integers(0, 50),
    length=st.integers(1, 500),
    ratio=ratios,
    init=st.floats(0.0, 1.0),
)
def test_shared_properties(
    name: str, warmup: int, stable: int, length: int, ratio: float, init: float
) -> None:
    start, end = warmup + stable, warmup + stable + length
    schedule = Schedule(warmup, warmup_init_ratio=init).with_decay(
        start, length, name, ratio, power=POWERS.get(name)
    )
    rates = [schedule.factor(n) for n in range(end + 10)]

    # exact at every boundary
    assert rates[0] == (init if warmup else 1.0)
    assert set(rates[warmup : start + 1]) == {1.0}
    assert set(rates[end:]) == {ratio}  # reached at the end, and held
    # warm-up only rises
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    # decay only falls, and stays between minimum and peak; a formula that is smooth in exact arithmetic may
    # still wobble by the few roundings it takes
    assert all(b <= a + 4 * ROUNDING for a, b in zip(rates[start:], rates[start + 1 :], strict=False))
    assert all(ratio <= rate <= 1.0 for rate in rates[start:])
    # phases
    phases = [schedule.phase(n) for n in range(end + 10)]
    assert phases == ["warmup"] * warmup + ["stable"] * stable + ["decay"] * length + ["done"] * 10


@pytest.mark.parametrize("name", SHAPES)
@given(ratio=st.floats(1e-3, 1.0))
def test_continuous_at_both_ends(name: str, ratio: float) -> None:
    def shape(x: float, r: float) -> float:
        return SHAPES[name](x, r, POWERS.get(name))

    assert shape(0.0, ratio) == 1.0
    assert shape(1.0, ratio) == 0.0
    # Just inside: sqrt moves by 2^-30 for x = 2^-60; the steepest inverse_sqrt by x / (2 r^2) < 2^-40.
    assert shape(2.0**-60, ratio) == pytest.approx(1.0, rel=0, abs=2.0**-29)
    # Last float before 1: slopes are at most 1 / (1 - r) * ln(1/r) < 7; the numerator's rounding of 2^-53 is
    # divided by 1 - r as well, which the weight is multiplied by again when it becomes a rate.
    assert (1.0 - ratio) * shape(1.0 - ROUNDING, ratio) == pytest.approx(0.0, abs=16 * ROUNDING)
