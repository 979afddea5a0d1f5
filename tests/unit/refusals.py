"""Commands that must refuse to do anything, and say why in one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_wsd.cli import app

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "launch" / "configs" / "tiny_cpu.json"
SIZE = ("--islands", "2", "--ranks", "2")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused must not start a run here either."""
    monkeypatch.setattr(sys.modules["megatron_wsd.cli.launch"], "_run", lambda *_: 0)
    monkeypatch.setattr(sys.modules["megatron_wsd.cli.island"], "_supervise", lambda *_: 0)
    monkeypatch.setattr(sys.modules["megatron_wsd.cli.island"], "_await_lighthouse", lambda *_: None)


def run(*words: object) -> tuple[int, str]:
    """Exit code, and what is told on stderr."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.stderr


def refused(*words: object) -> str:
    """The one line in which a command refuses to do anything."""
    code, told = run(*words)
    assert code == 2, told
    assert told.startswith("megatron-wsd: error: ") and told.count("\n") == 1, told
    assert not re.search(r"\.\.( |$)|: expected .*: expected ", told), told
    return told.removeprefix("megatron-wsd: error: ").strip()
