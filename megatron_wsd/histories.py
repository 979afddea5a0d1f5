"""Whether the islands of a run have one history: a committed round has one digest, whoever tells of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from megatron_wsd.records import Record

OUT_OF_IT = (
    "They committed rounds of their own under the same numbers, so what is told of these rounds mixes them. "
    "Take the anchor of those who finished first. Before you go on with all of them, move the checkpoints of "
    "the others from that round on out of their folders: then these are healed."
)
"""What to do about islands that went apart."""


@dataclass(frozen=True)
class Apart:
    """Islands that committed different rounds under the same numbers.

    Attributes:
        sides: islands by history; those of one side agree.
        since: first round that is not the same on all sides.
    """

    sides: tuple[tuple[int, ...], ...]
    since: int

    def __str__(self) -> str:
        if all(len(side) == 1 for side in self.sides):
            *some, last = (str(side[0]) for side in self.sides)
            who = f"islands {', '.join(some)} and {last} have"
        else:
            named = [f"island{'s' * (len(s) > 1)} {', '.join(map(str, s))}" for s in self.sides]
            who = f"{' against '.join(named)}:"
        return f"{who} different histories from round {self.since} on"


def committed_digests(records: Iterable[Record]) -> dict[int, str]:
    """Digest of the outer state after each committed round, by round, as one island's records tell.

    An island that was started from an older checkpoint went back: what it had committed since does not count.
    """
    found: dict[int, str] = {}
    for record in records:
        if record["kind"] == "start":
            found = {k: digest for k, digest in found.items() if k <= record.get("outer_step", k)}
        elif record["kind"] == "round" and record["committed"] and record.get("digest"):
            found[record["outer_step"]] = record["digest"]
    return found


def apart(each: Mapping[int, Mapping[int, str]]) -> Apart | None:
    """Whether islands have gone apart and not come together again.

    Two are together if the newest round that both tell of has one digest: one that was healed took over the
    state of the others, whatever it had committed before.

    Args:
        each: by island, what `committed_digests` found.
    """
    side = {island: {island} for island in each}
    differ: list[tuple[int, int, int]] = []
    for a, b in combinations(sorted(each), 2):
        common = sorted(each[a].keys() & each[b].keys(), reverse=True)
        other = [each[a][k] != each[b][k] for k in common]
        if other and not other[0]:
            joined = side[a] | side[b]
            side |= dict.fromkeys(joined, joined)
        elif other:
            differ.append((a, b, common[other.index(False) - 1 if False in other else -1]))
    since = [k for a, b, k in differ if b not in side[a]]
    if not since:
        return None
    of_differing = {tuple(sorted(side[i])) for a, b, _ in differ if b not in side[a] for i in (a, b)}
    return Apart(tuple(sorted(of_differing)), min(since))
