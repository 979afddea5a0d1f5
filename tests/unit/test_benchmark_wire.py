"""The benchmarks of the wire formats run and compare like with like."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

wire_error = importlib.import_module("wire_error")


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_speed_has_a_row_for_every_format() -> None:
    quick = ["--elements", "12", "--repetitions", "1", "--sample-s", "0.0001", "--threads", "2"]
    out = subprocess.run(
        [sys.executable, str(BENCHMARKS / "wire.py"), *quick], capture_output=True, text=True, check=True
    )
    rows = [line for line in out.stdout.splitlines() if line.startswith(("| encode", "| accum", "| resid"))]
    assert len(rows) == 15
    assert sum("times" in row for row in rows) == 3
    assert all(float(row.split("|")[3]) > 0 for row in rows)


def test_error_of_a_payload() -> None:
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    found = {name: wire_error.relative_error(name, x) for name in ("fp32", *wire_error.FORMATS)}
    # A uniform error of one step: top / (127 or 7) / sqrt(12), with tops of about 2.8 and 2.4.
    assert found["fp32"] == 0.0 and 0 < found["bf16"] < 2.0**-8
    assert found["int8"] == pytest.approx(2.8 / 127 / 12**0.5, rel=0.2)
    assert found["int4_linear"] == pytest.approx(2.4 / 7 / 12**0.5, rel=0.2)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_islands_train_and_feedback_of_nothing_changes_nothing(kind: str) -> None:
    text = wire_error.Text()
    losses = [
        wire_error.train(text, kind, name, feedback, 0, rounds, 2, 2)
        for name, feedback, rounds in (
            ("fp32", False, 3),
            ("fp32", True, 3),
            ("int4", True, 3),
            ("fp32", 0, 0),
        )
    ]
    assert losses[0] == losses[1] != losses[2] < losses[3]
