"""The pure schedule: boundaries, refusals, several decays, state."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
from torch.optim.lr_scheduler import LRScheduler

import megatron_wsd.schedule
from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import Decay, Schedule

RUN = Schedule(10).with_decay(90, 10, "linear", 0.1)


def test_importing_the_package_loads_no_framework() -> None:
    code = (
        "import sys, megatron_wsd.schedule as s; s.schedule_from_params({}).factor(1);"
        "print(*{'torch', 'deepspeed', 'megatron'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b""


def test_fronts_are_found_by_name() -> None:
    assert issubclass(megatron_wsd.schedule.WarmupStableDecayLR, LRScheduler)
    assert megatron_wsd.schedule.WSD.__module__ == "megatron_wsd.schedule.deepspeed"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = megatron_wsd.schedule.nonsense


def test_open_horizon() -> None:
    schedule = Schedule(4, warmup_init_ratio=0.2)
    assert schedule.end is None
    assert [schedule.factor(n) for n in (0, 2, 4, 10**15)] == [0.2, 0.6000000000000001, 1.0, 1.0]
    assert [schedule.phase(n) for n in (0, 3, 4, 10**15)] == ["warmup", "warmup", "stable", "stable"]


def test_phases_and_end() -> None:
    assert RUN.end == 100
    steps = (0, 9, 10, 89, 90, 99, 100, 150)
    phases = ["warmup", "warmup", "stable", "stable", "decay", "decay", "done", "done"]
    assert [RUN.phase(n) for n in steps] == phases


def test_no_warmup_and_decay_from_the_first_update() -> None:
    schedule = Schedule(0).with_decay(0, 4, "linear")
    assert [schedule.factor(n) for n in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert schedule.phase(0) == "decay"


def test_decay_right_after_warmup() -> None:
    assert [Schedule(2).with_decay(2, 2, "linear").factor(n) for n in range(5)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_with_decay_leaves_the_original_alone_and_the_past_too() -> None:
    stable = Schedule(10)
    decayed = stable.with_decay(90, 10, "linear", 0.1)
    assert stable.decays == () and decayed.decays == (Decay(90, 10, "linear", 0.1),)
    assert all(decayed.factor(n) == stable.factor(n) for n in range(91))


def test_a_second_decay_begins_where_the_first_ended() -> None:
    schedule = RUN.with_decay(120, 4, "linear", 0.02)
    assert all(schedule.factor(n) == RUN.factor(n) for n in range(121))
    assert [schedule.factor(n) for n in (100, 110, 120, 124, 200)] == [0.1, 0.1, 0.1, 0.02, 0.02]
    assert schedule.factor(122) == pytest.approx(0.06, rel=1e-15)
    phases = ["decay", "stable", "stable", "decay", "decay", "done"]
    assert [schedule.phase(n) for n in (99, 100, 119, 120, 123, 124)] == phases
    assert schedule.end == 124


def test_geometric_ratio_is_taken_from_the_rate_at_its_start() -> None:
    schedule = RUN.with_decay(100, 2, "geometric", 0.001)  # 0.1 -> 0.01 -> 0.001
    assert schedule.factor(101) == pytest.approx(0.01, rel=1e-14)


@pytest.mark.parametrize(
    "field,value",
    [(name, value) for name in ("warmup_steps",) for value in (-1, 1.0, True, None, "10", math.nan)]
    + [("warmup_init_ratio", value) for value in (-0.1, 1.1, math.nan, True, None, "0")],
)
def test_schedule_fields_refused(field: str, value: Any) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(**{"warmup_steps": 10, field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "attribute,field,value",
    [("start", "decay_start", value) for value in (-1, 1.0, True, None, "90", math.nan)]
    + [("length", "decay_steps", value) for value in (0, -1, 1.0, True, None, "10", math.inf)]
    + [("min_lr_ratio", "min_lr_ratio", value) for value in (-0.1, 1.1, math.nan, math.inf, True, None, "0")]
    + [("shape", "decay_shape", value) for value in ("cosin", None, 1)],
)
def test_decay_fields_refused(attribute: str, field: str, value: Any) -> None:
    with pytest.raises(ScheduleError) as caught:
        Decay(**{"start": 90, "length": 10, attribute: value})
    assert caught.value.field == field


@pytest.mark.parametrize("shape", ["geometric", "exponential", "inverse_sqrt"])
def test_shapes_that_never_reach_zero_want_a_minimum(shape: str) -> None:
    with pytest.raises(
        ScheduleError, match=r"min_lr_ratio: expected more than 0 .* got 0\.0\. Give a minimum"
    ):
        Decay(90, 10, shape, 0)
    assert Decay(90, 10, shape, 1e-9).end == 100


def test_decay_inside_warmup_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        ScheduleError, match=r"at least 10, where warmup_steps ends, got 7 \(10 - 7 = 3 too early\)"
    ):
        Schedule(10).with_decay(7, 10)


def test_overlapping_decays_refused() -> None:
    with pytest.raises(ScheduleError, match=r"at least 100, where the decay from 90 ends, got 95"):
        RUN.with_decay(95, 10, "linear", 0.01)


@pytest.mark.parametrize("first,second", [(0.1, 0.2), (0.0, 0.0)])
def test_decay_that_cannot_lower_the_rate_refused(first: float, second: float) -> None:
    with pytest.raises(ScheduleError, match="A decay only lowers the rate"):
        Schedule(0).with_decay(1, 1, "linear", first).with_decay(5, 1, "linear", second)


def test_total_steps_before_decay_start_refused() -> None:
    with pytest.raises(ScheduleError, match=r"got 80 \(total_steps - decay_start = -10 steps of decay\)"):
        Decay.until(90, 80, "linear", 0.0)


@pytest.mark.parametrize("n", [-1, 1.5, True, None])
def test_position_refused(n: Any) -> None:
    for method in (RUN.factor, RUN.phase):
        with pytest.raises(ScheduleError, match="n: expected a whole number"):
            method(n)


def test_frozen_and_equal_by_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.warmup_steps = 3  # type: ignore[misc]
    assert Schedule(10, [Decay(90, 10, "sqrt", 0)]) == Schedule(10).with_decay(90, 10)  # type: ignore[arg-type]
    assert hash(RUN) == hash(Schedule(10).with_decay(90, 10, "linear", 0.1))
    assert copy.deepcopy(RUN) == RUN == pickle.loads(pickle.dumps(RUN))


@pytest.mark.parametrize(
    "schedule",
    [Schedule(0), RUN, Schedule(3, warmup_init_ratio=0.1), RUN.with_decay(120, 4, "geometric", 0.02)],
)
def test_state_round_trip(schedule: Schedule) -> None:
    assert Schedule.from_state(json.loads(json.dumps(schedule.state_dict()))) == schedule


def broken(**changes: Any) -> dict[str, Any]:
    state = RUN.state_dict() | changes
    return {key: value for key, value in state.items() if value is not ...}


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        broken(version=2),
        broken(version=...),
        broken(warmup_steps=...),
        broken(decays=...),
        broken(decays=3),
        broken(decays=[{"start": 90}]),
        broken(decays=[RUN.decays[0].state_dict() | {"power": 2}]),
        broken(peak=1.0),
    ],
    ids=str,
)
def test_state_refused(state: Any) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_state(state)
    assert caught.value.field == "schedule state"
