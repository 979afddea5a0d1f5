"""What ``megatron-wsd launch`` says at its start, and what it proposes at its end."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from run_folders import checkpoint, event, start, step, write
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.cli.launch import next_commands
from megatron_wsd.config import load_config
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.files import write_json_atomic
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Schedule

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"
OPEN = {"warmup_steps": 5}


def invoke(*words: object) -> str:
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("flags", "islands", "schedule", "told"),
    [
        (
            (),
            {},
            {"warmup_steps": 5},
            "1 island x 1 rank (1 where --islands and --ranks are not given), no end",
        ),
        (("--islands", 2), {}, {}, "2 islands x 1 rank (1 where --ranks is not given), to step 320"),
        (("--ranks", 2), {"count": 3}, {}, "3 islands x 2 ranks, to step 320"),
        (("--islands", 2, "--ranks", 2, "--steps", 10), {}, {}, "2 islands x 2 ranks, to step 10"),
    ],
)
def test_the_first_lines_say_how_much_is_started_and_for_how_long(
    tmp_path: Path, flags: Any, islands: Any, schedule: Any, told: str
) -> None:
    raw = json.loads(TINY.read_text())
    raw["scheduler"]["params"] = schedule or raw["scheduler"]["params"]
    raw["megatron_wsd"]["islands"] = islands
    (config := tmp_path / "config.json").write_text(json.dumps(raw))
    text = invoke("launch", "--config", config, "--run-dir", tmp_path / "run", "--dry-run", *flags)
    until = ": until decay-now or Ctrl-C" if told.endswith("no end") else ""
    assert text.splitlines()[0] == f"# {told}{until}"


def ended(folder: Path, how: str, mode: str = "sync") -> RunDir:
    """A run of 2 islands with a decay from step 60 to 80 and checkpoints every 20 steps."""
    run = RunDir(folder)
    records = [start(0, 0.0), step(80, 3.0), event(how, 80)]
    write(run.path, {0: records, 1: records})
    raw = json.loads(TINY.read_text())
    raw["megatron_wsd"]["sync"]["mode"] = mode
    (given := folder / "given.json").write_text(json.dumps(raw))
    config = load_config(given, islands=2, ranks=2)
    write_json_atomic(run.config_json, config.resolved())
    write_json_atomic(run.run_json, {**run.facts(), "config_digest": config.digest()})
    schedule = Schedule(5).with_decay(60, 20)
    sampler = MixSampler({"broad": 100}, {"stable": {"broad": 1.0}}, seed=7, islands=2).state_dict()
    more = {"config": config.digest(), "sampler": sampler, "consumed": {"drawn": {}, "until": 0}}
    for island in range(2):
        for n in (20, 40, 60, 80):
            # In asynchronous mode one of them has come further by its own count.
            own = n + 7 * island * (mode == "async")
            checkpoint(run, island, own, schedule, position=n, outer_step=n // 10, serial=n, **more)
    return run


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("how", ["finish", "stop"])
def test_the_last_lines_are_commands_that_work(tmp_path: Path, how: str, mode: str) -> None:
    (folder := tmp_path / "a run").mkdir()
    run = ended(folder, how, mode)
    lines = [shlex.split(line) for line in next_commands(load_config(run.config_json), run)]
    assert all(words[:3] == [sys.executable, "-m", "megatron_wsd"] for words in lines)
    commands = {words[3]: words[3:] for words in lines}
    assert set(commands) == {"report", "branch", *["launch"] * (how == "stop")}
    assert commands["branch"][1] == f"{run.path}@40", "the newest before the decay"
    invoke(*commands["branch"])
    assert (folder.with_name("a run-decayed") / "run.json").is_file()
    invoke(*commands["report"])
    assert (run.path / "report.html").is_file()
    if how == "stop":
        invoke(*commands["launch"], "--dry-run")


def test_a_config_without_the_block_says_that_defaults_are_taken(tmp_path: Path) -> None:
    raw = json.loads((TINY.parents[1] / "examples" / "plain_torch.json").read_text())
    del raw["megatron_wsd"]
    (config := tmp_path / "mine.json").write_text(json.dumps(raw))
    script = TINY.parents[1] / "examples" / "plain_torch.py"
    flags = ("--config", config, "--run-dir", tmp_path / "run", "--dry-run", "--script", script)
    first = invoke("launch", *flags, "--islands", 2, "--ranks", 1).splitlines()[0]
    assert first == '# 2 islands x 1 rank; mine.json has no block "megatron_wsd": all its defaults are taken'
