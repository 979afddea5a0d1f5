"""The fronts against the table of cases, against the pure schedule, and through their states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wsd.schedule import SHAPES, WSD, Schedule, WarmupStableDecayLR
from megatron_wsd.schedule.megatron import OptimizerParamScheduler

CASES = json.loads((Path(__file__).parents[1] / "cases" / "wsd100.json").read_text())
# The table is printed to six decimals.
PRINTED = 0.5e-6

PEAKS = (1.0, 0.3)


def make_optimizer(peaks: tuple[float, ...] = PEAKS) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": peak} for peak in peaks], lr=0.5
    )


def torch_front(
    optimizer: torch.optim.Optimizer, shape: str, warmup: int, start: int, total: int, ratio: float
) -> WarmupStableDecayLR:
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
    schedule = Schedule(7).with_decay(31, 19, shape, 0.05)
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
