"""The json params of the scheduler block."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import Schedule, schedule_from_params

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
        ({"warmup_steps": 1e3}, "warmup_steps", "a whole number of at least 0, got 1000.0"),
    ],
    ids=str,
)
def test_refused(params: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule_from_params(params)
    assert caught.value.field == f"scheduler.params.{field}"
    assert text in str(caught.value)
