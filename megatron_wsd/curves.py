"""Learning rates as curves: that of a config, or those of a run and its branches. Imports no torch.

A curve of a run is what its newest checkpoint and the orders after it say, so everything that was decided and
overridden so far is in it; one of a branch begins where it left its parent.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_wsd.checkpoint.standing import Standing, batch_of, decided, newest
from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.config import Config, load_config
from megatron_wsd.control import ControlFolder
from megatron_wsd.errors import CheckpointError, ConfigError, MegatronWSDError, ScheduleError
from megatron_wsd.lineage import Parent, began, children, decay_of_branch, own_orders
from megatron_wsd.records import Record, begun_at, of_kind, phases, position, read_islands
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Batch, Length, Phase, Schedule, Unit
from megatron_wsd.schedule.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POINTS = 1000  # of a curve: more than a picture has pixels for
_BARE_UPDATES = 1000  # how far to look where nothing at all is planned


@dataclass(frozen=True)
class Curve:
    """One schedule with what is needed to tell it in rates, steps and tokens.

    Positions count completed updates, or samples or tokens where the schedule does.

    Attributes:
        name: of the config, the run or the branch.
        schedule: of the first param group, with everything decided so far.
        peak: rate of that group.
        batch: what one update and one sample hold, over all islands.
        begin: position from which the curve is one of its own: 0, or where a branch leaves its parent.
        position: where the run stands; None for a config, and for a run that has not begun.
    """

    name: str
    schedule: Schedule
    peak: float
    batch: Batch
    begin: int = 0
    position: int | None = None

    def rate(self, n: int) -> float:
        """Rate of the update that follows position n."""
        return self.schedule.rate(n, self.peak)

    def count(self, n: int, unit: Unit) -> int | None:
        """Position n in another unit, rounded up to a whole one; None if one update or sample is unknown."""
        try:
            return self.batch.convert(unit, Length(n, self.schedule.unit), unit)
        except ScheduleError:
            return None

    def spans(self, until: int | None = None) -> list[tuple[Phase, int, int | None]]:
        """The phases from ``begin`` on as (name, first position, position after the last).

        Args:
            until: position to stop at. None: the last phase has no end, and what comes after the end of the
                schedule is left out.
        """
        edges = {self.begin, self.schedule.warmup_steps}
        for decay in self.schedule.decays:
            edges |= {decay.start, decay.end, decay.settled}
        inside = sorted(e for e in edges if e >= self.begin and (until is None or e < until))
        ends: list[int | None] = [*inside[1:], until]
        found: list[tuple[Phase, int, int | None]] = []
        for left, right in zip(inside, ends, strict=True):
            name = self.schedule.phase(left)
            if until is None and name == "done":
                break
            found.append((name, left, right))
        return found

    def points(self, until: int) -> list[int]:
        """Positions that show the curve up to ``until``: evenly spaced, and both sides of every edge.

        A branch is over where its schedule ends; none if it begins later than ``until``.
        """
        if self.begin and self.schedule.end is not None:
            until = min(until, self.schedule.end)
        width = until - self.begin
        if width < 0:
            return []
        chosen = {self.begin + round(width * k / _POINTS) for k in range(_POINTS + 1)}
        for _, left, right in self.spans(until):
            chosen |= {left, max(left, left - 1 if right is None else right - 1)}
        if self.position is not None and self.begin <= self.position <= until:
            chosen.add(self.position)
        return sorted(chosen)


def of_config(config: Config, name: str) -> Curve:
    """The curve that a config asks for.

    Raises:
        ConfigError: its scheduler is no WSD, or no peak is given.
    """
    if config.schedule is None:
        given = config.deepspeed.get("scheduler", {}).get("type", "nothing")
        raise ConfigError("scheduler.type", '"WSD"', given, "Only a WSD schedule can be told in advance.")
    return Curve(name, config.schedule, _peak(config), batch_of(config))


def of_run(run: RunDir) -> tuple[list[Curve], list[str]]:
    """The curves of a run and of all branches that descend from it.

    Returns:
        The run's own curve, then those of its branches, each after its parent; and a line about each branch
        that cannot be told, since its folder or its parent's checkpoint is gone.

    Raises:
        ConfigError: the run's scheduler is no WSD.
    """
    curves, notes = [of_one(run, run.path.name)], []

    def grow(parent: RunDir, prefix: str) -> None:
        for branch in children(parent):
            child, name = RunDir(branch.path), prefix + branch.name
            if not child.run_json.is_file():
                notes.append(f"branch {name} @{branch.position}: {child.path} is gone")
                continue
            try:
                curve = of_one(child, name)
            except CheckpointError as e:
                notes.append(f"branch {name} @{branch.position}: {e}")
                continue
            curves.append(replace(curve, begin=began(child)))
            grow(child, f"{name}/")

    grow(run, "")
    return curves, notes


def of_one(run: RunDir, name: str) -> Curve:
    """A run's curve from position 0, with what came before it if it is a branch.

    Raises:
        ConfigError: the run's scheduler is no WSD.
        CheckpointError: it is a branch that has saved nothing yet, and its parent's checkpoint is gone.
    """
    config = load_config(run.config_json)
    curve = of_config(config, name)
    saved, parent = _newest(run, config), Parent.of(run)
    stands = None if saved is None else saved.position
    if saved is None and parent is not None:
        saved = parent.standing(config)
    if saved is None:
        plan, known = Plan((curve.schedule,), (curve.peak,)), frozenset[int]()
    else:
        plan, known = saved.plan, saved.orders
    if plan.schedule.unit == "steps":  # as are orders and metrics
        if parent is not None and saved is not None and stands is None and not own_orders(run):
            plan = Plan((decay_of_branch(plan.schedule, parent.position, parent.order),), plan.peaks[:1])
        since = [order for order in ControlFolder(run.path).accepted() if order["number"] not in known]
        plan = decided(plan, since, curve.batch)
        records = [r for island in read_islands(run.path).values() for r in of_kind(island, "step")]
        stands = max(map(position, records), default=stands)
    return replace(curve, schedule=plan.schedule, peak=plan.peaks[0], position=stands)


def passed(run: RunDir, islands: Mapping[int, list[Record]]) -> list[tuple[str, int, int]]:
    """The phases that a run has passed, as (name, first position, last position).

    A synchronous island has a record of the last step of every phase. The position of asynchronous ones
    passes it by what others have committed, so there the schedule is asked, if the folder tells it.

    Args:
        run: the run.
        islands: the records of each island.
    """
    each = [of_kind(records, "step") for records in islands.values()]
    longest = max(each, key=len, default=[])
    if longest and run.asynchronous and run.run_json.is_file():
        with suppress(MegatronWSDError):
            reached = max(position(r) for steps in each for r in steps)
            spans = replace(of_one(run, run.path.name), begin=began(run)).spans(reached)
            return [(name, left + 1, right or reached) for name, left, right in spans if name != "done"]
    return phases(longest, begun_at([r for records in islands.values() for r in records]))


def _newest(run: RunDir, config: Config) -> Standing | None:
    """The newest complete checkpoint of any island; None if there is none."""
    found = []
    for root in sorted(run.path.glob("island_*/checkpoints")):
        store = CheckpointStore(root, 2)
        found += [Standing.read(store.folder(step), config) for step in store.steps()[-1:]]
    return newest(found) if found else None


def _peak(config: Config) -> float:
    """Peak of the first param group: scheduler.params.max_lr, else the optimizer's lr."""
    max_lr: Any = config.deepspeed["scheduler"]["params"].get("max_lr")
    if isinstance(max_lr, list):
        max_lr = max_lr[0]
    if max_lr is None:
        max_lr = config.deepspeed.get("optimizer", {}).get("params", {}).get("lr")
    if isinstance(max_lr, bool) or not isinstance(max_lr, (int, float)):
        raise ConfigError("scheduler.params.max_lr", "a rate there or in optimizer.params.lr", max_lr)
    return float(max_lr)


def extent(curves: Sequence[Curve], updates: int | None) -> int:
    """How far to look: ``updates`` of them, or past everything that is planned.

    An open horizon is shown for half as long again as what is known of it: the decays that lie behind, the
    branches, where the run stands; at least for nine times the warm-up.

    Raises:
        ScheduleError: ``updates`` are not convertible into what the schedule counts.
    """
    first = curves[0]
    if updates is not None:
        return max(1, first.batch.convert("--steps", Length(updates, "steps"), first.schedule.unit))
    last = 0
    for curve in curves:
        ends = [decay.settled for decay in curve.schedule.decays]
        last = max([last, curve.begin, curve.position or 0, *ends])
    if all(curve.schedule.end is not None for curve in curves):
        return last + max(1, last // 20)
    bare = _BARE_UPDATES * (first.batch.per_step(first.schedule.unit) or 1)
    return max(last + last // 2, 10 * first.schedule.warmup_steps) or bare
