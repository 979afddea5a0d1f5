"""Configs and the command for the tests of the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.config import parse_config

ROOT = Path(__file__).resolve().parents[2]
SEVEN = ROOT / "launch" / "configs" / "7b_2x8_10gbps.json"
TINY = ROOT / "launch" / "configs" / "tiny_cpu.json"


def config(**block: Any) -> Any:
    raw = json.loads(TINY.read_text())
    raw["megatron_wsd"] |= block
    return parse_config(raw, islands=2, ranks=2)


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


def numbers(*arguments: str | Path) -> dict[str, Any]:
    code, text = run(*arguments, "--json")
    assert code == 0, text
    return dict(json.loads(text))
