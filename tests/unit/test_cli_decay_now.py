"""``megatron-wsd decay-now`` and what it says of runs that go on, that stand still, and that are over."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from run_folders import event, faulty, start, step, write
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.config import load_config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.files import write_json_atomic
from megatron_wsd.rundir import RunDir, held, open_run

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"


def ask(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["decay-now", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture
def stopped(tmp_path: Path) -> RunDir:
    """A run of two islands that was stopped at step 40."""
    run = RunDir(tmp_path / "run")
    records = [start(0, 0.0), step(40, 3.0), event("stop", 40)]
    write(run.path, {0: records, 1: records})
    write_json_atomic(run.config_json, load_config(TINY, islands=2, ranks=2).resolved())
    return run


def test_an_order_to_a_run_that_stands_still_is_kept_and_that_is_said(stopped: RunDir) -> None:
    control = ControlFolder(stopped.path)
    code, text = ask(stopped.path, "--steps", 5)
    assert code == 0 and "No island of this run is running (status: stopped)" in text
    assert "taken in the first outer round after the next start" in text and "--cancel" in text
    assert "Proposed" not in text
    order = control.pending()
    assert order is not None and order.length == 5
    assert ask(stopped.path, "--cancel") == (0, "Withdrawn; no island had taken it yet.\n")

    code, text = ask(stopped.path, "--steps", 5, "--wait", 36000)  # for nobody, so it does not
    assert code == 2 and "expected a run that is running, got one that is stopped" in text
    assert control.pending() is not None and control.withdraw()
    code, text = ask(stopped.path, "--cancel")
    order = control.pending()
    assert code == 0 and "is kept" in text and order is not None and order.kind == "cancel"


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (60, "Agreed before, and not withdrawn: decay of 9 steps (linear) from step 60; --cancel again"),
        (35, "Agreed before, and under way: decay of 9 steps"),
        (10, "Withdrawn; no island had taken it yet.\n"),
    ],
)
def test_withdrawing_what_waits_here_tells_what_stays_in_force(stopped: RunDir, at: int, said: str) -> None:
    control, taken = ControlFolder(stopped.path), Order(length=9, shape="linear", at=at, nonce="a")
    control.settle([{**taken.model_dump(mode="json"), "number": taken.number, "step": 8}])
    control.propose(Order(length=5, nonce="b"))
    code, text = ask(stopped.path, "--cancel")
    assert code == 0 and said in " ".join(text.split()) + "\n" and control.pending() is None
    assert len(control.accepted()) == 1


def test_an_order_that_waits_on_another_disk_is_not_withdrawn_from_here(stopped: RunDir) -> None:
    shutil.rmtree(stopped.island(1))
    ControlFolder(stopped.path).propose(Order(length=5))
    assert "must be withdrawn there" in " ".join(ask(stopped.path, "--cancel")[1].split())


@pytest.mark.parametrize("lock", ["island_1/lock", "launch.lock"])
def test_a_run_that_is_being_resumed_is_not_taken_for_a_stopped_one(stopped: RunDir, lock: str) -> None:
    with held(stopped.path / lock, "test"):
        assert ask(stopped.path, "--steps", 5) == (0, PROPOSED)


def test_an_island_of_another_machine_that_has_just_told_something_is_running(stopped: RunDir) -> None:
    records = [start(0, 0.0), {**step(40, 3.0), "time": time.time() - 1}]
    config = stopped.config_json.read_bytes()
    write(stopped.path, {0: records})
    stopped.config_json.write_bytes(config)
    assert ask(stopped.path, "--steps", 5) == (0, PROPOSED)


PROPOSED = (
    "Proposed; the islands agree on it in their next outer round. "
    "`megatron-wsd status` tells what they said, or --wait here.\n"
)


def test_a_run_that_is_over_takes_no_order(tmp_path: Path) -> None:
    run = RunDir(faulty(tmp_path / "run"))
    write_json_atomic(run.config_json, load_config(TINY, islands=2, ranks=2).resolved())
    for flags in (("--steps", 5), ("--cancel",)):
        code, text = ask(run.path, *flags)
        assert code == 2 and "one that has finished" in text and "megatron-wsd branch" in text
    assert not (run.path / "control").exists()


def agreed(run: RunDir, *flags: object, **more: Any) -> tuple[int, str]:
    """Ask while an island is there that agrees at step 60."""

    def islands() -> None:
        control = ControlFolder(run.path)
        while (order := control.pending()) is None:
            time.sleep(0.01)
        control.settle([{**order.model_dump(mode="json"), "number": order.number, "step": 60, **more}])

    thread = threading.Thread(target=islands, daemon=True)
    thread.start()
    try:
        return ask(run.path, *flags, "--wait", 60)
    finally:
        thread.join(60)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--steps", 30), "the decay begins at step 60 and ends at step 90, and the run with it"),
        (
            ("--steps", 30, "--at", 100, "--then", "stable"),
            "the decay begins at step 100 and ends at step 130, the stable phase follows",
        ),
        (("--cancel",), "the decay that had not begun is withdrawn"),
    ],
)
def test_an_agreed_order_says_what_it_does_and_when(tmp_path: Path, flags: Any, told: str) -> None:
    run = open_run(tmp_path / "run", load_config(TINY, islands=2, ranks=2), resume=False)
    with held(run.path / "launch.lock", "test"):
        code, text = agreed(run, *flags)
    assert code == 0 and f"Agreed by all islands at step 60: {told}.\n" in text


def test_a_refused_order_says_why(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", load_config(TINY, islands=2, ranks=2), resume=False)
    with held(run.path / "launch.lock", "test"):
        code, text = agreed(run, "--steps", 30, "--at", 10, refused="decay_start: That has passed.")
    assert code == 2 and "the run refused the order: decay_start: That has passed." in text


def test_a_step_that_has_passed_is_refused_at_once(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", load_config(TINY, islands=2, ranks=2), resume=False)
    run.island(0).mkdir()
    run.metrics(0).write_text(json.dumps(step(100, 2.0)) + "\n")
    code, text = ask(run.path, "--steps", 30, "--at", 50)
    assert code == 2 and "--at: expected a step of the run from 100 on, got 50" in text
    assert ControlFolder(run.path).pending() is None
