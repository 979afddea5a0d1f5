"""One rank of an island without an engine, for the tests of what it trains and adopts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from outer_states import config_of

from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.faults import NO_FAULTS, Faults
from megatron_wsd.diloco.fragments import plan_fragments
from megatron_wsd.diloco.local import Local, LocalFragment
from megatron_wsd.diloco.state import FragmentState, OuterState
from megatron_wsd.diloco.wire import Chunk, cut
from megatron_wsd.optim import wire
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.outer import OuterHyper, make_outer
from megatron_wsd.shards.zero3 import Shard, Shards

U = 2.0**-24  # unit roundoff of fp32
MODES = ("sync", "async")
# Fragments of falling lengths; shards of nothing, of one element, of less and of more than a block.
SIZES = {
    "embedding.word_embeddings.weight": 700,
    "layers.0.w": 1000,
    "layers.0.bias": 3,
    "layers.1.w": 257,
    "layers.2.w": 1,
    "layers.3.w": 0,
    "final_norm.weight": 5,
}


class MemoryShards:
    """Parameters of this rank in plain tensors.

    Attributes:
        values: fp32, one a shard.
        written: members of each `write`.
    """

    def __init__(self, draw: torch.Generator) -> None:
        self.shards = [Shard(name, (n,), 0, n) for name, n in SIZES.items()]
        self.values = [numbers(n, draw) for n in SIZES.values()]
        self.written: list[list[int]] = []

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        for i, target in zip(self._which(members), out, strict=True):
            assert target.shape == self.values[i].shape
            target.copy_(self.values[i])

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        which = self._which(members)
        for i, value in zip(which, values, strict=True):
            assert value.shape == self.values[i].shape
            self.values[i] = value.to(torch.float32, copy=True)
        self.written.append(list(which))

    def _which(self, members: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.shards)) if members is None else members


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, but for the sign of zero."""
    return a.dtype == b.dtype and torch.equal(a, b)


def numbers(count: int, draw: torch.Generator) -> torch.Tensor:
    """Multiples of 1/1024 below 4: a few sums and differences of them are exact in fp32."""
    return torch.randint(-4095, 4096, (count,), generator=draw) / 1024


class LocalIsland:
    """An island of one rank.

    Args:
        fragments: P.
        faults: to be injected.
        anchor_dtype: of the anchors.
        sync: further keys of the config's block ``sync``; asynchronous by default.
    """

    def __init__(
        self,
        fragments: int = 1,
        faults: Faults = NO_FAULTS,
        anchor_dtype: torch.dtype = torch.float32,
        **sync: Any,
    ) -> None:
        self.draw = torch.Generator().manual_seed(3)
        self.config = config_of(sync={"mode": "async", "fragments": fragments, **sync})
        self.fmt = wire.WireFormat.of(self.config.sync.wire)
        self.shards = MemoryShards(self.draw)
        self.plan = plan_fragments(self.shards.shards, fragments)
        found = []
        for part in self.plan:
            own = [self.shards.shards[i] for i in part.members]
            layout = FlatLayout([Segment(s.name, parameter_key(s.name), s.numel, 0, False) for s in own])
            anchor = torch.zeros(layout.total, dtype=anchor_dtype)
            self.shards.read(layout.views(anchor), part.members)
            optimizer = make_outer("sgd", layout, OuterHyper(lr=1.0), anchor_dtype)
            found.append(FragmentState(layout, anchor, optimizer))
        self.state = OuterState(found)
        shards: Shards = self.shards
        self.local = Local(shards, self.plan, self.state, self.config, faults)
        self.step = 0

    def __getitem__(self, i: int) -> LocalFragment:
        return self.local.fragments[i]

    def flat(self, i: int) -> torch.Tensor:
        """What the island holds of a fragment now."""
        layout = self.state.fragments[i].layout
        flat = torch.zeros(layout.total)
        self.shards.read(layout.views(flat), self.plan[i].members)
        return flat

    def train(self, steps: int = 1, tokens: int = 100) -> None:
        """Move every parameter by random numbers."""
        for _ in range(steps):
            for value in self.shards.values:
                value += numbers(value.numel(), self.draw) / 64
            self.local.count(tokens)
            self.step += 1

    def capture(self, i: int = 0) -> Contribution:
        """At a sync point: capture, offer, and let it be in flight."""
        made = self.local.encode(self.local.capture(i, self.step))
        self[i].flight = made
        return made

    def move(self, i: int = 0, *, island: int | None = None) -> torch.Tensor:
        """What a committed round does, with others' progress in it; the new anchor.

        Args:
            island: whose contribution in flight was part of it.
        """
        f = self.state.fragments[i]
        for view in f.layout.views(f.anchor):
            view += numbers(view.numel(), self.draw) / 16
        f.version += 1
        flight = self[i].flight
        if island is not None and flight is not None:
            f.taken[island] = flight.cursor
        return f.anchor.float().clone()

    def decoded(self, contribution: Contribution) -> torch.Tensor:
        """What all islands make of its payload."""
        layout = self.state.fragments[contribution.fragment].layout
        out = torch.zeros(layout.total)
        for c in self.chunks(contribution.fragment):
            payload = contribution.payload[c.first_byte : c.last_byte]
            wire.decode(self.fmt, payload, out[c.start : c.end])
        return out

    def chunks(self, i: int) -> list[Chunk]:
        """As messages carry the fragment."""
        return cut(self.fmt, self.state.fragments[i].layout.total, self.config.sync.bucket_bytes)
