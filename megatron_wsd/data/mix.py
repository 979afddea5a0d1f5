"""Which sample comes next: pure arithmetic, random access, nothing repeated and nothing lost.

A *sample* is ``seq_length + 1`` tokens: inputs and, one further, labels. A corpus is cut in consecutive
samples that share one token at their seams; the last part is held out. The training samples are visited in
an endless order: epoch after epoch, each in a seeded permutation of its own. Islands take every I-th number
of that order, so two islands never meet within an epoch, however different their speed. Which corpus the next
sample comes from is given by a *mix*, and a mix may be switched at any sample.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_wsd.errors import DataError

MIX_PERIOD = 1024  # slots after which a mix repeats its pattern: weights are kept to 1/1024
_STATE_FORMAT = 1
_ROUNDS = 6
_MASK64 = 2**64 - 1


@dataclass(frozen=True)
class Split:
    """How a corpus of ``num_tokens`` is cut (see ``split_corpus``)."""

    seq_length: int
    train_samples: int
    valid_samples: int

    def train_start(self, sample: int) -> int:
        """First token of training sample ``sample``, in [0, train_samples)."""
        return sample * self.seq_length

    def valid_start(self, sample: int) -> int:
        """First token of held-out sample ``sample``, in [0, valid_samples)."""
        return self.train_samples * self.seq_length + 1 + sample * self.seq_length

    @property
    def valid_tokens(self) -> tuple[int, int]:
        """First token and length of the held-out part."""
        return self.valid_start(0), self.valid_samples * self.seq_length + 1


def split_corpus(name: str, num_tokens: int, seq_length: int, valid_fraction: float) -> Split:
    """Cuts a corpus of T tokens in N = floor((T - 2) / seq_length) samples and holds out the last ones.

    round(valid_fraction * N) samples are held out, at least one. The held-out part begins one token after
    the last label of training, so both share no token (that is the 2 in N).

    Raises:
        DataError: too few tokens for one sample of each.
    """
    samples = (num_tokens - 2) // seq_length
    if samples < 2:
        raise DataError(
            f"data.corpora.{name}",
            f"at least {2 * seq_length + 2} tokens, one sample to train and one to validate",
            f"{num_tokens} tokens",
            "Use more text or a shorter seq_length.",
        )
    valid = min(samples - 1, max(1, round(valid_fraction * samples)))
    return Split(seq_length, samples - valid, valid)


def permuted(index: int, size: int, keys: tuple[int, ...]) -> int:
    """The image of ``index`` under a permutation of range(size) that is never written down.

    A balanced Feistel network over the smallest even number of bits that hold ``size``, walked along its
    cycle until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): fewer
    than 4 walks on average, O(1) memory. Bijective for any round keys.

    Args:
        index: in [0, size).
        size: number of elements, at least 1.
        keys: one 64-bit key a round; they choose the permutation.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right ^ key) & mask)
        index = (left << half) | right
        if index < size:
            return index


def _scramble(x: int) -> int:
    # The finaliser of splitmix64 (Steele, Lea, Flood, 2014): every input bit reaches every output bit.
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=256)
def _epoch_keys(seed: int, corpus: str, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{corpus}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


class Mix:
    """A repeating pattern of corpora whose shares are the weights.

    The weights are rounded to slots of a period of 1,024 by largest remainder, and every positive weight
    has at least one slot. The slots of each corpus are spread evenly: among the first n samples each of C
    corpora has its share of n to within (C + 1) / 2 samples.

    Args:
        name: of the mix, for messages.
        weights: relative shares, at least 0, of any sum; in samples, which is tokens.

    Raises:
        DataError: weights that are negative, not finite or all 0, or more corpora than slots.
    """

    def __init__(self, name: str, weights: Mapping[str, float]) -> None:
        bad = {corpus: w for corpus, w in weights.items() if not (math.isfinite(w) and w >= 0)}
        positive = {corpus: float(weights[corpus]) for corpus in sorted(weights) if weights[corpus] > 0}
        if bad or not 0 < len(positive) <= MIX_PERIOD:
            raise DataError(
                f"data.mixes.{name}",
                f"weights of at least 0, of which 1 to {MIX_PERIOD} are more than 0",
                bad or dict(weights),
                "Give every corpus its share of the samples, e.g. 0.7 and 0.3.",
            )
        self.slots = _apportion(positive)
        # Slot j of a corpus with n slots would like to be at (j + 1/2) / n of the period.
        wishes = [((j + 0.5) / n, corpus, j) for corpus, n in self.slots.items() for j in range(n)]
        self._pattern = [(corpus, j) for _, corpus, j in sorted(wishes)]

    def at(self, n: int) -> tuple[str, int]:
        """The corpus of the n-th sample, and how many earlier ones came from it."""
        period, slot = divmod(n, MIX_PERIOD)
        corpus, ordinal = self._pattern[slot]
        return corpus, period * self.slots[corpus] + ordinal

    def before(self, n: int) -> Counter[str]:
        """How many of the first n samples come from each corpus."""
        periods, slot = divmod(n, MIX_PERIOD)
        counts = Counter(corpus for corpus, _ in self._pattern[:slot])
        counts.update({corpus: periods * slots for corpus, slots in self.slots.items()})
        return counts


def _apportion(weights: Mapping[str, float]) -> dict[str, int]:
    # Scaled by the largest first, so that no sum of finite weights overflows.
    largest = max(weights.values())
    scaled = {corpus: w / largest for corpus, w in weights.items()}
    total = math.fsum(scaled.values())
    quotas = {corpus: w / total * MIX_PERIOD for corpus, w in scaled.items()}
    slots = {corpus: max(1, math.floor(quota)) for corpus, quota in quotas.items()}
    while (missing := MIX_PERIOD - sum(slots.values())) != 0:
        if missing > 0:
            slots[max(slots, key=lambda corpus: quotas[corpus] - slots[corpus])] += 1
        else:  # the guaranteed slots of small weights are paid for by whoever is furthest above its quota
            rich = [corpus for corpus in slots if slots[corpus] > 1]
            slots[min(rich, key=lambda corpus: quotas[corpus] - slots[corpus])] -= 1
    return slots


@dataclass(frozen=True)
class _Phase:
    start: int  # the island's sample with which the mix begins
    name: str
    taken: Counter[str]  # samples taken from each corpus before


class MixSampler:
    """Maps the k-th sample of an island to a corpus and a training sample of it.

    The island's j-th draw from a corpus has the number c = j * islands + island in the corpus's endless
    order; epoch e = c // N visits sample permutation_e(c % N). So the islands together visit every sample
    once an epoch, and the counters j go on when the mix is switched.

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
                    f"data.mixes.{name}",
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
        self._phases: list[_Phase] = []
        self._begin(0, start, Counter())

    @property
    def history(self) -> list[tuple[int, str]]:
        """(first sample, mix) of every phase so far."""
        return [(phase.start, phase.name) for phase in self._phases]

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
                "data.mixes",
                f"a switch at sample {last.start} or later",
                f"a switch to {mix!r} at sample {k}",
                f"The mix {last.name!r} began there; a switch cannot be put before it.",
            )
        self._begin(k, mix, last.taken + self._mixes[last.name].before(k - last.start))

    def locate(self, k: int) -> tuple[str, int]:
        """Corpus and training sample, in [0, N), of the island's sample ``k``; k from 0, in any order."""
        if k < 0:
            raise IndexError(f"sample {k}")
        phase = self._phases[bisect_right(self._phases, k, key=lambda p: p.start) - 1]
        corpus, drawn = self._mixes[phase.name].at(k - phase.start)
        number = (phase.taken[corpus] + drawn) * self._islands + self._island
        epoch, position = divmod(number, self._sizes[corpus])
        return corpus, permuted(position, self._sizes[corpus], _epoch_keys(self._seed, corpus, epoch))

    def state_dict(self) -> dict[str, Any]:
        """Everything ``locate`` depends on but the island, json-able; the position is the caller's k."""
        return {
            "format": _STATE_FORMAT,
            "seed": self._seed,
            "islands": self._islands,
            "sizes": dict(self._sizes),
            "mixes": {name: dict(weights) for name, weights in self._weights.items()},
            "history": [list(entry) for entry in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the switches of ``state``, which may come from any island of the run.

        Loading twice is loading once; on error nothing is changed. Corpora and mixes that were not there when
        the state was saved, as a branch may bring, are fine.

        Raises:
            DataError: another seed, number of islands, corpus size or mix than this sampler was given: its
                samples would be others. The message holds a table of both.
        """
        given = self.state_dict()
        for key in ("sizes", "mixes"):
            saved = state.get(key)
            if isinstance(saved, Mapping):
                given[key] = {name: value for name, value in given[key].items() if name in saved}
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
        before, self._phases = self._phases, []
        try:
            (start, name), *switches = state["history"]
            self._begin(start, name, Counter())
            for k, mix in switches:
                self.switch(k, mix)
        except BaseException:
            self._phases = before
            raise

    def _begin(self, k: int, mix: str, taken: Counter[str]) -> None:
        if mix not in self._mixes:
            raise DataError("data.mixes", f"one of {sorted(self._mixes)}", mix, "Define this mix.")
        self._phases.append(_Phase(k, mix, taken))
