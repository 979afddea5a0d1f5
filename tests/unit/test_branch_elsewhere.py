"""Branches of runs whose islands have a disk each: what `branch` must know of them, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_folders as folders
from typer.testing import CliRunner

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.cli import app
from megatron_wsd.config import load_config
from megatron_wsd.curves import of_one
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.errors import CheckpointError
from megatron_wsd.lineage import Parent, pinned_steps
from megatron_wsd.resume import starting_point
from megatron_wsd.rundir import RunDir, open_run
from megatron_wsd.schedule import Schedule

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"
SIZES = {"broad": 9000, "high_quality": 9000}


def cli(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["branch", *map(str, words)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def run_folder(folder: Path, mode: str, **islands: int) -> RunDir:
    """A run of two islands without checkpoints yet."""
    raw = json.loads(TINY.read_text())
    raw["scheduler"]["params"] = {"warmup_steps": 5}
    raw["megatron_wsd"]["sync"].update(mode=mode)
    folder.mkdir(exist_ok=True)
    config = folder / "open.json"
    config.write_text(json.dumps(raw))
    return open_run(
        folder / "base", load_config(config, islands=islands.get("count", 2), ranks=2), resume=False
    )


def save(run: RunDir, island: int, step: int, schedule: Schedule | None = None, **more: object) -> Path:
    """A checkpoint with one file besides its manifests."""
    config = load_config(run.config_json)
    sampler = MixSampler(SIZES, config.data.mixes, seed=7, islands=2).state_dict()
    ledger = {"drawn": {"stable": {"broad": step * config.island_batch}}, "until": step * config.island_batch}
    told = {"taken": {0: step, 1: step}, "files": {"engine/weights.pt": 3, "outer/manifest.json": None}}
    told |= {"sampler": sampler, "consumed": ledger, "config": config.digest(), **more}
    path = folders.checkpoint(run, island, step, schedule or Schedule(5), **told)
    (path / "engine").mkdir()
    (path / "engine" / "weights.pt").write_bytes(b"abc")
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"]["outer/manifest.json"] = (path / "outer" / "manifest.json").stat().st_size
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    return path


def away(run: RunDir, island: int) -> Path:
    """Leave of an island what a copy of all its json files would be here."""
    for weights in run.island(island).rglob("*.pt"):
        weights.unlink()
    return run.island(island)


def rounds(run: RunDir, *members: tuple[int, ...]) -> None:
    """Rounds of 10 steps that island 0 has recorded."""
    run.island(0).mkdir(exist_ok=True)
    text = [json.dumps(folders.outer(10 * k, k, there)) for k, there in enumerate(members, 1)]
    run.metrics(0).write_text("\n".join(text) + "\n")


def test_a_synchronous_branch_is_made_where_one_island_is_and_begins_where_each_is(tmp_path: Path) -> None:
    here, there = run_folder(tmp_path / "a", "sync"), run_folder(tmp_path / "b", "sync")
    for step in (10, 20):
        save(here, 0, step), save(there, 1, step)
    rounds(here, (0, 1), (0, 1))
    code, text = cli(f"{here.path}@10", "--name", "late", "--decay-steps", 5)
    assert code == 0, text
    child = RunDir(here.path.with_name("base-late"))
    parent = Parent.of(child)
    assert parent is not None and parent.steps == {"0": 10, "1": 10} and parent.digests["1"] == ["10a", "10b"]
    config = load_config(child.config_json)
    told = child.facts()["parent"]["consumed"]
    assert told["1"] == {"stable": {"broad": 10 * config.island_batch}}
    note = here.path / "branches" / "late.json"
    assert f"Island 1 saved on another disk. Copy to the same places there:\n  {child.path}\n  {note}" in text
    lines = [line for line in text.splitlines() if "island.sh" in line]
    assert [line.split("--island ")[1][0] for line in lines] == ["0", "1"]
    assert all("--islands 2 --ranks 2 --lighthouse http://HOST:PORT" in line for line in lines)
    assert all(f"--run-dir {child.path} --resume" in line for line in lines)
    assert "launch --config" not in text, "here only island 0 could begin"

    # What the lines above said, done: the branch and the note at the same places of the other disk.
    copied = RunDir(there.path.with_name("base-late"))
    copied.path.mkdir()
    for name in ("run.json", "config.json"):
        (copied.path / name).write_text((child.path / name).read_text())
    (there.path / "branches").mkdir()
    (there.path / "branches" / "late.json").write_text(note.read_text())
    start = starting_point(copied.path, 1, config)
    assert start.folder == there.island(1) / "checkpoints" / "step_00000010" and start.parent is not None
    assert pinned_steps(there, 1) == {10}
    assert [(d.start, d.end) for d in of_one(copied, "late").schedule.decays] == [(10, 15)]

    # It compares what it has with what the branch was made of.
    manifest = start.folder / "outer" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("10b", "10c"))
    with pytest.raises(CheckpointError, match="as it was when the branch was made"):
        starting_point(copied.path, 1, config)


def test_an_island_that_was_gone_begins_afresh(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "sync")
    for step in (10, 20):
        save(run, 0, step)
    rounds(run, (0, 1), (0,))
    for at, steps in ((10, {"0": 10, "1": 10}), (20, {"0": 20})):
        code, text = cli(f"{run.path}@{at}", "--name", f"at{at}", "--decay-steps", 5)
        assert code == 0 and "Island 1 saved" in text, text
        assert RunDir(run.path.with_name(f"base-at{at}")).facts()["parent"]["steps"] == steps
    child = RunDir(run.path.with_name("base-at20"))
    assert starting_point(child.path, 1, load_config(child.config_json)).folder is None


def test_manifests_are_all_that_an_asynchronous_branch_needs(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "async")
    save(run, 0, 40, position=38, committed=35, outer_step=8)
    code, text = cli(run.path, "--name", "late", "--decay-steps", 5)
    assert code == 2 and "island 0 at 38; island 1 at none" in text
    assert "copy at least all *.json files of base/island_I/checkpoints" in text
    save(run, 1, 12, position=33, committed=31, outer_step=6)
    folder = away(run, 1) / "checkpoints"
    store = CheckpointStore(folder, 2)
    assert store.steps() == [] and store.steps(told=True) == [12], "it is no checkpoint to resume from"
    code, text = cli(run.path, "--name", "late", "--decay-steps", 5)
    assert code == 0, text
    assert "island 0 at its step 40, island 1 at its step 12 and to be healed from round 6 on" in text
    assert "Island 1 saved on another disk" in text and text.count("island.sh --island") == 2
    # one that lost some of its files is torn, here or elsewhere
    (folder / "step_00000012" / "outer" / "manifest.json").write_text("{")
    assert store.steps(told=True) == []


def test_islands_whose_checkpoints_do_not_overlap(tmp_path: Path) -> None:
    """The fast one has kept steps 90 to 110, the slow one has saved at 60 and 80."""
    run = run_folder(tmp_path, "async")
    for n, step in enumerate((180, 200, 220)):
        save(run, 0, step, position=90 + 10 * n, committed=88 + 10 * n, outer_step=9 + n)
    for n, step in enumerate((30, 40)):
        save(run, 1, step, position=60 + 20 * n, committed=60 + 20 * n, outer_step=6 + 2 * n)
    base = ("--name", "late", "--decay-steps", 5)
    code, text = cli(f"{run.path}@85", *base)
    assert code == 2 and "island 0 at 90, 100, 110; island 1 at 60, 80" in text
    assert "Name position 90 or a later one" in text and "a larger keep reaches further back" in text
    code, text = cli(f"{run.path}@90", *base)
    assert code == 0 and "at step 88, which is what was committed in 9 rounds" in text
    assert "(island 0 at its step 180, island 1 at its step 40 and to be healed from round 8 on)" in text


@pytest.mark.parametrize("started", ["launch", "island.sh"])
def test_the_lines_are_those_of_how_the_parent_was_started(tmp_path: Path, started: str) -> None:
    run = run_folder(tmp_path, "sync")
    for island in range(2):
        save(run, island, 10)
    if started == "launch":
        run.set_lighthouse("http://127.0.0.1:1")
    code, text = cli(run.path, "--name", "late", "--decay-steps", 5)
    assert code == 0 and "-m megatron_wsd launch --config" in text
    assert text.count("island.sh --island") == (0 if started == "launch" else 2)
    assert "another disk" not in text


def test_a_refusal_in_a_decay_names_the_newest_checkpoint_that_is_not(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "async")
    decaying = Schedule(5).with_decay(50, 20)
    for island, stable in ((0, 45), (1, 40)):
        save(run, island, 10, position=stable, committed=stable, outer_step=4)
        save(run, island, 20, decaying, position=60 + island, committed=60, outer_step=6)
    base = ("--name", "late", "--decay-steps", 5)
    code, text = cli(run.path, *base)
    assert code == 2 and f"Take {run.path}@60, or" not in text
    assert (
        f"decay began at step 50. A second decay from a lowered rate learns little. Take {run.path}@45"
        in text
    )
    assert cli(f"{run.path}@45", *base)[0] == 0
