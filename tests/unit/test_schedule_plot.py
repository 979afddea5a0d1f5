"""``megatron-wsd schedule-plot``: what it prints and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from matplotlib.image import imread
from typer.testing import CliRunner

from megatron_wsd.cli.schedule_plot import schedule_plot, spans
from megatron_wsd.errors import ConfigError
from megatron_wsd.schedule import Schedule

CASES = json.loads((Path(__file__).parents[1] / "cases" / "wsd100.json").read_text())
WSD = {"warmup_steps": 10, "decay_start": 90, "decay_steps": 10, "min_lr_ratio": 0.1, "max_lr": 1.0}


def write(folder: Path, **params: Any) -> Path:
    path = folder / "config.json"
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 2.0}},
        "scheduler": {"type": "WSD", "params": {k: v for k, v in (WSD | params).items() if v is not None}},
    }
    path.write_text(json.dumps(config))
    return path


def run(*line: Any) -> str:
    app = typer.Typer()
    app.command()(schedule_plot)
    result = CliRunner().invoke(app, [str(word) for word in line])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("shape", CASES["shapes"])
def test_cases(shape: str, tmp_path: Path) -> None:
    expected = CASES["before_decay"] | CASES["shapes"][shape]
    lines = run(write(tmp_path, decay_shape=shape), "--at", ",".join(expected)).splitlines()
    for line, (n, value) in zip(lines, expected.items(), strict=True):
        position, _, rate = line.split()
        # the table is printed to six decimals
        assert position == n and float(rate) == pytest.approx(value, rel=0, abs=0.5e-6)


def test_json_tells_the_phases(tmp_path: Path) -> None:
    told = json.loads(run(write(tmp_path, max_lr=None), "--json"))
    assert (told["unit"], told["peak"]) == ("steps", 2.0)
    assert [(p["phase"], p["from"], p["to"]) for p in told["phases"]] == [
        ("warmup", 0, 10),
        ("stable", 10, 90),
        ("decay", 90, 100),
        ("done", 100, 105),
    ]
    assert told["phases"][1]["rates"] == {"10": 2.0, "50": 2.0, "89": 2.0}
    assert Schedule.from_state(told["schedule"]).end == 100


def test_an_open_horizon_and_a_chosen_one(tmp_path: Path) -> None:
    config = write(tmp_path, decay_start=None, decay_steps=None, min_lr_ratio=None)
    assert json.loads(run(config, "--json"))["phases"][-1]["to"] == 20
    assert json.loads(run(config, "--json", "--steps", 500))["phases"][-1]["to"] == 500


def test_a_picture_in_every_unit(tmp_path: Path) -> None:
    for unit in ("steps", "tokens"):
        config = write(
            tmp_path, warmup_steps=f"10 {unit}", decay_start=f"90 {unit}", decay_steps=f"10 {unit}"
        )
        out = tmp_path / f"{unit}.png"
        assert run(config, "--out", out) == f"wrote {out}\n"
        picture = imread(out)
        assert picture.shape[:2] == (600, 1350)
        assert picture[..., :3].std() > 0.05  # something is drawn


def test_spans_of_cycles() -> None:
    schedule = Schedule(2).with_decay(5, 3, then="stable", rewarmup=2).with_decay(12, 2)
    assert spans(schedule, 13) == [
        ("warmup", 0, 2),
        ("stable", 2, 5),
        ("decay", 5, 8),
        ("warmup", 8, 10),
        ("stable", 10, 12),
        ("decay", 12, 13),
    ]


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "1.5", "x"])
def test_positions_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--at"):
        run(write(tmp_path), f"--at={text}")


def test_without_a_schedule_or_a_peak(tmp_path: Path) -> None:
    path = write(tmp_path, max_lr=None)
    config = json.loads(path.read_text())
    del config["optimizer"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="optimizer"):
        run(path, "--json")
    config["scheduler"]["type"] = "WarmupLR"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="WSD"):
        run(path, "--json")
