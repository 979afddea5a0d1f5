"""Orders of the operator on one island: seen in the run folder, proposed, carried out alike everywhere."""

from __future__ import annotations

import logging
from typing import Any

from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.journal import Journal
from megatron_wsd.diloco.round import OuterState
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

    def proposed(self) -> Order | None:
        """The order that waits in the run folder, seen by rank 0; equal on all ranks of the island."""
        found = None
        if self._control is not None and self._group.rank == 0:
            try:
                pending = self._control.pending()
                found = pending.model_dump(mode="json") if pending else None
            except ConfigError as e:
                log.error("%s", e)
        found = self._group.share(found)
        return None if found is None else Order.model_validate(found)

    def loaded(self) -> None:
        """The state came from a checkpoint, and the scheduler with it: nothing in it is new."""
        self._done = len(self._state.orders)

    def carry_out(self, position: int) -> Schedule | None:
        """Carry out what was committed and has not been.

        Each at the step at which its round was committed, so an island that comes late to it ends with the
        very same schedule.

        Args:
            position: inner steps of this island, at which the scheduler is left.

        Returns:
            The schedule from now on; None without a WSD.
        """
        new = self._state.orders[self._done :]
        for entry in new:
            try:
                self._apply(entry)
            except ScheduleError as e:
                entry["refused"] = str(e)
            if isinstance(self._scheduler, WSD):
                self._scheduler.set_position(position)
            self._journal.note_order(entry, entry["step"])
        self._done = len(self._state.orders)
        if new and self._control is not None and self._group.rank == 0:
            self._control.settle(self._state.orders)
        return self._scheduler.schedule if isinstance(self._scheduler, WSD) else None

    def _apply(self, entry: dict[str, Any]) -> None:
        scheduler = self._scheduler
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
