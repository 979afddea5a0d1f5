"""Every block of commands in README and docs says what it is (run, dry-run, illustrative) and is held to it.

A comment above the fence says it:

    <!-- run -->                     is run here, in a scratch folder, page by page, from top to bottom
    <!-- run: by .ci/run, ... -->    is run there, since it takes minutes
    <!-- dry-run -->                 is run here with --dry-run at what starts islands
    <!-- illustrative: why -->       is not run

Whatever the tag, each `megatron-wsd` command must be one that its parser takes. The scratch folder has the
repository's launch/, the data/ that its configs name, a config CONFIG, and the runs RUN, RUN2 and RUN3.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from run_folders import faulty
from shipped_data import lay_data

from megatron_wsd.cli import app

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "launch" / "configs" / "tiny_cpu.json"
TAGGED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md"]
OTHERS += [ROOT / folder / "README.md" for folder in ("benchmarks", "launch/configs", "launch/examples")]
SHELLS = ("bash", "console", "sh", "shell")
FENCE = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TAG = re.compile(r"run|dry-run|run: by \.ci/run\b.*|illustrative: \S.*")
PROGRAMS = """
    megatron-wsd torchft_lighthouse deepspeed torchrun pip python python3 git make echo cp mv mkdir touch
    source export ssh sbatch kubectl apt-get sudo curl kill pkill tensorboard mkdocs
""".split()  # noqa: SIM905
WRAPPER_FLAGS = ("--restarts", "--restart-pause-s", "--nccl-interface")  # launch/island.sh's own


class Block(NamedTuple):
    """A fenced block of commands; ``line`` is where it begins."""

    page: Path
    line: int
    tag: str
    body: str

    @property
    def commands(self) -> list[str]:
        """One logical line each."""
        return [line for line in self.body.replace("\\\n", " ").splitlines() if line.strip()]


@functools.cache
def blocks(page: Path) -> list[Block]:
    """The blocks of a page that hold commands: in a shell's language, or in none and looking so."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        tag, language, body = match.groups()
        block = Block(page, text.count("\n", 0, match.start()) + 1, tag or "", body)
        if language in SHELLS or (not language and any(map(is_command, block.commands))):
            found.append(block)
    return found


def is_command(line: str) -> bool:
    first = line.removeprefix("$ ").split()[0]
    return first in PROGRAMS or first.startswith(("./", ".venv/", ".ci/", "launch/"))


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command in a line of shell, up to where its output goes."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";&|"):
            command.append(word)
        elif command:
            yield command[: command.index(">")] if ">" in command else command
            command = []


def arguments(command: list[str]) -> list[str] | None:
    """Those of megatron-wsd; None if the command is another program."""
    program, *rest = command
    if program.removeprefix(".venv/bin/") == "megatron-wsd":
        return rest
    if program.removeprefix("./") == "launch/quickstart.sh":
        return ["launch", "--config", "CONFIG", "--run-dir", "RUN", *rest]
    if program.removeprefix("./") == "launch/island.sh":
        flags = iter(rest)
        return ["island", *(word for word in flags if word not in WRAPPER_FLAGS or next(flags) is None)]
    return None


def parse(line: str) -> int:
    """Parse the megatron-wsd commands in a line without running them; how many they are."""
    group: Any = typer.main.get_command(app)
    given = [a for a in map(arguments, simple_commands(line)) if a is not None]
    for name, *rest in given:
        if name.startswith("-"):
            assert name in {option for param in group.params for option in param.opts} | {"--help"}, line
        else:
            assert name in group.commands, line
            group.commands[name].make_context(name, rest)
    return len(given)


def label(value: Block | Path) -> str:
    if isinstance(value, Block):
        return f"{value.page.relative_to(ROOT)}:{value.line}"
    return str(value.relative_to(ROOT))


def test_the_parser_finds_what_is_wrong() -> None:
    assert parse("megatron-wsd status RUN --watch && .venv/bin/megatron-wsd doctor > out  # both") == 2
    island = "--island 0 --islands 2 --ranks 8 --lighthouse L --config C --run-dir R"
    assert parse(f"./launch/island.sh {island} --restarts 3") == 1
    for wrong in ("status RUN --wach", "status", "plan CONFIG --islands two"):
        with pytest.raises(Exception, match=r"--wach|Missing|integer"):
            parse(f"megatron-wsd {wrong}")
    with pytest.raises(AssertionError):
        parse("megatron-wsd stats RUN")


@pytest.mark.parametrize("block", [b for page in TAGGED for b in blocks(page)], ids=label)
def test_a_block_of_commands_says_what_it_is(block: Block) -> None:
    expected = "<!-- run -->, <!-- dry-run --> or <!-- illustrative: why --> in the line above"
    assert TAG.fullmatch(block.tag), f"{label(block)}: expected {expected}, got {block.tag!r}:\n{block.body}"


@pytest.mark.parametrize("page", [*TAGGED, *OTHERS], ids=label)
def test_commands_are_known_with_their_options(page: Path) -> None:
    for block in blocks(page):
        for line in block.commands:
            parse(line)
    # those within a sentence may leave out what is required
    group: Any = typer.main.get_command(app)
    for name, rest in re.findall(r"`megatron-wsd ([a-z][a-z-]*)([^`]*)`", page.read_text()):
        assert name in group.commands, f"megatron-wsd {name}"
        known = {option for param in group.commands[name].params for option in param.opts} | {"--help"}
        given = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))
        assert given <= known, f"megatron-wsd {name}: {given - known}"


@pytest.mark.parametrize(
    "page", [p for p in TAGGED if {"run", "dry-run"} & {b.tag for b in blocks(p)}], ids=label
)
def test_what_is_tagged_run_or_dry_run_runs(page: Path, tmp_path: Path) -> None:
    folder = scratch(tmp_path)
    for block in blocks(page):
        if block.tag not in ("run", "dry-run"):
            continue
        script = block.body if block.tag == "run" else dry(block)
        before = sorted(folder.rglob("*"))
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
        )
        told = f"{label(block)}: exit status {done.returncode}\n{script}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, told
        assert "Traceback" not in done.stderr, told
        if block.tag == "dry-run":
            assert done.stdout.strip(), told
            assert sorted(folder.rglob("*")) == before  # touches nothing


def test_what_is_left_to_ci_is_there() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for block in (b for page in TAGGED for b in blocks(page) if b.tag.startswith("run: ")):
        for line in block.commands:
            assert line.split()[0] in script, label(block)


def dry(block: Block) -> str:
    """The commands of a block with --dry-run; the lighthouse, which has none, shows that it has the flags."""
    lines = []
    for line in block.commands:
        command = next(simple_commands(line))
        if command[0] == "torchft_lighthouse":
            flags = " ".join(word for word in command if word.startswith("--"))
            lines.append("known=$(torchft_lighthouse --help)")
            lines.append(f'for f in {flags}; do grep -o -m 1 -e "$f" <<<"$known"; done')
            continue
        given = arguments(command)
        assert given is not None, f"{label(block)} cannot be dry-run: {line}"
        assert given[0] in ("launch", "island"), f"{label(block)} cannot be dry-run: {line}"
        lines.append(shlex.join(command if "--dry-run" in command else [*command, "--dry-run"]))
    return "\n".join(lines)


def scratch(folder: Path) -> Path:
    """A folder that looks like the repository to whoever only reads, with a config and runs beside."""
    for name in ("launch", ".venv"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    lay_data(folder)
    shutil.copy(TINY, folder / "CONFIG")
    config = json.loads(TINY.read_text())
    config["megatron_wsd"]["islands"] = {"count": 2, "ranks": 2}
    for run in ("RUN", "RUN2", "RUN3"):
        (faulty(folder / run) / "config.json").write_text(json.dumps(config))
    return folder


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
