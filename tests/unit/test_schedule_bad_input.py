"""Lengths, minimums and shapes that make no schedule: every front refuses them and names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.errors import FieldError, ScheduleError
from megatron_wsd.schedule import WSD, Schedule, WarmupStableDecayLR
from megatron_wsd.schedule.megatron import OptimizerParamScheduler

GOOD: dict[str, Any] = {
    "warmup_steps": 10,
    "decay_start": 90,
    "decay_steps": 10,
    "decay_shape": "linear",
    "min_lr_ratio": 0.1,
}
PEAK = 3e-4
LENGTHS = ("warmup_steps", "decay_start", "decay_steps", "total_steps", "rewarmup_steps")
NO_LENGTHS = (-1, 1.5, True, "10", "auto", "-3 steps", "10 parsecs", "1.5 steps", "", {}, [[]], float("nan"))

CASES: list[tuple[dict[str, Any], str]] = [
    # negative, no whole number, a string, "auto"
    *(({key: value}, key) for key in LENGTHS for value in NO_LENGTHS),
    # zero, where something has to be
    ({"decay_steps": 0}, "decay_steps"),
    ({"decay_steps": "0 steps"}, "decay_steps"),
    ({"samples_per_step": 0}, "samples_per_step"),
    # overlapping
    ({"warmup_steps": 91}, "decay_start"),
    ({"decay_start": [90, 95]}, "decay_start"),
    ({"decay_start": [90, 105], "rewarmup_steps": 10}, "decay_start"),
    ({"decay_start": [200, 90]}, "decay_start"),
    # missing
    ({"decay_steps": None}, "decay_steps"),
    ({"decay_start": None}, "decay_start"),
    ({"decay_start": []}, "decay_start"),
    # longer than the run
    ({"decay_steps": None, "total_steps": 90}, "total_steps"),
    ({"decay_steps": None, "total_steps": 20}, "total_steps"),
    # a minimum above the peak, or none where the shape needs one
    ({"min_lr_ratio": 1.1}, "min_lr_ratio"),
    ({"min_lr_ratio": -0.1}, "min_lr_ratio"),
    ({"min_lr_ratio": "auto"}, "min_lr_ratio"),
    ({"min_lr_ratio": None, "min_lr": 1.0}, "min_lr"),
    ({"min_lr_ratio": None, "min_lr": "auto"}, "min_lr"),
    ({"min_lr_ratio": 0, "decay_shape": "geometric"}, "min_lr_ratio"),
    ({"max_lr": "auto"}, "max_lr"),
    ({"max_lr": -1e-3}, "max_lr"),
    # shapes and keys that are not known
    ({"decay_shape": "cosinus"}, "decay_shape"),
    ({"decay_shape": 3}, "decay_shape"),
    ({"decay_shape": "auto"}, "decay_shape"),
    ({"warmup_num_steps": 3}, "warmup_num_steps"),
]


def params_of(changes: dict[str, Any]) -> dict[str, Any]:
    params = GOOD | changes
    if "total_steps" in changes:
        params["decay_steps"] = None
    if changes.get("rewarmup_steps") is not None:
        params |= {"then": "stable"} if not isinstance(params["decay_start"], list) else {}
    return {key: value for key, value in params.items() if value is not None}


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)


@pytest.mark.parametrize("changes,field", CASES, ids=str)
def test_in_the_json(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    params = params_of(changes)
    optimizer = make_optimizer()
    with pytest.raises(ScheduleError) as caught:
        WSD(optimizer, **params)
    assert caught.value.field == f"scheduler.params.{field}"
    assert optimizer.param_groups[0]["lr"] == PEAK

    config = tmp_path / "config.json"
    scheduler = {"type": "WSD", "params": params}
    deepspeed = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    adam = {"type": "AdamW", "params": {"lr": PEAK}}
    config.write_text(json.dumps({**deepspeed, "optimizer": adam, "scheduler": scheduler}))
    for words in (
        ["schedule", str(config)],
        ["launch", "--config", str(config), "--run-dir", str(tmp_path / "r")],
    ):
        told = CliRunner().invoke(app, words)
        assert told.exit_code == 2
        assert told.stderr.startswith(f"megatron-wsd: error: scheduler.params.{field}: expected ")
        assert len(told.stderr.splitlines()) == 1 and told.stdout == ""
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "word,suggestion",
    [
        ("decay_shape", ("linnear", "linear")),
        ("decay_shape", ("one_minus_sqr", "one_minus_sqrt")),
        ("decay_shape", ("cosin", "cosine")),
        ("key", ("decay_shap", "decay_shape")),
        ("key", ("min_lr_rate", "min_lr")),
    ],
)
def test_the_nearest_name_is_suggested(word: str, suggestion: tuple[str, str]) -> None:
    wrong, right = suggestion
    with pytest.raises(ScheduleError, match=f"Did you mean '{right}"):
        WSD(make_optimizer(), **GOOD | ({"decay_shape": wrong} if word == "decay_shape" else {wrong: 1}))


@pytest.mark.parametrize("value", [-1, 1.5, True, "10", "auto", None, float("nan")])
@pytest.mark.parametrize("name", ["warmup_steps", "decay_start_step", "total_steps"])
def test_in_torch(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"warmup_steps": 10, "decay_start_step": 90, "total_steps": 100} | {
        name: value
    }
    with pytest.raises(ScheduleError) as caught:
        WarmupStableDecayLR(make_optimizer(), **arguments)
    # of the pair, one missing is told as the other's: both or neither
    assert caught.value.field in ((name, "total_steps") if value is None else (name,))


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "10", "auto", 91, 101, 10**6, float("nan")])
def test_in_megatron(value: Any) -> None:
    with pytest.raises(FieldError) as caught:
        OptimizerParamScheduler(
            make_optimizer(), 0.0, PEAK, 1e-5, 10, 100, "WSD", 0.0, 0.0, 100, "constant",
            wsd_decay_steps=value, lr_wsd_decay_style="linear",
        )  # fmt: skip
    assert "wsd_decay_steps" in caught.value.field


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "10", "auto", None, {}])
def test_on_command(value: Any) -> None:
    scheduler = WSD(make_optimizer(), warmup_steps=0)
    before = scheduler.state_dict()
    with pytest.raises(ScheduleError) as caught:
        scheduler.begin_decay(value)
    assert caught.value.field == "decay_steps" and scheduler.state_dict() == before
    with pytest.raises(ScheduleError):
        Schedule(0).begin_decay(0, value)
