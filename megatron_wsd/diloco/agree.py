"""What the islands tell each other before a round, and the one decision that follows from it.

Every island sends the same few numbers; every rank of every island computes the same `Decision` from
them. Pure: no process group in sight.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_wsd.errors import ExchangeError, IslandError

PROTOCOL = 1


@dataclass(frozen=True)
class Report:
    """One island's numbers, equal on all its ranks. All fields are int64 on the wire.

    Attributes:
        island: its number.
        outer_step: rounds it has committed; -1 if a torn healing left it without a whole state.
        digest: of its anchor and outer state, over all its ranks.
        config: digest of its config.
        data: digest of its corpora; 0 where the caller reads its own.
        ranks: how many it has.
        settled: 0 until it has met the others once since it was started.
        contributes: 1 if it offers a contribution.
        finite: 0 if its contribution holds a NaN or an Inf.
        base: outer step of the version that its contribution was trained from.
        steps: inner steps in the contribution.
        tokens: tokens in the contribution.
        inner_step: inner steps of the run, as this island counts them.
        order: number of an order that it proposes; 0 for none.
    """

    island: int
    outer_step: int
    digest: int
    config: int
    data: int
    ranks: int
    settled: int
    contributes: int
    finite: int
    base: int
    steps: int
    tokens: int
    inner_step: int
    order: int = 0
    protocol: int = PROTOCOL

    def numbers(self) -> list[int]:
        """The fields in order."""
        return list(dataclasses.astuple(self))

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Report:
        """From what `numbers` gave."""
        return cls(*numbers)


@dataclass(frozen=True)
class Decision:
    """What this round does, the same on every rank of every island.

    Attributes:
        reports: of all islands in the quorum, by island number.
        places: place in the quorum of each of ``reports``.
        outer_step: the step that the round starts from.
        source: island that heals others; None if none needs it.
        healed: islands that receive the outer state before anything else, in order.
        contributors: islands whose contribution is used, in the order of summation.
        dropped: islands whose contribution is not finite.
        staleness: per contributor, its age in outer rounds.
        inner_step: inner steps of the run after this round, for islands that were left behind.
        proposer: the leader whose order goes with this round; None if there is none.
    """

    reports: tuple[Report, ...]
    places: tuple[int, ...]
    outer_step: int
    source: int | None
    healed: tuple[int, ...]
    contributors: tuple[int, ...]
    dropped: tuple[int, ...]
    staleness: tuple[int, ...]
    inner_step: int
    proposer: int | None

    def place(self, island: int) -> int:
        """Place of an island in the quorum."""
        return self.places[[r.island for r in self.reports].index(island)]

    def report(self, island: int) -> Report:
        """The report of an island."""
        return next(r for r in self.reports if r.island == island)

    @property
    def islands(self) -> tuple[int, ...]:
        """All islands in the quorum, ascending."""
        return tuple(r.island for r in self.reports)


_MASK = (1 << 64) - 1


def combine_digests(digests: Sequence[int]) -> int:
    """One non-negative int64 from the 64-bit digests of an island's ranks; their order matters."""
    packed = struct.pack(f"<{len(digests)}Q", *(d & _MASK for d in digests))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def to_int64(value: int) -> int:
    """The int64 with the same low 64 bits as ``value``."""
    low = value & _MASK
    return low - (1 << 64) if low >> 63 else low


def decide(quorum: Sequence[Report], settled: bool = False) -> Decision:
    """The decision that every rank draws from the reports of a quorum.

    The island with most commits leads. At equal commits but different contents the majority leads, and
    at a tie the side of the lowest island number. Whoever is not with the leaders is healed by the lowest
    of them and contributes nothing.

    Args:
        quorum: one report an island, in the order of the quorum.
        settled: whether the caller has met the others since it was started. A newcomer that does not fit
            ends with an error; those under way only lose the round to it.

    Raises:
        IslandError: the islands run different configs, corpora, versions of this package or numbers of
            ranks, two of them claim the same number, or they start from different weights.
        ExchangeError: as above but with a newcomer, or nobody in the quorum could heal the others.
    """
    order = sorted(range(len(quorum)), key=lambda place: quorum[place].island)
    reports = tuple(quorum[place] for place in order)
    problem = _misfit(reports)
    if problem is not None:
        if settled:
            raise ExchangeError(f"an island that has just been started does not fit: {problem}")
        raise problem
    lead_step = max(r.outer_step for r in reports)
    if lead_step < 0:
        raise ExchangeError("every island in the quorum waits to be healed; none holds a whole outer state")
    ahead = [r for r in reports if r.outer_step == lead_step]
    sides: dict[int, list[Report]] = {}
    for r in ahead:
        sides.setdefault(r.digest, []).append(r)
    leaders = max(sides.values(), key=lambda side: (len(side), -side[0].island))
    healed = tuple(r.island for r in reports if r not in leaders)
    offers = [r for r in leaders if r.contributes]
    contributors = tuple(r for r in offers if r.finite)
    return Decision(
        reports=reports,
        places=tuple(order),
        outer_step=lead_step,
        source=leaders[0].island if healed else None,
        healed=healed,
        contributors=tuple(r.island for r in contributors),
        dropped=tuple(r.island for r in offers if not r.finite),
        staleness=tuple(lead_step - r.base for r in contributors),
        inner_step=max(r.inner_step for r in leaders),
        proposer=next((r.island for r in leaders if r.order), None),
    )


_MUST_AGREE = (
    ("protocol", "the same version of megatron_wsd", "Install the same version on both."),
    ("ranks", "equally many ranks", "Rank r of one island meets rank r of the other."),
    ("config", "the same config", "Compare config.json of both run folders."),
    ("data", "the same corpora", "Copy the prepared .bin and .idx files from one to the other."),
)


def _misfit(reports: Sequence[Report]) -> IslandError | None:
    """Why these islands cannot work together; None if they can. Compared with one under way if any is."""
    first = max(reports, key=lambda r: (r.settled, -r.island))
    for other in reports:
        if other is first:
            continue
        pair = " and ".join(f"island {i}" for i in sorted((first.island, other.island)))
        if other.island == first.island:
            numbers = [r.island for r in reports]
            return IslandError("--island", "a number of its own for every island", numbers)
        for name, what, remedy in _MUST_AGREE:
            values = [getattr(r, name) for r in sorted((first, other), key=lambda r: r.island)]
            if values[0] != values[1]:
                shown = " and ".join(f"{v:x}" if name in ("config", "data") else str(v) for v in values)
                return IslandError(pair, f"{what} on all islands", shown, remedy)
        if first.outer_step == other.outer_step == 0 and first.digest != other.digest:
            return IslandError(
                pair,
                "the same initial weights",
                f"digests {first.digest:x} and {other.digest:x}",
                "Set the same megatron_wsd.model.seed, or seed torch alike before the model is built.",
            )
    return None
