"""An error of this package that a script of a rank does not catch: one line, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LATE = "import sys; sys.excepthook = lambda *e: print('hook of a framework', file=sys.stderr)\n"
WRONG = "from megatron_wsd.config import parse_config; parse_config({'clip_grad': 1})\n"


def end_of(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_WSD")}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )


RANK = {"MEGATRON_WSD_ISLAND": "1", "RANK": "3"}


@pytest.mark.parametrize("before", ["", LATE])
def test_an_error_to_mend_is_a_line(before: str) -> None:
    done = end_of(f"{before}import megatron_wsd\n{WRONG}", **RANK)
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout.startswith("megatron-wsd: error: island 1 rank 3: clip_grad: expected a known key")
    assert done.stdout.count("\n") == 1


def test_debug_shows_where_it_came_from() -> None:
    done = end_of(f"import megatron_wsd\n{WRONG}", **RANK, MEGATRON_WSD_DEBUG="1")
    assert done.returncode == 2 and "Traceback (most recent call last)" in done.stderr
    assert done.stdout.startswith("megatron-wsd: error: island 1 rank 3: clip_grad")


def test_other_errors_and_other_processes_are_left_alone() -> None:
    done = end_of("import megatron_wsd\n1 / 0", **RANK)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and done.stdout == ""
    done = end_of(f"import megatron_wsd\n{WRONG}")
    assert done.returncode == 1 and "ConfigError" in done.stderr and done.stdout == ""
