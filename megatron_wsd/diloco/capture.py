"""Contributions: pseudo-gradients of one fragment, encoded for the wire, errors fed back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_wsd.diloco.wire import Chunk
from megatron_wsd.optim import native, wire
from megatron_wsd.optim.layout import FlatLayout


@dataclass
class Contribution:
    """What an island offers for one fragment; this rank's part of it.

    The same bytes are offered until a round settles them.

    Attributes:
        fragment: its number.
        pseudo_gradient: base minus local, fp32 [layout.total], zero in the padding.
        finite: whether this rank's part holds no NaN, no Inf and nothing beyond 2^63.
        base: version of the fragment that the island trained from.
        steps: inner steps since then.
        tokens: tokens of the island since then.
        cursor: inner steps of the island when it was captured.
        payload: uint8, what travels: `pseudo_gradient` plus the fed back error, encoded by chunks, on the
            same device; set by `encode` when it is offered.
        offered_at: monotonic time, in seconds.
        counted: it is part of an anchor, and what its encoding left out has been fed back.
    """

    fragment: int
    pseudo_gradient: torch.Tensor
    finite: bool
    base: int
    steps: int
    tokens: int
    cursor: int
    payload: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    offered_at: float = field(default_factory=time.monotonic)
    counted: bool = False


def encode(
    fmt: wire.WireFormat,
    chunks: Sequence[Chunk],
    layout: FlatLayout,
    contribution: Contribution,
    error: torch.Tensor | None,
    scratch: torch.Tensor,
) -> None:
    """payload = encode(pseudo_gradient + error); not finite if that sum is not, then nothing is encoded.

    Args:
        fmt: of the payload.
        chunks: of the fragment.
        layout: of the fragment.
        contribution: its payload is set; in fp32 it shares the memory of the pseudo-gradient.
        error: fp32 [layout.total], what earlier encodings left out; None for fp32, which leaves out nothing.
        scratch: fp32, at least layout.total, overwritten.
    """
    contribution.offered_at = time.monotonic()
    if error is None:
        contribution.payload = contribution.pseudo_gradient.view(torch.uint8)
        return
    total = torch.add(contribution.pseudo_gradient, error, out=scratch[: layout.total])
    contribution.finite = contribution.finite and native.gradient_ok(total, layout.table)
    size = chunks[-1].last_byte if chunks else 0
    contribution.payload = torch.zeros(size, dtype=torch.uint8, device=total.device)
    if not contribution.finite:
        return
    for chunk in chunks:
        payload = contribution.payload[chunk.first_byte : chunk.last_byte]
        wire.encode(fmt, total[chunk.start : chunk.end], payload)


def feed_back(
    fmt: wire.WireFormat, chunks: Sequence[Chunk], contribution: Contribution, error: torch.Tensor
) -> None:
    """error' = (pseudo_gradient + error) - decode(payload), in place, ungated: what was not told this time.

    To be called once, when the contribution was committed.
    """
    error.add_(contribution.pseudo_gradient)
    for chunk in chunks:
        part = error[chunk.start : chunk.end]
        wire.residual(fmt, part, contribution.payload[chunk.first_byte : chunk.last_byte], part)
