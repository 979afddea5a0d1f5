"""A rank that hangs ends itself: its heartbeats come from a native thread and would go on for ever."""

from __future__ import annotations

import faulthandler
import sys
import time


class HangWatch:
    """Ends the process, with the stacks of all threads, if nobody calls `beat` for too long.

    The clock runs in a thread of C that needs no interpreter lock, so that a rank which hangs in native
    code, or in an endless loop, is ended as well.

    Args:
        timeout_s: seconds from one beat to the end.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._beaten = 0.0

    def beat(self) -> None:
        """The outer half makes progress."""
        now = time.monotonic()
        if now - self._beaten > min(1.0, self._timeout_s / 10):  # starting the clock anew costs a thread
            self._beaten = now
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=sys.stderr)

    def stop(self) -> None:
        """Nothing more to watch."""
        faulthandler.cancel_dump_traceback_later()
        self._beaten = 0.0
