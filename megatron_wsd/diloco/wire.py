"""Payload between equal ranks: messages of bounded size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from megatron_wsd.diloco.membership import Membership
from megatron_wsd.optim.wire import WireFormat


@dataclass(frozen=True)
class Chunk:
    """A part of a fragment that travels as one message.

    Attributes:
        start, end: elements of the flat buffer.
        first_byte, last_byte: of the payload; the latter is one past the end.
    """

    start: int
    end: int
    first_byte: int
    last_byte: int


def cut(fmt: WireFormat, numel: int, bucket_bytes: int) -> list[Chunk]:
    """Cut a flat buffer into chunks whose encoded form is at most ``bucket_bytes`` each."""
    found, at, step = [], 0, fmt.chunk_elements(bucket_bytes)
    for start in range(0, numel, step):
        end = min(numel, start + step)
        size = fmt.encoded_bytes(end - start)
        found.append(Chunk(start, end, at, at + size))
        at += size
    return found


def gather_json(seat: Membership, value: Any, place: int, size: int) -> list[Any]:
    """The json values of the equal ranks of all islands, in the order of the quorum.

    Args:
        seat: this rank's.
        value: its own.
        place: its place in the quorum.
        size: islands in the quorum.

    Raises:
        ExchangeError: a peer is gone or too late.
    """
    return [broadcast_json(seat, value, i, receiving=i != place) for i in range(size)]


def broadcast_json(seat: Membership, value: Any, source: int, *, receiving: bool) -> Any:
    """Send a json value from one island to the equal ranks of all others; returns it everywhere.

    Raises:
        ExchangeError: a peer is gone or too late.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([0 if receiving else text.numel()], dtype=torch.int64)
    seat.broadcast(length, source)
    payload = torch.empty(int(length), dtype=torch.uint8) if receiving else text
    seat.broadcast(payload, source)
    return json.loads(bytes(payload.tolist()))
