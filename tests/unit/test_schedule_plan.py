"""The plan of all param groups: overrides one field at a time, old states, tables of difference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import Decay, Plan, Schedule, apply_overrides, plan_from_params

PARAMS = {
    "warmup_steps": 10,
    "decay_start": 90,
    "decay_steps": 10,
    "decay_shape": "linear",
    "min_lr_ratio": 0.1,
}
PEAKS = (1e-3, 1e-4)


def make(**changes: Any) -> Plan:
    return plan_from_params({k: v for k, v in (PARAMS | changes).items() if v is not None}, PEAKS)


@pytest.mark.parametrize(
    "given,told",
    [
        ({"min_lr_ratio": 0.01}, [("min_lr_ratio", 0.1, 0.01)]),
        ({"decay_steps": 20}, [("decay_steps", 10, 20)]),
        ({"total_steps": 120}, [("decay_steps", 10, 30)]),
        ({"decay_start": 95, "total_steps": 120}, [("decay_start", 90, 95), ("decay_steps", 10, 25)]),
        ({"decay_shape": "sqrt"}, [("decay_shape", "linear", "one_minus_sqrt")]),
        ({"warmup_steps": 5}, [("warmup_steps", 10, 5)]),
        ({"then": "stable", "rewarmup_steps": 3}, [("rewarmup_steps", 0, 3), ("then", "stop", "stable")]),
        ({"max_lr": 2e-3}, [("max_lr", [1e-3, 1e-4], 2e-3)]),
        ({"max_lr": [2e-3, 1e-4]}, [("max_lr", [1e-3, 1e-4], [2e-3, 1e-4])]),
        ({"min_lr_ratio": [0.1, 0.2]}, [("min_lr_ratio", 0.1, [0.1, 0.2])]),
        ({"min_lr_ratio": 0.1, "decay_shape": "linear"}, []),
    ],
    ids=str,
)
def test_one_field_at_a_time(given: dict[str, Any], told: list[tuple[str, Any, Any]]) -> None:
    state = make().state_dict(95)
    changed, changes = apply_overrides(json.loads(json.dumps(state)), given)
    assert sorted((c.field, c.old, c.new) for c in changes) == told
    assert all(change.at == 95 for change in changes)
    plan, position = Plan.from_state(json.loads(json.dumps(changed)))
    assert position == 95
    assert list(plan.schedule.changes) == changes
    # and again: nothing more to change
    assert apply_overrides(changed, given) == (changed, [])


def test_everything_else_stays() -> None:
    saved = make()
    plan, _ = saved.override(95, {"decay_steps": 20})
    for old, new in zip(saved.schedules, plan.schedules, strict=True):
        assert new.decays == (Decay(90, 20, "linear", 0.1),)
        assert (new.warmup_steps, new.unit, new.warmup_init_ratio) == (10, old.unit, 0.0)
    assert plan.peaks == PEAKS


def test_an_absolute_minimum_stays_when_the_peak_changes_and_a_ratio_follows() -> None:
    ratio, _ = make().override(0, {"max_lr": [2e-3, 2e-4]})
    assert ratio.rates(100) == [2e-4, 2e-5]
    saved = make(min_lr_ratio=None, min_lr=[5e-5, 2e-5])
    absolute, changes = saved.override(0, {"max_lr": [2e-3, 2e-4]})
    assert absolute.rates(100) == [5e-5, 2e-5]
    assert {change.field for change in changes} == {"max_lr", "min_lr_ratio"}
    with pytest.raises(ScheduleError, match="at most 1e-05, the peak"):
        saved.override(0, {"max_lr": 1e-5})


def test_a_decay_can_be_given_to_an_open_horizon() -> None:
    open_plan = plan_from_params({"warmup_steps": 10}, PEAKS)
    plan, changes = open_plan.override(50, {"decay_start": 60, "decay_steps": 20, "min_lr_ratio": 0.5})
    assert plan.schedule.end == 80
    assert ("decay_start", None, 60) in [(change.field, change.old, change.new) for change in changes]
    for given in ({"min_lr_ratio": 0.1}, {"decay_steps": 5}, {"total_steps": 5}):
        with pytest.raises(ScheduleError, match=r"an open horizon\. Begin a decay on command"):
            open_plan.override(50, given)


def test_a_commanded_decay_can_be_corrected() -> None:
    plan = plan_from_params({"warmup_steps": 10}, PEAKS).begin_decay(50, 20)
    longer, changes = plan.override(55, {"decay_steps": 40})
    assert longer.schedule.end == 90 and longer.schedule.decays[0].decided_at == 50
    assert [entry["decision"] for entry in longer.schedule.history()] == ["begin_decay", "override"]
    assert longer.schedule.configured() == Schedule(10)
    assert [(change.field, change.old, change.new) for change in changes] == [("decay_steps", 20, 40)]


@pytest.mark.parametrize(
    "given,field,text",
    [
        ({"min_lr_ration": 0.1}, "min_lr_ration", "Did you mean 'min_lr_ratio'"),
        ({"min_lr_ratio": 0.1, "min_lr": 1e-5}, "min_lr", "got both"),
        ({"total_steps": 120, "decay_steps": 20}, "total_steps", "got both"),
        ({"total_steps": 80}, "total_steps", "more than decay_start = 90"),
        ({"decay_start": 5}, "decay_start", "where warmup_steps ends"),
        ({"decay_shape": "geometrc"}, "decay_shape", "Did you mean 'geometric'"),
        ({"decay_shape": "polynomial"}, "decay_power", "got nothing"),
        ({"decay_steps": "20"}, "decay_steps", "got 20"),
        ({"max_lr": [1e-3]}, "max_lr", "2 for as many param groups"),
        ({"max_lr": "auto"}, "max_lr", "auto"),
    ],
    ids=str,
)
def test_overrides_refused(given: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make().override(0, given)
    assert caught.value.field == field and text in str(caught.value)


def test_a_decay_is_not_moved_into_the_past() -> None:
    with pytest.raises(ScheduleError, match=r"decay_start: expected at least 95, .* got 92\. That"):
        make().override(95, {"decay_start": 92})
    with pytest.raises(ScheduleError, match="That has passed"):
        plan_from_params({}, PEAKS).override(50, {"decay_start": 49, "decay_steps": 5})
    assert make().override(95, {"decay_start": 90})[1] == []  # where it is already


def test_leaving_polynomial_leaves_its_power() -> None:
    saved = make(decay_shape="polynomial", decay_power=2.0)
    plan, changes = saved.override(0, {"decay_shape": "linear"})
    assert plan.schedule.decays[0].power is None
    assert {change.field for change in changes} == {"decay_shape", "decay_power"}


def test_a_state_of_one_schedule_for_all_groups_loads() -> None:
    decay = {"start": 90, "length": 10, "shape": "linear", "min_lr_ratio": 0.1}
    schedule = {"version": 1, "warmup_steps": 10, "warmup_init_ratio": 0.0, "decays": [decay]}
    state = {"schedule": schedule, "peaks": list(PEAKS), "num_updates": 95}
    assert make().load(state) == (make(), 95)


@pytest.mark.parametrize(
    "state",
    [
        make().state_dict(3) | {"version": 3},
        make().state_dict(3) | {"peaks": [1e-3]},
        make().state_dict(3) | {"peaks": 1e-3},
        make().state_dict(3) | {"position": -1},
        make().state_dict(3) | {"more": 1},
        {"schedule": {}, "peaks": None, "num_updates": 0},
        "state",
    ],
    ids=str,
)
def test_state_refused(state: Any) -> None:
    with pytest.raises(ScheduleError):
        make().load(state)


def rows(error: ScheduleError) -> list[list[str]]:
    return [line.split() for line in str(error).splitlines()]


def test_difference_names_every_field_once_for_all_groups() -> None:
    with pytest.raises(ScheduleError) as caught:
        make(decay_steps=20, decay_shape="cosine").load(make().state_dict(5))
    assert [row[:3] for row in rows(caught.value) if row and row[0].startswith("schedule.")] == [
        ["schedule.decays[0].length", "10", "20"],
        ["schedule.decays[0].shape", "linear", "cosine"],
    ]


def test_difference_of_one_group_names_the_group() -> None:
    with pytest.raises(ScheduleError) as caught:
        make(min_lr_ratio=[0.1, 0.3]).load(make().state_dict(5))
    assert ["schedule[1].decays[0].min_lr_ratio", "0.1", "0.3"] in rows(caught.value)
    assert "schedule[0]" not in str(caught.value)


def test_decisions_are_not_a_difference_and_an_override_covers_its_own_field_only() -> None:
    saved = make(decay_start=None, decay_steps=None, decay_shape=None, min_lr_ratio=None).begin_decay(20, 5)
    given = plan_from_params({"warmup_steps": 10}, PEAKS)
    assert given.load(saved.state_dict(22)) == (saved, 22)
    other = plan_from_params({"warmup_steps": 11}, PEAKS)
    with pytest.raises(ScheduleError) as caught:
        other.load(saved.state_dict(22), {"decay_steps": 8})
    assert ["schedule.warmup_steps", "10", "11"] in rows(caught.value)
    plan, _ = other.load(saved.state_dict(22), {"warmup_steps": 11})
    assert plan.schedule.warmup_steps == 11 and plan.schedule.decays == saved.schedule.decays
