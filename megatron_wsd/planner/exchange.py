"""Bytes and seconds of an exchange between islands, and the share of the time that is left for training.

An exchange is one broadcast for each contributor, one after the other, from equal rank to equal rank; all
ranks of an island share its link. gloo's broadcast is a binomial tree: its source sends ceil(log2 N) copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_wsd.diloco.fragments import plan_fragments
from megatron_wsd.planner.model import Parameter

WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64}
"""Bytes a parameter: codes, and a 4-byte scale for each block of 256 (int8) or 64 (int4)."""

QUORUM_TICK_S = 0.1  # the lighthouse looks this often whether a quorum is complete
# Measured on one core: capture, zeroing, digest, step and adoption took 2.5 ns a parameter and adding one
# contribution 0.3 ns; decoding one is taken to cost twice that.
OUTER_NS = 2.5
OUTER_NS_EACH = 1.0
# Of these, what training waits for in asynchronous mode: capture and adoption, with the way from and to the
# device at 16 GB/s.
PAUSE_NS = 2.0


@dataclass(frozen=True)
class Link:
    """What joins one island to the others.

    Attributes:
        bits_per_s: in each direction, shared by all ranks of the island.
        rtt_s: round trip between two islands.
    """

    bits_per_s: float
    rtt_s: float


@dataclass(frozen=True)
class Traffic:
    """One run's exchanges.

    Attributes:
        islands: N, all of them contributing.
        ranks: of one island.
        fragments: elements of each fragment on one rank.
        wire: name of the format.
        bucket_bytes: largest single message.
    """

    islands: int
    ranks: int
    fragments: tuple[int, ...]
    wire: str
    bucket_bytes: int

    def sent(self) -> int:
        """Bytes of one rank's contributions over one sync of the whole model."""
        return round(WIRE_BYTES[self.wire] * sum(self.fragments)) if self.islands > 1 else 0

    def received(self) -> int:
        """Bytes that one rank receives over one sync of the whole model: those of each other island."""
        return self.sent() * (self.islands - 1)

    def wire_seconds(self, link: Link, numel: int) -> float:
        """Seconds for which one exchange of ``numel`` elements a rank occupies the links.

        N ceil(log2 N) (8 ranks bytes / bits_per_s + messages rtt)
        """
        if self.islands < 2:
            return 0.0
        nbytes = WIRE_BYTES[self.wire] * numel
        messages = math.ceil(nbytes / self.bucket_bytes)
        copies = self.islands * math.ceil(math.log2(self.islands))
        return copies * (8 * nbytes * self.ranks / link.bits_per_s + messages * link.rtt_s)

    def round_seconds(self, link: Link, numel: int) -> float:
        """Seconds of one whole round of ``numel`` elements a rank.

        Quorum, the agreement and the commit (two round trips, and one for each other island twice), the
        exchange, and the outer half's own work.
        """
        work = numel * (OUTER_NS + OUTER_NS_EACH * self.islands) * 1e-9
        if self.islands < 2:
            return work
        control = QUORUM_TICK_S + 2 * self.islands * link.rtt_s
        return control + self.wire_seconds(link, numel) + work

    def sync_seconds(self, link: Link) -> float:
        """Seconds of the rounds of all fragments, one after the other."""
        return sum(self.round_seconds(link, numel) for numel in self.fragments)

    def pause_seconds(self) -> float:
        """Seconds that training stands still for one capture and one adoption of the whole model."""
        return sum(self.fragments) * PAUSE_NS * 1e-9


class Fleet:
    """Islands that hold one model: what of it each rank exchanges, however it is cut.

    Args:
        parameters: of the model.
        islands: N.
        ranks: of one island.
        bucket_bytes: largest single message.
        order: which layers form a fragment.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        islands: int,
        ranks: int,
        bucket_bytes: int,
        order: Literal["strided", "sequential"] = "strided",
    ) -> None:
        self.parameters, self.islands, self.ranks = parameters, islands, ranks
        self._bucket_bytes, self._order = bucket_bytes, order
        self._sizes: dict[int, tuple[int, ...]] = {}

    def traffic(self, wire: str, fragments: int) -> Traffic:
        """The exchanges in that format with that many fragments of layers.

        Raises:
            ConfigError: more fragments than layers.
        """
        if fragments not in self._sizes:
            plan = plan_fragments(self.parameters, fragments, self._order)
            shards = [p.shard(self.ranks) for p in self.parameters]
            self._sizes[fragments] = tuple(sum(shards[i] for i in f.members) for f in plan)
        return Traffic(self.islands, self.ranks, self._sizes[fragments], wire, self._bucket_bytes)


def synchronous(traffic: Traffic, link: Link, inner_steps: int, step_s: float) -> float:
    """Utilisation where training waits for every round: H t / (H t + sum of the rounds)."""
    busy = inner_steps * step_s
    return busy / (busy + traffic.sync_seconds(link))


def streaming(traffic: Traffic, link: Link, inner_steps: int, step_s: float, overlap_steps: int) -> float:
    """Utilisation where a fragment's round has ``overlap_steps`` to hide in, and training then waits for it.

    A fragment's round that takes T_f leaves a wait of max(0, T_f - min(overlap t, H t / P)), since rounds do
    not run beside each other.
    """
    busy = inner_steps * step_s
    hidden = min(overlap_steps * step_s, busy / len(traffic.fragments))
    waits = sum(max(0.0, traffic.round_seconds(link, numel) - hidden) for numel in traffic.fragments)
    return busy / (busy + waits + traffic.pause_seconds())


def asynchronous(traffic: Traffic, inner_steps: int, step_s: float) -> float:
    """Utilisation where training waits for capture and adoption alone, however long a round takes."""
    busy = inner_steps * step_s
    return busy / (busy + traffic.pause_seconds())


def period_steps(traffic: Traffic, link: Link, inner_steps: int, step_s: float) -> float:
    """Inner steps between two syncs of a fragment that an asynchronous run really gets.

    The one asked for, or the time of all rounds where the link cannot keep up: then sync points pass unused.
    """
    return max(float(inner_steps), traffic.sync_seconds(link) / step_s)
