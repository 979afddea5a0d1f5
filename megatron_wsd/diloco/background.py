"""The outer half of an asynchronous island: a thread that meets the other islands while training goes on.

Only this thread touches the seat among the islands and its group of the island's ranks. What it shares with
the training thread is in this class, under one lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_wsd.control import Order
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.orders import Orders, apply_orders
from megatron_wsd.diloco.round import OuterHalf, RoundResult
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.diloco.watch import HangWatch, Patience

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # with a thread that should end


class OuterThread(threading.Thread):
    """Polls the other islands, runs rounds, and publishes what they committed.

    Args:
        half: the outer half, settled; nobody else may use it from now on.
        group: a group of the ranks of this island for this thread alone.
        local: where the contributions come from, and anchors are published.
        state: the outer state.
        orders: of the operator.
        shadow: the island's scheduler, or its double that no optimizer follows; see `orders.shadow_of`.
        position: tells the position in the schedule, as the training thread last knew it.
        island: number of this island.
        poll_s: pause between two polls with nothing to do.
        patience: with rounds that are void.
        watch: of this process.

    Attributes:
        trained_at: when the training thread last came by, on the monotonic clock.
        all_done: whether in the newest round no island had anything more to offer.
        error: what ended the thread; None while it is well.
    """

    def __init__(
        self,
        half: OuterHalf,
        group: IslandGroup,
        local: Local,
        state: OuterState,
        orders: Orders,
        shadow: Any,
        position: Callable[[], int],
        island: int,
        poll_s: float,
        patience: Patience,
        watch: HangWatch,
    ) -> None:
        super().__init__(name="outer-half", daemon=True)
        self._half, self._group, self._local, self._state = half, group, local, state
        self._orders, self._shadow, self._position = orders, shadow, position
        self._island, self._poll_s, self._patience = island, poll_s, patience
        self._watch = watch
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._pending: dict[int, Contribution] = {}
        self._results: deque[RoundResult] = deque()
        self._stopping = False
        self._ending = self._done = False
        self._obeyed = len(state.orders)
        self._here: tuple[int, ...] | None = None
        self.all_done = False
        self.trained_at = time.monotonic()
        self.error: BaseException | None = None

    # ---- called by the training thread ----

    def offer(self, contribution: Contribution) -> None:
        """Hand a contribution over; training goes on."""
        with self._lock:
            self._pending[contribution.fragment] = contribution
        self._wake.set()

    def results(self) -> list[RoundResult]:
        """The rounds since the last call that had anything to tell, oldest first."""
        with self._lock:
            found = list(self._results)
            self._results.clear()
        return found

    def set_ending(self) -> None:
        """No more inner steps will come; contributions that are left will."""
        self._ending = True

    def set_done(self) -> None:
        """The run of this island is over; wait for the others by looking at `all_done`."""
        self._done = True
        self._wake.set()

    def stop(self) -> None:
        """End the thread once all ranks have asked; one that waits for other islands is left behind."""
        self._stopping = True
        self._wake.set()
        self.join(_PATIENCE_S)

    # ---- the thread ----

    def run(self) -> None:
        try:
            with self._state.residence.beside_training():
                self._work()
        except BaseException as e:  # the training thread raises it
            log.error("the outer half ends: %s: %s", type(e).__name__, e)
            self.error = e

    def _work(self) -> None:
        while True:
            if self._group.all_agree(self._stopping):
                return
            if time.monotonic() - self.trained_at > self._watch.timeout_s:
                # A hung island that goes on to poll would look alive to the others for ever.
                self._watch.end("training has stood still for islands.hang_timeout_s: this rank ends itself")
            with self._lock:
                pending = dict(self._pending)
            order = self._orders.proposed(self._group)
            result = self._half.run_round(
                pending, self._position(), None, order, ending=self._ending, done=self._done
            )
            self._settle(pending, result, order)
            self._pause(result, self._patience.note(result))

    def _pause(self, result: RoundResult, seconds: float) -> None:
        """All ranks of an island pause alike, and islands meet in the quorum however long each pauses."""
        if result.void:
            self._watch.beat()
            self._wake.wait(seconds)
        elif not result.committed:
            # With a contribution in hand the pause is what another island may still need to send its own.
            self._wake.wait(self._poll_s)
        self._wake.clear()

    def _settle(self, pending: dict[int, Contribution], result: RoundResult, order: Order | None) -> None:
        """Publish what became of this island's contributions, and let the outer rate follow new orders."""
        decision = result.decision
        settled: dict[int, tuple[bool, bool]] = {}  # fragment -> committed, reset
        if decision is not None and result.fragment is not None and not result.void:
            if self._island in decision.dropped:
                settled[result.fragment] = (False, True)
            elif self._island in decision.contributors and (result.committed or result.skipped):
                settled[result.fragment] = (result.committed, False)
        if result.healed and self._state.outer_step >= 0:
            # It may have missed the commit of what it still holds.
            for i, contribution in pending.items():
                if self._state.fragments[i].taken.get(self._island, -1) >= contribution.cursor:
                    settled[i] = (True, False)
        new = self._state.orders[self._obeyed :]
        if new:
            apply_orders(self._shadow, new, self._state.inner_step)
            self._half.schedule = getattr(self._shadow, "schedule", None)
            self._obeyed = len(self._state.orders)
        for i, (committed, reset) in settled.items():
            self._local.publish(i, committed=committed, reset=reset)
        with self._lock:
            for i in settled:
                self._pending.pop(i, None)
            if (
                result.void
                or result.committed
                or result.healed
                or result.skipped
                or settled
                or self._news(result)
            ):
                self._results.append(result)
        # One that is being healed may have to try again, with somebody who is still here.
        self.all_done = decision is not None and decision.all_done and not (result.void or decision.healed)

    def _news(self, result: RoundResult) -> bool:
        """Whether other islands take part than in the round before."""
        here = result.decision.islands if result.decision else None
        news = None not in (here, self._here) and here != self._here
        self._here = here or self._here
        return news
