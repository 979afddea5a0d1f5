"""Orders of the operator on one island: seen in the run folder, proposed, carried out alike everywhere."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from megatron_wsd.control import ControlFolder, Order, as_typed
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.journal import Journal
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.errors import ConfigError, ScheduleError
from megatron_wsd.schedule import Schedule
from megatron_wsd.schedule.deepspeed import WSD

log = logging.getLogger(__name__)


class Orders:
    """The orders in the outer state, and how far this island has carried them out.

    Every method must be called by all ranks of the island.

    Args:
        control: folder in which new ones appear; None without a run folder.
        group: the ranks of this island.
        state: holds the orders that all islands have committed.
        journal: where they are told.
        scheduler: ``engine.lr_scheduler``; anything but a WSD refuses every order.
    """

    def __init__(
        self,
        control: ControlFolder | None,
        group: IslandGroup,
        state: OuterState,
        journal: Journal,
        scheduler: Any,
    ) -> None:
        self._control, self._group, self._state = control, group, state
        self._journal, self._scheduler = journal, scheduler
        self._done = 0

    def proposed(self, group: IslandGroup | None = None) -> Order | None:
        """The order that waits in the run folder, seen by rank 0; equal on all ranks of the island.

        Args:
            group: of the caller's thread; that of the constructor by default.
        """
        group = group or self._group
        found = None
        if self._control is not None and group.rank == 0:
            try:
                pending = self._control.pending()
                found = pending.model_dump(mode="json") if pending else None
            except ConfigError as e:
                log.error("%s", e)
        found = group.share(found)
        return None if found is None else Order.model_validate(found)

    @property
    def done(self) -> int:
        """How many of the orders in the outer state this island has carried out."""
        return self._done

    def loaded(self, done: int) -> None:
        """Outer state and scheduler came from a checkpoint; the latter has obeyed ``done`` of the orders."""
        self._done = done
        if self._control is not None and self._group.rank == 0:
            # A run that was killed may have told of orders that its newest checkpoint does not know.
            self._control.settle(self._state.orders)

    def carry_out(
        self, position: int, known: int | None = None, inner_step: int | None = None
    ) -> Schedule | None:
        """Carry out what was committed and has not been.

        Args:
            position: of this island in the schedule, at which the scheduler is left.
            known: how many orders all ranks of the island know; all of them by default.
            inner_step: of this island, where that is something else than the position at which an order was
                committed.

        Returns:
            The schedule from now on; None without a WSD.
        """
        new = self._state.orders[self._done : known]
        apply_orders(self._scheduler, new, position)
        for entry in new:
            self._journal.note_order(entry, entry["step"] if inner_step is None else inner_step)
        self._done += len(new)
        if new and self._control is not None and self._group.rank == 0:
            self._control.settle(self._state.orders[: self._done])
        return self._scheduler.schedule if isinstance(self._scheduler, WSD) else None


def apply_orders(scheduler: Any, entries: Sequence[dict[str, Any]], position: int) -> None:
    """Carry out orders, each at the step at which its round was committed.

    So an island that comes late to them ends with the very same schedule. A refused one says so in its entry.

    Args:
        scheduler: a WSD; anything else refuses every order.
        entries: committed orders.
        position: at which the scheduler is left.
    """
    for entry in entries:
        try:
            with as_typed(entry["kind"]):
                _apply(scheduler, entry)
        except ScheduleError as e:
            entry["refused"] = str(e)
    if entries and isinstance(scheduler, WSD):
        scheduler.set_position(position)


def shadow_of(scheduler: Any) -> Any:
    """A WSD like this one that moves no optimizer's rate; what is no WSD comes back as it is.

    The outer rate may follow the inner schedule, and must change in the same round on all islands, while
    each island's own scheduler obeys when that island adopts.
    """
    if not isinstance(scheduler, WSD):
        return scheduler
    shadow = copy.copy(scheduler)
    shadow.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0} for _ in scheduler.peaks])
    return shadow


def _apply(scheduler: Any, entry: dict[str, Any]) -> None:
    if not isinstance(scheduler, WSD):
        raise ScheduleError("scheduler.type", "WSD", type(scheduler).__name__)
    order = Order.model_validate({k: v for k, v in entry.items() if k in Order.model_fields})
    scheduler.set_position(entry["step"])
    if order.kind == "cancel":
        scheduler.cancel_decay()
    elif order.kind == "override":
        scheduler.load_state_dict(scheduler.state_dict(), order.fields)
    else:
        scheduler.begin_decay(
            order.length,
            start=order.at,
            shape=order.shape,
            min_lr_ratio=order.min_lr_ratio,
            then=order.then,
        )
