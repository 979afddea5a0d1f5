"""Payload between equal ranks: flat fp32 buffers in messages of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from megatron_wsd.diloco.membership import Membership


def buckets(numel: int, bucket_bytes: int, element_size: int = 4) -> Iterator[tuple[int, int]]:
    """Cut ``numel`` elements into ``(start, end)`` ranges of at most ``bucket_bytes`` each."""
    step = max(1, bucket_bytes // element_size)
    for start in range(0, numel, step):
        yield start, min(numel, start + step)


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


def broadcast_flat(seat: Membership, flat: torch.Tensor, source: int, bucket_bytes: int) -> None:
    """Send a flat tensor from one island to the equal ranks of all others; in place.

    Raises:
        ExchangeError: a peer is gone or too late; ``flat`` may be partly overwritten elsewhere.
    """
    for start, end in buckets(flat.numel(), bucket_bytes, flat.element_size()):
        seat.broadcast(flat[start:end], source)
