"""The registry of decay shapes."""

from __future__ import annotations

import pytest

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import ALIASES, SHAPES
from megatron_wsd.schedule.shapes import find_shape


def test_names() -> None:
    assert set(SHAPES) == {
        "linear",
        "cosine",
        "one_minus_sqrt",
        "geometric",
        "inverse_sqrt",
        "megatron_exponential",
    }
    assert ALIASES == {
        "sqrt": "one_minus_sqrt",
        "minus_sqrt": "one_minus_sqrt",
        "exponential": "geometric",
    }
    assert not SHAPES.keys() & ALIASES.keys()


@pytest.mark.parametrize("name", SHAPES.keys() | ALIASES.keys())
def test_find(name: str) -> None:
    assert find_shape(name) is SHAPES[ALIASES.get(name, name)]


@pytest.mark.parametrize(
    "name,suggestion", [("cosin", "'cosine'"), ("one-minus-sqrt", "'one_minus_sqrt'"), ("Linear", "'linear'")]
)
def test_unknown_name_suggests_the_nearest(name: str, suggestion: str) -> None:
    with pytest.raises(ScheduleError, match=f"Did you mean {suggestion}") as caught:
        find_shape(name)
    assert caught.value.field == "decay_shape"


@pytest.mark.parametrize("name", [None, 3, ["linear"], ""])
def test_not_a_name(name: object) -> None:
    with pytest.raises(ScheduleError, match="Known: cosine, exponential"):
        find_shape(name)


@pytest.mark.parametrize("name", SHAPES)
def test_ends_are_pinned_outside_too(name: str) -> None:
    assert SHAPES[name](-0.5, 0.0) == 1.0
    assert SHAPES[name](1.5, 0.0) == 0.0


def test_geometric_falls_by_the_same_factor_in_every_step() -> None:
    rates = [0.01 + 0.99 * SHAPES["geometric"](step / 4, 0.01) for step in range(5)]
    assert rates == pytest.approx([1.0, 10**-0.5, 0.1, 10**-1.5, 0.01], rel=1e-14)


def test_inverse_sqrt_grows_one_over_the_square_evenly() -> None:
    rates = [0.1 + 0.9 * SHAPES["inverse_sqrt"](step / 3, 0.1) for step in range(4)]
    assert [rate**-2 for rate in rates] == pytest.approx([1.0, 34.0, 67.0, 100.0], rel=1e-13)
