"""The Megatron front: what it refuses, and its state under upstream's flags."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Upstream

from megatron_wsd.errors import ScheduleError
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
    assert ours.keys() - theirs.keys() == {"init_lr", "wsd_decay_steps", "lr_wsd_decay_style"}
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


OTHER = {"wsd_decay_steps": 20, "lr_wsd_decay_style": "cosine", "init_lr": 0.05}
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


def test_old_key_names_load() -> None:
    state = {
        "start_lr": 1.0,
        "min_lr": 0.1,
        "warmup_iter": 10,
        "end_iter": 100,
        "decay_style": "WSD",
        "num_iters": 95,
    }
    scheduler, upstream = build(), build(Upstream)
    scheduler.load_state_dict(state)
    upstream.load_state_dict(state)
    assert scheduler.num_steps == 95
    assert scheduler.optimizer.param_groups[0]["lr"] == upstream.optimizer.param_groups[0]["lr"]
