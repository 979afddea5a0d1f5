"""The guide: every json in it is a schedule, every command exists, and what it says is equal is equal."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Upstream
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.control import override_order
from megatron_wsd.schedule import Schedule, WarmupStableDecayLR

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "wsd-guide.md", ROOT / "docs" / "schedule.md", ROOT / "README.md"]
GUIDE = PAGES[0].read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language; "" for commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in fenced if name == language]


COMMANDS = sorted(
    {
        line.split("  #")[0]
        for page in PAGES
        for block in blocks(page.read_text().replace("\\\n", " "), "")
        for line in block.splitlines()
        if re.match(r"(\.venv/bin/)?megatron-wsd ", line)
    }
)


def told(block: str, folder: Path) -> dict[str, Any]:
    """What ``megatron-wsd schedule`` makes of a piece of json."""
    tiny = json.loads((ROOT / "launch" / "configs" / "tiny_cpu.json").read_text())
    config = folder / "config.json"
    config.write_text(json.dumps(tiny | json.loads("{" + block + "}")))
    result = CliRunner().invoke(app, ["schedule", str(config), "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout)[0])


def the_one_after(words: str) -> str:
    return blocks(GUIDE[GUIDE.index(words) :], "json")[0]


@pytest.mark.parametrize("block", blocks(GUIDE, "json"))
def test_every_json_is_a_schedule(block: str, tmp_path: Path) -> None:
    assert told(block, tmp_path)["phases"][0]["phase"] == "warmup"


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    first, second = blocks(GUIDE[GUIDE.index("Both forms") :], "json")[:2]
    assert told(first, tmp_path) == told(second, tmp_path)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_known_with_its_flags(line: str) -> None:
    _, name, *words = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, list(words), resilient_parsing=False)
    for given in context.params.get("override") or []:
        override_order([given], "")


def test_megatrons_flags_are_that_json(tmp_path: Path) -> None:
    schedule = told(the_one_after("## From Megatron"), tmp_path)
    groups: list[dict[str, Any]] = [{}]
    upstream = Upstream(
        SimpleNamespace(param_groups=groups), 0.0, 3e-4, 3e-5, 2000, 100000, "WSD", 0.0, 0.0, 1, "constant",
        wsd_decay_steps=10000, lr_wsd_decay_style="minus_sqrt",
    )  # fmt: skip
    ours = Schedule.from_state(schedule["schedule"])
    for n in range(0, 101000, 500):
        # upstream adds min_lr to a share of max_lr - min_lr: a few roundings
        assert groups[0]["lr"] == pytest.approx(ours.rate(n, schedule["peak"]), rel=8 * 2.0**-53)
        upstream.step(500)


def test_deepspeeds_scheduler_is_that_json_one_step_later(tmp_path: Path) -> None:
    schedule = told(the_one_after("## From DeepSpeed"), tmp_path)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    theirs = WarmupDecayLR(
        optimizer, total_num_steps=1000, warmup_max_lr=1e-3, warmup_num_steps=100, warmup_type="linear"
    )
    ours = Schedule.from_state(schedule["schedule"])
    for n in range(1002):
        expected = ours.rate(max(0, n - 1), schedule["peak"])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=0, abs=8 * 2.0**-53 * 1e-3)
        theirs.step()


def test_the_torch_line_is_that_of_the_table() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    namespace: dict[str, Any] = {"optimizer": optimizer}
    exec(blocks(GUIDE, "python")[-1], namespace)
    scheduler = namespace["scheduler"]
    assert isinstance(scheduler, WarmupStableDecayLR)
    decay = scheduler.schedule.decays[0]
    assert (scheduler.schedule.warmup_steps, decay.start, decay.length, decay.shape) == (
        2000,
        90000,
        10000,
        "cosine",
    )


def test_links_and_pictures_are_there() -> None:
    for page in PAGES[:2]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), target
