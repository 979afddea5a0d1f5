"""Where a branch can begin: one checkpoint of each island, from which all come to one outer state.

Reads files; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.diloco.agree import whole_steps
from megatron_wsd.errors import CheckpointError
from megatron_wsd.rundir import RunDir


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of an island.

    Attributes:
        step: inner steps of the island, after which it is named.
        manifest: of the checkpoint.
        outer: the manifest of its outer state.
        position: of the schedule, in inner steps of the run, when it was saved.
    """

    step: int
    manifest: dict[str, Any]
    outer: dict[str, Any]
    position: int

    @property
    def outer_step(self) -> int:
        return int(self.manifest.get("outer_step", 0))


@dataclass(frozen=True)
class BranchPoint:
    """A checkpoint of each island.

    Attributes:
        position: of the schedule at which the branch begins, in inner steps of the run: in asynchronous mode
            that of what is committed in the newest outer state among the checkpoints. Islands with an older
            one are healed by the others when the branch begins.
        saved: the checkpoints by island.
        leader: that with the newest outer state; of equal ones that of the lowest island.
    """

    position: int
    saved: Mapping[int, Saved]
    leader: Saved

    @property
    def saved_at(self) -> int:
        """Position up to which any of the islands had trained."""
        return max(s.position for s in self.saved.values())

    def cursor(self, island: int) -> int:
        """Up to where the samples of an island are committed, in its inner steps."""
        fragments = self.leader.outer["counters"]["fragments"]
        return max(int(f["taken"].get(str(island), 0)) for f in fragments)


def branch_point(run: RunDir, at: int | None, *, lockstep: bool) -> BranchPoint:
    """The checkpoints that a branch of a run begins from.

    In synchronous mode all islands save after the same step: that one, or the newest that all have. Else each
    island saves after steps of its own: its newest that was not saved beyond the position.

    Args:
        run: to branch off.
        at: position of the schedule; None for the newest.
        lockstep: the run is a synchronous one.

    Raises:
        CheckpointError: there are none such.
    """
    saved = saved_by_island(run, lockstep=lockstep)
    where = f"{run.path}@{at if at is not None else 'newest'}"
    if lockstep:
        common = set.intersection(*({s.step for s in each} for each in saved.values())) if saved else set()
        if not common or (at is not None and at not in common):
            raise CheckpointError(
                where,
                "a checkpoint that all its islands have",
                f"those of steps {sorted(common)}" if common else "none",
                "Name one of these steps." if common else "The run must have saved one.",
            )
        step = max(common) if at is None else at
        chosen = {i: next(s for s in each if s.step == step) for i, each in saved.items()}
        return BranchPoint(step, chosen, _leader(chosen))
    fitting = {i: [s for s in each if at is None or s.position <= at] for i, each in saved.items()}
    if not all(fitting.values()):
        remedy = "Each must have saved one, and its folder must be here."
        if all(saved.values()):
            first = max(min(s.position for s in each) for each in saved.values())
            remedy = f"Name position {first} or a later one."
        raise CheckpointError(
            where,
            "a checkpoint of each of its islands" + ("" if at is None else " up to that position"),
            "; ".join(f"island {i} at {_listed(each)}" for i, each in saved.items()),
            remedy,
        )
    chosen = {i: each[-1] for i, each in fitting.items()}
    leader = _leader(chosen)
    spans = {int(whole): int(steps) for whole, steps in leader.outer["counters"]["spans"].items()}
    return BranchPoint(whole_steps(spans), chosen, leader)


def _leader(saved: Mapping[int, Saved]) -> Saved:
    return max((saved[i] for i in sorted(saved)), key=lambda s: s.outer_step)


def saved_by_island(run: RunDir, *, lockstep: bool) -> dict[int, list[Saved]]:
    """The complete checkpoints of each island, as they were written.

    Only those since the number of islands was changed last: older ones have other orders of data. Of a
    synchronous run islands whose folder is on another file system are left out: they have the same steps.
    """
    era = len(run.eras()) - 1
    found: dict[int, list[Saved]] = {}
    for island in range(int(run.facts()["islands"])):
        store = CheckpointStore(run.island(island) / "checkpoints", 2)
        if store.root.is_dir() or not lockstep:
            each = (_read(store, step, lockstep) for step in store.steps(era))
            found[island] = [saved for saved in each if saved is not None]
    return found


def _read(store: CheckpointStore, step: int, lockstep: bool) -> Saved | None:
    """A complete checkpoint; None if it was removed meanwhile."""
    manifest = store.manifest(step)
    if manifest is None:
        return None
    outer = json.loads((store.folder(step) / "outer" / "manifest.json").read_text())
    return Saved(step, manifest, outer, step if lockstep else int(outer["extra"]["position"]))


def _listed(saved: Sequence[Saved]) -> str:
    return ", ".join(str(s.position) for s in saved) or "none"
