"""Whether the lighthouse answers: asked once at the start, and then all the time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from megatron_wsd.errors import IslandError


def check_lighthouse(
    address: str, timeout_s: float = 10.0, stopping: Callable[[], bool] = lambda: False
) -> None:
    """Fail within seconds, and say why, when no lighthouse listens.

    Args:
        address: of the lighthouse.
        timeout_s: how long it is asked again and again.
        stopping: ends that early.

    Raises:
        IslandError: nothing answers at ``address`` for ``timeout_s`` seconds, or it is no address.
    """
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise IslandError("--lighthouse", "an address such as http://HOST:29510", address)
    end = time.monotonic() + timeout_s
    while True:
        try:
            left_s = min(5.0, max(0.1, end - time.monotonic()))
            socket.create_connection((parts.hostname, parts.port), timeout=left_s).close()
            return
        except OSError as e:
            if time.monotonic() > end or stopping():
                raise IslandError(
                    "--lighthouse",
                    "a torchft lighthouse that answers",
                    f"{address}: {e}",
                    "Start it with `torchft_lighthouse`, or check host, port and firewall.",
                ) from None
        time.sleep(0.2)


class LighthouseWatch:
    """Tells when the lighthouse stops answering, and when it answers again.

    torchft waits for a quorum as long for a lighthouse that is gone as for an island that is late, which may
    be an hour. This asks it from a thread of its own.

    Args:
        address: of the lighthouse.
        every_s: seconds from one question to the next.
    """

    def __init__(self, address: str, every_s: float = 10.0) -> None:
        self._address, self._every_s = address, every_s
        self._stopped = threading.Event()

    def start(self, tell: Callable[[bool, str], None]) -> None:
        """Begin.

        Args:
            tell: called, on the thread of the watch, with whether it answers and what there is to say.
        """
        threading.Thread(target=self._run, args=(tell,), name="lighthouse-watch", daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    def _run(self, tell: Callable[[bool, str], None]) -> None:
        away_since = None
        while not self._stopped.wait(self._every_s):
            began = time.monotonic()
            try:
                check_lighthouse(self._address, 2 * self._every_s)
            except IslandError as e:
                if away_since is None:
                    away_since = began
                    tell(False, f"the lighthouse does not answer ({e.got}); no round can begin until it does")
                continue
            if away_since is not None:
                tell(True, f"the lighthouse answers again after {time.monotonic() - away_since:.0f} s")
                away_since = None
