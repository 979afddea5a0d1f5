"""How often a run will go through each of its corpora, told before it starts. Imports no torch.

Arithmetic on sizes, the mixes and the schedule; a run that goes on counts what it has really committed, see
`megatron_wsd.data.consumption`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_wsd.config import Config
from megatron_wsd.data.corpus import Source, is_source, open_source
from megatron_wsd.data.indexed import check_pair, pair_tokens
from megatron_wsd.data.mix import MIX_PERIOD, Mix, split_corpus
from megatron_wsd.data.phases import planned_mixes
from megatron_wsd.schedule import Schedule

MANY_EPOCHS = 4
"""Repeated data is nearly as good as fresh up to about so many (Muennighoff et al., arXiv 2305.16264)."""


@dataclass(frozen=True)
class Amount:
    """How much a corpus holds, as far as that can be told without reading it.

    Attributes:
        tokens: with those that end documents.
        exact: to a few; else it is the most there can be, since text gives at most a token a byte.
        source: the text that it is to be made from; None for a pair of .bin and .idx.
    """

    tokens: int
    exact: bool = True
    source: Source | None = None


def amount_of(spec: str, tokenizer: str) -> Amount:
    """Look at a corpus.

    Args:
        spec: as in data.corpora.
        tokenizer: as in data.tokenizer; it is not loaded.

    Raises:
        DataError: nothing there, or files that do not belong together.
        OSError: no right to look there.
    """
    if not is_source(spec):
        return Amount(pair_tokens(check_pair(spec)))
    source = open_source(spec)
    tokens = source.num_bytes + source.most_documents
    return Amount(tokens, source.plain and tokenizer == "byte", source)


@dataclass(frozen=True)
class Passage:
    """How a run goes through one corpus.

    Attributes:
        corpus: its name.
        tokens: of one epoch: what is trained on, without what is held out.
        exact: whether ``tokens`` are; else there are at most so many, and ``epochs`` are the fewest.
        end: the step up to which ``epochs`` count; None where the run has no end.
        epochs: by the end; None without one.
        through: the step after which every sample was seen once; None if that is never.
    """

    corpus: str
    tokens: int
    exact: bool
    end: int | None
    epochs: float | None
    through: int | None

    @property
    def warning(self) -> str:
        """What to say of a corpus that is repeated too often; mostly empty."""
        if self.epochs is None or self.epochs <= MANY_EPOCHS:
            return ""
        return (
            f"corpus {self.corpus}: {self} to step {self.end:,}, of {'' if self.exact else 'at most '}"
            f"{self.tokens:,} tokens. Up to about {MANY_EPOCHS} epochs repeated data is nearly as good as "
            "fresh, beyond it is worth less and less (Muennighoff et al. 2023, arXiv 2305.16264): give it "
            "more text, a smaller weight, or the run fewer steps"
        )

    def __str__(self) -> str:
        if self.epochs is not None:
            text = f"{self.epochs:.3g}" if self.epochs < 100 else f"{self.epochs:,.0f}"
            return f"{'' if self.exact else 'at least '}{text} epochs"
        if self.through is None:
            return "never through as things are planned"
        return f"through once after step {self.through:,}{'' if self.exact else ' at the latest'}"


def passages(
    config: Config,
    amounts: Mapping[str, Amount],
    *,
    schedule: Schedule | None,
    orders: Sequence[Mapping[str, Any]] = (),
    steps: int | None = None,
) -> list[Passage]:
    """How a run goes through those of its corpora that it reads.

    Step n of the run takes ``island_batch`` samples on each island, from the mix that holds then; a mix of
    weights w takes the share w_c / sum(w) from corpus c, in 1,024ths.

    Args:
        config: of the run, with a model.
        amounts: by corpus; those that are not there are left out.
        schedule: in steps, with everything decided so far; None: no decay is planned and there is no end.
        orders: that were carried out, for their mixes.
        steps: the run stops there if not earlier.

    Raises:
        DataError: a corpus has too few tokens.
    """
    assert config.model is not None and config.islands.count is not None
    length, batch = config.model.seq_length, config.island_batch * config.islands.count
    switches = [(0, "stable")]
    ends = [steps]
    if schedule is not None:
        switches += planned_mixes(schedule, orders, config.data.mixes)
        ends.append(schedule.end)
    end = min((n for n in ends if n is not None), default=None)
    slots = {name: Mix(name, weights).slots for name, weights in config.data.mixes.items()}
    found = []
    for corpus, amount in amounts.items():
        size = split_corpus(corpus, amount.tokens, length, config.data.valid_fraction).train_samples
        rates = [(start, batch * slots[mix].get(corpus, 0) / MIX_PERIOD) for start, mix in switches]
        through = _reached(rates, size, end)
        if end is None:
            if any(rate for _, rate in rates):
                found.append(Passage(corpus, size * length, amount.exact, None, None, through))
        elif (drawn := _drawn(rates, end)) > 0:
            found.append(Passage(corpus, size * length, amount.exact, end, drawn / size, through))
    return found


Rates = Sequence[tuple[int, float]]
"""(first step, samples a step) ascending; the last holds for ever."""


def _drawn(rates: Rates, end: int) -> float:
    """Samples up to step ``end``."""
    edges = pairwise([*(start for start, _ in rates), end])
    return sum(
        rate * max(0, min(right, end) - left) for (left, right), (_, rate) in zip(edges, rates, strict=True)
    )


def _reached(rates: Rates, samples: int, end: int | None) -> int | None:
    """The first step by which so many samples are drawn; None if that is not before ``end``."""
    for (left, right), (_, rate) in zip(
        pairwise([*(start for start, _ in rates), math.inf]), rates, strict=True
    ):
        missing = samples - _drawn(rates, int(left))
        step = left + math.ceil(missing / rate) if rate > 0 else math.inf
        if step <= right and step < math.inf:
            return None if end is not None and step > end else int(step)
    return None
