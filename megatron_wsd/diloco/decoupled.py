"""The asynchronous outer loop: an island trains on while its contributions travel.

A sync point captures a fragment and hands it to the outer half; a later boundary between two inner steps, at
which all ranks of the island have the settled version, adopts it. Nobody's training waits for another island.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_wsd.diloco.background import OuterThread
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.orders import shadow_of
from megatron_wsd.diloco.outer_loop import OuterLoop, make_group
from megatron_wsd.diloco.round import RoundResult
from megatron_wsd.diloco.watch import Patience

log = logging.getLogger(__name__)

_NOTHING = -1


class Decoupled(OuterLoop):
    """Rounds beside training, on a thread of their own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The other group is for votes at boundaries; the thread must not wait in one group with training.
        numel = sum(s.numel for s in self._shards.shards)
        self._outer_group = make_group(self._config, self._address.islands, numel)
        self._thread: OuterThread | None = None
        self._position = self.inner_step
        self._live = self._address.islands
        # Steps are counted by fragment and island.
        self._whole = self._address.islands * len(self._state.fragments)

    @property
    def position(self) -> int:
        return self._position

    def round_due(self) -> bool:
        return False

    def _round_group(self) -> IslandGroup:
        return self._outer_group

    # ---- meeting ----

    def _met(self, result: RoundResult) -> None:
        if result.committed or result.healed:
            self._take_all()
            self._journal.note(result, self.inner_step)

    def _started(self) -> None:
        half = self._joined()
        if self.outer_step > 0 or self.inner_step > 0:  # a resumed island holds more than its base
            self._take_all()
        for order in self.at_start(self._position):
            if not any(known["number"] == order.number for known in self._state.orders):
                self.carry_out(order)
        half.refresh_digest()
        scheduler = getattr(self._engine, "lr_scheduler", None)
        shadow = shadow_of(scheduler)
        sync = self._config.sync
        assert self._seat is not None
        self._thread = OuterThread(
            half,
            self._outer_group,
            self._local,
            self._state,
            self._orders,
            shadow,
            lambda: self._position,
            self.island,
            sync.poll_s,
            Patience(self._config, self.island),
            self._seat.watch,
        )
        self._state.residence.finish()  # all that has been made so far, on the stream of this thread
        self._thread.start()

    def _take_all(self) -> None:
        """Train on from the newest anchors; what was in flight, and not committed, is trained again.

        So the position is that of what is committed, equal on all islands that hold this state.
        """
        for i in range(len(self._state.fragments)):
            self._local.adopt(i)
        self._obey()
        cursor = self._state.cursor(self.island)
        self._position = self._progress()
        self._move_to(cursor, self._position)

    def _loaded(self, extra: dict[str, Any]) -> None:
        self._position = extra["position"]

    # ---- a boundary between two inner steps ----

    def _advance(self) -> RoundResult | None:
        for i in self.sync_points.due(self.inner_step):
            self._capture(i)
        return self._boundary()

    def _capture(self, i: int) -> None:
        """At most one contribution of a fragment is in flight; a turn that comes meanwhile is missed."""
        f = self._local.fragments[i]
        if f.flight is not None:
            f.missed += 1
            return
        if f.steps == 0:
            return
        assert self._thread is not None
        began = time.perf_counter()
        f.flight = self._local.capture(i, self.inner_step)
        self._thread.offer(self._local.encode(f.flight))
        f.capture_s = time.perf_counter() - began

    def _boundary(self, last: bool = False) -> RoundResult | None:
        """Adopt what all ranks have, and take over from rank 0 what they may know at different times.

        Args:
            last: no steps are left in which to wait for ``sync.overlap_steps``.
        """
        thread = self._thread
        assert thread is not None
        self.alive()
        published = [_NOTHING if f.published is None else f.published for f in self._local.fragments]
        results = thread.results()
        for result in results:
            if result.decision is not None:
                self._live = len(result.decision.reports)
        now, orders = self._progress(), len(self._state.orders)
        row = [int(thread.error is not None), now, self._live, orders, *published]
        rows = self._group.gather(row)
        if any(r[0] for r in rows):
            thread.join(1.0)
            for result in (*results, *thread.results()):  # what led to it
                self._note(result)
            raise thread.error or RuntimeError("the outer half of another rank of this island has ended")
        self._live = rows[0][2]
        adopted = []
        for i, f in enumerate(self._local.fragments):
            ripe = last or self.inner_step - f.captured_at >= self._config.sync.overlap_steps
            if f.flight is not None and ripe and all(r[4 + i] != _NOTHING for r in rows):
                adopted.append(i)
                self._adopt(i)
        self._journal.note_ahead(self._position - rows[0][1], self._config.sync.inner_steps, self.inner_step)
        self._position = max(self._position, rows[0][1])
        if adopted:
            self._orders.carry_out(self._position, min(r[3] for r in rows), self.inner_step)
        self._rate.place(self._position, self._engine_step)
        for result in results:
            self._note(result)
        return self.last_round if adopted else None

    def _progress(self) -> int:
        """Position by what all islands have committed, and this one's steps since times the live islands."""
        with self._state.counting:
            own = self._local.uncommitted(self.island)[0] * self._live
            return self._state.progress(own, self._whole)

    def _adopt(self, i: int) -> None:
        f = self._local.fragments[i]
        waited, lag = self.inner_step - f.captured_at, self._state.fragments[i].version - (f.published or 0)
        discarded = f.steps if f.reset or self._config.sync.adopt == "mix" else 0
        began = time.perf_counter()
        version = self._local.merge_in(i)
        seconds = f.capture_s + time.perf_counter() - began
        self._journal.note_adopted(self.inner_step, i, version, lag, waited, discarded, f.missed, seconds)
        f.missed = 0

    def _note(self, result: RoundResult) -> None:
        self.last_round = result
        if result.void:
            self._journal.note_void(result, self.inner_step, self.outer_step)
        else:
            self._journal.note(result, self.inner_step)

    # ---- the end ----

    def _finish(self) -> RoundResult | None:
        """Offer what is left, wait until all live islands have done so, and hold the last anchor."""
        thread = self._thread
        if thread is None:
            return None
        thread.set_ending()
        while True:
            self._boundary(last=True)
            left = False
            for i, f in enumerate(self._local.fragments):
                if f.flight is None and f.steps:
                    self._capture(i)
                left = left or f.flight is not None
            if not left:
                thread.set_done()
            over = not left and thread.all_done
            if self._group.all_agree(over) or not self._group.all_agree(not self.stop_requested()):
                break
            time.sleep(self._config.sync.poll_s / 2)
        with self._one_state():
            for i in range(len(self._state.fragments)):
                self._local.adopt(i)
        return self.last_round

    def alive(self, more_s: float = 0.0) -> None:
        if self._thread is not None:
            self._thread.trained_at = time.monotonic() + more_s

    @contextmanager
    def _one_state(self) -> Iterator[None]:
        """While it is open no outer state changes, and all ranks of the island hold the same version.

        One that was torn, by a step or a healing that failed, is waited for: another island heals it.
        """
        thread, still = self._thread, self._state.still
        while True:
            self.alive()
            # No rank waits for its own outer half while another's waits for the end of this.
            held = still.acquire(blocking=False)
            try:
                ended = thread is not None and thread.error is not None
                mine = [self._state.outer_step, len(self._state.orders), int(held)]
                rows = self._group.gather([*mine, int(ended)])
                if held and mine[0] >= 0 and all(row[:3] == mine for row in rows):
                    yield
                    self._state.residence.finish()  # what was read may be written by another stream now
                    return
            finally:
                if held:
                    still.release()
            if thread is not None and any(row[3] for row in rows):
                raise thread.error or RuntimeError("the outer half of another rank of this island has ended")
            time.sleep(0.01)  # another rank's step is a moment behind or ahead

    def committed(self) -> dict[str, int]:
        with self._state.counting:  # without the steps that only this island knows of
            return {**super().committed(), "position": self._state.progress(0, self._whole)}

    def _anchors(self) -> tuple[list[torch.Tensor], dict[str, int]]:
        with self._one_state():
            return [f.anchor.float().clone() for f in self._state.fragments], self.committed()

    def _write(self, folder: Path) -> None:
        with self._one_state():
            super()._write(folder)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        super().close()
