"""What the islands tell each other before a round, and the one decision that follows from it.

Every island sends the same few numbers; every rank of every island computes the same `Decision` from
them. Pure: no process group in sight.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_wsd.config.compare import differing
from megatron_wsd.errors import ExchangeError, IslandError

PROTOCOL = 2
MAX_FRAGMENTS = 64  # a report has room for so many offers, so that all reports have one size


@dataclass(frozen=True)
class Offer:
    """What an island says of its contribution to one fragment. All fields are int64 on the wire.

    Attributes:
        version: commits of the fragment, whether or not there is a contribution.
        last_turn: turns of the fragment that had passed when it was last committed.
        turn: turns of the fragment that have passed by the island's position in the schedule.
        contributes: 1 if there is a contribution.
        finite: 0 if it holds a NaN or an Inf.
        base: version that it was trained from.
        steps: inner steps in it.
        tokens: tokens in it.
        cursor: inner steps of the island when it was captured; orders the contributions of an island.
        waiting_ms: how long it has been waiting for a round.
    """

    version: int = 0
    last_turn: int = 0
    turn: int = 0
    contributes: int = 0
    finite: int = 1
    base: int = 0
    steps: int = 0
    tokens: int = 0
    cursor: int = 0
    waiting_ms: int = 0


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
        ending: 1 if its training is over: no quorum waits for more than it offers now.
        done: 1 if it has nothing more to offer, since its run is over.
        inner_step: position of the schedule, as this island counts it.
        order: number of an order that it proposes; 0 for none.
        plan: digest of its fragments.
        missing: how many islands it misses that were there before the lighthouse was restarted.
        started: when its processes were, in nanoseconds since 1970.
        offers: one a fragment.
    """

    island: int
    outer_step: int
    digest: int
    config: int
    data: int
    ranks: int
    settled: int
    ending: int = 0
    done: int = 0
    inner_step: int = 0
    order: int = 0
    plan: int = 0
    missing: int = 0
    started: int = 0
    protocol: int = PROTOCOL
    offers: tuple[Offer, ...] = (Offer(),)

    def numbers(self) -> list[int]:
        """The fields in order; equally many for any number of fragments up to `MAX_FRAGMENTS`."""
        head = [getattr(self, name) for name in _HEAD]
        rows = [getattr(offer, name) for offer in self.offers for name in _OFFER]
        return [*head, len(self.offers), *rows, *[0] * ((MAX_FRAGMENTS - len(self.offers)) * len(_OFFER))]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Report:
        """From what `numbers` gave."""
        head = dict(zip(_HEAD, numbers, strict=False))
        count, rows = numbers[len(_HEAD)], numbers[len(_HEAD) + 1 :]
        width = len(_OFFER)
        offers = tuple(Offer(*rows[i * width : (i + 1) * width]) for i in range(count))
        return cls(**head, offers=offers)


_HEAD = tuple(f.name for f in fields(Report) if f.name != "offers")
_OFFER = tuple(f.name for f in fields(Offer))


@dataclass(frozen=True)
class Rules:
    """When contributions make a round.

    Attributes:
        lockstep: synchronous: whatever was offered is used, since everybody waits in the quorum.
        quorum: contributions to one fragment that make a round; fewer if fewer islands are alive and train.
        grace_ms: a round that could begin waits so long for the islands that have not offered.
    """

    lockstep: bool = True
    quorum: int = 1
    grace_ms: int = 0


LOCKSTEP = Rules()


@dataclass(frozen=True)
class Decision:
    """What this round does, the same on every rank of every island.

    Attributes:
        reports: of all islands in the quorum, by island number.
        places: place in the quorum of each of ``reports``.
        outer_step: the step that the round starts from.
        source: island that heals others; None if none needs it.
        healed: islands that receive the outer state before anything else, in order.
        fragment: what the round is about; None if there is nothing to merge yet.
        contributors: islands whose contribution is used, in the order of summation.
        dropped: islands whose contribution to the fragment is not finite.
        staleness: per contributor, its age in commits of the fragment.
        fragment_age: turns of the fragment that were missed since its newest commit.
        turn: turns of the fragment that have passed.
        inner_step: position of the schedule at this round.
        proposer: the leader whose order goes with this round; None if there is none.
    """

    reports: tuple[Report, ...]
    places: tuple[int, ...]
    outer_step: int
    source: int | None
    healed: tuple[int, ...]
    fragment: int | None
    contributors: tuple[int, ...]
    dropped: tuple[int, ...]
    staleness: tuple[int, ...]
    fragment_age: int
    turn: int
    inner_step: int
    proposer: int | None

    def place(self, island: int) -> int:
        """Place of an island in the quorum."""
        return self.places[[r.island for r in self.reports].index(island)]

    def report(self, island: int) -> Report:
        """The report of an island."""
        return next(r for r in self.reports if r.island == island)

    def offer(self, island: int) -> Offer:
        """What an island says of the fragment of this round."""
        assert self.fragment is not None
        return self.report(island).offers[self.fragment]

    @property
    def ages(self) -> tuple[int, ...]:
        """Per contributor, what its gate sees: max(staleness, fragment age), as PA-CGAD has it."""
        return tuple(max(tau, self.fragment_age) for tau in self.staleness)

    @property
    def islands(self) -> tuple[int, ...]:
        """All islands in the quorum, ascending."""
        return tuple(r.island for r in self.reports)

    @property
    def all_done(self) -> bool:
        """Whether nobody will offer anything more."""
        return all(r.done for r in self.reports)


_MASK = (1 << 64) - 1


def combine_digests(digests: Sequence[int]) -> int:
    """One non-negative int64 from the 64-bit digests of an island's ranks; their order matters."""
    packed = struct.pack(f"<{len(digests)}Q", *(d & _MASK for d in digests))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def to_int64(value: int) -> int:
    """The int64 with the same low 64 bits as ``value``."""
    low = value & _MASK
    return low - (1 << 64) if low >> 63 else low


def ask_for_configs(reports: Sequence[Report]) -> bool:
    """Whether the islands shall tell each other their configs, to say in what they differ.

    Only those that can: of one version, with an equal for every rank, and each under a number of its own.
    """
    if len({r.config for r in reports}) == 1:
        return False
    alike = len({(r.protocol, r.ranks) for r in reports}) == 1
    return alike and len({r.island for r in reports}) == len(reports)


def decide(
    quorum: Sequence[Report],
    settled: bool = False,
    rules: Rules = LOCKSTEP,
    configs: Mapping[int, Mapping[str, Any]] | None = None,
) -> Decision:
    """The decision that every rank draws from the reports of a quorum.

    The island with most commits leads. At equal commits but different contents the majority leads, and
    at a tie the side of the lowest island number. Whoever is not with the leaders is healed by the lowest
    of them and contributes nothing.

    Args:
        quorum: one report an island, in the order of the quorum.
        settled: whether the caller has met the others since it was started. A newcomer that does not fit
            ends with an error; those under way only lose the round to it.
        rules: when contributions make a round.
        configs: by island, `Config.identity`, where they differ and could be told.

    Raises:
        IslandError: the islands run different configs, corpora, versions of this package or numbers of
            ranks, two of them claim the same number, or they start from different weights.
        ExchangeError: as above but with a newcomer, or nobody in the quorum could heal the others.
    """
    order = sorted(range(len(quorum)), key=lambda place: quorum[place].island)
    reports = tuple(quorum[place] for place in order)
    problem = _misfit(reports, configs or {})
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
    position = max(r.inner_step for r in leaders)
    fragment = _ready(leaders, len(reports), rules)
    offers = [] if fragment is None else [(r.island, r.offers[fragment]) for r in leaders]
    offers = [(island, offer) for island, offer in offers if offer.contributes]
    used = [(island, offer) for island, offer in offers if offer.finite]
    version = 0 if fragment is None else leaders[0].offers[fragment].version
    turn = 0 if fragment is None else max(r.offers[fragment].turn for r in leaders)
    last_turn = 0 if fragment is None else leaders[0].offers[fragment].last_turn
    return Decision(
        reports=reports,
        places=tuple(order),
        outer_step=lead_step,
        source=leaders[0].island if healed else None,
        healed=healed,
        fragment=fragment,
        contributors=tuple(island for island, _ in used),
        dropped=tuple(island for island, offer in offers if not offer.finite),
        staleness=tuple(version - offer.base for _, offer in used),
        fragment_age=max(0, turn - last_turn - 1),
        turn=turn,
        inner_step=position,
        proposer=next((r.island for r in leaders if r.order), None),
    )


def _ready(leaders: Sequence[Report], islands: int, rules: Rules) -> int | None:
    """The fragment of this round: of those that are ready, the one whose offer has waited longest."""
    found: list[tuple[int, int]] = []
    for fragment in range(len(leaders[0].offers)):
        offers = [o for o in (r.offers[fragment] for r in leaders) if o.contributes]
        if not offers:
            continue
        waited = max(o.waiting_ms for o in offers)
        # An island that has ended its training may never offer this fragment again.
        able = sum(not r.ending or bool(r.offers[fragment].contributes) for r in leaders)
        enough = sum(o.finite for o in offers) >= min(rules.quorum, able)
        # A contribution that is not finite is settled at once: its island waits to be set back.
        everyone = len(offers) == islands or not all(o.finite for o in offers)
        if rules.lockstep or everyone or (enough and waited >= rules.grace_ms):
            found.append((-waited, fragment))
    return min(found)[1] if found else None


_MUST_AGREE = (
    ("protocol", "the same version of megatron_wsd", "Install the same version on both."),
    ("ranks", "equally many ranks", "Rank r of one island meets rank r of the other."),
    ("config", "the same config", "Compare config.json of both run folders."),
    ("plan", "the same fragments", "Compare sync.fragments and the models of both."),
    ("data", "the same corpora", "Copy the prepared .bin and .idx files from one to the other."),
)


def _misfit(reports: Sequence[Report], configs: Mapping[int, Mapping[str, Any]]) -> IslandError | None:
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
                if name == "config" and configs:
                    return _other_config(configs, *sorted((first.island, other.island)))
                shown = " and ".join(
                    f"{v:x}" if name in ("config", "data", "plan") else str(v) for v in values
                )
                return IslandError(pair, f"{what} on all islands", shown, remedy)
        if first.outer_step == other.outer_step == 0 and first.digest != other.digest:
            return IslandError(
                pair,
                "the same initial weights",
                f"digests {first.digest:x} and {other.digest:x}",
                "Set the same megatron_wsd.model.seed, or seed torch alike before the model is built.",
            )
    return None


_KEYS_SHOWN = 6


def _other_config(configs: Mapping[int, Mapping[str, Any]], one: int, other: int) -> IslandError:
    """In one line: a console and its excerpts go by lines."""
    found = differing(configs[one], configs[other])
    rows = [f"{key} {left} and {right}" for key, (left, right) in found.items()]
    more = [f"{len(rows) - _KEYS_SHOWN} more keys"] if len(rows) > _KEYS_SHOWN else []
    return IslandError(
        f"island {one} and island {other}",
        "the same config on all islands",
        "; ".join([*rows[:_KEYS_SHOWN], *more]),
        "Only logging, checkpoints, timeouts and folders may differ.",
    )
