"""The Megatron front: what it refuses, and its state under upstream's flags."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Upstream

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import Batch
from megatron_wsd.schedule.megatron import OptimizerParamScheduler

WSD = {"lr_decay_style": "WSD", "wsd_decay_steps": 10, "lr_wsd_decay_style": "linear"}


def build(cls: type[Upstream] = OptimizerParamScheduler, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 100,
        "start_wd": 0.0,
        "end_wd": 0.2,
        "wd_incr_steps": 100,
        "wd_incr_style": "linear",
    }
    groups = changes.pop("groups", [{}])
    return cls(SimpleNamespace(param_groups=groups), **settings | WSD | changes)


@pytest.mark.parametrize(
    "changes,field,text",
    [
        ({"wsd_decay_steps": 91}, "lr_decay_steps - wsd_decay_steps", "lr_warmup_steps ends, got 9 (10 - 9"),
        ({"wsd_decay_steps": 101}, "lr_decay_steps - wsd_decay_steps", "got -1"),
        (
            {"lr_warmup_steps": 90.5},
            "lr_decay_steps - wsd_decay_steps",
            "at least 91, where lr_warmup_steps ends",
        ),
        ({"wsd_decay_steps": 0}, "wsd_decay_steps", "at least 1, got 0"),
        ({"wsd_decay_steps": None}, "wsd_decay_steps", "got None"),
        ({"wsd_decay_steps": 10.0}, "wsd_decay_steps", "got 10.0"),
        ({"lr_wsd_decay_style": None}, "lr_wsd_decay_style", "Known: cosine"),
        ({"lr_wsd_decay_style": "minus-sqrt"}, "lr_wsd_decay_style", "Did you mean 'minus_sqrt'"),
        ({"lr_wsd_decay_style": "geometric", "min_lr": 0.0}, "min_lr / max_lr", "more than 0"),
        ({"min_lr": 2.0}, "min_lr", "at most max_lr = 1, got 2"),
        ({"groups": [{}, {"max_lr": 0.05}]}, "min_lr", "at most max_lr = 0.05, got 0.1"),
        ({"groups": [{"min_lr": 0.0}], "lr_wsd_decay_style": "geometric"}, "min_lr / max_lr", "more than 0"),
    ],
    ids=str,
)
def test_refused_when_built(changes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(**changes)
    assert caught.value.field == field
    assert text in str(caught.value)


def test_unknown_decay_style_refused_when_built() -> None:
    with pytest.raises(Exception, match="wsd decay style is not supported"):
        build(lr_decay_style="wsd")
    build(Upstream, lr_decay_style="wsd")  # upstream would find out after the warm-up


def test_exponential_is_upstreams_and_geometric_the_true_one() -> None:
    for style, middle in (("exponential", 0.1 + 0.9 * (2**0.5 - 1)), ("geometric", 0.1**0.5)):
        scheduler = build(lr_wsd_decay_style=style)
        scheduler.step(95)
        assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(middle, rel=1e-14)


def test_a_group_has_its_own_peak_and_minimum() -> None:
    groups = [{}, {"max_lr": 0.5, "min_lr": 0.005}, {"max_lr": 0.0, "min_lr": 0.0}]
    scheduler = build(lr_wsd_decay_style="geometric", groups=groups)
    scheduler.step(95)
    rates = [group["lr"] for group in groups]
    assert rates == [pytest.approx(0.1**0.5, rel=1e-14), pytest.approx(0.05, rel=1e-14), 0.0]


def test_schedule_is_the_pure_one() -> None:
    scheduler = build(init_lr=0.2)
    for _ in range(110):
        rate = scheduler.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(scheduler.schedule.factor(scheduler.num_steps), rel=1e-15)
        scheduler.step(1)
    with pytest.raises(ScheduleError, match="lr_decay_style"):
        _ = build(lr_decay_style="cosine").schedule


def test_state_carries_what_upstream_leaves_out() -> None:
    ours, theirs = build().state_dict(), build(Upstream).state_dict()
    assert ours.items() >= theirs.items()
    assert ours.keys() - theirs.keys() == {
        "init_lr",
        "wsd_decay_steps",
        "lr_wsd_decay_style",
        "wsd_decay_start",
        "wsd_open_horizon",
        "wsd_decay_power",
        "wsd_decisions",
    }
    assert json.loads(json.dumps(ours)) == ours


def test_loading_sets_the_position_and_both_values_of_every_group() -> None:
    saved = build()
    saved.step(95)
    resumed = build()
    resumed.step(40)
    for _ in range(2):
        resumed.load_state_dict(saved.state_dict())
        assert resumed.num_steps == 95
        assert resumed.optimizer.param_groups == saved.optimizer.param_groups


OTHER = {"wsd_decay_steps": 20, "lr_wsd_decay_style": "cosine", "init_lr": 0.05, "wsd_decay_start": 70}
CHECKPOINT = {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": False}
OVERRIDE = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True}
EQUAL = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": False}


def test_use_checkpoint_takes_the_saved_decay() -> None:
    resumed = build(**CHECKPOINT, **OTHER)
    resumed.load_state_dict(build().state_dict())
    assert resumed.state_dict() == build().state_dict()


def test_override_keeps_the_given_decay() -> None:
    resumed = build(**OVERRIDE, **OTHER)
    resumed.load_state_dict(build().state_dict())
    assert resumed.state_dict() == build(**OTHER).state_dict()


@pytest.mark.parametrize("field", OTHER)
def test_without_either_flag_a_difference_is_refused(field: str) -> None:
    resumed = build(**EQUAL, **{field: OTHER[field]})
    resumed.step(3)
    before = resumed.state_dict(), dict(resumed.optimizer.param_groups[0])
    saved = build()
    saved.step(95)
    with pytest.raises(AssertionError, match=field):
        resumed.load_state_dict(saved.state_dict())
    assert (resumed.state_dict(), resumed.optimizer.param_groups[0]) == before


def test_a_load_that_makes_an_impossible_decay_changes_nothing() -> None:
    resumed = build(**CHECKPOINT)
    resumed.step(95)
    before = resumed.state_dict(), dict(resumed.optimizer.param_groups[0])
    state = build().state_dict() | {"lr_warmup_steps": 95, "max_lr": 7.0}
    with pytest.raises(ScheduleError, match="where lr_warmup_steps ends"):
        resumed.load_state_dict(state)
    assert (resumed.state_dict(), resumed.optimizer.param_groups[0]) == before


def test_upstream_state_loads_with_a_warning_for_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    saved = build(Upstream)
    saved.step(95)
    resumed = build()
    with caplog.at_level(logging.WARNING, logger="megatron_wsd.schedule.megatron"):
        resumed.load_state_dict(saved.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]
    assert "the checkpoint does not say wsd_decay_steps, keeping 10" in caplog.text


@pytest.mark.parametrize("warmup,end", [("warmup_iter", "end_iter"), ("warmup_steps", "decay_steps")])
def test_old_key_names_load(warmup: str, end: str) -> None:
    state = {"start_lr": 1.0, "min_lr": 0.1, warmup: 10, end: 100, "decay_style": "WSD", "num_iters": 95}
    scheduler, upstream = build(), build(Upstream)
    scheduler.load_state_dict(state)
    upstream.load_state_dict(state)
    assert scheduler.num_steps == 95
    assert scheduler.optimizer.param_groups[0]["lr"] == upstream.optimizer.param_groups[0]["lr"]


FLAGS = {"use_checkpoint": CHECKPOINT, "override": OVERRIDE, "equal": EQUAL}
# field of the state -> another value that fits the saved ones and the given ones alike
CHANGES: dict[str, Any] = {
    "max_lr": 2.0,
    "min_lr": 0.05,
    "lr_warmup_steps": 5,
    "lr_decay_steps": 200,
    "start_wd": 0.1,
    "end_wd": 0.3,
    "wd_incr_steps": 150,
    "wd_incr_style": "cosine",
    **OTHER,
}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("field", CHANGES)
def test_every_field_under_every_flag(field: str, flags: str) -> None:
    saved = build()
    saved.step(60)
    resumed = build(**FLAGS[flags], **{field: CHANGES[field]})
    if flags == "equal":
        with pytest.raises(AssertionError, match="do not match"):
            resumed.load_state_dict(saved.state_dict())
        assert resumed.num_steps == 0
        return
    resumed.load_state_dict(saved.state_dict())
    same = build(**({field: CHANGES[field]} if flags == "override" else {}))
    same.step(60)
    for _ in range(50):
        assert resumed.optimizer.param_groups == same.optimizer.param_groups
        assert resumed.state_dict() == same.state_dict()
        resumed.step(1)
        same.step(1)


def test_both_flags_refused() -> None:
    with pytest.raises(AssertionError, match="both override and"):
        build(use_checkpoint_opt_param_scheduler=True, override_opt_param_scheduler=True)


def saved_groups() -> list[dict[str, Any]]:
    """What an optimizer's checkpoint brings: every group of Megatron carries its own range."""
    return [{"max_lr": 1.0, "min_lr": 0.1}, {"max_lr": 0.5, "min_lr": 0.05}]


@pytest.mark.parametrize("flags", FLAGS)
def test_the_range_of_each_group_follows_the_flags(flags: str) -> None:
    given = [{"max_lr": 1.0, "min_lr": 0.1}, {"max_lr": 0.4, "min_lr": 0.02}]
    resumed = build(**FLAGS[flags], groups=given)
    for group, loaded in zip(given, saved_groups(), strict=True):  # the optimizer loads first
        group.update(loaded)
    state = build(groups=saved_groups()).state_dict() | {"num_steps": 50}
    if flags == "equal":
        with pytest.raises(ScheduleError, match=r"max_lr of param group 1: expected 0\.4, as configured"):
            resumed.load_state_dict(state)
        return
    resumed.load_state_dict(state)
    assert [group["lr"] for group in given] == [1.0, 0.4 if flags == "override" else 0.5]
    resumed.step(50)
    assert [group["lr"] for group in given] == [0.1, 0.02 if flags == "override" else 0.05]


# ---- open horizon, own start, commands ----

OPEN: dict[str, Any] = {"wsd_decay_steps": None, "lr_wsd_decay_style": None, "wsd_open_horizon": True}


def rate(scheduler: OptimizerParamScheduler) -> float:
    return scheduler.optimizer.param_groups[0]["lr"]


def test_open_horizon_ends_nothing() -> None:
    scheduler = build(**OPEN)
    scheduler.step(10**7)  # upstream: the minimum, from lr_decay_steps on
    assert (rate(scheduler), scheduler.phase, scheduler.schedule.end) == (1.0, "stable", None)


def test_a_decay_with_a_start_of_its_own() -> None:
    scheduler = build(wsd_decay_start=50)
    assert (scheduler.schedule.decays[0].start, scheduler.schedule.end) == (50, 60)
    scheduler.step(55)
    assert rate(scheduler) == pytest.approx(0.55, rel=1e-15)


@pytest.mark.parametrize(
    "changes,field",
    [
        ({"wsd_decay_start": 95}, "wsd_decay_start"),  # longer than the run
        ({"wsd_decay_start": -1}, "wsd_decay_start"),
        ({"wsd_decay_start": "50"}, "wsd_decay_start"),
        ({"wsd_decay_start": 50, "wsd_open_horizon": True}, "wsd_decay_start"),
        ({"wsd_decay_start": 50, "lr_decay_style": "cosine"}, "lr_decay_style"),
        ({"wsd_open_horizon": True, "lr_decay_style": "cosine"}, "lr_decay_style"),
        ({"lr_wsd_decay_style": "polynomial"}, "wsd_decay_power"),
        ({"wsd_control_dir": "no/such/folder"}, "wsd_control_dir"),
    ],
    ids=str,
)
def test_own_settings_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(**changes)
    assert caught.value.field == field


def test_decay_on_command_and_each_group_reaches_its_own_minimum() -> None:
    groups = [{}, {"max_lr": 0.5, "min_lr": 0.3}]
    scheduler = build(**OPEN, groups=groups)
    scheduler.step(500)
    scheduler.begin_decay(10, shape="linear")
    with pytest.raises(ScheduleError, match="one from 500 to 510, planned"):
        scheduler.begin_decay(10)
    scheduler.step(5)
    assert [group["lr"] for group in groups] == pytest.approx([0.55, 0.4], rel=1e-14)
    with pytest.raises(ScheduleError, match="running"):
        scheduler.begin_decay(10)
    scheduler.step(5)
    assert [group["lr"] for group in groups] == [0.1, 0.3]
    assert scheduler.phase == "done"


def test_command_with_a_ratio_and_back_to_stable() -> None:
    groups = [{}, {"max_lr": 0.5, "min_lr": 0.3}]
    scheduler = build(**OPEN, groups=groups)
    scheduler.step(500)
    scheduler.begin_decay(10, shape="exponential", min_lr_ratio=0.2, then="stable", rewarmup=10)
    scheduler.step(5)  # upstream's "exponential"
    assert rate(scheduler) == pytest.approx(0.2 + 0.8 * (2**0.5 - 1), rel=1e-14)
    scheduler.step(10)
    assert [group["lr"] for group in groups] == pytest.approx([0.6, 0.3], rel=1e-14)
    assert scheduler.phase == "warmup"
    scheduler.step(5)
    assert [group["lr"] for group in groups] == [1.0, 0.5]
    scheduler.begin_decay("30 samples")
    assert scheduler.schedule.end == 550


def test_default_length_style_and_units_of_a_command() -> None:
    scheduler = build(
        **OPEN | {"wsd_decay_steps": 20, "lr_wsd_decay_style": "polynomial"}, wsd_decay_power=2.0
    )
    scheduler.step(50)
    scheduler.begin_decay()
    assert scheduler.schedule.decays[0].length == 20
    assert scheduler.schedule.decays[0].power == 2.0
    scheduler = build(**OPEN, wsd_batch=Batch(samples_per_step=8, tokens_per_sample=100))
    scheduler.step(50)
    scheduler.begin_decay("16e2 tokens", start="10 steps")
    assert (scheduler.schedule.decays[0].start, scheduler.schedule.end) == (80, 96)
    with pytest.raises(ScheduleError, match="a length in samples"):
        build(**OPEN).begin_decay("10 steps", start=20)


def test_a_planned_decay_is_cancelled_and_another_begun() -> None:
    scheduler = build()
    scheduler.step(50)
    with pytest.raises(ScheduleError, match="Cancel the planned one first"):
        scheduler.begin_decay(10)
    scheduler.cancel_decay()
    scheduler.step(200)
    assert rate(scheduler) == 1.0
    scheduler.begin_decay(10, shape="linear")
    scheduler.step(10)
    assert rate(scheduler) == 0.1
    told = [(entry["at"], entry["decision"]) for entry in scheduler.schedule.history()]
    assert told == [(50, "cancel_decay"), (250, "begin_decay")]


@pytest.mark.parametrize("flags", FLAGS)
def test_decisions_are_those_of_the_checkpoint_under_every_flag(flags: str) -> None:
    saved = build(**OPEN)
    saved.step(500)
    saved.begin_decay(10, shape="linear")
    saved.step(5)
    resumed = build(**OPEN, **FLAGS[flags])
    resumed.step(3)
    for _ in range(2):
        resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        assert rate(resumed) == rate(saved) == pytest.approx(0.55, rel=1e-14)
        assert resumed.state_dict() == saved.state_dict()
    theirs = build(Upstream)  # and upstream reads what it knows
    theirs.load_state_dict(saved.state_dict())
    assert theirs.num_steps == 505


def test_a_minimum_overridden_during_a_commanded_decay() -> None:
    saved = build(**OPEN)
    saved.step(500)
    saved.begin_decay(10, shape="linear")
    resumed = build(**OPEN, **OVERRIDE, min_lr=0.0)
    resumed.load_state_dict(saved.state_dict())
    resumed.step(10)
    assert rate(resumed) == 0.0


def test_broken_decisions_refused() -> None:
    scheduler = build(**OPEN)
    before = scheduler.state_dict()
    for broken in ({"decided": []}, {"decided": [{"start": 3}], "cancelled": []}, 3):
        with pytest.raises(ScheduleError, match="wsd_decisions"):
            scheduler.load_state_dict(before | {"wsd_decisions": broken})
    assert scheduler.state_dict() == before


# ---- the control folder ----


def drop(folder: Path, command: Any) -> None:
    text = command if isinstance(command, str) else json.dumps(command)
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / "decay_now.json")


def poll(scheduler: OptimizerParamScheduler) -> None:
    for _ in range(10):
        scheduler.step(1)


def test_a_file_begins_the_decay(tmp_path: Path) -> None:
    scheduler = build(**OPEN, wsd_control_dir=tmp_path)
    poll(scheduler)
    poll(scheduler)
    drop(tmp_path, {"length": 20, "shape": "linear", "run": tmp_path.name})
    poll(scheduler)
    assert scheduler.schedule.decays[0].start == 30
    answer = json.loads((tmp_path / "decay_now.accepted.json").read_text())
    assert (answer["answer"], answer["num_steps"]) == ("accepted", 30)
    assert [file.name for file in tmp_path.iterdir()] == ["decay_now.accepted.json"]
    poll(scheduler)
    assert rate(scheduler) == pytest.approx(0.55, rel=1e-14)


def test_a_file_cancels_it(tmp_path: Path) -> None:
    scheduler = build(**OPEN, wsd_control_dir=tmp_path)
    poll(scheduler)
    drop(tmp_path, {"length": 20, "start": 1000})
    poll(scheduler)
    assert scheduler.schedule.end == 1020
    drop(tmp_path, {"cancel": True})
    poll(scheduler)
    assert scheduler.schedule.end is None


@pytest.mark.parametrize(
    "command,reason",
    [
        ({"length": 20, "start": 5}, "That has passed"),
        ({"length": 20, "run": "another"}, "run: expected"),
        ({"lenght": 20}, "Did you mean 'length'"),
        ({}, "decay_steps: expected a whole number"),
        ({"length": -1}, "decay_steps"),
        ({"length": "20"}, "followed by steps, samples or tokens"),
        ({"length": 20, "shape": "linnear"}, "Did you mean 'linear'"),
        ({"length": 20, "shape": 3}, "a known shape"),
        ({"length": 20, "min_lr_ratio": 2}, "min_lr_ratio"),
        ({"length": 20, "then": "again"}, "then"),
        ({"length": 20, "rewarmup": [3]}, "rewarmup_steps"),
        ({"cancel": True}, "none is planned"),
        ({"cancel": True, "length": 3}, "nothing beside it"),
        ({"cancel": False}, "nothing beside it"),
        ("null", "a json object"),
        ("[1]", "a json object"),
    ],
    ids=str,
)
def test_a_wrong_file_is_refused_and_the_job_goes_on_untouched(
    tmp_path: Path, command: Any, reason: str
) -> None:
    scheduler, untouched = build(**OPEN, wsd_control_dir=tmp_path), build(**OPEN)
    drop(tmp_path, command)
    poll(scheduler)
    poll(untouched)
    answer = json.loads((tmp_path / "decay_now.refused.json").read_text())
    assert answer["answer"] == "refused" and reason in answer["reason"]
    assert not (tmp_path / "decay_now.json").exists()
    assert scheduler.state_dict() == untouched.state_dict()
    assert scheduler.optimizer.param_groups == untouched.optimizer.param_groups


def test_a_second_file_is_refused_not_stacked(tmp_path: Path) -> None:
    scheduler = build(**OPEN, wsd_control_dir=tmp_path)
    poll(scheduler)
    for _ in range(2):
        drop(tmp_path, {"length": 20})
        poll(scheduler)
    assert len(scheduler.schedule.decays) == 1
    assert "running" in json.loads((tmp_path / "decay_now.refused.json").read_text())["reason"]


def test_a_half_written_file_is_left_alone_until_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = build(**OPEN, wsd_control_dir=tmp_path)
    poll(scheduler)
    drop(tmp_path, '{"length": 2')
    with caplog.at_level(logging.WARNING, logger="megatron_wsd.schedule.megatron"):
        poll(scheduler)
        poll(scheduler)
    assert scheduler.schedule.end is None
    assert caplog.text.count("is not whole") == 1
    drop(tmp_path, '{"length": 20}')
    poll(scheduler)
    assert scheduler.schedule.end == 60
