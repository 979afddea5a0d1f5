"""What all islands hold alike: anchors and outer optimizers by fragment, and the counters beside them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_wsd.config import Config
from megatron_wsd.diloco.agree import Offer
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.fragments import Fragment
from megatron_wsd.diloco.progress import progress
from megatron_wsd.diloco.residence import HOST, Residence
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key, wants_8bit
from megatron_wsd.optim.outer import OuterHyper, OuterOptimizer, make_outer
from megatron_wsd.shards.zero3 import Shards


@dataclass
class FragmentState:
    """One fragment of this rank's shard.

    Attributes:
        layout: of the flat buffers.
        anchor: fp32 or bf16 [layout.total], the last agreed parameters.
        optimizer: the outer optimizer and its state.
        version: commits of this fragment.
        tokens: committed with it, over all islands.
        steps: inner steps committed with it, over all islands.
        turn: turns of the fragment that had passed when it was last committed.
        taken: island -> its cursor at the newest of its contributions that was committed.
        taken_steps: island -> inner steps in that contribution.
    """

    layout: FlatLayout
    anchor: torch.Tensor
    optimizer: OuterOptimizer
    version: int = 0
    tokens: int = 0
    steps: int = 0
    turn: int = 0
    taken: dict[int, int] = field(default_factory=dict)
    taken_steps: dict[int, int] = field(default_factory=dict)

    def offer(
        self, turn: int, contribution: Contribution | None = None, finite: bool = True, waiting_ms: int = 0
    ) -> Offer:
        """What an island says of this fragment.

        Args:
            turn: turns of the fragment that have passed by the island's position.
            contribution: that waits for a round.
            finite: whether all ranks of the island hold a finite part of it.
            waiting_ms: for how long it waits.
        """
        if contribution is None:
            return Offer(version=self.version, last_turn=self.turn, turn=turn)
        return Offer(
            version=self.version,
            last_turn=self.turn,
            turn=turn,
            contributes=1,
            finite=int(finite),
            base=contribution.base,
            steps=contribution.steps,
            tokens=contribution.tokens,
            cursor=contribution.cursor,
            waiting_ms=waiting_ms,
        )

    def counters(self) -> dict[str, Any]:
        """The json-able part."""
        taken = {str(i): self.taken[i] for i in sorted(self.taken)}
        taken_steps = {str(i): self.taken_steps[i] for i in sorted(self.taken_steps)}
        return {
            "version": self.version,
            "tokens": self.tokens,
            "steps": self.steps,
            "turn": self.turn,
            "taken": taken,
            "taken_steps": taken_steps,
            "t": self.optimizer.t,
        }

    def take_counters(self, counters: dict[str, Any]) -> None:
        """Take over what `counters` gave elsewhere."""
        self.version, self.tokens = counters["version"], counters["tokens"]
        self.steps, self.turn = counters["steps"], counters["turn"]
        self.taken = {int(i): cursor for i, cursor in counters["taken"].items()}
        self.taken_steps = {int(i): steps for i, steps in counters["taken_steps"].items()}
        self.optimizer.t = counters["t"]


@dataclass
class OuterState:
    """The outer state of one rank.

    Attributes:
        fragments: in the order of their turns.
        outer_step: committed rounds of all fragments; -1 after a healing that was torn.
        inner_step: position of the schedule, in inner steps of the run, at the last commit.
        orders: orders of the operator, each with the step at which its round was committed.
        residence: where the tensors are.
        spans: committed inner steps, summed over islands and fragments, by what makes one step of the run:
            islands times fragments. One entry, unless the number of islands was changed.
        still: held while anything here changes, so that whoever holds it finds one state; see `residence` for
            what must be done before it is given back.
        counting: held, for an instant, while counters change.
    """

    fragments: Sequence[FragmentState]
    outer_step: int = 0
    inner_step: int = 0
    orders: list[dict[str, Any]] = field(default_factory=list)
    residence: Residence = field(default=HOST, repr=False)
    spans: dict[int, int] = field(default_factory=dict)
    still: threading.RLock = field(default_factory=threading.RLock, repr=False)
    counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def tokens(self) -> int:
        """Committed tokens over all islands: the mean over the fragments, each of which counts its own."""
        return sum(f.tokens for f in self.fragments) // len(self.fragments)

    @property
    def steps(self) -> float:
        """Committed inner steps over all islands, counted as `tokens` are."""
        return sum(f.steps for f in self.fragments) / len(self.fragments)

    def progress(self, own: int, whole: int) -> int:
        """Whole inner steps of the run that are done; whoever calls it holds `counting`.

        Args:
            own: steps besides the committed ones, summed over islands and fragments.
            whole: islands times fragments.
        """
        return progress({**self.spans, whole: self.spans.get(whole, 0) + own})

    def cursor(self, island: int) -> int:
        """How far the data of an island are committed, with whatever fragment, in its inner steps."""
        return max(f.taken.get(island, 0) for f in self.fragments)

    def counters(self) -> dict[str, Any]:
        """The json-able part."""
        return {
            "outer_step": self.outer_step,
            "inner_step": self.inner_step,
            "orders": self.orders,
            "spans": {str(whole): self.spans[whole] for whole in sorted(self.spans)},
            "fragments": [f.counters() for f in self.fragments],
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The flat buffers by name, live."""
        found = {}
        for i, f in enumerate(self.fragments):
            parts = {"anchor": f.anchor, **f.optimizer.state_tensors()}
            found.update({f"{i}.{name}": tensor for name, tensor in parts.items()})
        return found

    def take_counters(self, counters: dict[str, Any]) -> None:
        """Take over `counters` of another island or of a checkpoint."""
        with self.counting:
            self.outer_step, self.inner_step = counters["outer_step"], counters["inner_step"]
            self.orders = list(counters["orders"])
            self.spans = {int(whole): steps for whole, steps in counters["spans"].items()}
            for f, theirs in zip(self.fragments, counters["fragments"], strict=True):
                f.take_counters(theirs)

    def forget_digest(self) -> None:
        """The tensors were written where torch does not see it."""
        for f in self.fragments:
            f.optimizer.forget_digest()

    def digest(self) -> int:
        """64-bit digest of anchors and optimizer states of this rank."""
        digests = [f.optimizer.digest(f.anchor) for f in self.fragments]
        if len(digests) == 1:
            return digests[0]
        packed = b"".join(d.to_bytes(8, "little") for d in digests)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")

    def counter_digest(self) -> int:
        """64-bit digest of the counters, equal on all ranks; without the text of refused orders."""
        content = self.counters()
        content["orders"] = [o["number"] for o in self.orders]
        text = json.dumps(content, sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def make_state(
    config: Config, shards: Shards, plan: Sequence[Fragment], residence: Residence = HOST
) -> OuterState:
    """Anchors, as the island holds them now, and fresh outer optimizers, fragment by fragment.

    Args:
        config: of the run.
        shards: where the island holds its parameters.
        plan: of the fragments.
        residence: where the outer half lives.
    """
    outer = config.outer
    dtype = torch.bfloat16 if outer.anchor_dtype == "bf16" else torch.float32
    hyper = OuterHyper.from_config(outer, config.data.seed)
    made = []
    for fragment in plan:
        layout = FlatLayout(
            [
                Segment(
                    name=s.key_name,
                    key=parameter_key(s.key_name),
                    numel=s.numel,
                    element0=s.start,
                    quantised=outer.state_bits == 8 and wants_8bit(s.name, s.global_numel, s.shape),
                )
                for s in (shards.shards[i] for i in fragment.members)
            ]
        )
        anchor = residence.zeros(layout.total, dtype)
        shards.read(layout.views(anchor), fragment.members)
        optimizer = make_outer(outer.optimizer, layout, hyper, dtype, residence.device)
        made.append(FragmentState(layout, anchor, optimizer))
    return OuterState(made, residence=residence)
