"""One outer round of one rank: agree, exchange, gate and merge, commit, step.

The vote comes before the step: what the islands compare is the digest of the merged pseudo-gradient
next to the digest of the state it will be applied to, and the step is the same arithmetic on the same
numbers everywhere. So a void round has nothing to undo, and no failed exchange can step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_wsd.config import Config
from megatron_wsd.control import Order
from megatron_wsd.diloco.agree import (
    Decision,
    Report,
    Rules,
    ask_for_configs,
    combine_digests,
    decide,
    to_int64,
)
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.faults import NO_FAULTS, Faults
from megatron_wsd.diloco.fragments import SyncPoints
from megatron_wsd.diloco.healing import Healer
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.membership import Membership
from megatron_wsd.diloco.merge import Merge, add_up, begin_merge, payload_sumsq, step_fragment
from megatron_wsd.diloco.residence import Dock
from megatron_wsd.diloco.state import FragmentState, OuterState
from megatron_wsd.diloco.wire import Chunk, broadcast_json, cut, gather_json
from megatron_wsd.errors import ExchangeError, IslandError, TooFewIslands, said
from megatron_wsd.optim import native, wire

log = logging.getLogger(__name__)


@dataclass
class RoundResult:
    """What became of one round.

    Attributes:
        committed: the anchor of ``fragment`` has moved.
        void: an exchange or a vote failed; nothing has changed and the same can be offered again.
        waiting: it is void since islands are missing without which nothing may be committed.
        healed: this island received the outer state of another.
        again: somebody was healed, and nothing else happened: what is offered waits for the next round.
        skipped: every gate was 0 and nothing moved; the contributions are used up.
        fragment: what the round was about; None if there was nothing to merge.
        decision: what the islands agreed on; None if they did not come that far.
        version: of the fragment, after the round.
        tokens: over all islands, committed by then.
        gates: gate of each contributor.
        bytes: payload that this rank sent or received.
        island_bytes: the same over all ranks of the island; of committed rounds alone.
        seconds: wall time.
        exchange_s: of it, the time in which payload moved.
        digest: of the outer state of this island after the round, over all its ranks.
        reason: why a round is void or empty.
    """

    committed: bool = False
    void: bool = False
    waiting: bool = False
    healed: bool = False
    again: bool = False
    skipped: bool = False
    fragment: int | None = None
    decision: Decision | None = None
    version: int = 0
    tokens: int = 0
    gates: list[float] = field(default_factory=list)
    bytes: int = 0
    island_bytes: int = 0
    seconds: float = 0.0
    exchange_s: float = 0.0
    digest: int = 0
    reason: str = ""


class OuterHalf:
    """The outer half of one rank.

    `run_round` must be called by all ranks of the island together.

    Args:
        config: the validated config.
        island: number of this island.
        group: the ranks of this island.
        seat: this rank among its equals.
        state: anchors and outer optimizers.
        data_digest: of the corpora, compared between islands.
        plan_digest: of the fragments, compared between islands.
        faults: to be injected.

    Attributes:
        settled: this island has met the others since it was started.
        schedule: of the inner rate, which the outer one may follow; equal on all islands.
        on_commit: called with this island's contribution when it has become part of the anchor.
    """

    def __init__(
        self,
        config: Config,
        island: int,
        group: IslandGroup,
        seat: Membership,
        state: OuterState,
        data_digest: int = 0,
        plan_digest: int = 0,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._config, self._island, self._group, self._seat = config, island, group, seat
        self.state = state
        self.settled = False
        self.schedule = config.schedule
        self.on_commit: Callable[[Contribution], None] = lambda contribution: None
        self._faults = faults
        self._points = SyncPoints(config.sync.inner_steps, len(state.fragments))
        sync = config.sync
        self._rules = Rules(sync.mode == "sync", sync.quorum, round(1000 * sync.grace_s))
        self.fmt = wire.WireFormat.of(sync.wire)
        self.chunks = [cut(self.fmt, f.layout.total, sync.bucket_bytes) for f in state.fragments]
        widest = max(f.layout.total for f in state.fragments)
        self._merged = torch.zeros(widest, device=state.residence.device)
        largest = max((c.last_byte - c.first_byte for cs in self.chunks for c in cs), default=0)
        self._dock = Dock(state.residence, largest)
        self._data_number, self._plan_number = data_digest, plan_digest
        self._config_number = int(config.digest()[:15], 16)
        self._started = group.broadcast([time.time_ns()])[0]
        self._healer = Healer(config, island, group, seat, state, faults)
        self._island_digest = 0
        self.refresh_digest()

    def close(self) -> None:
        """Heal nobody any more."""
        self._healer.close()

    def refresh_digest(self) -> int:
        """Digest the outer state anew after it changed; equal on all ranks of the island."""
        self._renew(0)
        return self._island_digest

    def _renew(self, moved: int, torn: bool = False) -> tuple[int, bool]:
        """The digest; and the sum of ``moved``, and whether anything is ``torn``, over the ranks."""
        rows = self._group.gather([to_int64(self.state.digest()), moved, int(torn)])
        self._island_digest = combine_digests([*(row[0] for row in rows), self.state.counter_digest()])
        return sum(row[1] for row in rows), any(row[2] for row in rows)

    def run_round(
        self,
        pending: Mapping[int, Contribution],
        position: int,
        withdraw: Callable[[Decision], bool] | None = None,
        order: Order | None = None,
        *,
        ending: bool = False,
        done: bool = False,
    ) -> RoundResult:
        """Run one round, from quorum to the stepped anchor.

        Args:
            pending: this rank's part of the island's contributions, by fragment; those that some rank of the
                island lacks wait. None to meet the others empty-handed.
            position: of the schedule, in inner steps of the run, as this island counts them.
            withdraw: asked, on all ranks alike, once it is known who takes part; True makes the round void.
            order: to be proposed to the others; equal on all ranks of the island.
            ending: the training of this island is over.
            done: and it has nothing left to offer.

        Raises:
            IslandError: the islands cannot work together.
        """
        result = RoundResult()
        started, bytes_before = time.perf_counter(), self._seat.bytes_moved
        try:
            self._attempt(pending, position, withdraw, order, (ending, done), result)
        except ExchangeError as e:
            result.void, result.reason = True, str(e)
            result.waiting = isinstance(e, TooFewIslands)
        result.bytes = self._seat.bytes_moved - bytes_before
        result.seconds = time.perf_counter() - started
        result.digest, result.tokens = self._island_digest, self.state.tokens
        return result

    def _attempt(
        self,
        pending: Mapping[int, Contribution],
        position: int,
        withdraw: Callable[[Decision], bool] | None,
        order: Order | None,
        over: tuple[bool, bool],
        result: RoundResult,
    ) -> None:
        bytes_before = self._seat.bytes_moved
        self._seat.start_round(self.state.outer_step)
        if order is not None and any(o["number"] == order.number for o in self.state.orders):
            order = None
        decision = result.decision = self._agree(pending, position, order, over)
        if withdraw is not None and withdraw(decision):
            self._seat.vote(False)
            raise ExchangeError("withdrawn: the run is being stopped")
        if self._island in decision.healed:
            self._healer.note_outvoted(decision)
        if decision.healed:
            self._heal(decision, pending)
            result.healed, result.again = self._island in decision.healed, True
            result.reason = f"islands {list(decision.healed)} are being healed"
            return
        result.fragment = decision.fragment
        if decision.fragment is None or not decision.contributors:
            result.reason = "nothing to merge"
            return
        least, here = self._config.islands.min_islands or 1, decision.islands
        if len(here) < least:
            raise TooFewIslands(f"islands {list(here)} are here, and at least {least} must be to commit")
        fragment = self.state.fragments[decision.fragment]
        result.gates, merge = begin_merge(self._config, decision, self.fmt, fragment.layout, self._merged)
        if merge is None:
            result.skipped, result.reason = True, "every contribution is too old to count"
            return
        own = pending[decision.fragment].payload if self._island in decision.contributors else None
        norms = None if own is None or not merge.radial else self._norms(fragment, decision.fragment, own)
        why, ordered = "", None
        began = time.perf_counter()
        try:
            if decision.proposer is not None:
                ordered = self._take_order(decision, order)
            self._exchange(decision, merge, own, norms)
        except Exception as e:  # whatever goes wrong on one rank, the round is void on all
            why = said(e)
            self._seat.abort()
        result.exchange_s = time.perf_counter() - began
        if not self._commit(why, merge):
            raise ExchangeError(why or "a peer could not commit")
        why = ""
        with self.state.still:
            try:
                self._faults.here("step", decision.outer_step)
                step_fragment(self._config, self.schedule, self.state, decision, merge.merged)
                if ordered is not None:
                    self.state.orders.append({**ordered, "step": decision.inner_step})
                if own is not None:
                    self.on_commit(pending[decision.fragment])
            except Exception as e:  # the state is torn on this rank: it must be healed on all
                why = said(e)
                log.exception("the outer step failed after it was committed")
                self.state.outer_step = -1
            self.state.residence.finish()  # whoever takes `still` next may work on another stream
        moved, torn = self._renew(self._seat.bytes_moved - bytes_before, bool(why))
        if torn:
            with self.state.still:
                self.state.outer_step = -1
            raise ExchangeError(f"step: {why or 'another rank of this island failed'}; waiting to be healed")
        result.committed, result.island_bytes, result.version = True, moved, fragment.version

    def _agree(
        self,
        pending: Mapping[int, Contribution],
        position: int,
        order: Order | None,
        over: tuple[bool, bool],
    ) -> Decision:
        """Exchange the islands' numbers; every rank of every island draws the same decision."""
        report = self._report(pending, position, order, over)
        problem, rows = "", []
        try:
            self._faults.here("agree", self.state.outer_step)
            rows = self._seat.gather(report.numbers())
        except Exception as e:  # void on all ranks, whatever it was
            problem = said(e)
            self._seat.abort()
        if not self._group.all_agree(not problem):
            self._seat.vote(False)  # makes torchft reconfigure the group
            raise ExchangeError(problem or "another rank of this island could not agree")
        reports = [Report.from_numbers(row) for row in rows]
        if any(r.island == self._island and r.settled and r.started > self._started for r in reports):
            raise IslandError(
                f"island {self._island}",
                "one launch under this number",
                "another that was started later and has taken its place",
                "Nothing is to be done: it goes on.",
            )
        decision = decide(reports, self.settled, self._rules, self._configs(reports))
        self._seat.roll.check_complete(max(r.missing for r in decision.reports))
        return decision

    def _configs(self, reports: Sequence[Report]) -> dict[int, Any]:
        """By island, what it is configured with: where they differ, for the message that says in what.

        All ranks of all islands have the same reports, so all ask or none.
        """
        if not ask_for_configs(reports):
            return {}
        place = [r.island for r in reports].index(self._island)
        try:
            found = gather_json(self._seat, self._config.identity(), place, len(reports))
        except ExchangeError as e:  # then the message has digests alone
            log.warning("the islands' configs differ and cannot be compared: %s", e)
            return {}
        return {r.island: config for r, config in zip(reports, found, strict=True)}

    def _report(
        self,
        pending: Mapping[int, Contribution],
        position: int,
        order: Order | None,
        over: tuple[bool, bool],
    ) -> Report:
        """The numbers of this island, from those of its ranks; all ranks must call it."""
        now = time.monotonic()
        mine = [position, *map(int, over)]
        for i in range(len(self.state.fragments)):
            c = pending.get(i)
            waiting = 0 if c is None else round(1000 * (now - c.offered_at))
            mine += [-1, 1, 0] if c is None else [c.cursor, int(c.finite), waiting]
        rows = self._group.gather(mine)
        position = rows[0][0]
        ending, done = (all(row[i] for row in rows) for i in (1, 2))
        offers = []
        for i, f in enumerate(self.state.fragments):
            at = 3 + 3 * i
            c = pending.get(i) if all(row[at] == rows[0][at] for row in rows) else None
            finite = all(row[at + 1] for row in rows)
            offers.append(f.offer(self._points.turns(i, position), c, finite, rows[0][at + 2]))
        return Report(
            island=self._island,
            outer_step=self.state.outer_step,
            digest=self._island_digest,
            config=self._config_number,
            data=self._data_number,
            ranks=self._group.size,
            settled=int(self.settled),
            ending=int(ending),
            done=int(done),
            inner_step=position,
            order=order.number if order else 0,
            plan=self._plan_number,
            missing=self._seat.roll.missing(),
            started=self._started,
            offers=tuple(offers),
        )

    def _heal(self, decision: Decision, pending: Mapping[int, Contribution]) -> None:
        def received() -> None:  # it may have missed the commit of what it still holds
            for i, c in pending.items():
                if self.state.fragments[i].taken.get(self._island, -1) >= c.cursor:
                    self.on_commit(c)

        try:
            self._healer.heal(decision, received)
        finally:
            if self._island in decision.healed:
                self.refresh_digest()

    def _take_order(self, decision: Decision, own: Order | None) -> dict[str, Any]:
        """The order of the proposer, json-able, on every rank of every island."""
        assert decision.proposer is not None
        mine = decision.proposer == self._island
        sent = {**own.model_dump(mode="json"), "number": own.number} if mine and own else None
        return dict(broadcast_json(self._seat, sent, decision.place(decision.proposer), receiving=not mine))

    def _exchange(
        self, decision: Decision, merge: Merge, own: torch.Tensor | None, own_norms: torch.Tensor | None
    ) -> None:
        """Every contribution goes to everybody, in the order of the island numbers, and is added up."""
        assert decision.fragment is not None
        self._faults.here("before_exchange", decision.outer_step)

        def norms(number: int) -> torch.Tensor:
            island = decision.contributors[number]
            found = torch.zeros(len(merge.layout.ordered), dtype=torch.float64)
            if island == self._island and own_norms is not None:
                found = own_norms
            self._seat.broadcast(found, decision.place(island))
            return found

        def payload(number: int, chunk: Chunk) -> torch.Tensor:
            island, size = decision.contributors[number], chunk.last_byte - chunk.first_byte
            part = None
            if island == self._island and own is not None:
                part = own[chunk.first_byte : chunk.last_byte]
            message = self._dock.room(size) if part is None else self._dock.outbound(part)
            self._seat.broadcast(message, decision.place(island))
            self._faults.here("within_exchange", decision.outer_step)
            return self._dock.landed(size) if part is None else part

        if not add_up(merge, self.chunks[decision.fragment], norms, payload):
            raise ExchangeError("the merged pseudo-gradient overflows fp32")
        self._faults.here("after_exchange", decision.outer_step)

    def _norms(self, fragment: FragmentState, number: int, own: torch.Tensor) -> torch.Tensor:
        """Norms of the whole parameters of this island's contribution, as the others will decode it.

        Float64 [segments]; all ranks of the island must call it.
        """
        return self._total(payload_sumsq(self.fmt, fragment.layout, self.chunks[number], own)).sqrt()

    def _total(self, sumsq: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the island, in their order; all ranks must call it."""
        rows = self._group.gather(sumsq.view(torch.int64).tolist())
        total = torch.zeros_like(sumsq)
        for row in rows:
            total += torch.tensor(row, dtype=torch.int64).view(torch.float64)
        return total

    def _commit(self, why: str, merge: Merge) -> bool:
        """All ranks of the island well; equal ranks hold the same sum; all ranks again; the vote."""
        if why:
            log.warning("exchange failed: %s", why)
        self._seat.beat(self._group.timeout_s)  # another rank may be in the exchange still
        well = self._group.all_agree(not why)
        self._seat.beat()
        if well:
            merge.finish(self._total)
        try:
            self._faults.here("commit", self.state.outer_step)
            if well and merge.radial and not native.gradient_ok(merge.merged, merge.layout.table):
                raise ExchangeError("the merged pseudo-gradient overflows fp32")
        except Exception as e:  # a rank in trouble votes against
            log.warning("commit failed: %s", said(e))
            well = False
        if self._seat.usable:
            try:
                rows = self._seat.gather([int(well), to_int64(native.digest(merge.merged))])
                well = well and all(row == [1, rows[0][1]] for row in rows)
            except ExchangeError as e:
                log.warning("commit failed: %s", e)
                well = False
        else:
            well = False
        well = self._group.all_agree(well)
        return self._seat.vote(well)
