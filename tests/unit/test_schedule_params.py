"""The json params of the scheduler block."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import Decay, Schedule, plan_from_params, schedule_from_params

DECAY = {"decay_start": 90, "decay_steps": 10}


@pytest.mark.parametrize(
    "params,schedule",
    [
        ({}, Schedule(0)),
        ({"warmup_steps": 10, "warmup_init_ratio": 0.1}, Schedule(10, (), 0.1)),
        ({"warmup_steps": 10, "decay_start": None, "max_lr": None}, Schedule(10)),
        (DECAY, Schedule(0).with_decay(90, 10, "one_minus_sqrt", 0.0)),
        ({"decay_start": 90, "total_steps": 100}, Schedule(0).with_decay(90, 10)),
        (
            DECAY | {"decay_shape": "exponential", "min_lr_ratio": 0.1, "max_lr": 1e-3},
            Schedule(0).with_decay(90, 10, "geometric", 0.1),
        ),
        ({"max_lr": [1e-3, 0]}, Schedule(0)),
        (
            DECAY | {"decay_shape": "polynomial", "decay_power": 2, "then": "stable", "rewarmup_steps": 3},
            Schedule(0).with_decay(90, 10, "polynomial", 0.0, power=2.0, then="stable", rewarmup=3),
        ),
        (
            DECAY | {"max_lr": [4e-3, 1e-3], "min_lr": 1e-3, "decay_shape": "linear"},
            Schedule(0).with_decay(90, 10, "linear", 0.25, min_lr=1e-3),
        ),
        ({"warmup_steps": "2e3 steps"}, Schedule(2000)),
        ({"warmup_steps": "2e9 tokens"}, Schedule(2 * 10**9, unit="tokens")),
        (
            {
                "warmup_steps": 10,
                "decay_start": "1000 samples",
                "total_steps": "2000 samples",
                "samples_per_step": 4,
            },
            Schedule(40, unit="samples").with_decay(1000, 1000),
        ),
        (
            {
                "warmup_steps": 10,
                "decay_start": "5000 samples",
                "decay_steps": "20e3 tokens",
                "samples_per_step": 4,
                "tokens_per_sample": 8,
            },
            Schedule(320, unit="tokens").with_decay(40000, 20000),
        ),
        (
            {"decay_start": [90, 200], "decay_steps": 10, "rewarmup_steps": 5},
            Schedule(0).with_decay(90, 10, then="stable", rewarmup=5).with_decay(200, 10),
        ),
    ],
    ids=str,
)
def test_accepted(params: dict[str, Any], schedule: Schedule) -> None:
    assert schedule_from_params(params) == schedule


@pytest.mark.parametrize(
    "params,field,text",
    [
        ({"warmup": 10}, "warmup", "Did you mean 'warmup_steps'"),
        ({"warmup_num_steps": 10}, "warmup_num_steps", "Did you mean 'warmup_steps'"),
        ({"total_num_steps": 10}, "total_num_steps", "Did you mean 'total_steps'"),
        ({"decay_shapes": "linear"}, "decay_shapes", "Did you mean 'decay_shape'"),
        ({"warmup_steps": "auto"}, "warmup_steps", '"auto" is filled in by'),
        ({"max_lr": "auto"}, "max_lr", '"auto" is filled in by'),
        (DECAY | {"decay_start": "auto"}, "decay_start", '"auto" is filled in by'),
        (DECAY | {"min_lr_ratio": "auto"}, "min_lr_ratio", '"auto" is filled in by'),
        ({"decay_start": 90, "total_steps": "auto"}, "total_steps", '"auto" is filled in by'),
        ({"decay_start": 90}, "decay_steps", "got neither. total_steps = decay_start + decay_steps"),
        (DECAY | {"total_steps": 100}, "decay_steps", "got both"),
        ({"total_steps": 100}, "decay_start", "since total_steps is given, got nothing"),
        ({"min_lr_ratio": 0.1}, "decay_start", "remove min_lr_ratio for a stable phase without end"),
        ({"decay_start": 90, "total_steps": 90}, "total_steps", "= 0 steps of decay"),
        (DECAY | {"warmup_steps": 91}, "decay_start", "91 - 90 = 1 too early"),
        (DECAY | {"decay_steps": 0}, "decay_steps", "at least 1, got 0"),
        (DECAY | {"decay_shape": "exponential"}, "min_lr_ratio", "approaches 0 without reaching it"),
        (DECAY | {"decay_shape": "cosinus"}, "decay_shape", "Did you mean 'cosine'"),
        ({"max_lr": -1e-3}, "max_lr", "at least 0, got -0.001"),
        ({"max_lr": [1e-3, float("nan")]}, "max_lr", "got nan"),
        ({"warmup_steps": "2000"}, "warmup_steps", 'Write 2000, "2000 steps" or "20e9 tokens"'),
        ({"warmup_steps": "-1 steps"}, "warmup_steps", "got '-1 steps'"),
        (
            {"warmup_steps": 3, "decay_start": "9 tokens", "decay_steps": "9 tokens"},
            "warmup_steps",
            "3 steps",
        ),
        (DECAY | {"decay_steps": "0 samples"}, "decay_steps", "at least 1"),
        (DECAY | {"min_lr": 1e-4}, "min_lr", "a max_lr beside it"),
        (DECAY | {"min_lr": 1e-4, "max_lr": 1e-5}, "min_lr", "at most 1e-05, the peak of param group 0"),
        (DECAY | {"min_lr": 1e-4, "max_lr": 1e-3, "min_lr_ratio": 0.1}, "min_lr", "got both"),
        (DECAY | {"decay_power": 2.0}, "decay_power", "It belongs to polynomial"),
        (DECAY | {"then": "go on"}, "then", "got go on"),
        (DECAY | {"rewarmup_steps": 4}, "rewarmup_steps", 'Set then to "stable"'),
        ({"decay_start": [90, 95], "decay_steps": 10}, "decay_start", "where the decay from 90 ends"),
        ({"decay_start": [90, 200], "total_steps": 300}, "total_steps", "decay_steps instead"),
        ({"samples_per_step": 0}, "samples_per_step", "at least 1"),
        ({"warmup_steps": 1e3}, "warmup_steps", "a whole number of at least 0, got 1000.0"),
    ],
    ids=str,
)
def test_refused(params: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule_from_params(params)
    assert caught.value.field == f"scheduler.params.{field}"
    assert text in str(caught.value)


def test_batch_arithmetic_may_come_from_outside() -> None:
    params = {"warmup_steps": 10, "decay_start": "1e4 tokens", "decay_steps": "1e3 tokens"}
    schedule = schedule_from_params(params, samples_per_step=4, tokens_per_sample=25)
    assert (schedule.unit, schedule.warmup_steps, schedule.end) == ("tokens", 1000, 11000)


def test_the_optimizers_rate_may_be_the_peak() -> None:
    schedule = schedule_from_params(DECAY | {"min_lr": 1e-4}, peak=1e-3)
    assert schedule.decays == (Decay(90, 10, "one_minus_sqrt", 0.1, min_lr=1e-4),)


def test_a_schedule_for_each_param_group() -> None:
    plan = plan_from_params(DECAY | {"min_lr_ratio": [0.1, 0.2]}, [1e-3, 1e-4])
    assert [schedule.decays[0].min_lr_ratio for schedule in plan.schedules] == [0.1, 0.2]
    assert plan.rates(200) == [1e-4, 2e-5]
