"""Samples, permutations and mixes: how a corpus is cut, and which corpus comes next.

A *sample* is ``seq_length + 1`` tokens: inputs and, one further, labels. A corpus is cut in consecutive
samples that share one token at their seams; the last part is held out.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_wsd.errors import DataError

MIX_PERIOD = 1024  # slots after which a mix repeats its pattern: weights are kept to 1/1024
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
            f"megatron_wsd.data.corpora.{name}",
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
def epoch_keys(seed: int, corpus: str, epoch: int) -> tuple[int, ...]:
    """The round keys of ``permuted`` for one epoch of a corpus."""
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
                f"megatron_wsd.data.mixes.{name}",
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
