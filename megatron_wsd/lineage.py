"""Branches: runs that begin from a checkpoint of another run, and the tree they form. Imports no torch.

A branch is a run folder of its own whose ``run.json`` names its parent: folder, step, and the digests of the
outer state there. The parent's files are used where they are, never copied or changed; a small file in
``PARENT/branches/`` lets the parent know, so that it keeps the checkpoint and `lineage` finds the branch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.branch_point import BranchPoint, branch_point, saved_by_island
from megatron_wsd.checkpoint.standing import Standing, newest
from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.config import Config, load_config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.data.consumption import Drawn, committed, total
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.errors import CheckpointError, ConfigError
from megatron_wsd.files import write_json_atomic
from megatron_wsd.records import read_islands
from megatron_wsd.rundir import RunDir, begin_branch, difference
from megatron_wsd.schedule import Schedule


@dataclass(frozen=True)
class Parent:
    """Where a branch began, as its ``run.json`` says.

    Attributes:
        path: folder of the parent, absolute.
        position: of the schedule at which the branch begins, in inner steps of the run.
        config: config digest of the parent.
        steps: by island, the step of its checkpoint there; all are ``position`` in synchronous mode.
        cursors: by island, up to where the parent has consumed its samples, in its inner steps.
        digests: by island, the digests of the ranks' outer state in its checkpoint.
        order: the decay of the branch.
    """

    path: Path
    position: int
    config: str
    steps: dict[str, int]
    cursors: dict[str, int]
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
        own = {name: facts[name] for name in ("position", "config", "steps", "cursors", "digests")}
        return cls(path=path, order=order, **own)

    def standing(self, config: Config) -> Standing:
        """The newest state from which the branch begins, among the islands whose checkpoints are here.

        Raises:
            CheckpointError: there is none, or it is no longer what it was.
        """
        store = {i: CheckpointStore(self.path / f"island_{i}" / "checkpoints", 2) for i in self.steps}
        here = [int(i) for i in self.steps if store[i].manifest(self.steps[i]) is not None]
        folders = [self.checkpoint(i) for i in here or map(int, self.steps)]
        return newest(Standing.read(folder, config) for folder in folders)

    def checkpoint(self, island: int) -> Path:
        """Folder of the checkpoint that an island of the branch begins from.

        Raises:
            CheckpointError: it is gone, or no longer what it was when the branch was made.
        """
        store = CheckpointStore(self.path / f"island_{island}" / "checkpoints", 2)
        step = self.steps[str(island)]
        folder = store.folder(step)
        if store.manifest(step) is None:
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
    parent: RunDir, at: int | None, name: str, order: Order, child: Path, config: Config, *, force: bool
) -> tuple[RunDir, BranchPoint]:
    """Make the folder of a branch; trains nothing.

    Args:
        parent: the run to branch off.
        at: position of the schedule, in synchronous mode that of a checkpoint; None for the newest that all
            islands have. See `branch_point`.
        name: of the branch.
        order: its decay.
        child: its folder, which must not be there.
        config: its config: that of the parent, perhaps with more corpora and mixes.
        force: branch off a checkpoint whose decay has begun.

    Returns:
        The branch, and where it begins.

    Raises:
        CheckpointError: there is no such checkpoint, or it is in a decay and ``force`` is not set.
        ConfigError: ``child`` is there already, or the parent has a branch of that name.
    """
    point = branch_point(parent, at, config)
    schedule = point.leader.plan.schedule
    if not (before_decay(schedule, point.saved_at) or force):
        raise _in_decay(parent, schedule, point.saved_at, newest_stable(parent, config))
    decay_of_branch(schedule, point.position, order)
    note = parent.path / "branches" / f"{name}.json"
    if note.exists():
        raise ConfigError("--name", "a name that no branch of the parent has", name, f"See {note}.")
    steps = {str(i): saved.step for i, saved in point.saved.items()}
    record = {
        "path": os.path.relpath(parent.path, child.absolute()),
        "position": point.position,
        "tokens": point.leader.tokens,
        "config": parent.facts()["config_digest"],
        "steps": steps,
        "cursors": {str(i): point.cursor(i) for i in point.saved},
        "digests": {str(i): saved.digests for i, saved in point.saved.items()},
        "order": order.model_dump(mode="json"),
        "name": name,
        "consumed": _consumed_at(parent, point, config),
    }
    run = begin_branch(child, config, record)
    note.parent.mkdir(exist_ok=True)
    path = os.path.relpath(run.path, parent.path)
    write_json_atomic(note, {"path": path, "position": point.position, "steps": steps})
    return run, point


def consumed(run: RunDir, until: Mapping[str, int]) -> dict[str, Drawn]:
    """What a run has committed of its corpora, by island; of a branch also what it inherited.

    Args:
        run: the run.
        until: by island, the sample from which on it counts no more.
    """
    own = {str(i): committed(records, until.get(str(i), 0)) for i, records in read_islands(run.path).items()}
    before = inherited(run)
    return {i: total([before.get(i, {}), own.get(i, {})]) for i in sorted(before.keys() | own.keys())}


def _consumed_at(run: RunDir, point: BranchPoint, config: Config) -> dict[str, Drawn]:
    """What a run had committed of its corpora in the outer state from which a branch begins, by island."""
    drawn = consumed(run, {str(i): point.cursor(i) * config.island_batch for i in point.saved})
    if not run.asynchronous:
        return {**drawn, **{str(i): _elsewhere(run, point, i, config) for i in point.elsewhere}}
    # There the newest state may know of contributions of which their own island has not told yet.
    before = inherited(run)
    for i, saved in point.saved.items():
        ledger, sampler = saved.manifest["consumed"], MixSampler.from_state(saved.manifest["sampler"], i)
        untold = sampler.drawn(ledger["until"], point.cursor(i) * config.island_batch)
        drawn[str(i)] = total([before.get(str(i), {}), ledger["drawn"], untold])
    return drawn


def _elsewhere(run: RunDir, point: BranchPoint, island: int, config: Config) -> Drawn:
    """The same of an island whose records are not here; in synchronous mode all have one history of mixes."""
    parent = Parent.of(run)
    first = 0 if parent is None else parent.cursors.get(str(island), 0)
    sampler = MixSampler.from_state(point.leader.manifest["sampler"], island)
    ends = (first * config.island_batch, point.cursor(island) * config.island_batch)
    return total([inherited(run).get(str(island), {}), sampler.drawn(*ends)])


def inherited(run: RunDir) -> dict[str, Drawn]:
    """What a branch had from its parent when it was made, by island; empty for any other run."""
    parent = run.facts().get("parent") if run.run_json.exists() else None
    return dict(parent.get("consumed", {})) if parent is not None else {}


def own_orders(run: RunDir) -> list[dict[str, Any]]:
    """The orders that a run has committed; of a branch without those that came with its parent's state.

    Empty for a branch that has not begun its decay.
    """
    accepted, parent = ControlFolder(run.path).accepted(), Parent.of(run) if run.run_json.is_file() else None
    if parent is None:
        return accepted
    return list(dropwhile(lambda entry: entry["nonce"] != parent.order.nonce, accepted))


def began(run: RunDir) -> int:
    """Position at which a branch began its decay, or is going to; 0 for any other run."""
    parent = Parent.of(run)
    if parent is None:
        return 0
    entry = next((e for e in own_orders(run) if e["kind"] == "decay"), None)
    return parent.position if entry is None else int(entry["step"])


def decay_of_branch(schedule: Schedule, step: int, order: Order) -> Schedule:
    """The schedule of a branch: that of its parent up to position ``step``, then its own decay.

    Raises:
        ScheduleError: the decay does not fit; one that is running cannot be replaced even by force.
    """
    if any(decay.start >= step for decay in schedule.decays):
        schedule = schedule.cancel_decay(step)
    return schedule.begin_decay(
        step, order.length, shape=order.shape, min_lr_ratio=order.min_lr_ratio, then=order.then
    )


def newest_stable(run: RunDir, config: Config) -> int | None:
    """The newest position of a run off which a branch can be made; None if there is none."""
    saved = saved_by_island(run, config)
    for at in sorted({s.position for each in saved.values() for s in each}, reverse=True):
        try:
            point = branch_point(run, at, config)
        except CheckpointError:
            continue
        if before_decay(point.leader.plan.schedule, point.saved_at):
            return at
    return None


def before_decay(schedule: Schedule, step: int) -> bool:
    """Whether a checkpoint that was saved at this step of the run is one to branch off."""
    return schedule.phase(step) in ("stable", "warmup")


def _in_decay(parent: RunDir, schedule: Schedule, step: int, stable: int | None) -> CheckpointError:
    """The refusal of a checkpoint; ``stable`` is the newest position that is not refused, if there is one."""
    begun = max((d.start for d in schedule.decays if d.start <= step), default=step)
    way = (
        "None of the stable phase is left: add" if stable is None else f"Take {parent.path}@{stable}, or add"
    )
    return CheckpointError(
        f"{parent.path}@{step}",
        "a checkpoint of the stable phase",
        f"one whose decay began at step {begun}",
        f"A second decay from a lowered rate learns little. {way} --force.",
    )


def _digests(checkpoint: Path) -> list[str]:
    return list(json.loads((checkpoint / "outer" / "manifest.json").read_text())["digests"])


def same_but_for_data(parent: RunDir, path: Path) -> Config:
    """A config for a branch: that of its parent, with more corpora and mixes at most.

    Raises:
        ConfigError: anything else differs.
    """
    own = load_config(parent.config_json)
    # the command line may have given the parent its numbers
    config = load_config(path, islands=own.islands.count, ranks=own.islands.ranks, named="--config")
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
    bare = Config(block, config.deepspeed, config.schedule)
    if bare.digest() != own.digest():
        raise ConfigError(
            "--config",
            "the parent's config with more corpora and mixes at most",
            f"{path}, which differs more:{difference(parent, bare)}",
        )
    return config


@dataclass(frozen=True)
class Child:
    """A branch, as its parent knows it.

    Attributes:
        name: of the branch.
        position: of the schedule at which it begins.
        steps: by island, the step of the checkpoint that it begins from.
        path: its folder.
    """

    name: str
    position: int
    steps: dict[str, int]
    path: Path


def children(run: RunDir) -> list[Child]:
    """Every branch of a run, by where it begins."""
    found = []
    for note in sorted((run.path / "branches").glob("*.json")):
        entry = json.loads(note.read_text())
        path = Path(os.path.normpath(run.path / entry["path"]))
        found.append(Child(note.stem, entry["position"], entry["steps"], path))
    return sorted(found, key=lambda child: (child.position, child.name))


def root_of(run: RunDir) -> RunDir:
    """The run that all others of its lineage descend from, as far as their folders are there."""
    while (parent := Parent.of(run)) is not None and (parent.path / "run.json").is_file():
        run = RunDir(parent.path)
    return run


def pinned_steps(run: RunDir, island: int) -> set[int]:
    """Steps of an island whose checkpoints branches need."""
    return {child.steps[str(island)] for child in children(run) if str(island) in child.steps}
