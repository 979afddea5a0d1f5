"""Which sample comes next: pure arithmetic, random access, nothing repeated and nothing lost.

The training samples of a corpus are visited in an endless order: epoch after epoch, each in a seeded
permutation of its own. Islands take every I-th number of that order, so two islands never meet within an
epoch, however different their speed; when their number changes, what is left of the order is dealt anew.
Which corpus the next sample comes from is given by a *mix*, and a mix may be switched at any sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wsd.data.deal import dealt
from megatron_wsd.data.mix import Mix, epoch_keys, permuted
from megatron_wsd.errors import DataError

_STATE_FORMAT = 2


@dataclass(frozen=True)
class _Phase:
    start: int  # the island's sample with which the mix begins
    name: str
    taken: Counter[str]  # samples taken from each corpus before


@dataclass(frozen=True)
class _Layer:
    """A change of the number of islands."""

    taken: list[
        dict[str, int]
    ]  # draws that each of the islands before made from each corpus since their layer
    starts: list[int]  # the sample with which each of the islands from then on begins

    def draws(self, corpus: str) -> list[int]:
        return [taken.get(corpus, 0) for taken in self.taken]


class MixSampler:
    """Maps the k-th sample of an island to a corpus and a training sample of it.

    The island's j-th draw from a corpus has the number c = j * islands + island in the corpus's endless
    order; epoch e = c // N visits sample permutation_e(c % N). So the islands together visit every sample
    once an epoch, and the counters j go on when the mix is switched. Where the number of islands has changed
    (see ``resized``), j counts from that change, and c is the number that has this place among those that no
    island had taken (see ``megatron_wsd.data.deal``).

    The position is the caller's k and nothing but k: an island that read further than it committed, and
    starts again, asks for the sample after its last committed one and gets the same samples once more.

    Args:
        sizes: number N of training samples of each corpus.
        mixes: weights of each mix (see ``Mix``).
        seed: chooses the permutations.
        islands: how many islands share the corpora.
        island: this one, in [0, islands).
        start: the mix to begin with.

    Raises:
        DataError: a mix of an unknown corpus or with unusable weights, or no mix of the name ``start``.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        mixes: Mapping[str, Mapping[str, float]],
        seed: int,
        islands: int = 1,
        island: int = 0,
        start: str = "stable",
    ) -> None:
        if not 0 <= island < islands:
            raise DataError("island", f"a number in [0, {islands})", island)
        for name, weights in mixes.items():
            if unknown := sorted(set(weights) - set(sizes)):
                raise DataError(
                    f"megatron_wsd.data.mixes.{name}",
                    f"corpora among {sorted(sizes)}",
                    unknown,
                    "Add them to data.corpora or take them out of the mix.",
                )
        self._sizes = dict(sizes)
        self._weights = {name: {c: float(w) for c, w in weights.items()} for name, weights in mixes.items()}
        self._mixes = {name: Mix(name, weights) for name, weights in mixes.items()}
        self._seed = seed
        self._islands = islands
        self._island = island
        self._layers: list[_Layer] = []
        self._phases: list[_Phase] = []
        self._begin(0, start, Counter())

    @classmethod
    def from_state(cls, state: Mapping[str, Any], island: int) -> MixSampler:
        """The sampler of an island with what ``state_dict`` of any island of its run gave.

        Raises:
            DataError: the state is of another version, or there is no such island.
        """
        found = cls(
            state["sizes"],
            state["mixes"],
            state["seed"],
            islands=state["islands"],
            island=island,
            start=state["history"][0][1],
        )
        found.load_state_dict(state)
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """Training samples of each corpus, one epoch of it."""
        return dict(self._sizes)

    @property
    def history(self) -> list[tuple[int, str]]:
        """(first sample, mix) of every phase so far."""
        return [(phase.start, phase.name) for phase in self._phases]

    @property
    def start(self) -> int:
        """This island's first sample since the number of islands last changed; 0 if it never did."""
        return self._layers[-1].starts[self._island] if self._layers else 0

    def switch(self, k: int, mix: str) -> None:
        """Uses ``mix`` from the island's sample ``k`` on. To the mix already in use: changes nothing.

        Raises:
            DataError: an unknown mix, or ``k`` before the last switch.
        """
        last = self._phases[-1]
        if mix == last.name:
            return
        if k < last.start:
            raise DataError(
                "megatron_wsd.data.mixes",
                f"a switch at sample {last.start} or later",
                f"a switch to {mix!r} at sample {k}",
                f"The mix {last.name!r} began there; a switch cannot be put before it.",
            )
        self._begin(k, mix, self.before(k))

    def locate(self, k: int) -> tuple[str, int]:
        """Corpus and training sample, in [0, N), of the island's sample ``k``; k from 0, in any order.

        Raises:
            IndexError: ``k`` is negative, or before the island came into being.
        """
        corpus, number = self.number(k)
        epoch, position = divmod(number, self._sizes[corpus])
        return corpus, permuted(position, self._sizes[corpus], epoch_keys(self._seed, corpus, epoch))

    def number(self, k: int) -> tuple[str, int]:
        """Corpus of the island's sample ``k``, and its number in the corpus's endless order.

        Raises:
            IndexError: as ``locate``.
        """
        depth, start, islands = self._era(k)
        phase = self._phase(k)
        corpus, drawn = self._mixes[phase.name].at(k - phase.start)
        draw = phase.taken[corpus] + drawn
        if start:
            draw -= self._before(start)[corpus]
        return corpus, dealt(draw, self._island, islands, [x.draws(corpus) for x in self._layers[:depth]])

    def before(self, k: int) -> Counter[str]:
        """How many of the island's first ``k`` samples come from each corpus, by its mixes alone."""
        phase = self._phase(k)
        return phase.taken + self._mixes[phase.name].before(k - phase.start)

    def taken(self, k: int) -> dict[str, int]:
        """Draws from each corpus, up to ``k``, since the number of islands last changed."""
        now = self.before(max(k, self.start))
        now.subtract(self.before(self.start))
        return {corpus: n for corpus, n in sorted(now.items()) if n}

    def drawn(self, first: int, end: int) -> dict[str, dict[str, int]]:
        """Mix -> corpus -> how many of the island's samples [first, end) come from there; O(mixes)."""
        found: dict[str, Counter[str]] = {}
        ends = [*(phase.start for phase in self._phases[1:]), max(first, end)]
        for phase, until in zip(self._phases, ends, strict=True):
            a, b = max(first, phase.start), min(end, until)
            if a < b:
                part = self._mixes[phase.name].before(b - phase.start)
                part.subtract(self._mixes[phase.name].before(a - phase.start))
                found.setdefault(phase.name, Counter()).update(part)
        return {mix: {c: n for c, n in sorted(part.items()) if n} for mix, part in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything ``locate`` depends on but the island, json-able; the position is the caller's k."""
        return {
            "format": _STATE_FORMAT,
            "seed": self._seed,
            "islands": self._islands,
            "sizes": dict(self._sizes),
            "mixes": {name: dict(weights) for name, weights in self._weights.items()},
            "history": [list(entry) for entry in self.history],
            "layers": [
                {"taken": [dict(t) for t in layer.taken], "starts": list(layer.starts)}
                for layer in self._layers
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the switches of ``state``, which may come from any island of the run.

        Loading twice is loading once; on error nothing is changed. Corpora and mixes that were not there when
        the state was saved, as a branch may bring, are fine.

        Raises:
            DataError: another seed, number of islands, corpus size or mix than this sampler was given: its
                samples would be others. The message holds a table of both. Another number of islands wants
                ``resized`` first.
        """
        given = self.state_dict()
        for key in ("sizes", "mixes"):
            saved = state.get(key)
            if isinstance(saved, Mapping):
                given[key] = {name: value for name, value in given[key].items() if name in saved}
        if state.get("format") == 1:  # before the number of islands could change
            state = {**state, "format": _STATE_FORMAT, "layers": []}
        rows = [
            (key, state.get(key), given[key])
            for key in ("format", "seed", "islands", "sizes", "mixes")
            if state.get(key) != given[key]
        ]
        if rows:
            table = "".join(f"\n  {key:<8} saved {saved}\n  {'':<8} given {new}" for key, saved, new in rows)
            raise DataError(
                "data",
                "the corpora, mixes and seed of the checkpoint",
                f"other {', '.join(key for key, _, _ in rows)}",
                f"Give the saved ones, or start a new run.{table}",
            )
        before = self._phases, self._layers
        self._phases = []
        try:
            self._layers = [_Layer([dict(t) for t in x["taken"]], list(x["starts"])) for x in state["layers"]]
            (start, name), *switches = state["history"]
            self._begin(start, name, Counter())
            for k, mix in switches:
                self.switch(k, mix)
        except BaseException:
            self._phases, self._layers = before
            raise

    def _begin(self, k: int, mix: str, taken: Counter[str]) -> None:
        if mix not in self._mixes:
            raise DataError(
                "megatron_wsd.data.mixes", f"one of {sorted(self._mixes)}", mix, "Define this mix."
            )
        self._phases.append(_Phase(k, mix, taken))
        self._memory: dict[int, Counter[str]] = {}

    def _phase(self, k: int) -> _Phase:
        return self._phases[bisect_right(self._phases, k, key=lambda p: p.start) - 1]

    def _before(self, k: int) -> Counter[str]:
        """``before``, remembered: for the few starts."""
        if k not in self._memory:
            self._memory[k] = self.before(k)
        return self._memory[k]

    def _era(self, k: int) -> tuple[int, int, int]:
        """Under which number of islands sample ``k`` is: changes before it, its first sample, the number."""
        for depth in range(len(self._layers), 0, -1):
            starts = self._layers[depth - 1].starts
            if self._island < len(starts) and k >= starts[self._island]:
                return depth, starts[self._island], len(starts)
        islands = len(self._layers[0].taken) if self._layers else self._islands
        if k < 0 or self._island >= islands:
            raise IndexError(f"sample {k} of island {self._island}")
        return 0, 0, islands


def resized(
    states: Sequence[Mapping[str, Any]], cursors: Sequence[int], starts: Sequence[int]
) -> dict[str, Any]:
    """The sampler state of a run that goes on with another number of islands.

    What counts as consumed is what each island committed, wherever it stood: of every corpus, the numbers
    that no island has taken are dealt to the new islands in ascending order. So within an epoch of a corpus
    nothing is repeated and nothing left out, after any number of changes. An island that merely starts
    again, and had read further than it committed, needs none of this: it asks for its next sample by its
    number.

    Args:
        states: ``state_dict`` of every island until now, in their order.
        cursors: how many samples each of them committed; its next would have been the sample of this number.
        starts: the number that the next sample of each new island has, in its own counting. An island that
            stays goes on at its cursor; one that is new begins where the others are.

    Returns:
        The state for all new islands alike, with the history of the island that came furthest.

    Raises:
        DataError: states that do not belong together.
    """
    common = [{k: v for k, v in s.items() if k not in ("history", "layers")} for s in states]
    if not states or any(c != common[0] or c["islands"] != len(states) for c in common) or not starts:
        raise DataError(
            "islands",
            "the sampler states of all islands of one run",
            f"{len(states)} that say {sorted({c['islands'] for c in common})} islands",
        )
    samplers = [MixSampler.from_state(state, island) for island, state in enumerate(states)]
    layers = samplers[0].state_dict()["layers"]
    taken = [sampler.taken(cursor) for sampler, cursor in zip(samplers, cursors, strict=True)]
    furthest = states[max(range(len(states)), key=lambda i: cursors[i])]
    return {
        **furthest,
        "format": _STATE_FORMAT,
        "islands": len(starts),
        "layers": [*layers, {"taken": taken, "starts": list(starts)}],
    }
