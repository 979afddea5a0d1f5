"""The fronts against the table of cases, against the pure schedule, and through their states."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import SHAPES, WSD, Schedule, WarmupStableDecayLR
from megatron_wsd.schedule.megatron import OptimizerParamScheduler

CASES = json.loads((Path(__file__).parents[1] / "cases" / "wsd100.json").read_text())
# The table is printed to six decimals.
PRINTED = 0.5e-6

PEAKS = (1.0, 0.3)
POWERS = {"polynomial": 1.7}


def make_optimizer(peaks: tuple[float, ...] = PEAKS) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": peak} for peak in peaks], lr=0.5
    )


def torch_front(
    optimizer: torch.optim.Optimizer, shape: str, warmup: int, start: int, total: int, ratio: float
) -> WarmupStableDecayLR:
    if shape in POWERS:
        schedule = Schedule(warmup).with_decay(start, total - start, shape, ratio, power=POWERS[shape])
        return WarmupStableDecayLR.from_schedule(optimizer, schedule)
    return WarmupStableDecayLR(optimizer, warmup, start, total, ratio, shape)


def deepspeed_front(
    optimizer: torch.optim.Optimizer, shape: str, warmup: int, start: int, total: int, ratio: float
) -> WSD:
    return WSD(
        optimizer,
        warmup_steps=warmup,
        decay_start=start,
        total_steps=total,
        decay_shape=shape,
        decay_power=POWERS.get(shape),
        min_lr_ratio=ratio,
    )


class MegatronFront(OptimizerParamScheduler):
    """Steps by one and takes the package's shape names, so that it can stand beside the others."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, shape: str, warmup: int, start: int, total: int, ratio: float
    ) -> None:
        for group in optimizer.param_groups:
            group["max_lr"], group["min_lr"] = group["lr"], group["lr"] * ratio
        super().__init__(
            optimizer,
            init_lr=0.0,
            max_lr=PEAKS[0],
            min_lr=PEAKS[0] * ratio,
            lr_warmup_steps=warmup,
            lr_decay_steps=total,
            lr_decay_style="WSD",
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=total,
            wd_incr_style="constant",
            wsd_decay_steps=total - start,
            wsd_decay_power=POWERS.get(shape),
            lr_wsd_decay_style={"megatron_exponential": "exponential", "one_minus_sqrt": "minus_sqrt"}.get(
                shape, shape
            ),
        )

    def step(self, increment: int = 1) -> None:
        super().step(increment)


FRONTS: dict[str, Callable[..., Any]] = {
    "torch": torch_front,
    "deepspeed": deepspeed_front,
    "megatron": MegatronFront,
}
front_names = pytest.mark.parametrize("front", FRONTS)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def walk(front: str, *args: Any, steps: int) -> list[list[float]]:
    """Rates of the first updates of every param group, read where the optimizer reads them."""
    optimizer = make_optimizer()
    scheduler = FRONTS[front](optimizer, *args)
    seen = []
    for _ in range(steps):
        seen.append(rates(optimizer))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("shape", CASES["shapes"])
def test_cases_pure(shape: str) -> None:
    schedule = Schedule(10).with_decay(90, 10, shape, 0.1)
    for n, value in (CASES["before_decay"] | CASES["shapes"][shape]).items():
        assert schedule.factor(int(n)) == pytest.approx(value, rel=0, abs=PRINTED)


@front_names
@pytest.mark.parametrize("shape", CASES["shapes"])
def test_cases(front: str, shape: str) -> None:
    seen = walk(front, shape, 10, 90, 100, 0.1, steps=151)
    for n, value in (CASES["before_decay"] | CASES["shapes"][shape]).items():
        for group, peak in enumerate(PEAKS):
            assert seen[int(n)][group] == pytest.approx(peak * value, rel=0, abs=PRINTED)


@front_names
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_pure(front: str, shape: str) -> None:
    schedule = Schedule(7).with_decay(31, 19, shape, 0.05, power=POWERS.get(shape))
    for n, groups in enumerate(walk(front, shape, 7, 31, 50, 0.05, steps=55)):
        for rate, peak in zip(groups, PEAKS, strict=True):
            # torch and DeepSpeed multiply the factor; Megatron adds min_lr to a share of max_lr - min_lr,
            # which is the same to the three roundings on either side
            tolerance = 6 * 2.0**-53 * peak if front == "megatron" else 0.0
            assert rate == pytest.approx(peak * schedule.factor(n), rel=0, abs=tolerance)


@front_names
@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    warmup=st.integers(0, 9),
    stable=st.integers(0, 9),
    length=st.integers(1, 9),
    done=st.integers(0, 30),
    detour=st.integers(0, 30),
)
def test_state_round_trip(
    front: str, shape: str, warmup: int, stable: int, length: int, done: int, detour: int
) -> None:
    args = (shape, warmup, warmup + stable, warmup + stable + length, 0.1)
    optimizer, other = make_optimizer(), make_optimizer()
    scheduler, resumed = FRONTS[front](optimizer, *args), FRONTS[front](other, *args)
    for _ in range(done):
        optimizer.step()
        scheduler.step()
    for _ in range(detour):  # a load replaces the position, whatever it was
        other.step()
        resumed.step()

    state = json.loads(json.dumps(scheduler.state_dict()))
    for _ in range(2):  # the second load changes nothing
        resumed.load_state_dict(state)
        assert resumed.state_dict() == scheduler.state_dict()
        assert rates(other) == rates(optimizer)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
        other.step()
        resumed.step()
        assert rates(other) == rates(optimizer)


@pytest.mark.parametrize("saved,given_front", [("torch", "deepspeed"), ("deepspeed", "torch")])
def test_torch_and_deepspeed_read_each_other(saved: str, given_front: str) -> None:
    args = ("cosine", 3, 6, 12, 0.1)
    optimizer, other = make_optimizer(), make_optimizer()
    scheduler, resumed = FRONTS[saved](optimizer, *args), FRONTS[given_front](other, *args)
    for _ in range(8):
        optimizer.step()
        scheduler.step()
    resumed.load_state_dict(scheduler.state_dict())
    assert rates(other) == rates(optimizer)


# ---- open horizon, decided while running ----


def open_megatron(optimizer: torch.optim.Optimizer, warmup: int) -> OptimizerParamScheduler:
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = group["lr"], 0.0
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=PEAKS[0],
        min_lr=0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=100,  # ends nothing
        lr_decay_style="WSD",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=100,
        wd_incr_style="constant",
        wsd_open_horizon=True,
    )


OPEN_FRONTS: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "torch": lambda optimizer, warmup: WarmupStableDecayLR(optimizer, warmup, None, None),
    "deepspeed": lambda optimizer, warmup: WSD(optimizer, warmup_steps=warmup),
    "megatron": open_megatron,
}


def megatron_shape(front: str, shape: str) -> str:
    return "exponential" if front == "megatron" and shape == "megatron_exponential" else shape


commands = st.fixed_dictionaries(
    {
        "at": st.integers(0, 60),
        "delay": st.integers(0, 10),
        "length": st.integers(1, 12),
        "shape": st.sampled_from(sorted(SHAPES)),
        "min_lr_ratio": st.floats(0.01, 0.9),
        "then": st.sampled_from(["stop", "stable"]),
        "rewarmup": st.integers(0, 4),
        "cancel": st.booleans(),
        "reload": st.booleans(),
    }
)


@pytest.mark.parametrize("front", OPEN_FRONTS)
@settings(deadline=None, max_examples=60)
@given(warmup=st.integers(0, 9), told=st.lists(commands, max_size=5))
def test_history_of_commands(front: str, warmup: int, told: list[dict[str, Any]]) -> None:
    """Commands at random updates: the front is the pure schedule, keeps the past, and its state tells all."""
    optimizer = make_optimizer()
    scheduler = OPEN_FRONTS[front](optimizer, warmup)
    pure, seen, decided = Schedule(warmup), [], set()
    for n in range(90):
        for command in [command for command in told if command["at"] == n]:
            arguments = {key: command[key] for key in ("length", "min_lr_ratio", "then")}
            arguments |= {"start": n + command["delay"], "power": POWERS.get(command["shape"])}
            arguments["rewarmup"] = command["rewarmup"] if command["then"] == "stable" else 0
            try:
                after = pure.cancel_decay(n) if command["cancel"] else pure.begin_decay(
                    n, shape=command["shape"], **arguments
                )  # fmt: skip
            except ScheduleError:
                before = scheduler.state_dict(), rates(optimizer)
                with pytest.raises(ScheduleError):
                    if command["cancel"]:
                        scheduler.cancel_decay()
                    else:
                        scheduler.begin_decay(shape=megatron_shape(front, command["shape"]), **arguments)
                assert (scheduler.state_dict(), rates(optimizer)) == before
                continue
            if command["cancel"]:
                scheduler.cancel_decay()
            else:
                scheduler.begin_decay(shape=megatron_shape(front, command["shape"]), **arguments)
            assert all(after.factor(k) == pure.factor(k) for k in range(n + 1))  # the past stands
            pure = after
            decided.add(n)
            if command["reload"]:  # a resume right after the decision, under the config of the beginning
                state = json.loads(json.dumps(scheduler.state_dict()))
                optimizer = make_optimizer()
                scheduler = OPEN_FRONTS[front](optimizer, warmup)
                scheduler.load_state_dict(state)
                assert scheduler.state_dict() == state
        seen.append(rates(optimizer))
        for rate, peak in zip(seen[-1], PEAKS, strict=True):
            # see test_equals_pure; a level that was reached by an earlier decay brings its roundings along
            tolerance = 24 * 2.0**-53 * peak if front == "megatron" else 0.0
            assert rate == pytest.approx(peak * pure.factor(n), rel=0, abs=tolerance)
        optimizer.step()
        scheduler.step(*([1] if front == "megatron" else []))

    assert [entry["at"] for entry in scheduler.schedule.history()] == sorted(
        entry["at"] for entry in pure.history()
    )
    assert {entry["at"] for entry in pure.history()} == decided
    check_shared_properties(pure, [groups[0] for groups in seen])


def check_shared_properties(schedule: Schedule, seen: list[float]) -> None:
    """Within [minimum, peak]; rises in a warm-up or at the end of a cycle only."""
    rounding = 24 * 2.0**-53
    back = {decay.end for decay in schedule.decays if decay.then == "stable" and not decay.rewarmup}
    for n, (rate, following) in enumerate(pairwise(seen)):
        assert 0.0 <= rate <= 1.0 + rounding
        if schedule.phase(n) == "warmup" or n + 1 in back:
            assert following >= rate - rounding
        else:
            assert following <= rate + rounding
        if schedule.phase(n) == "decay":
            (decay,) = [decay for decay in schedule.decays if decay.start <= n < decay.end]
            assert rate >= decay.min_lr_ratio - rounding
        if schedule.phase(n) == "stable":
            assert following == pytest.approx(rate, rel=0, abs=rounding)


@pytest.mark.parametrize("shape", SHAPES)
@given(length=st.integers(1, 400), ratio=st.floats(0.01, 1.0))
def test_no_jump_larger_than_the_slope_of_one_step(shape: str, length: int, ratio: float) -> None:
    """The decay takes its whole way in steps, none longer than the shape goes in 1 / length of it."""
    schedule = Schedule(0).with_decay(5, length, shape, ratio, power=POWERS.get(shape))
    falls = [schedule.factor(n) - schedule.factor(n + 1) for n in range(5 + length + 3)]
    x = 1 / length
    # Shapes are convex or concave or both (cosine): the steepest step is the first, last or middle one.
    weight = SHAPES[shape]
    steps = [(0.0, x), (1 - x, 1.0), (max(0.0, 0.5 - x / 2), min(1.0, 0.5 + x / 2))]
    power = POWERS.get(shape)
    steepest = max(weight(a, ratio, power) - weight(b, ratio, power) for a, b in steps)
    # two weights, each rounded about ten times
    assert max(falls) <= (1 - ratio) * steepest + 32 * 2.0**-53
    assert sum(falls) == pytest.approx(1 - ratio, rel=0, abs=length * 2.0**-53 + 2.0**-52)
