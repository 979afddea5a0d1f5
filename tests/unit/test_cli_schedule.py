"""``megatron-wsd schedule``: what it tells and draws of configs, runs and branches."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
from matplotlib.image import imread
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.config import load_config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.curves import Curve, extent, of_run
from megatron_wsd.rundir import RunDir, open_run
from megatron_wsd.schedule import Batch, Schedule

CASES = json.loads((Path(__file__).parents[1] / "cases" / "wsd100.json").read_text())
TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"
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


def run(*line: Any, fails: bool = False) -> str:
    """What the command prints: to stdout, or its error if it is to fail."""
    result = CliRunner().invoke(app, ["schedule", *map(str, line)], env={"COLUMNS": "80"})
    assert result.exit_code == (2 if fails else 0), result.output
    return result.stderr if fails else result.stdout


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


# ---- a config ----


@pytest.mark.parametrize("shape", CASES["shapes"])
def test_cases_in_csv_and_json(shape: str, tmp_path: Path) -> None:
    expected = CASES["before_decay"] | CASES["shapes"][shape]
    config, at = write(tmp_path, decay_shape=shape), ",".join(expected)
    rows = table(run(config, "--csv", "--at", at))
    (told,) = json.loads(run(config, "--json", "--at", at))
    for row, entry, (n, value) in zip(rows, told["at"], expected.items(), strict=True):
        # the table is printed to six decimals
        assert row["step"] == n and float(row["lr"]) == pytest.approx(value, rel=0, abs=0.5e-6)
        assert entry["position"] == int(n) and entry["lr"] == float(row["lr"])


def test_json_tells_the_phases(tmp_path: Path) -> None:
    (told,) = json.loads(run(write(tmp_path, max_lr=None, tokens_per_sample=8), "--json"))
    assert (told["unit"], told["peak"], told["end"], told["position"]) == ("steps", 2.0, 100, None)
    assert [tuple(p.values()) for p in told["phases"]] == [
        ("warmup", 1, 10, 10, 320, 0.0, 1.8),
        ("stable", 11, 90, 80, 2560, 2.0, 2.0),
        ("decay", 91, 100, 10, 320, 2.0, pytest.approx(2 * (1 - 0.9 * 0.9**0.5), rel=1e-14)),
    ]
    assert Schedule.from_state(told["schedule"]).end == 100


def test_the_table_of_a_trillion_tokens_fits_into_80_columns(tmp_path: Path) -> None:
    raw = json.loads(TINY.read_text())
    raw["scheduler"]["params"] = {"warmup_steps": 2000, "decay_start": 430000, "decay_steps": 47000}
    raw["optimizer"]["params"]["lr"] = 3e-4
    raw["train_micro_batch_size_per_gpu"] = 256
    raw["megatron_wsd"]["model"]["seq_length"] = 4096
    config = tmp_path / "large.json"
    config.write_text(json.dumps(raw))
    lines = run(config, "--at", "0,450000", "--islands", 2).splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    words = [line.split() for line in lines]
    assert ["warmup", "1", "2,000", "2,000", "4,194,304,000", "0", "0.0002998"] in words
    assert ["stable", "2,001", "430,000", "428,000", "897,581,056,000", "0.0003", "0.0003"] in words
    assert ["decay", "430,001", "477,000", "47,000", "98,566,144,000", "0.0003", "3.192e-09"] in words
    assert "ends after 477,000 steps, 1,000,341,504,000 tokens, at 0" in lines
    assert ["450,000", "943,718,400,000", "0.000104302", "decay"] in words


def test_islands_count_in_tokens() -> None:
    one, two = (json.loads(run(TINY, "--json", "--islands", n))[0]["phases"][0]["tokens"] for n in (1, 2))
    assert (one, two) == (20 * 4 * 128, 2 * 20 * 4 * 128)


def test_csv_has_both_sides_of_every_edge(tmp_path: Path) -> None:
    rows = table(run(write(tmp_path, decay_start=5000, decay_steps=1000), "--csv"))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps)) and {9, 10, 4999, 5000, 5999, 6000} <= set(steps)
    assert 1000 <= len(steps) <= 1010 and steps[-1] == 6300
    schedule = Schedule(10).with_decay(5000, 1000, min_lr_ratio=0.1)
    assert all(float(row["lr"]) == schedule.factor(n) for row, n in zip(rows, steps, strict=True))
    assert rows[0].keys() == {"step", "tokens", "phase", "lr"}


def test_an_open_horizon_has_a_sensible_end_and_a_chosen_one(tmp_path: Path) -> None:
    config = write(tmp_path, decay_start=None, decay_steps=None, min_lr_ratio=None)
    assert table(run(config, "--csv"))[-1]["step"] == "100"
    assert table(run(config, "--csv", "--steps", 500))[-1]["step"] == "500"
    (told,) = json.loads(run(config, "--json"))
    assert told["phases"][-1] | {"lr_first": 0, "lr_last": 0} == {
        "phase": "stable", "first": 11, "last": None, "length": None, "tokens": None,
        "lr_first": 0, "lr_last": 0,
    }  # fmt: skip
    assert "no end: stable until a decay is begun" in run(config)


def test_extents() -> None:
    def until(schedule: Schedule, **more: Any) -> int:
        return extent([Curve("x", schedule, 1.0, Batch(8, 4), **more)], None)

    assert until(Schedule(0)) == 1000
    assert until(Schedule(0, unit="tokens")) == 1000 * 32
    assert until(Schedule(20)) == 200
    assert until(Schedule(20), position=4000) == 6000
    assert until(Schedule(20).with_decay(300, 100, then="stable")) == 600
    assert until(Schedule(20).with_decay(300, 100)) == 420


def test_a_schedule_in_tokens(tmp_path: Path) -> None:
    lengths = {"warmup_steps": "10 tokens", "decay_start": "90 tokens", "decay_steps": "10 tokens"}
    config = write(tmp_path, **lengths)
    assert table(run(config, "--csv", "--at", "95"))[0] | {"lr": ""} == {
        "step": "", "tokens": "95", "phase": "decay", "lr": "",
    }  # fmt: skip
    assert "ends after 100 tokens, at 0.1" in run(config, "--at", "95")
    assert "--steps" in run(config, "--csv", "--steps", 3, fails=True)
    config = write(tmp_path, **lengths, tokens_per_sample=5)  # and 4 samples a step
    assert table(run(config, "--csv", "--at", "100"))[0]["step"] == "5"
    assert table(run(config, "--csv", "--steps", 3))[-1]["tokens"] == "60"


def test_a_picture_in_every_unit(tmp_path: Path) -> None:
    for unit in ("steps", "tokens"):
        lengths = {"warmup_steps": f"10 {unit}", "decay_start": f"90 {unit}", "decay_steps": f"10 {unit}"}
        out = tmp_path / f"{unit}.png"
        assert "decay" in run(write(tmp_path, **lengths, tokens_per_sample=4), "--plot", out)
        picture = imread(out)
        assert picture.shape[:2] == (630, 1350)
        assert picture[..., :3].std() > 0.05  # something is drawn


def test_spans_of_cycles() -> None:
    schedule = Schedule(2).with_decay(5, 3, then="stable", rewarmup=2).with_decay(12, 2)
    curve = Curve("x", schedule, 1.0, Batch())
    first = [("warmup", 0, 2), ("stable", 2, 5), ("decay", 5, 8), ("warmup", 8, 10), ("stable", 10, 12)]
    assert curve.spans(13) == [*first, ("decay", 12, 13)]
    assert curve.spans(20) == [*first, ("decay", 12, 14), ("done", 14, 20)]
    assert curve.spans() == [*first, ("decay", 12, 14)]
    assert Curve("x", schedule.cancel_decay(9), 1.0, Batch()).spans()[-1] == ("stable", 10, None)
    assert Curve("x", schedule, 1.0, Batch(), begin=9).spans() == [
        ("warmup", 9, 10),
        *first[4:],
        ("decay", 12, 14),
    ]


# ---- what is refused ----


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "1.5", "x", "²"])
def test_positions_refused(text: str, tmp_path: Path) -> None:
    assert "--at" in run(write(tmp_path), f"--at={text}", fails=True)


def test_other_flags_refused(tmp_path: Path) -> None:
    config = write(tmp_path)
    assert "--csv" in run(config, "--csv", "--json", fails=True)
    assert "ends in .png" in run(config, "--plot", tmp_path / "a.pdf", fails=True)
    assert "a folder without a run" in run(tmp_path, fails=True)
    assert "does not exist" in run(tmp_path / "none", fails=True)
    assert "Make the folder first." in run(config, "--plot", tmp_path / "none" / "a.png", fails=True)


def test_without_a_schedule_or_a_peak(tmp_path: Path) -> None:
    path = write(tmp_path, max_lr=None)
    config = json.loads(path.read_text())
    del config["optimizer"]
    path.write_text(json.dumps(config))
    assert "optimizer.params.lr" in run(path, fails=True)
    config["scheduler"]["type"] = "WarmupLR"
    path.write_text(json.dumps(config))
    assert "WSD" in run(path, fails=True)


# ---- a run and its branches ----


def begin(tmp_path: Path) -> RunDir:
    """A run of two islands with an open horizon, not trained yet."""
    raw = json.loads(TINY.read_text())
    raw["scheduler"]["params"] = {"warmup_steps": 20}
    config = tmp_path / "open.json"
    config.write_text(json.dumps(raw))
    return open_run(tmp_path / "base", load_config(config, islands=2, ranks=2), resume=False)


def save(run: RunDir, step: int, schedule: Schedule, islands: int = 2, **more: Any) -> None:
    """What a checkpoint says about the schedule."""
    for island in range(islands):
        folders.checkpoint(run, island, step, schedule, outer_step=step // 10, **more)


def agreed(step: int, order: Order, **more: Any) -> dict[str, Any]:
    """An order that the islands have committed."""
    return {**order.model_dump(mode="json"), "number": order.number, "step": step, **more}


def test_a_run_is_told_as_it_stands(tmp_path: Path) -> None:
    base = begin(tmp_path)
    (told,) = json.loads(run(base.path, "--json"))
    assert (told["name"], told["position"], told["end"]) == ("base", None, None)

    save(base, 40, Schedule(20))
    known = agreed(80, Order(length=50, nonce="in the checkpoint, and cancelled there"))
    # overridden, and on one island already
    save(base, 80, Schedule(20), peak=2e-3, islands=1, orders=([known], 1))
    (told,) = json.loads(run(base.path, "--json"))
    assert (told["peak"], told["position"], told["end"]) == (2e-3, 80, None)
    assert "stands at 80 steps: stable, next rate 0.002" in run(base.path)

    # orders after that checkpoint count, those before it are in it, and refused ones do not
    changed = {"decay_steps": "80 steps", "max_lr": 1e-3}
    orders = [
        known,
        agreed(90, Order(length=7, nonce="a"), refused="no"),
        agreed(100, Order(length=50, shape="linear", at=200, nonce="b")),
        agreed(110, Order(kind="cancel", nonce="c")),
        agreed(120, Order(length=60, shape="cosine", min_lr_ratio=0.1, nonce="d")),
        agreed(130, Order(kind="override", fields=changed, nonce="e")),
    ]
    ControlFolder(base.path).settle(orders)
    records = [{"kind": "start", "step": 0}, {"kind": "step", "step": 140, "lr": 1.0, "phase": "decay"}]
    base.metrics(1).write_text("".join(json.dumps(record) + "\n" for record in records))
    (told,) = json.loads(run(base.path, "--json", "--at", "120,200"))
    assert (told["peak"], told["position"], told["end"]) == (1e-3, 140, 200)
    assert [entry["lr"] for entry in told["at"]] == [1e-3, 1e-4]
    words = [entry["decision"] for entry in told["history"]]
    assert words == ["begin_decay", "cancel_decay", "begin_decay", "override", "override"]
    text = run(base.path)
    assert "withdrawn at 110: decay of 50 steps from 200, linear" in text
    assert "changed at 130: decay_steps from 60 to 80" in text
    assert "stands at 140 steps: decay" in text
    assert "--islands" in run(base.path, "--islands", 2, fails=True)


def branch(parent: RunDir, step: int, name: str, steps: int) -> RunDir:
    words = [
        "branch",
        f"{parent.path}@{step}",
        "--name",
        name,
        "--decay-steps",
        str(steps),
        "--shape",
        "linear",
    ]
    assert CliRunner().invoke(app, words).exit_code == 0
    return RunDir(parent.path.with_name(f"{parent.path.name}-{name}"))


def test_branches_are_curves_of_their_own_from_where_they_begin(tmp_path: Path) -> None:
    base = begin(tmp_path)
    for step in (40, 80):
        save(base, step, Schedule(20))
    branch(base, 40, "early", 10)
    late = branch(base, 80, "late", 20)
    trained = Schedule(20).begin_decay(80, 20, shape="linear", then="stable")
    save(late, 110, trained)
    inner = branch(late, 110, "inner", 30)

    told = json.loads(run(base.path, "--json"))
    assert [(t["name"], t["begin"], t["position"], t["end"]) for t in told] == [
        ("base", 0, 80, None),
        ("early", 40, None, 50),
        ("late", 80, 110, None),
        ("late/inner", 110, None, 140),
    ]
    assert [p["phase"] for p in told[2]["phases"]] == ["decay", "stable"]

    rows = table(run(base.path, "--csv", "--at", "30,45,90"))
    assert [(row["run"], row["step"], float(row["lr"])) for row in rows] == [
        ("base", "30", 3e-3), ("base", "45", 3e-3), ("base", "90", 3e-3),
        ("early", "45", 1.5e-3), ("early", "90", 0.0), ("late", "90", 1.5e-3),
    ]  # fmt: skip
    rows = table(run(base.path, "--csv"))
    ends = {name: int([r["step"] for r in rows if r["run"] == name][-1]) for name in ("base", "early")}
    assert ends == {
        "base": 210,
        "early": 50,
    }  # half as long again as the last decay, of inner; and its own end

    # a branch by itself knows what came before it
    (told, _) = json.loads(run(late.path, "--json"))
    assert [p["phase"] for p in told["phases"]] == ["warmup", "stable", "decay", "stable"]
    assert "leaves its parent at 40" in run(base.path)

    lone = tmp_path / "lone.png"
    run(inner.path, "--plot", lone)
    run(base.path, "--plot", tmp_path / "all.png")
    orange, blue = (232, 113, 10), (31, 119, 180)

    def shows(png: Path, colour: tuple[int, int, int]) -> bool:
        pixels = (imread(png)[..., :3] * 255).round().astype(int)
        return bool((pixels == colour).all(axis=-1).any())

    assert not shows(lone, orange) and not shows(lone, blue)
    assert shows(tmp_path / "all.png", orange) and shows(tmp_path / "all.png", blue)


def test_a_branch_that_is_gone_or_has_lost_its_parent_is_named(tmp_path: Path) -> None:
    base = begin(tmp_path)
    for step in (40, 80):
        save(base, step, Schedule(20))
    gone, lost = branch(base, 40, "gone", 10), branch(base, 80, "lost", 10)
    shutil.rmtree(gone.path)
    for island in range(2):
        shutil.rmtree(base.island(island) / "checkpoints" / "step_00000080")
    curves, notes = of_run(base)
    assert [curve.name for curve in curves] == ["base"]
    assert f"branch gone @40: {gone.path} is gone" in notes
    assert any(note.startswith("branch lost @80") and "began from" in note for note in notes)
    result = CliRunner().invoke(app, ["schedule", str(base.path), "--csv"])
    assert result.exit_code == 0 and "branch gone" in result.stderr and "gone" not in result.stdout
    assert "bring the folder back" in run(lost.path, fails=True)


def test_what_is_assumed_stands_where_the_numbers_are_read() -> None:
    line = "assumed: 1 rank an island, so 8 samples a step; to say otherwise: --ranks\n"
    config = str(TINY)
    tables = CliRunner().invoke(app, ["schedule", config, "--islands", "2"])
    assert tables.exit_code == 0 and tables.stdout.startswith(line) and tables.stderr == ""
    rows = CliRunner().invoke(app, ["schedule", config, "--islands", "2", "--csv"])
    assert rows.stderr == line and rows.stdout.startswith("step,tokens,phase,lr\n")
    assert (
        "assumed"
        not in CliRunner().invoke(app, ["schedule", config, "--islands", "2", "--ranks", "2"]).output
    )
