"""Where islands begin again: their own checkpoints, those of a parent, and after a change of their number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
from typer.testing import CliRunner

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.cli import app
from megatron_wsd.config import Config, load_config
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.errors import CheckpointError, ConfigError
from megatron_wsd.lineage import Parent, pinned_steps
from megatron_wsd.resume import Change, plan_change, starting_point
from megatron_wsd.rundir import RunDir, held, open_island, open_run
from megatron_wsd.schedule import Schedule

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"
SIZES, MIXES = (
    {"broad": 5000, "high_quality": 900},
    {"stable": {"broad": 1.0}, "decay": {"high_quality": 1.0}},
)


class Job:
    """A run folder whose checkpoints hold no tensors."""

    def __init__(self, folder: Path, islands: int = 2, mode: str = "sync") -> None:
        raw = json.loads(TINY.read_text())
        raw["megatron_wsd"]["sync"]["mode"] = mode
        self.given = folder / "given.json"
        self.given.write_text(json.dumps(raw))
        self.run = open_run(folder / "run", self.config(islands), resume=False)

    def config(self, islands: int) -> Config:
        return load_config(self.given, islands=islands, ranks=2)

    def save(
        self,
        island: int,
        step: int,
        outer_step: int,
        taken: dict[int, int],
        history: Any = None,
        run: Any = None,
        position: int | None = None,
        schedule: Schedule | None = None,
    ) -> Path:
        """A checkpoint as an island would write it, in whatever era the run is.

        ``position`` is another one than the step in asynchronous mode.
        """
        run = run or self.run
        eras = run.eras()
        era, islands = len(eras) - 1, eras[-1]["islands"]
        start = starting_point(run.path, island, load_config(run.config_json))
        state = start.sampler or MixSampler(SIZES, MIXES, seed=7, islands=islands).state_dict()
        return folders.checkpoint(
            run,
            island,
            step,
            schedule or Schedule(5),
            position=position,
            outer_step=outer_step,
            taken=taken,
            spans={str(islands): sum(taken.values())},
            digests=[f"{outer_step}a", f"{outer_step}b"],
            era=era,
            config=eras[-1]["config_digest"],
            sampler={**state, "history": history or state["history"]},
            consumed={"drawn": {"stable": {"broad": step}}, "until": step},
        )

    def change(self, islands: int) -> Change | None:
        """``launch --resume --islands N`` up to where it would start ranks."""
        config = load_config(self.run.config_json, islands=islands, ranks=2, resize=True)
        change = plan_change(self.run.path, config)
        open_run(self.run.path, config, resume=True, eras=None if change is None else change.eras)
        return change

    def samplers(self, islands: int) -> list[MixSampler]:
        states = [starting_point(self.run.path, i, self.config(islands)).sampler for i in range(islands)]
        assert None not in states
        return [MixSampler.from_state(s, i) for i, s in enumerate(states) if s is not None]


BATCH = 8  # two ranks of 4


def test_two_islands_become_three(tmp_path: Path) -> None:
    job = Job(tmp_path)
    saved = [job.save(i, 40, 4, {0: 40, 1: 40}) for i in range(2)]
    change = job.change(3)
    assert change is not None
    assert change.told(job.config(3)) == (
        "islands 2 -> 3 from step 40: global batch 16 -> 24 samples, 2,048 -> 3,072 tokens a step; "
        "lengths of the schedule in steps stay as saved"
    )
    assert job.run.eras() == change.eras and len(change.eras) == 2
    assert change.eras[1]["cursors"] == [40, 40] and change.eras[1]["starts"] == [40, 40, 40]
    assert job.run.facts()["islands"] == 3
    assert json.loads(job.run.config_json.read_text())["megatron_wsd"]["islands"]["min_islands"] == 2
    starts = [starting_point(job.run.path, i, job.config(3)) for i in range(3)]
    assert [s.folder for s in starts] == [*saved, None]
    first = 40 * BATCH
    numbers = [s.number(first + j)[1] for j in range(5) for s in job.samplers(3)]
    assert numbers == list(range(2 * first, 2 * first + 15))
    assert job.change(3) is None  # a plain resume from here on
    assert open_run(job.run.path, job.config(3), resume=True).eras() == change.eras


def test_an_island_that_starts_late_learns_the_order_from_one_that_has_saved_since(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for i in range(2):
        job.save(i, 40, 4, {0: 40, 1: 40})
    job.change(3)
    expected = job.samplers(3)[2].state_dict()
    newer = job.save(0, 50, 5, {0: 50, 1: 50, 2: 50}, history=[[0, "stable"], [45 * BATCH, "decay"]])
    for i in range(2):
        shutil.rmtree(job.run.island(i) / "checkpoints" / "step_00000040")
    start = starting_point(job.run.path, 2, job.config(3))
    # The order of samples is that of the others; the switches of mix are made anew by the trainer.
    assert start.folder is None and start.sampler == expected
    assert starting_point(job.run.path, 0, job.config(3)).folder == newer
    shutil.rmtree(newer)
    with pytest.raises(CheckpointError, match="none on this file system"):
        starting_point(job.run.path, 2, job.config(3))


def test_islands_that_leave_or_stand_behind_have_consumed_what_they_committed(tmp_path: Path) -> None:
    job = Job(tmp_path, islands=4)
    taken = {0: 32, 1: 32, 2: 21, 3: 32}
    job.save(0, 33, 4, taken)  # stopped between two rounds
    job.save(1, 34, 4, taken)
    job.save(
        2, 20, 2, dict.fromkeys(range(4), 20)
    )  # was killed; the others know that it committed one step more
    job.save(3, 35, 4, taken)
    change = job.change(3)
    assert change is not None and change.step == 34
    assert change.eras[1]["from"] == [33, 34, 20, 35]
    assert change.eras[1]["cursors"] == [33, 34, 21, 32]
    assert change.eras[1]["starts"] == [33, 34, 34]
    behind = starting_point(job.run.path, 2, job.config(3))
    assert behind.folder == job.run.island(2) / "checkpoints" / "step_00000020"
    seen = {(4 * j + i) for i, n in enumerate((33, 34, 21, 32)) for j in range(n * BATCH)}
    new = [s.number(k)[1] for s in job.samplers(3) for k in range(s.start, s.start + 200)]
    assert not seen & set(new) and len(set(new)) == 600
    assert min(new) == min(set(range(2000)) - seen)


def test_rounds_that_only_leaving_islands_saved_are_told(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.save(0, 40, 4, {0: 40, 1: 40})
    job.save(1, 50, 5, {0: 40, 1: 50})
    change = job.change(1)
    assert change is not None and change.eras[1]["cursors"] == [40, 40]
    assert "; 1 rounds that only islands which leave have saved are lost" in change.told(job.config(1))


def test_asynchronous_islands_go_on_where_they_committed(tmp_path: Path) -> None:
    job = Job(tmp_path, mode="async")
    job.save(0, 60, 9, {0: 55, 1: 30}, history=[[0, "stable"], [50 * BATCH, "decay"]])
    job.save(1, 40, 9, {0: 55, 1: 30}, history=[[0, "stable"], [28 * BATCH, "decay"]])
    change = job.change(3)
    assert change is not None
    assert change.eras[1]["cursors"] == [55, 30] and change.eras[1]["starts"] == [55, 30, 0]
    assert change.step == (55 + 30) // 2, "what is committed, not what an island has counted besides"
    samplers = job.samplers(3)
    assert [s.history[1:] for s in samplers] == [[(50 * BATCH, "decay")], [(28 * BATCH, "decay")], []]
    # Of broad the islands took 50 and 28 steps: free are odd numbers, from 2 * 28 * BATCH + 1 on.
    assert samplers[2].number(0) == ("broad", 2 * 28 * BATCH + 1 + 2 * 2)
    assert samplers[0].number(55 * BATCH)[0] == "high_quality"


def test_a_change_that_trained_nothing_is_replaced_or_taken_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for i in range(2):
        job.save(i, 40, 4, {0: 40, 1: 40})
    first = job.run.eras()
    for islands in (3, 5, 1):
        change = job.change(islands)
        assert change is not None and [e["islands"] for e in change.eras] == [2, islands]
        assert len(change.eras[1]["starts"]) == islands
    change = job.change(2)
    assert change is not None and job.run.eras() == first
    assert starting_point(job.run.path, 1, job.config(2)).folder is not None


def test_a_number_may_come_back_and_old_checkpoints_stay_old(tmp_path: Path) -> None:
    job = Job(tmp_path, islands=2)
    for i in range(2):
        job.save(i, 40, 4, {0: 40, 1: 40})
    job.change(1)
    alone = job.save(0, 60, 6, {0: 60, 1: 40})
    job.change(2)
    assert [e["islands"] for e in job.run.eras()] == [2, 1, 2]
    starts = [starting_point(job.run.path, i, job.config(2)) for i in range(2)]
    assert [s.folder for s in starts] == [alone, None], "island 1 left at step 40: it comes back as a new one"
    a, b = job.samplers(2)
    assert [s.number(60 * BATCH + j)[1] for j in range(3) for s in (a, b)] == list(
        range(100 * BATCH, 100 * BATCH + 6)
    )
    assert b.number(39 * BATCH)[1] == 2 * 39 * BATCH + 1, "its first samples are what they were"


def test_nothing_but_the_number_may_change_and_only_on_purpose(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(CheckpointError, match="Resume with --islands 2 until it has saved one"):
        job.change(3)
    for i in range(2):
        job.save(i, 40, 4, {0: 40, 1: 40})
    before = job.run.run_json.read_bytes()
    with pytest.raises(ConfigError, match=r"megatron-wsd resize .*run --islands 3"):
        open_run(job.run.path, job.config(3), resume=True)
    raw = json.loads(job.given.read_text())
    raw["megatron_wsd"]["sync"]["inner_steps"] = 20
    job.given.write_text(json.dumps(raw))
    change = plan_change(job.run.path, job.config(3))
    assert change is not None
    with pytest.raises(ConfigError, match=r"sync\.inner_steps: saved 10, given 20"):
        open_run(job.run.path, job.config(3), resume=True, eras=change.eras)
    assert job.run.run_json.read_bytes() == before
    assert plan_change(tmp_path / "nowhere", job.config(3)) is None


def test_a_run_that_is_over_keeps_its_islands(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for i in range(2):
        job.save(i, 120, 12, {0: 120, 1: 120}, schedule=Schedule(5).with_decay(100, 20))
    before = job.run.run_json.read_bytes()
    with pytest.raises(ConfigError, match=r"--islands: expected 2, .* its schedule ended at step 120"):
        plan_change(job.run.path, job.config(3))
    done = CliRunner().invoke(app, ["resize", str(job.run.path), "--islands", "3"])
    assert done.exit_code == 2 and job.run.run_json.read_bytes() == before


def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    manifest = job.save(0, 40, 4, {0: 40}) / "checkpoint.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "config": "another"}))
    with pytest.raises(CheckpointError, match="one of another"):
        starting_point(job.run.path, 0, job.config(2))
    assert starting_point(job.run.path, 1, job.config(2)).folder is None


def test_resize_is_for_islands_that_are_started_one_by_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for i in range(2):
        job.save(i, 40, 4, {0: 40, 1: 40})
    words = ["resize", str(job.run.path), "--islands", "3"]
    with held(job.run.island(1) / "lock", "island 1"):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and "island_1: expected a stopped island" in done.output
        assert len(job.run.eras()) == 1
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "islands 2 -> 3 from step 40" in done.output
    assert open_island(job.run.path, job.config(3), island=2, resume=True).facts()["islands"] == 3
    assert "has 3 islands already" in CliRunner().invoke(app, words).output
    assert CliRunner().invoke(app, ["resize", str(tmp_path / "no"), "--islands", "3"]).exit_code == 2


# --- branches


def branch(job: Job, at: str = "", name: str = "code", fails: str = "") -> RunDir:
    line = ("branch", f"{job.run.path}{at}", "--name", name, "--decay-steps", 5)
    done = CliRunner().invoke(app, [str(w) for w in line])
    assert done.exit_code == (2 if fails else 0) and fails in done.output, done.output
    return RunDir(job.run.path.with_name(f"run-{name}"))


def launch(run: RunDir, *words: object) -> tuple[int, str]:
    line = ("launch", "--config", run.config_json, "--run-dir", run.path, "--resume", *words)
    done = CliRunner().invoke(app, [str(w) for w in line])
    return done.exit_code, done.output


def files(run: RunDir) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    for i in range(2):
        job.save(i, 40, 4, {0: 40, 1: 40})
    return job


def test_a_branch_begins_from_its_parent_and_then_from_itself(job: Job) -> None:
    child = branch(job)
    start = starting_point(child.path, 1, job.config(2))
    assert start.folder == job.run.island(1) / "checkpoints" / "step_00000040"
    assert start.parent is not None and start.parent.position == 40
    own = job.save(1, 44, 5, {0: 44, 1: 44}, run=child)
    shutil.rmtree(job.run.path)  # from here on it needs its parent no more
    assert starting_point(child.path, 1, job.config(2)).folder == own


def test_a_branch_of_an_asynchronous_run_takes_of_each_island_its_own_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path, mode="async")
    # Island 0 is more than twice as fast: no step at which both have saved, and none they could both save at.
    slow = [job.save(1, 21, 5, {0: 44, 1: 20}, position=34)]
    fast = [job.save(0, step, n, t, position=p) for step, n, t, p in (
        (40, 4, {0: 36, 1: 16}, 30), (60, 7, {0: 56, 1: 24}, 44), (80, 9, {0: 80, 1: 33}, 58),
    )]  # fmt: skip

    early = branch(job, "@40", "early")
    parent = Parent.of(early)
    assert parent is not None and parent.steps == {"0": 40, "1": 21}
    assert parent.position == (44 + 20) // 2, "what was committed in the newest state, that of island 1"
    assert parent.cursors == {"0": 44, "1": 20}, "of island 0 more than its own checkpoint knows"
    # Of which the ledgers of the checkpoints tell but one sample a step.
    consumed = early.facts()["parent"]["consumed"]
    drawn = {i: mixes["stable"]["broad"] for i, mixes in consumed.items()}
    assert drawn == {"0": 44 * BATCH, "1": 20 * BATCH}
    starts = [starting_point(early.path, i, job.config(2)) for i in range(2)]
    assert [s.folder for s in starts] == [fast[0], slow[0]] and all(s.parent for s in starts)

    newest = Parent.of(branch(job, name="newest"))
    assert newest is not None and newest.steps == {"0": 80, "1": 21} and newest.position == (80 + 33) // 2
    assert (pinned_steps(job.run, 0), pinned_steps(job.run, 1)) == ({40, 80}, {21})
    branch(job, "@33", "none", fails="Name position 34 or a later one")
    shutil.rmtree(slow[0])
    branch(job, "@60", "none", fails="island 0 at 30, 44, 58; island 1 at none")
    shutil.rmtree(job.run.island(1))
    branch(job, name="none", fails="island_I/checkpoints from there to here")
    assert not job.run.path.with_name("run-none").exists()


def test_a_branch_may_begin_with_another_number_of_islands(job: Job) -> None:
    child = branch(job)
    config = load_config(child.config_json, islands=3, ranks=2, resize=True)
    change = plan_change(child.path, config)
    assert change is not None and change.eras[1]["from"] == [40, 40]
    open_run(child.path, config, resume=True, eras=change.eras)
    starts = [starting_point(child.path, i, config) for i in range(3)]
    parents = [job.run.island(i) / "checkpoints" / "step_00000040" for i in range(2)]
    assert [s.folder for s in starts] == [*parents, None]
    assert [s.parent is not None for s in starts] == [True, True, False]
    states = [s.sampler for s in starts if s.sampler is not None]
    numbers = [MixSampler.from_state(s, i).number(40 * BATCH)[1] for i, s in enumerate(states)]
    assert numbers == [80 * BATCH + i for i in range(3)]


def test_a_parent_that_moved_is_told_before_any_rank_starts(job: Job) -> None:
    child = branch(job)
    moved = job.run.path.rename(job.run.path.with_name("elsewhere"))
    before = files(child)
    code, text = launch(child)
    assert code == 2 and "that this branch began from" in text and "change its path in run.json" in text
    assert files(child) == before
    facts = child.facts()
    facts["parent"]["path"] = "../elsewhere"
    child.run_json.write_text(json.dumps(facts))
    start = starting_point(child.path, 0, job.config(2))
    assert start.folder == moved / "island_0" / "checkpoints" / "step_00000040"
    both = child.path.parent / "both"
    both.mkdir()
    for folder in (moved, child.path):
        folder.rename(both / folder.name)
    assert starting_point(both / child.path.name, 0, job.config(2)).folder is not None, "moved together"


@pytest.mark.parametrize("what", ["outer state", "config", "torn", "branch of a copy"])
def test_a_parent_that_changed_is_told_before_any_rank_starts(job: Job, what: str) -> None:
    child = branch(job)
    folder = job.run.island(1) / "checkpoints" / "step_00000040"
    if what == "outer state":
        outer = json.loads((folder / "outer" / "manifest.json").read_text())
        (folder / "outer" / "manifest.json").write_text(json.dumps({**outer, "digests": ["x", "y"]}))
        word = "another one of the same step"
    elif what == "config":
        content = json.loads((folder / "checkpoint.json").read_text())
        (folder / "checkpoint.json").write_text(json.dumps({**content, "config": "z"}))
        word = "one of z"
    elif what == "torn":
        content = json.loads((folder / "checkpoint.json").read_text())
        (folder / "checkpoint.json").write_text(json.dumps({**content, "files": {"engine/gone.pt": 3}}))
        word = "none that is complete"
    else:
        shutil.rmtree(folder)
        job.save(1, 50, 5, {0: 50, 1: 50})
        word = "none that is complete"
    before = files(child)
    code, text = launch(child)
    assert code == 2 and word in text, text
    code, more = launch(child, "--islands", 3)
    assert code == 2 and word in more, more
    assert files(child) == before
    parent = Parent.of(child)
    assert parent is not None and parent.checkpoint(0).is_dir()  # the other island's is as it was


def test_a_run_whose_every_checkpoint_is_torn_does_not_begin_afresh(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for island in range(2):
        folder = job.save(island, 40, 2, {0: 40, 1: 40})
        (folder / "checkpoint.json").write_text('{"step": 40, "files": {"gone": 1}}')
    with pytest.raises(CheckpointError, match="step_00000040, damaged"):
        starting_point(job.run.path, 0, job.config(2))
    CheckpointStore(job.run.island(0) / "checkpoints", 2).set_aside(40)
    with pytest.raises(CheckpointError, match="damaged_step_00000040, damaged"):
        starting_point(job.run.path, 0, job.config(2))
    shutil.rmtree(job.run.island(1) / "checkpoints")
    job.save(1, 40, 2, {0: 40, 1: 40})  # one is whole: it will heal the other
    assert starting_point(job.run.path, 0, job.config(2)).folder is None
    assert starting_point(job.run.path, 1, job.config(2)).folder is not None
