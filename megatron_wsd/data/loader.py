"""Batches: the corpora of a run, its endless training stream and its held-out part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_wsd.data.corpus import is_source
from megatron_wsd.data.indexed import TokenFile
from megatron_wsd.data.mix import Split, split_corpus
from megatron_wsd.data.prepare import prepare_in_cache, read_manifest, refuse_tokenizer
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.data.tokenizer import load_tokenizer
from megatron_wsd.errors import DataError

Batch = tuple[torch.Tensor, torch.Tensor]

_SCAN_TOKENS = 2**28  # ids looked at for the vocabulary check: under a second from a warm cache
_ENTROPY_TOKENS = 2**24


class Corpora:
    """The opened corpora of a run, by name.

    Args:
        files: one token stream a corpus.
    """

    def __init__(self, files: Mapping[str, TokenFile]) -> None:
        self.files = dict(files)

    def splits(self, seq_length: int, valid_fraction: float) -> dict[str, Split]:
        """How each corpus is cut in training and held-out samples; see ``split_corpus``."""
        return {
            name: split_corpus(name, file.num_tokens, seq_length, valid_fraction)
            for name, file in self.files.items()
        }

    def check_vocab(self, vocab_size: int) -> None:
        """Makes sure that a model of ``vocab_size`` rows has one for every id.

        Files written by ``prepare`` say their largest id. Others are read: all of them up to 2**28 tokens,
        evenly spaced chunks of that many beyond.

        Raises:
            DataError: an id outside [0, vocab_size).
        """
        for name, file in self.files.items():
            manifest = read_manifest(file.prefix)
            low, high = (0, manifest["max_token_id"]) if manifest else file.id_range(_SCAN_TOKENS)
            if low < 0 or high >= vocab_size:
                raise DataError(
                    f"megatron_wsd.data.corpora.{name}",
                    f"token ids in [0, {vocab_size}), the rows of the model's vocabulary",
                    f"ids from {low} to {high} in {file.prefix}.bin",
                    f"Set the model's vocab_size to at least {high + 1}, or use this model's tokenizer.",
                )

    def fingerprints(self) -> dict[str, str]:
        """A digest of each corpus, equal where the tokens are (see ``TokenFile.fingerprint``).

        Islands of one run must hold the same: on two machines "builtin:stdlib" is two interpreters.
        """
        return {name: file.fingerprint() for name, file in self.files.items()}


def open_corpora(corpora: Mapping[str, str], cache_dir: str | Path, tokenizer: str) -> Corpora:
    """Opens what ``data.corpora`` lists, and prepares what is text still.

    Safe to call from all ranks at once: one writes, the others wait. Every caller reads (without tokenizing)
    the text to know whether the cache has it: prepare tens of gigabytes beforehand and give the prefix.

    Args:
        corpora: name to "builtin:stdlib", "builtin:pydoc", "text:PATH", or the prefix of a .bin and .idx.
        cache_dir: where prepared text goes; made if there is text to prepare.
        tokenizer: "byte" or "hf:PATH".

    Raises:
        DataError: no corpora, an unusable source or pair of files, or a pair that was prepared with
            another tokenizer.
    """
    if not corpora:
        raise DataError(
            "megatron_wsd.data.corpora", "at least one corpus", "none", "Use e.g. builtin:stdlib."
        )
    files = {}
    for name, spec in corpora.items():
        if is_source(spec):
            files[name] = TokenFile(prepare_in_cache(spec, load_tokenizer(tokenizer), cache_dir, name))
            continue
        files[name] = TokenFile(spec)
        refuse_tokenizer(name, files[name].prefix, tokenizer)
    return Corpora(files)


@dataclass(frozen=True)
class TrainStream:
    """The training batches of one rank, a pure function of the step.

    One optimizer step of an island takes ``island_batch`` = ranks * micro_batch * grad_accum samples of the
    island's stream: sample k = step * island_batch + (micro * ranks + rank) * micro_batch + b is row b of
    the rank's batch ``micro``. So each micro-batch of the island is contiguous in k and each rank has a
    contiguous part of it. To resume is to ask for the next step.

    Args:
        corpora: the opened corpora.
        sampler: of this island, built with the training sizes of ``corpora.splits(seq_length, ...)``.
        seq_length: tokens a sample, labels excluded.
        ranks: data-parallel ranks of the island; rank: this one.
        micro_batch: samples a rank and forward pass; grad_accum: forward passes a step.
    """

    corpora: Corpora
    sampler: MixSampler
    seq_length: int
    ranks: int
    rank: int
    micro_batch: int
    grad_accum: int = 1

    @property
    def island_batch(self) -> int:
        """Samples that the island takes a step; ``sampler.switch`` counts in these."""
        return self.ranks * self.micro_batch * self.grad_accum

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Tokens and labels, each [micro_batch, seq_length] int64 on the CPU, of forward pass ``micro``.

        Args:
            step: completed optimizer steps.
            micro: in [0, grad_accum).
        """
        first = step * self.island_batch + (micro * self.ranks + self.rank) * self.micro_batch
        rows = []
        for k in range(first, first + self.micro_batch):
            corpus, sample = self.sampler.locate(k)
            file = self.corpora.files[corpus]
            rows.append(file.tokens(sample * self.seq_length, self.seq_length + 1))
        return _shifted(rows)


class HeldOut:
    """The part of every corpus that no island trains on.

    Args:
        corpora: the opened corpora.
        seq_length: tokens a sample, labels excluded.
        valid_fraction: share of the samples that is held out, at the end of each corpus.
    """

    def __init__(self, corpora: Corpora, seq_length: int, valid_fraction: float) -> None:
        self._corpora = corpora
        self.splits = corpora.splits(seq_length, valid_fraction)

    def batches(self, corpus: str, batches: int, micro_batch: int, ranks: int, rank: int) -> Iterator[Batch]:
        """The same batches at every call: tokens and labels, each [micro_batch, seq_length] int64.

        ``batches * micro_batch * ranks`` samples, spread evenly over the held-out part and dealt to the
        ranks, without repetition. Every rank gets equally many batches: fewer than asked for where the part
        is short, but at least one, in which samples then repeat.
        """
        split = self.splits[corpus]
        batches = max(1, min(batches, split.valid_samples // (micro_batch * ranks)))
        total = batches * micro_batch * ranks
        for batch in range(batches):
            first = (batch * ranks + rank) * micro_batch
            samples = (n * split.valid_samples // total for n in range(first, first + micro_batch))
            file = self._corpora.files[corpus]
            yield _shifted([file.tokens(split.valid_start(s), split.seq_length + 1) for s in samples])

    def unigram_entropy(self, corpus: str) -> float:
        """Entropy of the held-out tokens taken one by one, in nats a token.

        H = -sum_t p_t ln p_t, with p the frequencies in the held-out part (its first 2**24 tokens): the
        least loss of a model that knows how often each token comes and sees no context.
        """
        start, length = self.splits[corpus].valid_tokens
        tokens = self._corpora.files[corpus].tokens(start, min(length, _ENTROPY_TOKENS))
        counts = np.bincount(tokens)
        p = counts[counts > 0] / tokens.size
        return float(-(p * np.log(p)).sum())


def _shifted(rows: list[np.ndarray]) -> Batch:
    samples = torch.from_numpy(np.stack(rows))
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
