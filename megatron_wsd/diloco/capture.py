"""Pseudo-gradients from the fp32 shards of an island."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout
from megatron_wsd.shards.zero3 import Zero3Shards


@dataclass
class Contribution:
    """What an island offers for one round; this rank's part of it.

    Attributes:
        pseudo_gradient: base minus local, fp32 [layout.total], zero in the padding.
        finite: whether this rank's part holds no NaN, no Inf and nothing beyond 2^63.
        base: outer step of the version that the island trained from.
        steps: inner steps since then.
        tokens: tokens of the island since then.
    """

    pseudo_gradient: torch.Tensor
    finite: bool
    base: int
    steps: int
    tokens: int


def capture(
    shards: Zero3Shards,
    layout: FlatLayout,
    base: torch.Tensor,
    out: torch.Tensor,
    *,
    version: int,
    steps: int,
    tokens: int,
) -> Contribution:
    """Take the island's progress since ``base`` as a pseudo-gradient.

    Args:
        shards: where the island holds its parameters.
        layout: of the flat buffers.
        base: fp32 or bf16 [layout.total], what the island trained from; not changed.
        out: fp32 [layout.total], overwritten; zero in the padding before and after.
        version: outer step of ``base``.
        steps: inner steps since ``base``.
        tokens: tokens of the island since ``base``.
    """
    shards.read(layout.views(out))
    torch.sub(base, out, out=out)
    return Contribution(out, native.gradient_ok(out, layout.table), version, steps, tokens)
