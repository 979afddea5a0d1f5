"""When a rank ends itself: it hangs, rounds stay void, or what it trains is NaN for good."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import time
from typing import TYPE_CHECKING

from megatron_wsd.errors import GaveUp, NotFiniteError

if TYPE_CHECKING:
    import torch

    from megatron_wsd.config import Config
    from megatron_wsd.diloco.island import IslandGroup
    from megatron_wsd.diloco.round import RoundResult

_LONGEST_PAUSE_S = 5.0
_WAITING_PAUSE_S = 1.0
# One may come from a single bad batch: then the anchor, which the island takes over, cures it. If the inner
# moments are NaN or Inf it does not, and every later contribution is lost as well.
_MOST_DROPPED = 3
_NOT_FINITE = (
    "Checkpoints are only written of what is finite: go on with --resume. If it comes again, move the newest "
    "step_... folders out of checkpoints, so that an older one is taken, or lower the rate with --override."
)


class HangWatch:
    """Ends the process, with the stacks of all threads, if nobody calls `beat` for too long.

    The clock runs in a thread of C that needs no interpreter lock, so that a rank which hangs in native
    code, or in an endless loop, is ended as well.

    Args:
        timeout_s: seconds from one beat to the end.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._beaten = 0.0

    def beat(self, more_s: float = 0.0) -> None:
        """The outer half makes progress.

        Args:
            more_s: how much longer than usual the next step may take, for what cannot beat by itself.
        """
        now = time.monotonic()
        # Starting the clock anew costs a thread.
        if more_s or now - self._beaten > min(1.0, self.timeout_s / 10):
            self._beaten = 0.0 if more_s else now
            faulthandler.dump_traceback_later(self.timeout_s + more_s, exit=True, file=sys.stderr)

    def end(self, why: str) -> None:
        """End the process now, with the stacks of all threads."""
        sys.stderr.write(f"megatron-wsd: {why}\n")
        faulthandler.dump_traceback(file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    def stop(self) -> None:
        """Nothing more to watch."""
        faulthandler.cancel_dump_traceback_later()
        self._beaten = 0.0


class Patience:
    """How many void rounds in a row a run bears, how many lost contributions, and how long it waits.

    Counts rounds, not seconds, so that all ranks of an island give up at the same one.

    Args:
        config: for ``sync.max_voids`` and ``islands.start_timeout_s``.
        island: number of this island.
    """

    def __init__(self, config: Config, island: int) -> None:
        self._config, self._island = config, island
        self._voids = self._waits = 0
        self._dropped: dict[int | None, int] = {}  # fragment -> in a row
        # `HangWatch` must not take a pause for a hang.
        hang_s = config.islands.hang_timeout_s
        self._longest_s = _LONGEST_PAUSE_S if hang_s is None else min(_LONGEST_PAUSE_S, hang_s / 4)

    def note(self, result: RoundResult) -> float:
        """One more round.

        Returns:
            Seconds to pause before the next, 0 after one that was not void.

        Raises:
            GaveUp: that was too many.
            NotFiniteError: three contributions of one fragment in a row were dropped for NaN or Inf.
        """
        if not result.void:
            self._voids = self._waits = 0
            self._note_dropped(result)
            return 0.0
        if result.waiting:
            self._voids, self._waits = 0, self._waits + 1
            patience_s = self._config.islands.start_timeout_s
            pause_s = min(_WAITING_PAUSE_S, self._longest_s)
            if self._waits > math.ceil(patience_s / pause_s):
                raise GaveUp(
                    "megatron_wsd.islands.start_timeout_s",
                    f"enough islands within {patience_s:g} s",
                    result.reason,
                    "Start the others, then go on with --resume.",
                )
            return pause_s
        self._voids += 1
        if self._voids >= self._config.sync.max_voids:
            raise GaveUp(
                "megatron_wsd.sync.max_voids",
                f"a round that commits within {self._config.sync.max_voids} attempts",
                result.reason,
                "Look at the network between the islands; go on with --resume.",
            )
        return float(min(0.1 * 2**self._voids, self._longest_s))

    def _note_dropped(self, result: RoundResult) -> None:
        decision, fragment = result.decision, result.fragment
        if decision is None:
            return
        if self._island in decision.contributors:
            self._dropped.pop(fragment, None)
        elif self._island in decision.dropped:
            self._dropped[fragment] = self._dropped.get(fragment, 0) + 1
            if self._dropped[fragment] >= _MOST_DROPPED:
                raise NotFiniteError(
                    f"island {self._island}",
                    "finite pseudo-gradients",
                    f"NaN or Inf in {_MOST_DROPPED} in a row, which the others dropped",
                    _NOT_FINITE,
                )


class LossWatch:
    """Ends an island whose loss stays NaN or Inf though its weights may be finite.

    Under bf16 DeepSpeed skips updates whose gradients are not finite: then the weights stand still, and what
    the island contributes is a zero that nobody drops.

    Args:
        config: for ``sync.inner_steps``, in which every fragment has its turn.
        island: number of this island.
        group: its ranks.
    """

    def __init__(self, config: Config, island: int, group: IslandGroup) -> None:
        self._longest, self._island, self._group = _MOST_DROPPED * config.sync.inner_steps, island, group
        self._lost: torch.Tensor | None = None

    def add(self, loss: torch.Tensor) -> None:
        """That of one more inner step, a scalar; waits for no device."""
        before = 0 if self._lost is None else self._lost
        self._lost = (before + 1) * ~loss.detach().isfinite()

    def check(self, *, ended: bool = False) -> None:
        """To be called by all ranks of the island after a round, or at the end.

        Raises:
            NotFiniteError: the loss of some rank was not finite for 3 x ``sync.inner_steps`` steps in a row;
                at the end, in the last step.
        """
        own = 0 if self._lost is None else int(self._lost)
        lost = max(row[0] for row in self._group.gather([own]))
        if lost >= (1 if ended else self._longest):
            raise NotFiniteError(
                f"island {self._island}", "a finite loss", f"NaN or Inf for {lost} inner steps", _NOT_FINITE
            )
