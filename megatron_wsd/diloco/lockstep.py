"""The synchronous outer loop: at a sync point all islands stand still until the round is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.delay import HeldBack, delays
from megatron_wsd.diloco.outer_loop import OuterLoop
from megatron_wsd.diloco.round import RoundResult
from megatron_wsd.diloco.watch import Patience

log = logging.getLogger(__name__)


class Lockstep(OuterLoop):
    """Rounds on the training thread, back to back with training; every age is 0 without controlled delay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count = len(self._state.fragments)
        delay = self._config.sync.controlled_delay
        self._held = HeldBack(self._local, count, delays(delay, self.island)) if delay else None
        self._patience = Patience(self._config, self.island)

    @property
    def position(self) -> int:
        return self.inner_step

    def round_due(self) -> bool:
        return bool(self.sync_points.due(self.inner_step + 1))

    def _met(self, result: RoundResult) -> None:
        if result.committed or result.healed:
            self._adopt(result, everything=result.healed)
            self._journal.note(result, self.inner_step)

    def _started(self) -> None:
        for i in self.sync_points.due(self.inner_step):
            if self._local.fragments[i].steps:
                self._round(i)  # it was stopped while it waited for this one

    def _advance(self) -> RoundResult | None:
        self.alive()  # between two rounds there may be more time than a hang is given
        result = None
        for i in self.sync_points.due(self.inner_step):
            result = self._round(i)
            if result.void:
                break  # the run is being stopped
        return result

    def _finish(self) -> RoundResult | None:
        result = None
        for i, f in enumerate(self._local.fragments):
            if f.steps:
                result = self._round(i)
                if result.void:
                    break
        return result

    def _contribution(self, i: int) -> Contribution | None:
        """What is offered at a sync point of a fragment: its progress, or what was held back and is due."""
        f = self._local.fragments[i]
        if self._held is not None:
            return self._held.next(i, self.inner_step)
        return self._local.encode(self._local.capture(i, self.inner_step)) if f.steps else None

    def _round(self, i: int) -> RoundResult:
        half = self._joined()
        contribution = self._contribution(i)
        while True:
            pending = {} if contribution is None else {i: contribution}
            result = half.run_round(pending, self.inner_step, self._withdraw, self._orders.proposed())
            self.last_round = result
            if result.healed:
                # At once: the next round is stepped at the rate of the orders that came with the state, and
                # whatever was trained before is from what this island no longer holds.
                self._adopt(result, everything=True)
                contribution = None
            if result.again:
                self._journal.note(result, self.inner_step)
                if not self._group.all_agree(not self.stop_requested()):
                    result.void, result.reason = True, "stopped while an island was being healed"
                    return result
                continue
            if not result.void:
                break
            self._journal.note_void(result, self.inner_step, self.outer_step)
            if not self._group.all_agree(not self.stop_requested()):
                return result  # the progress stays local, and is offered after a resume
            log.warning("round void: %s", result.reason)
            pause_s = self._patience.note(result)
            self.alive()
            time.sleep(pause_s)
        self._adopt(result, i)
        self._journal.note(result, self.inner_step)
        self._patience.note(result)
        return result

    def alive(self, more_s: float = 0.0) -> None:
        if self._seat is not None:
            self._seat.beat(more_s)

    def _withdraw(self, decision: Decision) -> bool:
        """Whether to leave a round because the run is being stopped and the others have left already.

        To commit it alone would set this island apart from what all would have done together.
        """
        before = self.last_round.decision if self.last_round else None
        fewer = before is not None and len(decision.reports) < len(before.reports)
        return fewer and not self._group.all_agree(not self.stop_requested())

    def _adopt(self, result: RoundResult, own: int | None = None, *, everything: bool = False) -> None:
        """Make the island hold the anchor, and stand where the others stand.

        Args:
            own: the fragment at whose sync point it stands.
            everything: all fragments, since the island was healed.
        """
        which = {i for i in (own, result.fragment) if i is not None}
        if everything:
            which = set(range(len(self._state.fragments)))
        for i in sorted(which):
            self._local.adopt(i)
        self._obey()
        ahead = result.decision.inner_step if result.decision else self.inner_step
        if ahead != self.inner_step:
            self._move_to(ahead, ahead)

    @contextmanager
    def anchor_weights(self) -> Iterator[dict[str, int]]:
        if not any(f.steps for f in self._local.fragments):
            yield self.committed()  # after a round of the whole model the island holds it
            return
        with super().anchor_weights() as committed:
            yield committed

    def _anchors(self) -> tuple[list[torch.Tensor], dict[str, int]]:
        return [f.anchor.float() for f in self._state.fragments], self.committed()

    def _own_facts(self) -> dict[str, Any]:
        return {} if self._held is None else {"held": self._held.counts()}

    def _loaded(self, extra: dict[str, Any]) -> None:
        if self._held is not None:
            self._held.take_counts(extra["held"])
        for f, (version, steps, tokens) in zip(self._local.fragments, extra["since"], strict=True):
            f.version, f.steps, f.tokens = version, steps, tokens
