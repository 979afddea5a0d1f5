"""What an island reads, and what of it rounds have committed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wsd.config import Config
from megatron_wsd.data.consumption import Ledger
from megatron_wsd.data.loader import HeldOut, TrainStream, open_corpora
from megatron_wsd.data.phases import planned_mixes
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.diloco.island import IslandAddress

if TYPE_CHECKING:
    from megatron_wsd.diloco.outer_loop import OuterLoop
    from megatron_wsd.diloco.round import RoundResult
    from megatron_wsd.schedule import Schedule


class Feed:
    """The data of one rank.

    Args:
        config: of the run.
        run_dir: its folder, where corpora are prepared unless ``data.cache_dir`` says otherwise.
        address: which island.
        rank: which of the island's readers this is; the ranks of a tensor parallel group read alike.
        ranks: how many readers there are.

    Attributes:
        corpora: that the config names.
        sampler: which sample comes when; its history has the switches of mix.
        ledger: what rounds have committed.

    Raises:
        FieldError: a corpus cannot be read, or is too small.
    """

    def __init__(self, config: Config, run_dir: Path, address: IslandAddress, rank: int, ranks: int) -> None:
        assert config.model is not None
        data, length = config.data, config.model.seq_length
        self._config, self._own, self._reader = config, address.island, (ranks, rank)
        cache = Path(data.cache_dir) if data.cache_dir else run_dir / "data"
        self.corpora = open_corpora(data.corpora, cache, data.tokenizer)
        self._held_out = HeldOut(self.corpora, length, data.valid_fraction)
        sizes = {name: split.train_samples for name, split in self._held_out.splits.items()}
        self.sampler = MixSampler(
            sizes, data.mixes, data.seed, islands=address.islands, island=address.island
        )
        self.ledger = Ledger()
        self._stream = TrainStream(
            self.corpora,
            self.sampler,
            length,
            ranks=ranks,
            rank=rank,
            micro_batch=config.micro_batch,
            grad_accum=config.grad_accum,
        )

    @property
    def digest(self) -> int:
        """Non-negative int64 of the content of all corpora, which must be equal on all islands."""
        text = "".join(v for _, v in sorted(self.corpora.fingerprints().items()))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def facts(self) -> dict[str, Any]:
        """For the record of a start."""
        return {
            "unigram_entropy": {name: self._held_out.unigram_entropy(name) for name in self.corpora.files},
            "epoch_samples": self.sampler.sizes,
            "seq_length": self._stream.seq_length,
        }

    def batch(self, step: int, micro: int) -> tuple[Any, Any]:
        """Tokens and labels, int64 [micro_batch, seq_length], of a micro-batch of a step of the island."""
        return self._stream.batch(step, micro)

    def held_out(self, corpus: str) -> Iterable[tuple[Any, Any]]:
        """This rank's batches of the held-out part of a corpus; equally many on every rank."""
        batches = self._config.log.eval_batches
        return self._held_out.batches(corpus, batches, self._config.micro_batch, *self._reader)

    def inherited(self, cursor: int) -> None:
        """What a branch had from its parent, up to an inner step of this island, is not its own."""
        self.ledger.until = cursor * self._config.island_batch

    def switch_mix(self, schedule: Schedule, outer: OuterLoop) -> None:
        """Make the switches of data mix that are due.

        At the very sample at which each is planned, even if this island was moved past it: then the samples
        in between were never read here, and all islands keep one history. In asynchronous mode each island
        has read its own number of samples by then.
        """
        lockstep, history = self._config.sync.mode == "sync", self.sampler.history
        plan = planned_mixes(schedule, outer.orders, self._config.data.mixes)
        done = len(history) - 1  # the first entry is where the run began
        for start, mix in plan[done:]:
            if start > outer.position:
                break
            at = (start if lockstep else outer.inner_step) * self._config.island_batch
            # An asynchronous island may have gone back behind its own last switch.
            self.sampler.switch(max(at, self.sampler.history[-1][0]), mix)
            outer.metrics.event("mix", outer.inner_step, f"step {start}: data mix is now {mix!r}")

    def note(self, outer: OuterLoop, result: RoundResult | None) -> None:
        """Count the samples of this island that rounds have committed by now."""
        first, end = 0, outer.state.cursor(self._own)
        if self._config.sync.mode == "sync":  # there an island may be moved past samples that it never read
            decision = None if result is None or not result.committed else result.decision
            if decision is None or self._own not in decision.contributors:
                return
            end = decision.offer(self._own).cursor
            first = end - decision.offer(self._own).steps
        self._commit(outer, first, end)

    def note_earlier(self, outer: OuterLoop) -> None:
        """Tell of the last contribution of an earlier process, which may have been killed before it could."""
        fragments = [f for f in outer.state.fragments if self._own in f.taken]
        if self._config.sync.mode != "sync" or not fragments:
            return
        newest = max(fragments, key=lambda f: f.taken[self._own])
        end = newest.taken[self._own]
        self._commit(outer, end - newest.taken_steps[self._own], end)

    def _commit(self, outer: OuterLoop, first: int, end: int) -> None:
        """The samples of this island's inner steps [first, end) are committed."""
        batch = self._config.island_batch
        new = self.ledger.commit(self.sampler, first * batch, end * batch)
        if new is not None:
            outer.metrics.write("data", step=outer.inner_step, outer_step=outer.outer_step, **new)
