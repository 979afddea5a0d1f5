"""Where the islands of a run begin again, also when their number has changed. Reads files; imports no torch.

A change of the number of islands begins an *era* of the run. ``run.json`` records from which checkpoints, so
that every island comes to the same order of samples, whenever it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as counting
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.standing import Standing
from megatron_wsd.checkpoint.store import MANIFEST, CheckpointStore, resume_step
from megatron_wsd.config import Config
from megatron_wsd.control import Order, as_typed
from megatron_wsd.curves import of_config
from megatron_wsd.data.sampler import resized
from megatron_wsd.diloco.fragments import SyncPoints
from megatron_wsd.errors import CheckpointError, ConfigError, ScheduleError
from megatron_wsd.lineage import Parent, decay_of_branch
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule.front import in_own_units
from megatron_wsd.schedule.plan import Plan


@dataclass(frozen=True)
class Start:
    """How one island begins.

    Attributes:
        folder: the checkpoint to load; None: fresh weights, which the others heal.
        sampler: state of its sampler; None: that of a new run.
        parent: set if ``folder`` is that of the parent, so that the branch begins here.
    """

    folder: Path | None = None
    sampler: dict[str, Any] | None = None
    parent: Parent | None = None

    def position(self, config: Config) -> int:
        """Where the run goes on from it: what is committed, and in synchronous mode its own steps besides."""
        return 0 if self.folder is None else Standing.read(self.folder, config).committed

    def plan(self, config: Config) -> Plan:
        """The schedule that it goes on with."""
        if self.folder is None:
            curve = of_config(config, "")
            return Plan((curve.schedule,), (curve.peak,))
        plan, parent = Standing.read(self.folder, config).plan, self.parent
        if parent is None:
            return plan
        own = tuple(decay_of_branch(s, parent.position, parent.order) for s in plan.schedules)
        return replace(plan, schedules=own)


def stands_at(starts: Sequence[Start], config: Config) -> int:
    """The step of the run from which all islands go on; asynchronous ones take the newest of their states."""
    positions = [start.position(config) for start in starts]
    return min(positions) if config.sync.mode == "sync" else max(positions)


def fit_override(order: Order, starts: Sequence[Start], config: Config) -> Order:
    """An order to change fields of the schedule, held against where the run stands.

    Args:
        order: of the kind ``override``.
        starts: of all islands.
        config: of the run.

    Returns:
        The order with all lengths in steps.

    Raises:
        ScheduleError: the islands would refuse it in their first round; naming the field as it was typed.
    """
    ahead = max(starts, key=lambda start: start.position(config))
    now, plan = ahead.position(config), ahead.plan(config)
    first = _first_round(config, now)
    begins = [decay.start for decay in plan.schedule.decays]
    with as_typed("override"):
        fields = in_own_units(order.fields, of_config(config, "").batch, plan.schedule.unit)
        begin = fields.get("decay_start")
        if isinstance(begin, int) and begin < first and begin not in begins[-1:]:
            soonest = f"the first outer round from step {now} on, where the run stands"
            remedy = "Give that or a later one: the islands agree on it in a round."
            raise ScheduleError("decay_start", f"at least {first}, {soonest}", begin, remedy)
        plan.override(now, fields)
    return order.model_copy(update={"fields": fields})


def _first_round(config: Config, position: int) -> int:
    """The first step from which on an order can be obeyed: after the next round; asynchronous: any."""
    sync = config.sync
    if sync.mode != "sync":
        return position
    points = SyncPoints(sync.inner_steps, sync.fragments + (sync.fragments > 1))
    return next(n for n in counting(position + 1) if points.due(n))


def starting_point(
    run_dir: Path, island: int, config: Config, eras: Sequence[Mapping[str, Any]] | None = None
) -> Start:
    """Where an island of a run that is resumed begins.

    Its newest checkpoint as `resume_step` says; of a branch that has none, that of the parent; after a change
    of the number of islands that has no checkpoint yet, the one that the change names.

    Args:
        run_dir: the run folder.
        island: its number.
        config: of the run.
        eras: of the run as they will be, see `plan_change`; those that it has by default.

    Raises:
        CheckpointError: the checkpoint is of another config; the parent's is gone or is another one; or the
            number of islands has changed and what was consumed before cannot be told from this file system.
    """
    run = RunDir(run_dir)
    parent = Parent.of(run) if run.run_json.exists() else None
    if eras is None and run.run_json.exists():
        eras = run.eras()
    eras = eras or [{"islands": config.islands.count, "config_digest": config.digest()}]
    era, count = len(eras) - 1, int(eras[-1]["islands"])
    step = resume_step(
        run_dir, island, count, era, keep=config.checkpoint.keep, lockstep=config.sync.mode == "sync"
    )
    if step is None:
        _refuse_torn(run, island, count)
    if step is None and era > 0:
        return _after_change(run, eras, parent, island, config)
    source = _at(run, eras, parent, island, step)
    if source is None:
        return Start()
    return Start(source.folder, source.manifest["sampler"], parent if source.of_parent else None)


def _refuse_torn(run: RunDir, island: int, count: int) -> None:
    """An island whose checkpoints are all damaged begins afresh only if another one's will heal it."""
    lost = _store(run, island).lost()
    if not lost or any(_store(run, i).steps() for i in range(max(count, island + 1))):
        return
    raise CheckpointError(
        str(_store(run, island).root),
        "a complete checkpoint, here or of another island of this run",
        f"{', '.join(lost)}, damaged",
        "Restore the files of one of them, or begin anew in another --run-dir.",
    )


@dataclass(frozen=True)
class Change:
    """A change of the number of islands.

    Attributes:
        was: how many there were.
        now: how many there are to be.
        step: position of the schedule at which the run goes on.
        eras: of the run from now on, for ``run.json``. The last says in inner steps, by island: ``from``, the
            checkpoint of each old one (null without one); ``cursors``, up to where its samples are consumed;
            ``starts``, where each new one begins.
        lost: rounds that none of the islands that stay has saved.
    """

    was: int
    now: int
    step: int
    eras: list[dict[str, Any]]
    lost: int = 0

    def told(self, config: Config) -> str:
        """What changes, in one line."""
        batch = config.island_batch
        text = (
            f"islands {self.was} -> {self.now} from step {self.step}: "
            f"global batch {self.was * batch:,} -> {self.now * batch:,} samples"
        )
        if config.model is not None:
            tokens = batch * config.model.seq_length
            text += f", {self.was * tokens:,} -> {self.now * tokens:,} tokens a step"
        if self.lost:
            text += f"; {self.lost} rounds that only islands which leave have saved are lost"
        return text + "; lengths of the schedule in steps stay as saved"


def plan_change(run_dir: Path, config: Config) -> Change | None:
    """What it takes to resume a run with the number of islands of ``config``; None if that is what it has.

    An island goes on at its newest checkpoint. Of one that leaves, or that stands behind the others, what it
    committed is consumed; what it trained beyond that is lost. A change that was made before and has no
    checkpoint is replaced.

    Raises:
        CheckpointError: there is no checkpoint to go on from.
        ConfigError: the run is over.
    """
    run = RunDir(run_dir.absolute())
    try:
        eras, parent = run.eras(), Parent.of(run)
        was = int(eras[-1]["islands"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no run: to be told by whoever opens it
    now, digest = config.islands.count or 1, config.digest()
    if now == was:
        return None
    while len(eras) > 1 and not any(
        _store(run, i).steps(len(eras) - 1) for i in range(int(eras[-1]["islands"]))
    ):
        eras = eras[:-1]
    count = int(eras[-1]["islands"])
    lockstep = config.sync.mode == "sync"
    keep, era = config.checkpoint.keep, len(eras) - 1
    steps = [resume_step(run.path, i, count, era, keep=keep, lockstep=lockstep) for i in range(count)]
    sources = [_at(run, eras, parent, i, step) for i, step in enumerate(steps)]
    rounds = [0 if s is None else s.outer_step for s in sources]
    lead = max(rounds[:now])
    if lead == 0:
        raise CheckpointError(
            f"{run.path}",
            f"a checkpoint after a round, of an island below {now}, to go on from with {now} islands",
            "none",
            f"Resume with --islands {was} until it has saved one.",
        )
    leaders = {i: s for i, s in enumerate(sources[:now]) if s is not None and s.outer_step == lead}
    outer = [s.outer() for s in leaders.values()]
    ahead = max((Standing.read(s.folder, config) for s in leaders.values()), key=lambda s: s.committed)
    position, end = ahead.committed, ahead.plan.schedule.end
    if end is not None and position >= end:
        raise ConfigError(
            "--islands",
            f"{was}, as the run has, which is over: its schedule ended at step {end}",
            now,
            "To train on, branch off an earlier checkpoint.",
        )
    if eras[-1] == {**eras[-1], "islands": now, "config_digest": digest}:
        return Change(was, now, position, eras)
    taken = [_committed(outer[0]["counters"], i) for i in range(max(count, now))]
    starts = taken[:now]
    if config.sync.mode == "sync":  # there an island keeps what it has trained since the newest round
        top = max(s.step for s in leaders.values())
        starts = [leaders[i].step if i in leaders else top for i in range(now)]
    entry = {
        "islands": now,
        "config_digest": digest,
        "step": position,
        "from": [None if s is None else s.step for s in sources],
        "cursors": [starts[i] if i in leaders else taken[i] for i in range(count)],
        "starts": starts,
    }
    return Change(was, now, position, [*eras, entry], lost=max(rounds) - lead)


@dataclass(frozen=True)
class _Source:
    """A complete checkpoint of an island; ``of_parent`` if it lies in the run that this one branches off."""

    folder: Path
    manifest: dict[str, Any]
    of_parent: bool = False

    @classmethod
    def read(cls, folder: Path, config: str, *, of_parent: bool = False) -> _Source:
        """Read its manifest.

        Raises:
            CheckpointError: it is of another config than the one with this digest.
        """
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest.get("config") != config:
            raise CheckpointError(
                str(folder),
                f"a checkpoint of this config ({config})",
                f"one of {manifest.get('config')}",
                "Resume with the config.json of the run folder.",
            )
        return cls(folder, manifest, of_parent)

    def outer(self) -> dict[str, Any]:
        """The manifest of its outer state."""
        return dict(json.loads((self.folder / "outer" / "manifest.json").read_text()))

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def outer_step(self) -> int:
        return int(self.manifest.get("outer_step", 0))


def _store(run: RunDir, island: int) -> CheckpointStore:
    return CheckpointStore(run.island(island) / "checkpoints", 2)


def _at(
    run: RunDir, eras: Sequence[Mapping[str, Any]], parent: Parent | None, island: int, step: int | None
) -> _Source | None:
    """The checkpoint of an island at a step of the newest era; in the first also that of the parent."""
    store, era = _store(run, island), len(eras) - 1
    manifest = None if step is None else store.manifest(step)
    if step is not None and manifest is not None and manifest.get("era", 0) == era:
        return _Source.read(store.folder(step), eras[-1]["config_digest"])
    begun = None if era > 0 or parent is None else parent.steps.get(str(island))
    if parent is not None and begun is not None and step in (None, begun):
        return _Source.read(parent.checkpoint(island), parent.config, of_parent=True)
    return None


def _after_change(
    run: RunDir, eras: Sequence[Mapping[str, Any]], parent: Parent | None, island: int, config: Config
) -> Start:
    """Where an island begins that has no checkpoint since the newest change."""
    change, before = eras[-1], list(eras[:-1])
    sources = [_at(run, before, parent, i, step) for i, step in enumerate(change["from"])]
    own = sources[island] if island < len(sources) else None
    folder = None if own is None else own.folder
    begins = parent if own is not None and own.of_parent else None
    for other in range(int(change["islands"])):
        # One that has saved since then knows the order; old checkpoints may be gone.
        store = _store(run, other)
        for step in reversed(store.steps(len(before))):
            if (manifest := store.manifest(step)) is not None:
                return Start(folder, _with_own_history(manifest["sampler"], own), begins)
    known = [s for s in sources if s is not None]
    if not known:
        raise CheckpointError(
            f"{run.path}",
            f"the checkpoints from which {change['islands']} islands go on, or a newer one of any of them",
            "none on this file system",
            "All islands must see the run folder when their number changes; bring its checkpoints here.",
        )
    lockstep, batch = config.sync.mode == "sync", config.island_batch
    ahead = max(known, key=lambda s: (s.outer_step, s.step))
    # In synchronous mode all islands have one history of mixes, and one that stands behind not its end.
    states = [
        (ahead if s is None or (lockstep and s.step < cursor) else s).manifest["sampler"]
        for s, cursor in zip(sources, change["cursors"], strict=True)
    ]
    state = resized(states, [c * batch for c in change["cursors"]], [s * batch for s in change["starts"]])
    return Start(folder, _with_own_history(state, own), begins)


def _with_own_history(state: dict[str, Any], own: _Source | None) -> dict[str, Any]:
    """``state`` with the switches of mix that the island itself has made; the trainer makes the others."""
    history = state["history"][:1] if own is None else own.manifest["sampler"]["history"]
    return {**state, "history": history}


def _committed(counters: Mapping[str, Any], island: int) -> int:
    """Up to where the samples of an island are committed, in its inner steps, as all islands count."""
    return max(int(f["taken"].get(str(island), 0)) for f in counters["fragments"])
