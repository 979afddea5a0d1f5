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


def test_a_decay_that_follows_at_once_keeps_the_rate_it_begins_at_to_the_last_bit() -> None:
    low, lower = 0.8817407808560492, 1 / 3
    assert lower + (low - lower) != low  # else this would test nothing
    first = Schedule(0).with_decay(0, 1, "cosine", low)
    assert first.begin_decay(1, 1, shape="cosine", min_lr_ratio=lower).factor(1) == first.factor(1) == low


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
        broken(version=3),
        broken(version=...),
        broken(unit=...),
        broken(unit="epochs"),
        broken(cancelled=...),
        broken(changes=[{"at": 3}]),
        broken(warmup_steps=...),
        broken(decays=...),
        broken(decays=3),
        broken(decays=[{"start": 90}]),
        broken(decays=[RUN.decays[0].state_dict() | {"speed": 2}]),
        broken(peak=1.0),
    ],
    ids=str,
)
def test_state_refused(state: Any) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_state(state)
    assert caught.value.field in ("schedule state", "unit")


def test_a_state_of_version_1_loads() -> None:
    decay = {"start": 90, "length": 10, "shape": "linear", "min_lr_ratio": 0.1}
    state = {"version": 1, "warmup_steps": 10, "warmup_init_ratio": 0.0, "decays": [decay]}
    assert Schedule.from_state(state) == RUN


# ---- cycles (WSD-S) ----

CYCLES = Schedule(4).with_decay(10, 4, "linear", 0.2, then="stable", rewarmup=2).with_decay(20, 4, "linear")


def test_after_a_decay_back_to_stable() -> None:
    rates = [CYCLES.factor(n) for n in range(10, 25)]
    down, up = [1.0, 0.8, 0.6, 0.4], [0.2, 0.6]
    assert rates == pytest.approx([*down, *up, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0], rel=1e-14)
    phases = [CYCLES.phase(n) for n in (9, 10, 13, 14, 15, 16, 19, 20, 24)]
    expected = ["stable", "decay", "decay", "warmup", "warmup", "stable", "stable", "decay", "done"]
    assert phases == expected
    assert CYCLES.end == 24


def test_back_to_stable_at_once_and_for_good() -> None:
    schedule = Schedule(0).with_decay(2, 2, "linear", then="stable")
    assert [schedule.factor(n) for n in range(6)] == [1.0, 1.0, 1.0, 0.5, 1.0, 1.0]
    assert schedule.end is None and schedule.phase(10**6) == "stable"


def test_back_to_stable_is_back_to_the_peak_from_wherever_the_decay_began() -> None:
    schedule = Schedule(0).with_decay(2, 2, "linear", 0.5).with_decay(6, 2, "linear", 0.1, then="stable")
    assert [schedule.factor(n) for n in (5, 6, 8, 20)] == [0.5, 0.5, 1.0, 1.0]


def test_cycles_refused() -> None:
    with pytest.raises(ScheduleError, match="at least 16, where the decay from 10 ends"):
        Schedule(4).with_decay(10, 4, then="stable", rewarmup=2).with_decay(15, 4)
    with pytest.raises(ScheduleError, match="rewarmup_steps: expected none") as caught:
        Decay(10, 4, rewarmup=2)
    assert "stable" in caught.value.remedy
    with pytest.raises(ScheduleError, match="then"):
        Decay(10, 4, then="again")  # type: ignore[arg-type]


# ---- decided while running ----


def test_begin_decay_keeps_the_past_and_says_when_it_was_decided() -> None:
    stable = Schedule(10)
    schedule = stable.begin_decay(50, 20, shape="linear", min_lr_ratio=0.5)
    assert all(schedule.factor(n) == stable.factor(n) for n in range(51))
    assert (schedule.factor(60), schedule.factor(70), schedule.end) == (0.75, 0.5, 70)
    assert schedule.decays == (Decay(50, 20, "linear", 0.5, decided_at=50),)
    assert schedule.configured() == stable
    assert stable.begin_decay(50, 20, start=60).end == 80


@pytest.mark.parametrize("now,word", [(0, "planned"), (60, "planned"), (61, "running"), (79, "running")])
def test_asking_twice_is_refused_not_stacked(now: int, word: str) -> None:
    schedule = Schedule(0).begin_decay(0, 20, start=60, min_lr_ratio=0.5)
    with pytest.raises(ScheduleError, match=f"one from 60 to 80, {word}") as caught:
        schedule.begin_decay(now, 5)
    assert caught.value.field == "begin_decay"


def test_a_configured_decay_ahead_is_in_the_way_until_it_is_cancelled() -> None:
    with pytest.raises(ScheduleError, match="Cancel the planned one first"):
        RUN.begin_decay(50, 10)
    schedule = RUN.cancel_decay(50).begin_decay(50, 10)
    assert schedule.end == 60
    assert schedule.configured() == RUN  # what the config says is still known


def test_a_decay_may_follow_one_that_is_over() -> None:
    first = Schedule(0).begin_decay(0, 10, min_lr_ratio=0.5, then="stable")
    assert first.begin_decay(10, 10).end == 20
    stopped = Schedule(0).begin_decay(0, 10, min_lr_ratio=0.5)
    assert stopped.begin_decay(10, 10, min_lr_ratio=0.1).factor(20) == 0.1


@pytest.mark.parametrize(
    "now,arguments,field",
    [
        (50, {"length": 10, "start": 49}, "decay_start"),
        (5, {"length": 10}, "decay_start"),  # in the warm-up
        (50, {"length": 0}, "decay_steps"),
        (50, {"length": -3}, "decay_steps"),
        (50, {"length": 10, "shape": "geometric"}, "min_lr_ratio"),
        (50, {"length": 10, "shape": "linnear"}, "decay_shape"),
        (50, {"length": 10, "min_lr_ratio": 1.5}, "min_lr_ratio"),
        (-1, {"length": 10}, "now"),
        (5.0, {"length": 10}, "now"),
    ],
)
def test_begin_decay_refused(now: Any, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(10).begin_decay(now, **arguments)
    assert caught.value.field == field


def test_cancel_before_it_begins_and_not_after() -> None:
    schedule = Schedule(0).begin_decay(40, 10, start=50)
    for now in (40, 50):  # at its start the rate is the full one still
        cancelled = schedule.cancel_decay(now)
        assert cancelled.end is None and cancelled.factor(60) == 1.0
    with pytest.raises(ScheduleError, match="the decay from 50 has begun"):
        schedule.cancel_decay(51)
    with pytest.raises(ScheduleError, match="none is planned"):
        Schedule(0).cancel_decay(3)


def test_cancel_takes_all_that_lie_ahead_and_leaves_the_running_one() -> None:
    schedule = CYCLES.cancel_decay(12)
    assert [decay.start for decay in schedule.decays] == [10]
    assert schedule.end is None
    assert [decay.start for decay in CYCLES.cancel_decay(5).cancelled] == [10, 20]


def test_history_is_in_order_and_survives_the_state() -> None:
    schedule = Schedule(0)
    for now in (5, 5, 9):  # begun and withdrawn three times, twice at the same update
        schedule = schedule.begin_decay(now, 10, start=20, min_lr_ratio=0.5).cancel_decay(now)
    schedule = schedule.begin_decay(9, 10)
    told = [(entry["at"], entry["decision"]) for entry in schedule.history()]
    pair = ["begin_decay", "cancel_decay"]
    assert told == [(5, word) for word in pair * 2] + [(9, word) for word in [*pair, "begin_decay"]]
    again = Schedule.from_state(json.loads(json.dumps(schedule.state_dict())))
    assert again == schedule and again.history() == schedule.history()
    assert json.loads(json.dumps(schedule.history())) == schedule.history()


def test_absolute_minimum_is_met_exactly() -> None:
    peak, low = 3e-4, 1.1e-5
    schedule = Schedule(0).with_decay(10, 10, "linear", low / peak, min_lr=low)
    assert [schedule.rate(n, peak) for n in (0, 10, 20, 30)] == [peak, peak, low, low]
    assert schedule.rate(15, peak) == pytest.approx((peak + low) / 2, rel=1e-15)
    assert Schedule(0).with_decay(1, 1, "linear", 1.0, min_lr=0.0).rate(5, 0.0) == 0.0
