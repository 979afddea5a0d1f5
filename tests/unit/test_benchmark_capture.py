"""The benchmark of captures runs, and measures what changes the shards."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import torch

from megatron_wsd.diloco.residence import Residence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

capture = importlib.import_module("capture")


def test_a_row_for_every_format() -> None:
    quick = ["--elements", "14", "--repetitions", "1", "--threads", "2"]
    out = subprocess.run(
        [sys.executable, str(BENCHMARKS / "capture.py"), *quick], capture_output=True, text=True, check=True
    )
    rows = [line.split("|") for line in out.stdout.splitlines() if line.startswith("| cpu")]
    assert [row[2].strip() for row in rows] == list(capture.WIRES)
    assert all(float(row[5]) > 0 for row in rows)


def test_what_was_trained_is_adopted_once() -> None:
    shards = capture.PlainShards(1 << 12, torch.device("cpu"))
    before = shards._values[0].clone()
    capture.pauses(shards, Residence(torch.device("cpu"), staged=True), "int8", 2)
    # Three steps of 1e-3; the anchor never moves here, so adoption takes back what was captured.
    assert torch.allclose(shards._values[0], before, atol=1e-6)
