"""The torch front."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import Schedule, WarmupStableDecayLR


def make_optimizer(*peaks: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": peak} for peak in peaks]
    return torch.optim.AdamW(groups)


def advance(scheduler: WarmupStableDecayLR, steps: int) -> None:
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()


def textbook_factor(step: int, warmup: int, start: int, total: int, low: float, decay_type: str) -> float:
    """The usual way to write WSD down, independent of the package."""
    if step < warmup:
        return step / warmup
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / (total - start))
    if decay_type == "cosine":
        return low + 0.5 * (1.0 - low) * (1.0 + math.cos(math.pi * progress))
    if decay_type == "linear":
        return low + (1.0 - low) * (1.0 - progress)
    return low + (1.0 - low) * (1.0 - math.sqrt(progress))


@settings(deadline=None, max_examples=50)
@given(
    decay_type=st.sampled_from(["linear", "cosine", "sqrt"]),
    warmup=st.integers(0, 20),
    stable=st.integers(0, 20),
    length=st.integers(1, 20),
    low=st.floats(0.0, 1.0),
)
def test_equals_the_textbook(decay_type: str, warmup: int, stable: int, length: int, low: float) -> None:
    start, total = warmup + stable, warmup + stable + length
    optimizer = make_optimizer(3e-4, 1e-2)
    scheduler = WarmupStableDecayLR(optimizer, warmup, start, total, low, decay_type)
    for step in range(total + 3):
        factor = textbook_factor(step, warmup, start, total, low, decay_type)
        # the same operations up to a multiplication by 1/2, which is exact
        assert [group["lr"] for group in optimizer.param_groups] == [3e-4 * factor, 1e-2 * factor]
        advance(scheduler, 1)


def test_is_a_torch_scheduler_with_the_promised_defaults() -> None:
    scheduler = WarmupStableDecayLR(make_optimizer(1.0), 10, 90, 100)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    (decay,) = scheduler.schedule.decays
    assert (decay.shape, decay.min_lr_ratio) == ("cosine", 0.0)
    assert scheduler.get_last_lr() == [0.0]
    advance(scheduler, 95)
    assert (scheduler.num_updates, scheduler.phase) == (95, "decay")
    assert scheduler.get_last_lr() == scheduler.get_lr() == [0.5]


def test_open_horizon() -> None:
    scheduler = WarmupStableDecayLR(make_optimizer(1.0), 2, None, None)
    advance(scheduler, 500)
    assert scheduler.get_last_lr() == [1.0] and scheduler.phase == "stable"


def test_decay_on_command() -> None:
    scheduler = WarmupStableDecayLR(make_optimizer(1.0, 0.5), 2, None, None)
    advance(scheduler, 10)
    scheduler.begin_decay(4, start=12, shape="linear", min_lr_ratio=0.5)
    with pytest.raises(ScheduleError, match="planned"):
        scheduler.begin_decay(4)
    scheduler.cancel_decay()
    scheduler.begin_decay(4, shape="linear", then="stable")
    seen = []
    for _ in range(6):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        advance(scheduler, 1)
    assert seen == [1.0, 0.75, 0.5, 0.25, 1.0, 1.0]
    resumed = WarmupStableDecayLR(make_optimizer(1.0, 0.5), 2, None, None)
    resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert resumed.state_dict() == scheduler.state_dict()
    told = [entry["decision"] for entry in resumed.schedule.history()]
    assert told == ["begin_decay", "cancel_decay", "begin_decay"]


def test_any_schedule_in_steps() -> None:
    cycles = Schedule(0).with_decay(2, 2, "linear", then="stable").with_decay(6, 2, "linear")
    scheduler = WarmupStableDecayLR.from_schedule(make_optimizer(2.0), cycles)
    seen = []
    for _ in range(9):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        advance(scheduler, 1)
    assert seen == [2.0, 2.0, 2.0, 1.0, 2.0, 2.0, 2.0, 1.0, 0.0]
    for schedule in (Schedule(0, unit="tokens"), Schedule(0).with_decay(1, 1, min_lr=0.0)):
        with pytest.raises(ScheduleError, match="Use WSD"):
            WarmupStableDecayLR.from_schedule(make_optimizer(2.0), schedule)


def test_override_of_the_peak() -> None:
    scheduler = WarmupStableDecayLR(make_optimizer(1.0, 0.5), 2, None, None)
    advance(scheduler, 10)
    resumed = WarmupStableDecayLR(make_optimizer(1.0, 0.5), 2, None, None)
    resumed.load_state_dict(scheduler.state_dict(), overrides={"max_lr": [0.25, 0.125]})
    assert resumed.get_last_lr() == resumed.base_lrs == [0.25, 0.125]
    advance(resumed, 1)
    assert resumed.get_last_lr() == [0.25, 0.125]


def test_chained_resume_with_last_epoch() -> None:
    optimizer = make_optimizer(1e-3, 1e-4)
    scheduler = WarmupStableDecayLR(optimizer, 5, 20, 40, 0.1, "linear")
    advance(scheduler, 30)

    resumed = make_optimizer(1e-3, 1e-4)
    resumed.load_state_dict(optimizer.state_dict())
    again = WarmupStableDecayLR(resumed, 5, 20, 40, 0.1, "linear", last_epoch=29)
    assert again.num_updates == 30
    for _ in range(15):
        assert again.get_last_lr() == scheduler.get_last_lr()
        advance(scheduler, 1)
        advance(again, 1)


def test_resume_into_a_loaded_optimizer_keeps_the_peak() -> None:
    optimizer = make_optimizer(1e-3)
    scheduler = WarmupStableDecayLR(optimizer, 5, 20, 40, 0.1)
    advance(scheduler, 35)
    resumed = make_optimizer(1e-3)
    resumed.load_state_dict(optimizer.state_dict())  # its lr is the decayed one by now
    again = WarmupStableDecayLR(resumed, 5, 20, 40, 0.1)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_last_lr() == scheduler.get_last_lr()


def test_load_sets_the_rates_without_the_optimizer_state_and_without_warnings() -> None:
    scheduler = WarmupStableDecayLR(make_optimizer(1.0), 5, 20, 40, 0.1)
    advance(scheduler, 30)
    resumed = WarmupStableDecayLR(make_optimizer(1.0), 5, 20, 40, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        assert resumed.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        advance(resumed, 1)


def test_rate_in_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    scheduler = WarmupStableDecayLR(make_optimizer(rate), 4, 8, 12, 0.0, "linear")
    held = scheduler.optimizer.param_groups[0]["lr"]
    advance(scheduler, 2)
    assert held.item() == 0.25
    other = WarmupStableDecayLR(make_optimizer(rate.new_tensor(0.5)), 4, 8, 12, 0.0, "linear")
    held = other.optimizer.param_groups[0]["lr"]
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert held.item() == 0.25


def test_inside_sequential_lr() -> None:
    optimizer = make_optimizer(1.0)
    parts = [
        torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 100),
        WarmupStableDecayLR(optimizer, 2, 4, 6),
    ]
    chain = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
    seen = []
    for _ in range(10):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        chain.step()
    assert seen == [0.5, 0.5, 0.5, 0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]


def test_state_of_another_schedule_refused_with_a_table() -> None:
    scheduler = WarmupStableDecayLR(make_optimizer(1e-3), 5, 20, 40, 0.1)
    advance(scheduler, 7)
    other = WarmupStableDecayLR(make_optimizer(2e-3), 5, 20, 50, 0.1, "linear")
    before = other.state_dict()
    with pytest.raises(ScheduleError) as caught:
        other.load_state_dict(scheduler.state_dict())
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert ["saved", "given"] in rows
    assert ["schedule.decays[0].length", "20", "30"] in rows
    assert ["schedule.decays[0].shape", "cosine", "linear"] in rows
    assert ["peaks[0]", "0.001", "0.002"] in rows
    assert "min_lr_ratio" not in str(caught.value)  # equal fields stay out
    assert other.state_dict() == before


@pytest.mark.parametrize(
    "state", [None, {}, {"last_epoch": 3}, {"schedule": {}, "peaks": [], "num_updates": 0}]
)
def test_foreign_state_refused(state: Any) -> None:
    with pytest.raises(ScheduleError, match="state"):
        WarmupStableDecayLR(make_optimizer(1.0), 5, 20, 40).load_state_dict(state)


@pytest.mark.parametrize("position", [-1, 1.5, None])
def test_impossible_position_refused(position: Any) -> None:
    scheduler = WarmupStableDecayLR(make_optimizer(1.0), 5, 20, 40)
    with pytest.raises(ScheduleError, match="num_updates"):
        scheduler.load_state_dict(scheduler.state_dict() | {"num_updates": position})


@pytest.mark.parametrize(
    "args,field,text",
    [
        ((-1, 20, 40), "warmup_steps", "got -1"),
        ((30, 20, 40), "decay_start_step", "30 - 20 = 10 too early"),
        ((5, 20, 20), "total_steps", "total_steps - decay_start_step = 0 steps of decay"),
        ((5, 40, 20), "total_steps", "more than decay_start_step = 40"),
        ((5, 20, None), "total_steps", "or None for both"),
        ((5, None, 20), "total_steps", "or None for both"),
        ((5, 20.0, 40), "decay_start_step", "got 20.0"),
        ((5, 20, 40, 1.5), "min_lr_ratio", "got 1.5"),
        ((5, 20, 40, 0.1, "cosin"), "decay_type", "Did you mean 'cosine'"),
        ((5, 20, 40, 0.0, "exponential"), "min_lr_ratio", "for decay_type 'exponential'"),
    ],
)
def test_refused_in_its_own_words(args: tuple[Any, ...], field: str, text: str) -> None:
    optimizer = make_optimizer(1.0)
    with pytest.raises(ScheduleError) as caught:
        WarmupStableDecayLR(optimizer, *args)
    assert caught.value.field == field
    assert text in str(caught.value)
    assert optimizer.param_groups[0]["lr"] == 1.0
