"""Where a checkpoint stands: position, rounds, and the schedule with what was decided. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.store import MANIFEST
from megatron_wsd.config import Config
from megatron_wsd.diloco.progress import progress
from megatron_wsd.errors import CheckpointError, ScheduleError
from megatron_wsd.schedule import Batch
from megatron_wsd.schedule.front import in_own_units
from megatron_wsd.schedule.params import batch_from_params
from megatron_wsd.schedule.plan import Plan


@dataclass(frozen=True)
class Standing:
    """What the manifests of one complete checkpoint of one island tell.

    Attributes:
        step: inner steps of the island; the name of the checkpoint.
        position: of the schedule, as the island counted it.
        committed: position of what rounds have committed, at which a branch begins. In synchronous mode it is
            ``position``: an island keeps its own steps there.
        outer_step: committed rounds.
        tokens: committed over all islands.
        cursors: by island, up to where its data are committed, in its inner steps.
        plan: the schedules of all param groups, with every order that the islands had committed.
        orders: numbers of these orders.
        digests: of the ranks' outer states.
        manifest: the checkpoint's own.
    """

    step: int
    position: int
    committed: int
    outer_step: int
    tokens: int
    cursors: dict[str, int]
    plan: Plan
    orders: frozenset[int]
    digests: list[str]
    manifest: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, config: Config) -> Standing:
        """That of a checkpoint of a run with this config.

        Raises:
            CheckpointError: its manifests cannot be read.
            ScheduleError: it was saved without a WSD schedule.
        """
        try:
            own = json.loads((folder / MANIFEST).read_text())
            outer = json.loads((folder / "outer" / "manifest.json").read_text())
            counters, done = outer["counters"], outer["extra"]["orders"]
            tokens = [f["tokens"] for f in counters["fragments"]]
            spans = {int(whole): steps for whole, steps in counters["spans"].items()}
            taken = [f["taken"] for f in counters["fragments"]]
            digests, step, state = list(outer["digests"]), own["step"], own["schedule"]
        except (OSError, ValueError, KeyError) as e:
            raise CheckpointError(str(folder), "a checkpoint with its manifests", repr(e)) from None
        plan, position = Plan.from_state(state)
        # An island obeys at an adoption, which may come after the round and after the checkpoint.
        plan = decided(plan, counters["orders"][done:], batch_of(config))
        return cls(
            step=step,
            position=position,
            committed=position if config.sync.mode == "sync" else progress(spans),
            outer_step=counters["outer_step"],
            tokens=sum(tokens) // len(tokens),
            cursors={i: max(t.get(i, 0) for t in taken) for i in sorted({i for t in taken for i in t})},
            plan=plan,
            orders=frozenset(order["number"] for order in counters["orders"]),
            digests=digests,
            manifest=own,
        )


def newest(found: Iterable[Standing]) -> Standing:
    """That with the most rounds, which all islands take over when they meet."""
    return max(found, key=lambda s: (s.outer_step, s.position))


def decided(plan: Plan, orders: Sequence[Mapping[str, Any]], batch: Batch) -> Plan:
    """The plan with orders that the islands have committed; those that they refuse change nothing."""
    for entry in orders:
        with suppress(ScheduleError):
            plan = _with_order(plan, entry, batch)
    return plan


def _with_order(plan: Plan, entry: Mapping[str, Any], batch: Batch) -> Plan:
    step = entry["step"]
    if "refused" in entry:
        return plan
    if entry["kind"] == "cancel":
        return plan.cancel_decay(step)
    if entry["kind"] == "override":
        return plan.override(step, in_own_units(entry["fields"], batch, plan.schedule.unit))[0]
    decay = {key: entry[key] for key in ("shape", "min_lr_ratio", "then")}
    return plan.begin_decay(step, entry["length"], start=entry["at"], **decay)


def batch_of(config: Config) -> Batch:
    """What one update and one sample hold, over all islands."""
    samples = config.island_batch * (config.islands.count or 1)
    if config.model is not None:
        return Batch(samples, config.model.seq_length)
    # a script of the user's own may say in the params what the model would
    given = batch_from_params(config.deepspeed["scheduler"]["params"])
    return Batch(given.samples_per_step or samples, given.tokens_per_sample)
