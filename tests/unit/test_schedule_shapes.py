"""The registry of decay shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import ALIASES, SHAPES, Decay, Schedule, register_shape
from megatron_wsd.schedule.shapes import find_shape


def test_names() -> None:
    assert set(SHAPES) == {
        "linear",
        "cosine",
        "one_minus_sqrt",
        "one_minus_square",
        "polynomial",
        "geometric",
        "inverse",
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
    with pytest.raises(
        ScheduleError, match=r"Known: cosine, exponential.* comes first through .*register_shape"
    ):
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


def test_inverse_grows_one_over_the_rate_evenly() -> None:
    rates = [0.1 + 0.9 * SHAPES["inverse"](step / 3, 0.1) for step in range(4)]
    assert [1 / rate for rate in rates] == pytest.approx([1.0, 4.0, 7.0, 10.0], rel=1e-14)


def test_polynomial_wants_its_power_and_the_others_none() -> None:
    half = [Decay(0, 2, "polynomial", 0.0, power=power).weight(1) for power in (1, 2, 0.5)]
    assert half == [0.5, 0.25, 0.5**0.5]
    for power, text in ((None, "got nothing"), (0, "above 0"), (-1.0, "at least 0"), ("2", "got 2")):
        with pytest.raises(ScheduleError, match=text) as caught:
            Decay(0, 2, "polynomial", 0.0, power=power)  # type: ignore[arg-type]
        assert caught.value.field == "decay_power"
    with pytest.raises(ScheduleError, match="It belongs to polynomial"):
        Decay(0, 2, "linear", 0.0, power=2.0)


@pytest.fixture
def own_shapes() -> Iterator[None]:
    before = dict(SHAPES)
    yield
    SHAPES.clear()
    SHAPES.update(before)


def cubic(x: float, _: float) -> float:
    return (1.0 - x) ** 3


def quartic(x: float, _: float) -> float:
    return (1.0 - x) ** 4


@pytest.mark.usefixtures("own_shapes")
def test_a_registered_function_is_a_shape() -> None:
    for _ in range(2):  # repeating it is harmless
        register_shape("cubic", cubic)
    schedule = Schedule(0).with_decay(10, 10, "cubic", 0.2)
    assert schedule.factor(15) == pytest.approx(0.2 + 0.8 * 0.125, rel=1e-15)
    assert (schedule.factor(10), schedule.factor(20)) == (1.0, 0.2)


@pytest.mark.usefixtures("own_shapes")
def test_a_resume_needs_the_same_function_under_the_same_name() -> None:
    register_shape("cubic", cubic)
    state = json.loads(json.dumps(Schedule(0).with_decay(10, 10, "cubic", 0.2).state_dict()))
    assert Schedule.from_state(state).factor(15) == Schedule(0).with_decay(10, 10, "cubic", 0.2).factor(15)
    del SHAPES["cubic"]
    with pytest.raises(ScheduleError, match=r"got cubic\..*register_shape"):
        Schedule.from_state(state)
    register_shape("cubic", quartic)
    with pytest.raises(ScheduleError, match="the function of the saved run"):
        Schedule.from_state(state)


@pytest.mark.usefixtures("own_shapes")
@pytest.mark.parametrize(
    "name,formula,text",
    [
        ("linear", cubic, "a name that is free"),
        ("sqrt", cubic, "a name that is free"),
        ("Cubic", cubic, "lower-case letters"),
        ("up", lambda x, r: x, "falls from 1"),
        ("late", lambda x, r: 1.0 - 0.5 * x, "0.5 at 1"),
        ("bump", lambda x, r: 1.0 - x + 0.5 * (0.4 < x < 0.6), "never rises"),
        ("nothing", lambda x, r: float("nan"), "nan"),
    ],
)
def test_functions_that_are_no_shape_refused(
    name: str, formula: Callable[[float, float], float], text: str
) -> None:
    known = dict(SHAPES)
    with pytest.raises(ScheduleError, match=text):
        register_shape(name, formula)
    assert known == SHAPES
