"""What of an island's log reaches the console, and what is shown when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wsd.cli.logs import HEADER, console_text, excerpt
from megatron_wsd.cli.process import describe_exit, exit_status

NOISE = "[2026-01-02 03:04:05,678] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 17"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("megatron-wsd: step 5 loss 3.2", "step 5 loss 3.2"),
        ("worker-1: megatron-wsd: step 5", "step 5"),
        ("[island 1] step 5", "step 5"),
        ("megatron-wsd: error: island 0 rank 1: x", "error: island 0 rank 1: x"),
        (NOISE, None),
        ("a warning about megatron-wsd: no", None),
        ("", None),
    ],
)
def test_only_the_trainers_own_lines_reach_the_console(line: str, text: str | None) -> None:
    assert console_text(line) == text


def log(folder: Path, *lines: str) -> Path:
    file = folder / "log.txt"
    file.write_text("\n".join([f"{HEADER} 0: now", *lines, NOISE]) + "\n")
    return file


def test_errors_that_the_trainer_names_come_first_and_once(tmp_path: Path) -> None:
    lines = [f"megatron-wsd: error: island 0 rank {r}: data.seed: expected x" for r in range(2)]
    assert excerpt(log(tmp_path, "Traceback (most recent call last):", *lines)) == ["data.seed: expected x"]


def test_the_first_traceback_is_shown_to_its_exception(tmp_path: Path) -> None:
    first = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "    f()",
        "ValueError: the cause",
    ]
    later = ["Traceback (most recent call last):", '  File "b.py", line 1', "RuntimeError: connection reset"]
    ranks = [f"[rank0]: {line}" for line in first] + [f"[rank1]: {line}" for line in later]
    assert excerpt(log(tmp_path, "hello", *ranks)) == first
    deep = [first[0], *[f"  frame {i}" for i in range(50)], "ValueError: the cause"]
    assert excerpt(log(tmp_path, *deep), 3) == ["  frame 48", "  frame 49", "ValueError: the cause"]
    assert excerpt(log(tmp_path, *first[:3])) == first[:3]  # killed while it wrote


def test_without_an_error_the_last_lines_are_shown_without_the_launchers(tmp_path: Path) -> None:
    lines = [f"line {i}" for i in range(30)]
    assert excerpt(log(tmp_path, *lines)) == lines[-20:]
    assert excerpt(log(tmp_path)) == []


def test_only_the_newest_start_counts(tmp_path: Path) -> None:
    old = "megatron-wsd: error: an old one"
    assert excerpt(log(tmp_path, old, f"{HEADER} 0: later", "killed")) == ["killed"]
    assert "No such file" in excerpt(tmp_path / "nowhere")[0]


def test_exit_codes_of_signals_are_those_of_a_shell() -> None:
    assert [exit_status(code) for code in (0, 1, 2, -9, 247, 241)] == [0, 1, 2, 137, 137, 143]
    assert describe_exit(137) == "killed by SIGKILL"
    assert describe_exit(2) == "exit code 2"
