"""What the command says about itself: examples that parse, what was meant, exit codes, completion."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.cli.usage import EXAMPLES

GROUP: Any = typer.main.get_command(app)
CLI_PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})
    return result.exit_code, re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_has_an_example_that_parses(name: str) -> None:
    code, text = run(name, "--help")
    assert code == 0
    assert text.count(f"Example: megatron-wsd {name}") == 1
    command = GROUP.commands[name]
    example = EXAMPLES.get(name) or command.help.partition("Example: ")[2]
    program, given, *rest = shlex.split(example)
    assert (program, given) == ("megatron-wsd", name)
    command.make_context(name, rest)


def test_the_page_names_every_command_in_its_own_words() -> None:
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (.+) \|$", CLI_PAGE.read_text().partition("## Commands")[2], re.MULTILINE
    )
    assert rows == [(name, command.help.split("\n\n")[0]) for name, command in GROUP.commands.items()]


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_argument_is_explained(name: str) -> None:
    assert [p.name for p in GROUP.commands[name].params if not p.help] == []


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (("launhc",), "'launch'"),
        (("decay_now", "RUN"), "'decay-now'"),
        (("--vresion",), "--version"),
        (("launch", "--conifg", "x"), "--config"),
        (("plan", "x", "--island", "2"), "--islands"),
        (("status", "RUN", "--wach"), "--watch"),
        (("launch", "--hostfile", "x"), "It is one of megatron-wsd island."),
        (("decay-now", "RUN", "--length", "3"), "There are --steps, --shape"),
        (("decay-now", "RUN", "--then", "stabel"), "'stable'"),
    ],
)
def test_what_is_wrong_is_answered_with_what_was_meant(wrong: tuple[str, ...], meant: str) -> None:
    code, text = run(*wrong)
    assert code == 2
    assert meant in text, text


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["megatron_wsd.cli.doctor"], "findings", interrupted)
    assert run("doctor")[0] == 130


def test_the_page_of_the_command_has_the_exit_codes() -> None:
    section = CLI_PAGE.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    codes = re.findall(r"^\| (\S[^|]*?) \|", section, re.MULTILINE)
    assert codes == ["code", "---", "0", "1", "2", "128 + n"]


def test_completion_knows_the_commands() -> None:
    variables = {"COMP_WORDS": "megatron-wsd sta", "COMP_CWORD": "1"}
    variables["_MEGATRON_WSD_COMPLETE"] = "complete_bash"
    done = CliRunner().invoke(app, [], env=variables, prog_name="megatron-wsd")
    assert done.output.split() == ["status"]
