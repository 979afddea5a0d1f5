"""Healing: an island that lacks a commit fetches the outer state of one that has it, rank by equal rank.

The state is served over HTTP at one address, as safetensors, to whoever shows a token that only islands of
the same quorum were told. It is immutable: outer state changes in rounds alone, rounds wait for the island
that is being healed, and should they stop waiting, what is asked for a version that is gone is refused.
"""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron_wsd.diloco.faults import NO_FAULTS, Faults
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.errors import ExchangeError

_PIECE = 1 << 20  # bytes between two looks at the clock
_MOST_COUNTERS = 1 << 24
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}


class SnapshotServer:
    """Serves the outer state of this rank, each tensor as a safetensors file of its own.

    Args:
        state: what to serve; read while `OuterState.still` is held.
        host: address of the interface to listen at, under which the other islands reach this machine.
        timeout_s: of a client that does not take what it asked for.
        faults: to be injected, at the point ``healing``.
    """

    def __init__(self, state: OuterState, host: str, timeout_s: float, faults: Faults = NO_FAULTS) -> None:
        self._state, self._token = state, secrets.token_urlsafe(24)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = timeout_s

            def do_GET(self) -> None:
                try:
                    status, body = outer._answer(self.path, self.headers.get("Authorization"), faults)
                except Exception as e:  # the client is told, and the island goes on
                    status, body = 500, f"{type(e).__name__}: {e}".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                # In pieces: a socket's timeout is that of one call, however much it has to send.
                for start in range(0, len(body), _PIECE):
                    self.wfile.write(memoryview(body)[start : start + _PIECE])

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="snapshot-server", daemon=True).start()
        self._host = host

    def offer(self) -> dict[str, Any]:
        """Where and how to fetch the state as it is now: json-able, for those who may have it."""
        state = self._state
        return {
            "url": f"http://{self._host}:{self._server.server_address[1]}",
            "token": self._token,
            "version": state.outer_step,
            "digest": f"{state.digest():016x}",
            "bytes": sum(t.numel() * t.element_size() for t in state.tensors().values()),
        }

    def close(self) -> None:
        """Serve nothing any more."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, authorization: str | None, faults: Faults) -> tuple[int, bytes]:
        from safetensors.torch import save

        if not secrets.compare_digest(authorization or "", f"Bearer {self._token}"):
            return 403, b"no or another token"
        _, version, name = [*path.split("/", 2), "", ""][:3]
        faults.here("healing", self._state.outer_step)
        with self._state.still:
            if version != str(self._state.outer_step):
                return 409, f"version {self._state.outer_step} now".encode()
            if name == "counters":
                return 200, json.dumps(self._state.counters()).encode()
            tensor = self._state.tensors().get(name)
            return (404, b"no such tensor") if tensor is None else (200, save({name: tensor}))


def fetch(
    offer: dict[str, Any], state: OuterState, timeout_s: float, mbit_per_s: float, beat: Callable[[], None]
) -> None:
    """Overwrite the outer state of this rank with what `SnapshotServer.offer` offers.

    Args:
        offer: of the island that heals.
        state: overwritten; on an error it is torn, and its ``outer_step`` is -1.
        timeout_s: in which an answer must begin, and then go on.
        mbit_per_s: slowest link that is waited for: each tensor has its bytes over this, and ``timeout_s``.
        beat: called while bytes come.

    Raises:
        ExchangeError: it failed, or what came is not what was offered.
    """
    where = urlsplit(offer["url"])
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)

    def ask(name: str, size: int) -> bytearray:
        path = f"/{offer['version']}/{name}"
        connection.request("GET", path, headers={"Authorization": f"Bearer {offer['token']}"})
        return _read(connection.getresponse(), size, timeout_s, mbit_per_s, beat)

    with state.still:
        state.outer_step = -1
    try:
        for name, target in sorted(state.tensors().items()):
            tensor = _tensor(name, ask(name, target.numel() * target.element_size()), target)
            with state.still:
                target.copy_(tensor)
                state.residence.finish()
        counters = json.loads(ask("counters", _MOST_COUNTERS))
        with state.still:
            state.forget_digest()
            if f"{_digest_at(state, counters):016x}" != offer["digest"]:
                raise ExchangeError("healing: what came has another digest than what was offered")
            state.take_counters(counters)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
        raise ExchangeError(f"healing from {offer['url']}: {type(e).__name__}: {e}") from e
    finally:
        connection.close()


def _digest_at(state: OuterState, counters: dict[str, Any]) -> int:
    """The digest that the tensors have with the step counts of ``counters``, which it depends on."""
    for fragment, theirs in zip(state.fragments, counters["fragments"], strict=True):
        fragment.optimizer.t = theirs["t"]
    return state.digest()


def _tensor(name: str, content: bytearray, like: torch.Tensor) -> torch.Tensor:
    """The one tensor of a safetensors file, in the memory in which it came.

    Raises:
        ExchangeError: it is of another dtype or shape.
    """
    length = int.from_bytes(content[:8], "little")
    told = json.loads(content[8 : 8 + length])[name]
    expected = _DTYPES[like.dtype], list(like.shape)
    if (told["dtype"], told["shape"]) != expected:
        raise ExchangeError(f"healing: {name} is {told['dtype']} {told['shape']}, expected {expected}")
    if like.numel() == 0:
        return torch.empty_like(like)
    return torch.frombuffer(content, dtype=like.dtype, offset=8 + length).view(like.shape)


def _read(
    response: http.client.HTTPResponse,
    size: int,
    timeout_s: float,
    mbit_per_s: float,
    beat: Callable[[], None],
) -> bytearray:
    """The body, within a time that its size allows."""
    end = time.monotonic() + timeout_s + 8e-6 * size / mbit_per_s
    found = bytearray()
    while piece := response.read(_PIECE):
        found += piece
        beat()
        if time.monotonic() > end:
            raise ExchangeError(f"healing: {size / 1e6:.1f} MB take longer than at {mbit_per_s:g} Mbit/s")
    if response.status != 200:
        raise ExchangeError(f"healing: the other island answers {response.status}: {bytes(found[:200])!r}")
    return found
