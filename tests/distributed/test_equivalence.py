"""What islands must not change, through the real launcher and three lines in a DeepSpeed script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_wsd.reporting.status import RunStatus

pytestmark = pytest.mark.launch

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    # eps bounds how much a rounding of a gradient can move a weight: lr / eps times it.
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5, "torch_adam": True}},
    "scheduler": {
        "type": "WSD",
        "params": {
            "warmup_steps": 2,
            "warmup_init_ratio": 0.5,
            "decay_start": 4,
            "decay_steps": 5,
            "min_lr_ratio": 0.1,
        },
    },
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 100000,
    "megatron_wsd": {"sync": {"inner_steps": 3}, "log": {"interval_steps": 4}},
}


def launch(folder: Path, islands: int) -> list[dict[str, Any]]:
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    run = folder / f"run{islands}"
    script = Path(__file__).parent / "equivalence_script.py"
    command = [sys.executable, "-m", "megatron_wsd", "launch", "--islands", str(islands), "--ranks", "2"]
    command += ["--config", str(config), "--run-dir", str(run), "--script", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((run / f"results_{i}.json").read_text()) for i in range(islands)]


def flat(result: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(w, dtype=torch.float64).flatten() for w in result["weights"].values()])


def test_islands_change_nothing_that_they_should_not(tmp_path: Path) -> None:
    (alone,) = launch(tmp_path, 1)
    for name in ("sgd", "cgad"):
        assert alone[name]["rounds"] == 3
        assert alone[name]["stale"] == [], f"working copies that are not the anchor, {name}"

    # One island, outer SGD at lr 1 without momentum: anchor - (anchor - local). Where the two differ by
    # less than a factor of 2 this is exact; elsewhere it is off by at most an ulp of the difference, about
    # 1e-3 x 2^-23 = 1e-10 a round. Adam turns an error d of a weight into at most lr / eps x |d gradient| a
    # step, with gradients of order |d|: 9 steps x 100 x 3e-10 = 3e-7.
    difference = (flat(alone["plain"]) - flat(alone["sgd"])).abs().max().item()
    assert difference < 3e-7
    moved = (flat(alone["plain"]) - flat(alone["cgad"])).abs().max().item()
    assert moved > 1e-3, "the comparison must be able to fail: CGAD goes elsewhere"
    assert alone["plain"]["losses"] == pytest.approx(alone["sgd"]["losses"], abs=1e-6)

    # Two islands with the same data: 0.5 x + 0.5 x is x, so the outer state is the same to the last bit.
    first, second = launch(tmp_path, 2)
    assert first["cgad"]["digest"] == second["cgad"]["digest"] == alone["cgad"]["digest"]
    assert first["cgad"]["weights"] == second["cgad"]["weights"] == alone["cgad"]["weights"]
    assert first["cgad"]["evals"] == alone["cgad"]["evals"]
    assert second["cgad"]["stale"] == []
    check_records(tmp_path, alone, second)


def check_records(folder: Path, alone: dict[str, Any], second: dict[str, Any]) -> None:
    """What the loop has recorded for the script: losses where it was told them, and how it ended."""
    for result in (alone["sgd"], alone["cgad"], second["cgad"]):
        assert result["refused"].startswith(
            "update 2: outer.step(): expected a call after every engine.step()"
        )
    records = read_metrics_file(folder / "run1" / "island_0")
    starts = [i for i, r in enumerate(records) if r["kind"] == "start"]
    first, last = records[: starts[1]], records[starts[1] :]
    # Every 4, and the ends of the warm-up and of the stable phase, 2 and 4; 9 is the last.
    for part, told in ((first, None), (last, alone["cgad"]["means"])):
        steps = [r for r in part if r["kind"] == "step"]
        assert [(r["step"], r["phase"]) for r in steps] == [
            (2, "warmup"),
            (4, "stable"),
            (8, "decay"),
            (9, "decay"),
        ]
        assert steps[0]["lr"] == pytest.approx(0.75e-3)  # of update 2, halfway from 0.5 to 1
        assert all(r["grad_norm"] > 0 for r in steps)
        spans = [(0, 2), (2, 4), (4, 8), (8, 9)]
        means = [None if told is None else sum(told[a:b]) / (b - a) for a, b in spans]
        # The same fp32 losses, summed in float64 in another order: equal to some ulps of a double.
        assert [r.get("loss") for r in steps] == (means if told is None else pytest.approx(means, rel=1e-12))
    ends = [[r["event"] for r in part if r["kind"] == "event"] for part in (first, last)]
    assert ends == [["stop"], ["finish"]]
    assert [i["state"] for i in RunStatus(folder / "run2").look()["islands"]] == ["finished", "finished"]


def read_metrics_file(folder: Path) -> list[dict[str, Any]]:
    """Every record, also those that a later start has made void."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
