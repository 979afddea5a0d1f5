"""What a run has taken of each corpus: samples, tokens and epochs, by mix. Imports no torch.

``Drawn`` maps mix -> corpus -> samples. What counts is what was committed: samples whose contribution entered
an outer round, not those that an island read and lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_wsd.data.sampler import MixSampler

Drawn = dict[str, dict[str, int]]


def total(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> Drawn:
    """The sum of several; mixes and corpora by name."""
    found: Drawn = {}
    for part in parts:
        for mix, corpora in part.items():
            into = found.setdefault(mix, {})
            for corpus, samples in corpora.items():
                into[corpus] = into.get(corpus, 0) + samples
    return {mix: dict(sorted(found[mix].items())) for mix in sorted(found)}


class Ledger:
    """What one island has committed since its run began, in the order of its samples.

    Attributes:
        drawn: all of it.
        until: the sample after the last committed one.
    """

    def __init__(self) -> None:
        self.drawn: Drawn = {}
        self.until = 0

    def commit(self, sampler: MixSampler, first: int, end: int) -> dict[str, Any] | None:
        """Count the island's samples [first, end); those before ``until`` are counted already.

        Returns:
            What is new, as ``committed`` reads it back: ``first``, ``end`` and ``drawn``; None if nothing is.
        """
        first = max(first, self.until)
        if first >= end:
            return None
        new = sampler.drawn(first, end)
        self.drawn, self.until = total([self.drawn, new]), end
        return {"first": first, "end": end, "drawn": new}

    def state_dict(self) -> dict[str, Any]:
        """Json-able."""
        return {"drawn": total([self.drawn]), "until": self.until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.drawn, self.until = total([state["drawn"]]), int(state["until"])


def committed(records: Sequence[Mapping[str, Any]], until: int | None = None) -> Drawn:
    """What an island has committed by its metrics.

    A ``data`` record tells of the samples of one committed round. An island that went back to an older
    checkpoint tells of some again: what it had told from there on then never was, or is told anew.

    Args:
        records: of one island, as `records.read_metrics` gives them.
        until: leave out what ends behind this sample.
    """
    kept: list[Mapping[str, Any]] = []
    for record in records:
        if record["kind"] == "data":
            kept = [*(r for r in kept if r["end"] <= record["first"]), record]
    return total(r["drawn"] for r in kept if until is None or r["end"] <= until)


def amounts(drawn: Drawn, sizes: Mapping[str, int], seq_length: int) -> dict[str, Any]:
    """``mixes``: mix -> corpus -> samples, tokens and epochs; ``corpora``: the same over all mixes.

    Args:
        drawn: what was taken.
        sizes: training samples of each corpus.
        seq_length: tokens a sample.
    """

    def told(corpora: Mapping[str, int]) -> dict[str, dict[str, float]]:
        return {
            corpus: {"samples": n, "tokens": n * seq_length, "epochs": n / sizes[corpus]}
            for corpus, n in corpora.items()
        }

    together = total({"": corpora} for corpora in drawn.values()).get("", {})
    return {"mixes": {mix: told(corpora) for mix, corpora in drawn.items()}, "corpora": told(together)}
