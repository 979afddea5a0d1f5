"""Learning rates as curves: that of a config, or those of a run and its branches. Imports no torch.

A curve of a run is what its newest checkpoint and the orders after it say, so everything that was decided and
overridden so far is in it; one of a branch begins where it left its parent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_wsd.checkpoint.store import MANIFEST, CheckpointStore
from megatron_wsd.config import Config, load_config
from megatron_wsd.control import ControlFolder
from megatron_wsd.errors import CheckpointError, ConfigError, ScheduleError
from megatron_wsd.lineage import Parent, children, decay_of_branch
from megatron_wsd.records import of_kind, read_islands
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Batch, Length, Phase, Schedule, Unit
from megatron_wsd.schedule.front import in_own_units
from megatron_wsd.schedule.params import batch_from_params
from megatron_wsd.schedule.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    if config.model is not None:
        batch = Batch(config.island_batch * (config.islands.count or 1), config.model.seq_length)
    else:  # a script of the user's own may say in the params what the model would
        batch = batch_from_params(config.deepspeed["scheduler"]["params"])
        if batch.samples_per_step is None:
            batch = replace(batch, samples_per_step=config.island_batch * (config.islands.count or 1))
    return Curve(name, config.schedule, _peak(config), batch)


def of_run(run: RunDir) -> tuple[list[Curve], list[str]]:
    """The curves of a run and of all branches that descend from it.

    Returns:
        The run's own curve, then those of its branches, each after its parent; and a line about each branch
        that cannot be told, since its folder or its parent's checkpoint is gone.

    Raises:
        ConfigError: the run's scheduler is no WSD.
    """
    curves, notes = [_of_run(run, run.path.name)], []

    def grow(parent: RunDir, prefix: str) -> None:
        for short, step, path in children(parent):
            child, name = RunDir(path), prefix + short
            if not child.run_json.is_file():
                notes.append(f"branch {name} @{step}: {path} is gone")
                continue
            try:
                curve = _of_run(child, name)
            except CheckpointError as e:
                notes.append(f"branch {name} @{step}: {e}")
                continue
            curves.append(replace(curve, begin=step))
            grow(child, f"{name}/")

    grow(run, "")
    return curves, notes


def _of_run(run: RunDir, name: str) -> Curve:
    """A run's curve from position 0, with what came before it if it is a branch."""
    config = load_config(run.config_json)
    curve = of_config(config, name)
    manifest, parent = _newest(run), Parent.of(run)
    stands: int | None = None
    if manifest is not None:
        plan, saved_at = Plan.from_state(manifest["schedule"])
        stands = saved_at
    elif parent is not None:
        folder = parent.checkpoint(min(int(island) for island in parent.digests))
        plan, saved_at = Plan.from_state(json.loads((folder / MANIFEST).read_text())["schedule"])
        plan = Plan((decay_of_branch(plan.schedule, parent.step, parent.order),), plan.peaks[:1])
    else:
        plan, saved_at = Plan((curve.schedule,), (curve.peak,)), -1
    if plan.schedule.unit == "steps":  # as are orders and metrics
        plan = _decided_since(plan, saved_at, ControlFolder(run.path).accepted(), curve.batch)
        records = [r for island in read_islands(run.path).values() for r in of_kind(island, "step")]
        stands = max((r["step"] for r in records), default=stands)
    return replace(curve, schedule=plan.schedule, peak=plan.peaks[0], position=stands)


def _newest(run: RunDir) -> dict[str, Any] | None:
    """Manifest of the newest complete checkpoint of any island."""
    found: dict[str, Any] | None = None
    for root in sorted(run.path.glob("island_*/checkpoints")):
        store = CheckpointStore(root, 2)
        steps = store.steps()
        manifest = store.manifest(steps[-1]) if steps else None
        if manifest is not None and (found is None or manifest["step"] > found["step"]):
            found = manifest
    return found


def _decided_since(plan: Plan, saved_at: int, orders: Sequence[dict[str, Any]], batch: Batch) -> Plan:
    """The plan with the orders that the islands committed after it was saved."""
    for entry in orders:
        step = entry["step"]
        if step <= saved_at or "refused" in entry:
            continue
        if entry["kind"] == "cancel":
            plan = plan.cancel_decay(step)
        elif entry["kind"] == "override":
            plan = plan.override(step, in_own_units(entry["fields"], batch, plan.schedule.unit))[0]
        else:
            decay = {key: entry[key] for key in ("shape", "min_lr_ratio", "then")}
            plan = plan.begin_decay(step, entry["length"], start=entry["at"], **decay)
    return plan


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
