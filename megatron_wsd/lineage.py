"""Branches: runs that begin from a checkpoint of another run, and the tree they form. Imports no torch.

A branch is a run folder of its own whose ``run.json`` names its parent: folder, step, and the digests of the
outer state there. The parent's files are used where they are, never copied or changed; a small file in
``PARENT/branches/`` lets the parent know, so that it keeps the checkpoint and `lineage` finds the branch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.config import Config, load_config
from megatron_wsd.control import Order
from megatron_wsd.data.consumption import Drawn, committed, total
from megatron_wsd.errors import CheckpointError, ConfigError
from megatron_wsd.files import write_json_atomic
from megatron_wsd.records import read_islands
from megatron_wsd.rundir import RunDir, begin_branch
from megatron_wsd.schedule import Schedule


@dataclass(frozen=True)
class Parent:
    """Where a branch began, as its ``run.json`` says.

    Attributes:
        path: folder of the parent, absolute.
        step: inner steps at which the branch began.
        config: config digest of the parent.
        digests: by island, the digests of the ranks' outer state there.
        order: the decay of the branch.
    """

    path: Path
    step: int
    config: str
    digests: dict[str, list[str]]
    order: Order

    @classmethod
    def of(cls, run: RunDir) -> Parent | None:
        """That of a run; None if it is no branch."""
        facts = run.facts().get("parent")
        if facts is None:
            return None
        path = Path(os.path.normpath(run.path / facts["path"]))
        order = Order.model_validate(facts["order"])
        return cls(path, facts["step"], facts["config"], facts["digests"], order)

    def checkpoint(self, island: int) -> Path:
        """Folder of the checkpoint that an island of the branch begins from.

        Raises:
            CheckpointError: it is gone, or no longer what it was when the branch was made.
        """
        store = CheckpointStore(self.path / f"island_{island}" / "checkpoints", 2)
        folder = store.folder(self.step)
        if store.manifest(self.step) is None:
            raise CheckpointError(
                str(folder),
                "the checkpoint that this branch began from",
                "none that is complete",
                "A branch needs its parent: bring the folder back, or change its path in run.json.",
            )
        if _digests(folder) != self.digests[str(island)]:
            raise CheckpointError(
                str(folder),
                "the checkpoint as it was when the branch was made",
                "another one of the same step",
                "Make the branch anew.",
            )
        return folder


def make_branch(
    parent: RunDir, step: int | None, name: str, order: Order, child: Path, config: Config, *, force: bool
) -> tuple[RunDir, int]:
    """Make the folder of a branch; trains nothing.

    Args:
        parent: the run to branch off.
        step: of the checkpoint; None for the newest that all islands have.
        name: of the branch.
        order: its decay.
        child: its folder, which must not be there.
        config: its config: that of the parent, perhaps with more corpora and mixes.
        force: branch off a checkpoint whose decay has begun.

    Returns:
        The branch, and the step it begins from.

    Raises:
        CheckpointError: there is no such checkpoint, or it is in a decay and ``force`` is not set.
        ConfigError: ``child`` is there already, or the parent has a branch of that name.
    """
    facts = parent.facts()
    stores = {
        i: CheckpointStore(parent.island(i) / "checkpoints", 2)
        for i in range(facts["islands"])
        if (parent.island(i) / "checkpoints").is_dir()
    }
    era = len(parent.eras()) - 1  # checkpoints from before another number of islands have other data orders
    common = set.intersection(*(set(s.steps(era)) for s in stores.values())) if stores else set()
    if not common or (step is not None and step not in common):
        raise CheckpointError(
            f"{parent.path}@{step if step is not None else 'newest'}",
            "a checkpoint that all its islands have",
            f"those of steps {sorted(common)}" if common else "none",
            "Name one of these steps." if common else "The run must have saved one.",
        )
    step = max(common) if step is None else step
    manifest = stores[min(stores)].manifest(step) or {}
    schedule = schedule_of(manifest)
    if schedule is None:
        raise CheckpointError(f"{parent.path}@{step}", "a checkpoint with a WSD schedule", "one without")
    _refuse_in_decay(parent, schedule, step, force)
    decay_of_branch(schedule, step, order)
    note = parent.path / "branches" / f"{name}.json"
    if note.exists():
        raise ConfigError("--name", "a name that no branch of the parent has", name, f"See {note}.")
    record = {
        "path": os.path.relpath(parent.path, child.absolute()),
        "step": step,
        "config": facts["config_digest"],
        "digests": {str(i): _digests(s.folder(step)) for i, s in stores.items()},
        "order": order.model_dump(mode="json"),
        "name": name,
        "consumed": consumed(parent, manifest.get("outer_step")),
    }
    run = begin_branch(child, config, record)
    note.parent.mkdir(exist_ok=True)
    write_json_atomic(note, {"path": os.path.relpath(run.path, parent.path), "step": step})
    return run, step


def consumed(run: RunDir, outer_step: int | None = None) -> dict[str, Drawn]:
    """What a run has committed of its corpora, by island; of a branch also what it inherited.

    Args:
        run: the run.
        outer_step: leave out what its own later rounds committed.
    """
    own = {str(i): committed(records, outer_step) for i, records in read_islands(run.path).items()}
    before = inherited(run)
    return {i: total([before.get(i, {}), own.get(i, {})]) for i in sorted(before.keys() | own.keys())}


def inherited(run: RunDir) -> dict[str, Drawn]:
    """What a branch had from its parent when it was made, by island; empty for any other run."""
    parent = run.facts().get("parent") if run.run_json.exists() else None
    return dict(parent.get("consumed", {})) if parent is not None else {}


def decay_of_branch(schedule: Schedule, step: int, order: Order) -> Schedule:
    """The schedule of a branch: that of its parent up to ``step``, then its own decay.

    Raises:
        ScheduleError: the decay does not fit; one that is running cannot be replaced even by force.
    """
    if any(decay.start >= step for decay in schedule.decays):
        schedule = schedule.cancel_decay(step)
    return schedule.begin_decay(
        step, order.length, shape=order.shape, min_lr_ratio=order.min_lr_ratio, then=order.then
    )


def _refuse_in_decay(parent: RunDir, schedule: Schedule, step: int, force: bool) -> None:
    if schedule.phase(step) in ("stable", "warmup") or force:
        return
    begun = max((d.start for d in schedule.decays if d.start <= step), default=step)
    raise CheckpointError(
        f"{parent.path}@{step}",
        "a checkpoint of the stable phase",
        f"one whose decay began at step {begun}",
        "A second decay from a lowered rate learns little. Branch off an earlier checkpoint, or add --force.",
    )


def schedule_of(manifest: dict[str, Any]) -> Schedule | None:
    """The schedule that a checkpoint was saved under, with everything that had been decided."""
    state = manifest.get("schedule", {})
    found = state.get("schedules") or [state.get("schedule")]
    return Schedule.from_state(found[0]) if found[0] else None


def _digests(checkpoint: Path) -> list[str]:
    return list(json.loads((checkpoint / "outer" / "manifest.json").read_text())["digests"])


def same_but_for_data(parent: RunDir, path: Path) -> Config:
    """A config for a branch: that of its parent, with more corpora and mixes at most.

    Raises:
        ConfigError: anything else differs.
    """
    config, own = load_config(path, named="--config"), load_config(parent.config_json)
    for name, mine, theirs in (
        ("corpora", config.data.corpora, own.data.corpora),
        ("mixes", config.data.mixes, own.data.mixes),
    ):
        changed = sorted(k for k in theirs if mine.get(k) != theirs[k])
        if changed:
            raise ConfigError(
                f"megatron_wsd.data.{name}.{changed[0]}",
                f"{theirs[changed[0]]}, as in the parent",
                mine.get(changed[0], "nothing"),
                "A branch may add corpora and mixes, and change none.",
            )
    data = config.data.model_copy(update={"corpora": own.data.corpora, "mixes": own.data.mixes})
    block = config.block.model_copy(update={"data": data})
    if Config(block, config.deepspeed, config.schedule).digest() != own.digest():
        raise ConfigError(
            "--config",
            "the parent's config with more corpora and mixes at most",
            f"{path}, which differs more",
        )
    return config


def children(run: RunDir) -> list[tuple[str, int, Path]]:
    """(name, step, folder) of every branch of a run, by step."""
    found = []
    for note in sorted((run.path / "branches").glob("*.json")):
        entry = json.loads(note.read_text())
        found.append((note.stem, entry["step"], Path(os.path.normpath(run.path / entry["path"]))))
    return sorted(found, key=lambda child: (child[1], child[0]))


def root_of(run: RunDir) -> RunDir:
    """The run that all others of its lineage descend from, as far as their folders are there."""
    while (parent := Parent.of(run)) is not None and (parent.path / "run.json").is_file():
        run = RunDir(parent.path)
    return run


def pinned_steps(run_dir: Path) -> set[int]:
    """Steps whose checkpoints branches need."""
    return {step for _, step, _ in children(RunDir(run_dir))}
