"""The DeepSpeed front, driven by the engine's own code without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import WSD, register

PARAMS = {
    "warmup_steps": 4,
    "decay_start": 8,
    "total_steps": 12,
    "decay_shape": "linear",
    "min_lr_ratio": 0.1,
}


def make_optimizer(*peaks: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": peak} for peak in peaks]
    return torch.optim.AdamW(groups)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


class ZeroWrapper:
    """What the engine hands over: holds the optimizer, is none, and promotes its param groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


class Engine(SimpleNamespace):
    """The parts of an engine that ``_scheduler_from_config`` and the scheduler call in ``step`` look at."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> None:
        super().__init__(optimizer=ZeroWrapper(optimizer))
        self.scheduler_name = lambda: "WSD"
        self.scheduler_params = lambda: params
        self.lr_scheduler = DeepSpeedEngine._scheduler_from_config(self, self.optimizer)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_schedules, "WSD", None, raising=False)  # removed again after the test
    register()
    register()


def test_the_engine_finds_it_by_name() -> None:
    optimizer = make_optimizer(1.0)
    scheduler = Engine(optimizer, PARAMS).lr_scheduler
    assert type(scheduler) is WSD
    assert scheduler.optimizer is optimizer
    assert not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    # a callable would be taken for a factory when it is passed as client scheduler
    assert not callable(scheduler)


def test_deepspeeds_helpers_for_its_own_schedules_still_answer() -> None:
    assert lr_schedules.get_lr_from_config({"type": "WSD", "params": PARAMS})[0] is None


def test_first_update_runs_at_the_first_rate_and_each_update_counts_once() -> None:
    optimizer = make_optimizer(1.0)
    scheduler = Engine(optimizer, PARAMS).lr_scheduler
    used = []
    for n in range(14):
        assert (scheduler.num_updates, scheduler.phase) == (n, scheduler.schedule.phase(n))
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert used == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]


def test_peaks_come_from_the_optimizer_group_by_group() -> None:
    optimizer = make_optimizer(1e-3, 0.0, 2e-4)
    scheduler = WSD(optimizer, **PARAMS)
    scheduler.set_position(6)
    assert scheduler.peaks == [1e-3, 0.0, 2e-4]
    assert scheduler.get_lr() == scheduler.get_last_lr() == rates(optimizer) == [1e-3, 0.0, 2e-4]


def test_max_lr_goes_before_the_optimizers_lr() -> None:
    assert WSD(make_optimizer(1.0, 2.0), **PARAMS, max_lr=3e-4).peaks == [3e-4, 3e-4]
    assert WSD(make_optimizer(1.0, 2.0), **PARAMS, max_lr=[3e-4, 0]).peaks == [3e-4, 0.0]


def test_a_second_scheduler_on_the_same_optimizer_finds_the_same_peak() -> None:
    optimizer = make_optimizer(1e-3)
    WSD(optimizer, **PARAMS).set_position(11)
    assert WSD(optimizer, **PARAMS).peaks == [1e-3]


@pytest.mark.parametrize(
    "peaks,max_lr", [((0.0,), None), ((1.0,), 0), ((1.0,), [1.0, 1.0]), ((float("nan"),), None)]
)
def test_peaks_refused(peaks: tuple[float, ...], max_lr: Any) -> None:
    with pytest.raises(ScheduleError, match="lr"):
        WSD(make_optimizer(*peaks), **PARAMS, max_lr=max_lr)


def test_unknown_param_refused_by_name_through_the_engine() -> None:
    with pytest.raises(
        ScheduleError, match=r"scheduler\.params\.warmup_num_steps.*Did you mean 'warmup_steps'"
    ):
        Engine(make_optimizer(1.0), {"warmup_num_steps": 4})


def test_rates_reach_the_groups_that_a_load_put_in_place() -> None:
    optimizer = make_optimizer(1.0)
    scheduler = Engine(optimizer, PARAMS).lr_scheduler
    old = optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0] is not old
    scheduler.step()
    assert rates(optimizer) == [0.25]


def test_rate_in_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = make_optimizer(rate)
    scheduler = WSD(optimizer, **PARAMS)
    scheduler.set_position(2)
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    assert scheduler.peaks == [0.5]


@pytest.mark.parametrize("n", [-1, 1.0, True, None])
def test_impossible_position_refused_and_nothing_changed(n: Any) -> None:
    scheduler = WSD(make_optimizer(1.0), **PARAMS)
    scheduler.set_position(3)
    with pytest.raises(ScheduleError, match="num_updates"):
        scheduler.set_position(n)
    assert (scheduler.num_updates, rates(scheduler.optimizer)) == (3, [0.75])


def take_model_step(engine: Engine, lr_kwargs: dict[str, Any] | None = None) -> None:
    """The engine's own ``_take_model_step``, with the rest of an engine held still."""
    engine.gradient_clipping = lambda: 0.0
    engine.torch_autocast_z0_gradscaler = None
    engine.bfloat16_enabled = engine.fp16_enabled = lambda: False
    engine.zero_optimization = lambda: True
    engine.optimizer.step, engine.optimizer.zero_grad = lambda: None, lambda: None
    engine.train_batch_size = lambda: 32
    engine.steps_per_print = lambda: None
    engine.managed_gradient_accumulation = lambda: True
    engine.global_steps = engine.global_samples = engine.skipped_steps = 0
    engine.global_rank = 0
    engine.tput_timer = engine.monitor = None
    DeepSpeedEngine._take_model_step(engine, lr_kwargs)


def test_the_engine_steps_it_once_per_update_and_not_on_overflow() -> None:
    engine = Engine(make_optimizer(1.0), PARAMS)
    take_model_step(engine)
    assert engine.lr_scheduler.num_updates == 1
    engine.optimizer.overflow = True
    take_model_step(engine)
    assert engine.lr_scheduler.num_updates == 1


def test_a_genuine_type_error_is_not_turned_into_a_jump() -> None:
    engine = Engine(make_optimizer(1.0), PARAMS)
    broken = replace(engine.lr_scheduler._plan, peaks=(None,))  # breaks the multiplication inside step()
    engine.lr_scheduler._plan = broken
    with pytest.raises(ScheduleError, match="counts optimizer updates, got 32") as caught:
        take_model_step(engine)
    assert isinstance(caught.value.__context__, TypeError)
    assert engine.lr_scheduler.num_updates == 0


# ---- units ----

TOKENS = {"warmup_steps": "4000 tokens", "decay_start": "8e3 tokens", "decay_steps": "4000 tokens"}


def test_a_schedule_in_tokens_moves_by_what_an_update_takes() -> None:
    optimizer = make_optimizer(1.0)
    scheduler = WSD(optimizer, **TOKENS, decay_shape="linear")
    for increment, rate in ((1000, 0.25), (500, 0.375), (7500, 0.75), (5000, 0.0)):  # as the batch grows
        scheduler.step(increment=increment)
        assert rates(optimizer) == [pytest.approx(rate, rel=1e-15)]
    assert scheduler.position == 14000
    with pytest.raises(ScheduleError, match="Read position"):
        _ = scheduler.num_updates


def test_the_engine_hands_the_tokens_of_an_update_through() -> None:
    engine = Engine(make_optimizer(1.0), TOKENS)
    take_model_step(engine, {"increment": 1000})
    assert engine.lr_scheduler.position == 1000
    with pytest.raises(ScheduleError, match="counts optimizer updates, got 32") as caught:
        take_model_step(engine, {"tokens": 1000})  # a misspelt argument is a TypeError, not a jump
    assert isinstance(caught.value.__context__, TypeError)
    assert engine.lr_scheduler.position == 1000


def test_a_bare_step_needs_to_know_what_an_update_holds() -> None:
    scheduler = WSD(make_optimizer(1.0), **TOKENS)
    with pytest.raises(ScheduleError, match="increment: expected the tokens of this update, got nothing"):
        scheduler.step()
    scheduler = WSD(make_optimizer(1.0), **TOKENS, samples_per_step=4, tokens_per_sample=250)
    scheduler.step()
    assert scheduler.position == 1000
    with pytest.raises(ScheduleError, match="this schedule counts updates"):
        WSD(make_optimizer(1.0), **PARAMS).step(increment=3)


# ---- minimums, decisions, overrides ----


def test_each_group_has_a_minimum_of_its_own_through_every_save_and_load() -> None:
    def build() -> WSD:
        params = {"warmup_steps": 0, "decay_start": 10, "decay_steps": 10, "decay_shape": "geometric"}
        return WSD(
            make_optimizer(1.0, 2.0, 0.0), **params, max_lr=[1e-2, 1e-3, 0.0], min_lr=[1e-4, 5e-4, 0.0]
        )

    scheduler = build()
    scheduler.set_position(15)
    expected = [1e-3, (1e-3 * 5e-4) ** 0.5, 0.0]
    assert scheduler.get_lr() == pytest.approx(expected, rel=1e-13)
    resumed = build()
    resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert resumed.get_lr() == rates(resumed.optimizer) == scheduler.get_lr()
    resumed.set_position(20)
    assert rates(resumed.optimizer) == [1e-4, 5e-4, 0.0]


def test_minimum_above_the_peak_of_a_group_refused() -> None:
    with pytest.raises(ScheduleError, match=r"at most 0\.0001, the peak of param group 1"):
        WSD(make_optimizer(1e-2, 1e-4), decay_start=1, decay_steps=1, min_lr=1e-3)
    with pytest.raises(ScheduleError, match="2 for as many param groups"):
        WSD(make_optimizer(1e-2, 1e-4), decay_start=1, decay_steps=1, min_lr=[1e-3])


def test_begin_decay_on_a_running_front() -> None:
    optimizer = make_optimizer(1.0, 0.5)
    scheduler = WSD(optimizer, warmup_steps=4)
    scheduler.set_position(10)
    schedule = scheduler.begin_decay(4, shape="linear", min_lr_ratio=[0.0, 0.5])
    assert schedule is scheduler.schedule and schedule.end == 14
    assert rates(optimizer) == [1.0, 0.5]
    scheduler.step()
    scheduler.step()
    assert rates(optimizer) == [0.5, 0.375]
    before = scheduler.state_dict()
    with pytest.raises(ScheduleError, match="running"):
        scheduler.begin_decay(4)
    with pytest.raises(ScheduleError, match="has begun"):
        scheduler.cancel_decay()
    assert scheduler.state_dict() == before

    resumed = WSD(make_optimizer(1.0, 0.5), warmup_steps=4)  # the config knows nothing of it
    resumed.load_state_dict(json.loads(json.dumps(before)))
    assert rates(resumed.optimizer) == [0.5, 0.375]
    assert resumed.schedule.history() == scheduler.schedule.history()
    assert resumed.state_dict() == before


def test_lengths_of_a_decision_may_name_their_unit() -> None:
    scheduler = WSD(make_optimizer(1.0), warmup_steps=4, samples_per_step=8, tokens_per_sample=100)
    scheduler.set_position(10)
    assert scheduler.begin_decay("7900 tokens", start="160 samples").end == 30  # 9.9 updates are ten
    in_tokens = WSD(make_optimizer(1.0), warmup_steps="4000 tokens")
    in_tokens.set_position(5000)
    with pytest.raises(ScheduleError, match=r"decay_steps: expected a length in tokens, .* got 10 steps"):
        in_tokens.begin_decay("10 steps")
    assert in_tokens.begin_decay(1000).end == 6000


def test_override_on_load_changes_one_field_and_records_it() -> None:
    scheduler = WSD(make_optimizer(1.0), **PARAMS)
    scheduler.set_position(6)
    state = scheduler.state_dict()
    for params in (PARAMS, PARAMS | {"min_lr_ratio": 0.5}):  # the config may or may not say it already
        resumed = WSD(make_optimizer(1.0), **params)
        resumed.load_state_dict(state, overrides={"min_lr_ratio": 0.5})
        resumed.set_position(12)
        assert rates(resumed.optimizer) == [0.5]
        (change,) = resumed.schedule.changes
        assert (change.at, change.field, change.old, change.new) == (6, "min_lr_ratio", 0.1, 0.5)
    with pytest.raises(ScheduleError, match="override these fields by name"):
        resumed.load_state_dict(state)  # it says 0.5, the state 0.1, and nothing says which


def test_state_of_another_schedule_refused_with_a_table() -> None:
    scheduler = WSD(make_optimizer(1e-3), **PARAMS)
    scheduler.set_position(7)
    other = WSD(make_optimizer(1e-3, 1e-4), **PARAMS | {"warmup_steps": 3})
    with pytest.raises(ScheduleError) as caught:
        other.load_state_dict(scheduler.state_dict())
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert ["schedule.warmup_steps", "4", "3"] in rows
    assert ["peaks[1]", "-", "0.0001"] in rows
    assert other.num_updates == 0 and rates(other.optimizer) == [0.0, 0.0]


@pytest.mark.parametrize("state", [None, {"last_batch_iteration": 4}])
def test_state_of_another_scheduler_refused(state: Any) -> None:
    with pytest.raises(ScheduleError, match="with another scheduler"):
        WSD(make_optimizer(1.0), **PARAMS).load_state_dict(state)
