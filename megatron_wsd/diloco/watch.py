"""A rank that hangs ends itself: its heartbeats come from a native thread and would go on for ever."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import time
from typing import TYPE_CHECKING

from megatron_wsd.errors import GaveUp

if TYPE_CHECKING:
    from megatron_wsd.config import Config
    from megatron_wsd.diloco.round import RoundResult

_LONGEST_PAUSE_S = 5.0
_WAITING_PAUSE_S = 1.0


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
    """How many void rounds in a row a run bears, and how long it waits when islands are missing.

    Counts rounds, not seconds, so that all ranks of an island give up at the same one.

    Args:
        config: for ``sync.max_voids`` and ``islands.start_timeout_s``.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._voids = self._waits = 0
        # `HangWatch` must not take a pause for a hang.
        hang_s = config.islands.hang_timeout_s
        self._longest_s = _LONGEST_PAUSE_S if hang_s is None else min(_LONGEST_PAUSE_S, hang_s / 4)

    def note(self, result: RoundResult) -> float:
        """One more round.

        Returns:
            Seconds to pause before the next, 0 after one that was not void.

        Raises:
            GaveUp: that was too many.
        """
        if not result.void:
            self._voids = self._waits = 0
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
