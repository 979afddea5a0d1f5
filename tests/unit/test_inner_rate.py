"""The inner rate of an island without moments, of one that skipped an update, and of one that was moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_wsd.diloco.inner_rate import InnerRate
from megatron_wsd.schedule.deepspeed import WSD


def engine(beta2: float = 0.75) -> Any:
    """One with a schedule that is flat at 0.5 from step 4 on."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=0.5, betas=(0.9, beta2))
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=WSD(optimizer, warmup_steps=4))


def test_an_island_without_moments_warms_up_over_the_horizon_of_the_second() -> None:
    made = engine()
    rate = InnerRate(made)
    rate.place(100, 0)
    told = []
    assert rate.begin_rewarm() == 8  # 2 / (1 - 0.75)
    for _ in range(11):
        told.append(made.optimizer.param_groups[0]["lr"])
        made.lr_scheduler.step()
        rate.rewarm()
    expected = [0.5 * k / 9 for k in range(1, 9)] + [0.5] * 3
    assert told == pytest.approx(expected, rel=1e-15)


def test_an_optimizer_without_betas_has_nothing_to_warm_up() -> None:
    made = SimpleNamespace(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.5))
    rate = InnerRate(made)
    assert rate.begin_rewarm() == 0
    rate.rewarm()
    assert made.optimizer.param_groups[0]["lr"] == 0.5


def test_a_skipped_update_is_a_step_for_the_schedule() -> None:
    made = engine()
    rate = InnerRate(made)
    made.lr_scheduler.step()
    rate.follow_skipped_update(0)  # it was not skipped
    assert made.lr_scheduler.num_updates == 1
    rate.follow_skipped_update(1)
    assert made.lr_scheduler.num_updates == 2
    assert made.optimizer.param_groups[0]["lr"] == 0.25


def test_a_scheduler_that_cannot_be_moved_is_said_to_be_behind(caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    made.lr_scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 10)
    rate = InnerRate(made)
    rate.place(7, 7)
    assert not caplog.records
    rate.place(8, 7)
    assert "cannot be moved to step 8" in caplog.text
