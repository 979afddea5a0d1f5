"""The torchft lighthouse of a run on one machine: who is alive, and who is in the next round."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from megatron_wsd.cli.machine import tool
from megatron_wsd.cli.process import Guarded, free_port
from megatron_wsd.config import IslandsConfig
from megatron_wsd.errors import IslandError

_MOST_RESTARTS = 3
_START_TIMEOUT_S = 60.0  # it imports torch first, which a cold disk makes slow


def lighthouse_command(islands: IslandsConfig, bind: str) -> list[str]:
    """The command of a lighthouse that listens at ``bind`` (host:port) with the timeouts of the config.

    One replica is enough for torchft's quorum: whether enough islands take part to commit is decided by
    the islands (``min_islands``). The join timeout is long, since a synchronous round waits for the slowest.
    """
    return [
        *tool("torchft_lighthouse"),
        *("--bind", bind),
        *("--min_replicas", "1"),
        *("--join_timeout_ms", str(round(islands.join_timeout_s * 1000))),
        *("--heartbeat_timeout_ms", str(round(islands.heartbeat_timeout_s * 1000))),
        *("--quorum_tick_ms", "100"),
    ]


class Lighthouse:
    """A lighthouse on the loopback interface, which answers once it was made.

    Args:
        islands: for its timeouts.
        log: of its output; appended to.

    Attributes:
        address: http address, the same over restarts.

    Raises:
        IslandError: it ended, or did not answer in time.
    """

    def __init__(self, islands: IslandsConfig, log: Path) -> None:
        self._islands, self._log, self._port = islands, log, free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self._restarts = 0
        self._server = self._start()

    def _start(self) -> Guarded:
        with self._log.open("ab") as file:
            server = Guarded(lighthouse_command(self._islands, f"127.0.0.1:{self._port}"), output=file)
        try:
            _await(server, self._port, self._log)
        except BaseException:
            server.kill()
            raise
        return server

    def alive(self) -> bool:
        """Whether it runs."""
        return self._server.poll() is None

    def restart(self) -> bool:
        """Start it again where it was; False if it has ended too often, or does not start.

        It has forgotten who was alive; the islands commit nothing until all of them are back.
        """
        self._server.kill()
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            return False
        try:
            self._server = self._start()
        except IslandError:
            return False
        return True

    def kill(self) -> None:
        """End it."""
        self._server.kill()


def _await(server: Guarded, port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        got = "no answer" if server.poll() is None else f"its end with status {server.poll()}"
        if server.poll() is not None or time.monotonic() > deadline:
            expected = f"an answer within {_START_TIMEOUT_S:g} s"
            raise IslandError("lighthouse", expected, got, f"{log} tells why.")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)
