"""A rank that hangs ends itself: its heartbeats come from a native thread and would go on for ever."""

from __future__ import annotations

import faulthandler
import os
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
        self.timeout_s = timeout_s
        self._beaten = 0.0

    def beat(self) -> None:
        """The outer half makes progress."""
        now = time.monotonic()
        if now - self._beaten > min(1.0, self.timeout_s / 10):  # starting the clock anew costs a thread
            self._beaten = now
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.stderr)

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
