"""Where a branch can begin: one checkpoint of each island, from which all come to one outer state.

Reads files; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_wsd.checkpoint.standing import Standing, newest
from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.config import Config
from megatron_wsd.errors import CheckpointError
from megatron_wsd.records import of_kind, position, read_islands
from megatron_wsd.rundir import RunDir


@dataclass(frozen=True)
class BranchPoint:
    """A checkpoint of each island.

    Attributes:
        position: of the schedule at which the branch begins, in inner steps of the run: in asynchronous mode
            that of what is committed in the newest outer state among the checkpoints. Islands with an older
            one are healed by the others when the branch begins.
        saved: the checkpoints by island; ``leader`` for one of ``elsewhere``.
        leader: one with the newest outer state.
        elsewhere: islands of a synchronous run whose checkpoint is not on this file system. They have saved
            the same outer state at the same step, and compare digests when the branch begins.
    """

    position: int
    saved: Mapping[int, Standing]
    leader: Standing
    elsewhere: tuple[int, ...] = ()

    @property
    def saved_at(self) -> int:
        """Position up to which any of the islands had trained."""
        return max(s.position for s in self.saved.values())

    def cursor(self, island: int) -> int:
        """Up to where the samples of an island are committed, in its inner steps."""
        return self.leader.cursors.get(str(island), 0)


def branch_point(run: RunDir, at: int | None, config: Config) -> BranchPoint:
    """The checkpoints that a branch of a run begins from.

    In synchronous mode all islands save after the same step: that one, or the newest that all have. Else each
    island saves after steps of its own: its newest that was not saved beyond the position.

    Args:
        run: to branch off.
        at: position of the schedule; None for the newest.
        config: of the run.

    Raises:
        CheckpointError: there are none such.
        ScheduleError: they were saved without a WSD schedule.
    """
    saved = saved_by_island(run, config)
    where = f"{run.path}@{at if at is not None else 'newest'}"
    if not run.asynchronous:
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
        leader, elsewhere = newest(chosen.values()), _elsewhere(run, chosen, step)
        return BranchPoint(step, {**chosen, **dict.fromkeys(elsewhere, leader)}, leader, elsewhere)
    fitting = {i: [s for s in each if at is None or s.position <= at] for i, each in saved.items()}
    if not all(fitting.values()):
        none = [str(i) for i, each in saved.items() if not each]
        remedy = (
            f"Island {' and '.join(none)} must have saved one. If it has, on another cluster: copy at least "
            f"all *.json files of {run.path.name}/island_I/checkpoints from there to here."
        )
        if not none:
            first = max(min(s.position for s in each) for each in saved.values())
            remedy = (
                f"Name position {first} or a later one: of earlier ones an island has none left. "
                "checkpoint.interval_steps counts own steps of an island; a larger keep reaches further back."
            )
        raise CheckpointError(
            where,
            "a checkpoint of each of its islands" + ("" if at is None else " up to that position"),
            "; ".join(f"island {i} at {_listed(each)}" for i, each in saved.items()),
            remedy,
        )
    chosen = {i: each[-1] for i, each in fitting.items()}
    leader = newest(chosen.values())
    return BranchPoint(leader.committed, chosen, leader)


def saved_by_island(run: RunDir, config: Config) -> dict[int, list[Standing]]:
    """The complete checkpoints of each island, as they were written.

    Only those since the number of islands was changed last: older ones have other orders of data. Of a
    synchronous run islands whose folder is on another file system are left out: they have the same steps.
    Of other islands' checkpoints the manifests do: to read them is all that `branch` does.
    """
    era = len(run.eras()) - 1
    found: dict[int, list[Standing]] = {}
    for island in range(int(run.facts()["islands"])):
        store = CheckpointStore(run.island(island) / "checkpoints", 2)
        if store.root.is_dir() or run.asynchronous:
            found[island] = [
                Standing.read(store.folder(step), config) for step in store.steps(era, told=True)
            ]
    return found


def _elsewhere(run: RunDir, here: Mapping[int, Standing], step: int) -> tuple[int, ...]:
    """The islands that have saved this step too, of those whose checkpoints are not on this file system.

    One that was gone in the newest round before it has not: it begins afresh, and is healed.
    """
    missing = [i for i in range(int(run.facts()["islands"])) if i not in here]
    rounds = [
        r
        for records in (read_islands(run.path).values() if missing else ())
        for r in of_kind(records, "round")
        if r["committed"] and position(r) <= step
    ]
    there = max(rounds, key=lambda r: r["outer_step"])["islands"] if rounds else missing
    return tuple(i for i in missing if i in there)


def _listed(saved: Sequence[Standing]) -> str:
    return ", ".join(str(s.position) for s in saved) or "none"
