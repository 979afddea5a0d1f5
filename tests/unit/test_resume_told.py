"""What `launch --resume` tells before anything starts: changes that cannot be, steps that are done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import ROOT, SIZE, TINY, nothing_starts, refused, run
from run_folders import checkpoint
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.config import load_config
from megatron_wsd.control import Order
from megatron_wsd.errors import ScheduleError
from megatron_wsd.resume import fit_override, stands_at, starting_point
from megatron_wsd.rundir import open_run

__all__ = ["nothing_starts"]


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run of two islands that stands at step 43, between two rounds, and whose decay begins at 260."""
    config = load_config(TINY, islands=2, ranks=2)
    run = open_run(tmp_path / "run", config, resume=False)
    assert config.schedule is not None
    for island in range(2):
        more: dict[str, Any] = {"config": config.digest(), "sampler": {}}
        checkpoint(run, island, 43, config.schedule, outer_step=4, **more)
    return run.path


def resume(run: Path, *words: object) -> tuple[object, ...]:
    return ("launch", "--config", run / "config.json", "--run-dir", run, "--resume", *words)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("decay_start=40", "decay_start: expected at least 50, the first outer round from step 43 on"),
        ("decay_start=45", "decay_start: expected at least 50, the first outer round from step 43 on"),
        ("decay_start=soon", "decay_start: expected a whole number of at least 0, alone for steps or"),
        ("decay_steps=0", "decay_steps: expected a whole number of at least 1, got 0."),
        ("total_steps=100", "total_steps: expected more than decay_start = 260"),
        ("decay_shape=cosin", "decay_shape: expected a known shape, got cosin. Did you mean 'cosine'"),
        ("min_lr_ratio=2", "min_lr_ratio: expected a number in [0, 1], got 2.0."),
        ("max_lr=-1", "max_lr: expected a finite number of at least 0, got -1."),
    ],
)
def test_an_override_that_the_run_would_refuse(given: str, told: str, stopped: Path) -> None:
    for more in ((), ("--dry-run",)):
        text = refused(*resume(stopped, "--override", f"schedule.{given}", *more))
        assert text.startswith(f"--override schedule.{told}"), text
    assert not (stopped / "control").exists()


def test_an_override_that_fits_is_handed_over_in_steps(stopped: Path) -> None:
    flags = ("--override", "schedule.decay_start=50", "--override", "schedule.decay_steps=204_800 tokens")
    assert run(*resume(stopped, *flags)) == (0, "")
    order = json.loads((stopped / "control" / "order.json").read_text())
    assert order["fields"] == {
        "decay_start": 50,
        "decay_steps": 100,
    }  # 2 islands x 2 ranks x 4 x 128 tokens a step
    told = refused(*resume(stopped, *flags))
    assert told.startswith("--override: expected no order that waits already, got one in ")
    assert f"megatron-wsd decay-now {stopped} --cancel withdraws it" in told


@pytest.mark.parametrize("steps", [10, 43])
def test_steps_that_are_done_already(steps: int, stopped: Path) -> None:
    words = resume(stopped, "--steps", steps, "--override", "schedule.max_lr=1e-3")
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0
    assert done.output.startswith("[launch] nothing to do: the run stands at step 43, and --steps asks for ")
    assert "nothing is overridden" in done.output and not (stopped / "control").exists()
    flags = ["island", "--island", "0", *SIZE, "--lighthouse", "http://127.0.0.1:9", "--resume"]
    flags += ["--config", str(stopped / "config.json"), "--run-dir", str(stopped), "--steps", str(steps)]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0 and done.output.startswith(
        "[island 0] nothing to do: the run stands at step 43"
    )


def test_a_torn_checkpoint_is_told_once(stopped: Path) -> None:
    torn = stopped / "island_1" / "checkpoints" / "step_00000050"
    torn.mkdir()
    words = [str(w) for w in resume(stopped, "--steps", 40)]
    program = f"import sys; sys.argv[1:] = {words!r}; from megatron_wsd.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"ignoring {torn}: it is torn\n"


def test_an_asynchronous_run_goes_on_at_what_is_committed(tmp_path: Path) -> None:
    raw = json.loads(TINY.read_text())
    raw["megatron_wsd"]["sync"].update(mode="async")
    (given := tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_config(given, islands=2, ranks=2)
    made = open_run(tmp_path / "run", config, resume=False)
    assert config.schedule is not None
    more: dict[str, Any] = {"config": config.digest(), "sampler": {}}
    for island, (position, committed, outer_step) in enumerate(((60, 40, 6), (50, 45, 7))):
        told = {"position": position, "committed": committed, "outer_step": outer_step}
        checkpoint(made, island, 10 * (island + 1), config.schedule, **told, **more)
    starts = [starting_point(made.path, i, config) for i in range(2)]
    assert stands_at(starts, config) == 45
    order = Order(kind="override", fields={"decay_start": 50}, nonce="x")
    assert fit_override(order, starts, config).fields == {"decay_start": 50}
    with pytest.raises(ScheduleError, match="at least 45"):
        fit_override(order.model_copy(update={"fields": {"decay_start": 44}}), starts, config)
