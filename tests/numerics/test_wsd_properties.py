"""What every schedule of every shape promises, for random lengths, through all four fronts.

Within [minimum, peak]; no jump larger than the slope of one step; never rising after the warm-up; equal
through torch, DeepSpeed, Megatron and the command line; a state saved and loaded at any step, once or twice,
changes nothing. Schedules with decisions and cycles are in test_wsd_fronts.py.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.schedule import SHAPES, WSD, Schedule, WarmupStableDecayLR
from megatron_wsd.schedule.megatron import OptimizerParamScheduler

PEAK = 3e-4
POWERS = {"polynomial": 1.7}
UPSTREAM_NAMES = {"megatron_exponential": "exponential", "one_minus_sqrt": "minus_sqrt"}
# A rate is a product or sum of a few float64 numbers of at most the peak; each rounds by 2^-53 of it.
ROUNDING = 2.0**-53 * PEAK


@dataclass(frozen=True)
class Case:
    shape: str
    warmup: int
    stable: int
    length: int
    ratio: float
    init: float

    @property
    def start(self) -> int:
        return self.warmup + self.stable

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def pure(self) -> Schedule:
        return Schedule(self.warmup, warmup_init_ratio=self.init).with_decay(
            self.start, self.length, self.shape, self.ratio, power=POWERS.get(self.shape)
        )

    @property
    def params(self) -> dict[str, Any]:
        return {
            "warmup_steps": self.warmup,
            "warmup_init_ratio": self.init,
            "decay_start": self.start,
            "decay_steps": self.length,
            "decay_shape": self.shape,
            "decay_power": POWERS.get(self.shape),
            "min_lr_ratio": self.ratio,
        }


def torch_front(optimizer: torch.optim.Optimizer, case: Case) -> Any:
    return WarmupStableDecayLR.from_schedule(optimizer, case.pure)


def deepspeed_front(optimizer: torch.optim.Optimizer, case: Case) -> Any:
    return WSD(optimizer, **case.params)


class MegatronFront(OptimizerParamScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, case: Case) -> None:
        super().__init__(
            optimizer,
            init_lr=case.init * PEAK,
            max_lr=PEAK,
            min_lr=case.ratio * PEAK,
            lr_warmup_steps=case.warmup,
            lr_decay_steps=case.end,
            lr_decay_style="WSD",
            start_wd=0.01,
            end_wd=0.1,
            wd_incr_steps=case.end,
            wd_incr_style="cosine",
            wsd_decay_steps=case.length,
            lr_wsd_decay_style=UPSTREAM_NAMES.get(case.shape, case.shape),
            wsd_decay_power=POWERS.get(case.shape),
        )

    def step(self, increment: int = 1) -> None:
        super().step(increment)


FRONTS: dict[str, Callable[..., Any]] = {
    "torch": torch_front,
    "deepspeed": deepspeed_front,
    "megatron": MegatronFront,
}


def build(front: str, case: Case) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    return optimizer, FRONTS[front](optimizer, case)


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]


def walk(
    front: str, case: Case, steps: int, save_at: int | None = None, detour: int = 0
) -> list[tuple[float, float]]:
    """Rate and weight decay of each update, read where the optimizer reads them.

    Args:
        save_at: completed updates after which the state goes through json into a new optimizer and
            scheduler, twice.
        detour: updates that the new one has done before it loads.
    """
    optimizer, scheduler = build(front, case)
    seen = []
    for n in range(steps):
        if n == save_at:
            text = json.dumps(scheduler.state_dict())
            optimizer, scheduler = build(front, case)
            for _ in range(detour):
                optimizer.step()
                scheduler.step()
            for _ in range(2):
                scheduler.load_state_dict(json.loads(text))
                assert json.dumps(scheduler.state_dict()) == text
        seen.append(settings_of(optimizer))
        optimizer.step()
        scheduler.step()
    return seen


def command_line(config: Path, case: Case, steps: int) -> list[float]:
    """Rates as the command prints them; its json tells the whole schedule, from which they follow again."""
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3},
                "optimizer": {"type": "AdamW", "params": {"lr": PEAK}},
                "scheduler": {"type": "WSD", "params": case.params},
            }
        )
    )
    line = ["schedule", str(config), "--at", ",".join(map(str, range(steps)))]
    rows = csv.DictReader(CliRunner().invoke(app, [*line, "--csv"]).stdout.splitlines())
    rates = [float(row["lr"]) for row in rows]
    (told,) = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert [entry["lr"] for entry in told["at"]] == rates
    again = Schedule.from_state(told["schedule"])
    assert [again.rate(n, told["peak"]) for n in range(steps)] == rates
    return rates


def steepest(case: Case, n: int) -> float:
    """The most that the rate may change from n to n + 1: the slope of one step, in the phase that n is in."""
    phase = case.pure.phase(n)
    if phase == "warmup":
        return PEAK * (1.0 - case.init) / case.warmup
    if phase != "decay":
        return 0.0
    # Shapes are convex or concave or both (cosine): their steepest step is the first, last or middle one.
    weight, x, power = SHAPES[case.shape], 1 / case.length, POWERS.get(case.shape)
    steps = [(0.0, x), (1 - x, 1.0), (max(0.0, 0.5 - x / 2), min(1.0, 0.5 + x / 2))]
    fall = max(weight(a, case.ratio, power) - weight(b, case.ratio, power) for a, b in steps)
    return PEAK * (1.0 - case.ratio) * fall


def check(case: Case, rates: list[float]) -> None:
    low, tolerance = PEAK * case.ratio, 32 * ROUNDING  # formulas round about ten times on either side
    assert rates[case.warmup] == pytest.approx(PEAK, rel=0, abs=4 * ROUNDING)
    assert rates[case.start] == pytest.approx(PEAK, rel=0, abs=4 * ROUNDING)
    assert rates[case.end] == rates[-1] == pytest.approx(low, rel=0, abs=ROUNDING)
    for n, (rate, following) in enumerate(pairwise(rates)):
        if n >= case.warmup:
            assert low - 4 * ROUNDING <= rate <= PEAK + 4 * ROUNDING
            assert following <= rate + 4 * ROUNDING
        else:
            assert case.init * PEAK - 4 * ROUNDING <= rate <= following <= PEAK + 4 * ROUNDING
        assert abs(following - rate) <= steepest(case, n) + tolerance


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=25)
@given(
    warmup=st.integers(0, 12),
    stable=st.integers(0, 12),
    length=st.integers(1, 25),
    ratio=st.floats(1e-3, 1.0),
    init=st.floats(0.0, 1.0),
    share=st.floats(0.0, 1.0),
    detour=st.integers(0, 40),
)
def test_every_promise_through_every_front(
    shape: str,
    warmup: int,
    stable: int,
    length: int,
    ratio: float,
    init: float,
    share: float,
    detour: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = Case(shape, warmup, stable, length, ratio, init)
    steps = case.end + 4
    rates = {"command line": command_line(tmp_path_factory.getbasetemp() / "config.json", case, steps)}
    for front in FRONTS:
        seen = walk(front, case, steps)
        assert walk(front, case, steps, save_at=round(share * (steps - 1)), detour=detour) == seen
        rates[front] = [rate for rate, _ in seen]
    pure = [case.pure.rate(n, PEAK) for n in range(steps)]
    for front, found in rates.items():
        check(case, found)
        # Megatron adds min_lr to a share of max_lr - min_lr, the others multiply a factor: a few roundings
        tolerance = 8 * ROUNDING if front == "megatron" else 0.0
        assert found == pytest.approx(pure, rel=0, abs=tolerance)
