"""One outer round of one rank: agree, exchange, gate and merge, commit, step.

The vote comes before the step: what the islands compare is the digest of the merged pseudo-gradient
next to the digest of the state it will be applied to, and the step is the same arithmetic on the same
numbers everywhere. So a void round has nothing to undo, and no failed exchange can step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_wsd.config import Config
from megatron_wsd.control import Order
from megatron_wsd.diloco.agree import Decision, Report, combine_digests, decide, to_int64
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.membership import Membership
from megatron_wsd.diloco.merge import age_gate, merge_coefficients, rate_scale
from megatron_wsd.diloco.wire import broadcast_flat, broadcast_json, buckets
from megatron_wsd.errors import ExchangeError, IslandError
from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout
from megatron_wsd.optim.outer import OuterOptimizer

log = logging.getLogger(__name__)


@dataclass
class OuterState:
    """What all islands hold alike, sharded over the ranks of each.

    Attributes:
        layout: of the flat buffers.
        anchor: fp32 or bf16 [layout.total], the last agreed parameters.
        optimizer: the outer optimizer and its state.
        outer_step: committed rounds.
        tokens: committed tokens over all islands.
        inner_step: inner steps of the run at the last commit.
        orders: orders of the operator, each with the step at which its round was committed.
    """

    layout: FlatLayout
    anchor: torch.Tensor
    optimizer: OuterOptimizer
    outer_step: int = 0
    tokens: int = 0
    inner_step: int = 0
    orders: list[dict[str, Any]] = field(default_factory=list)

    def counters(self) -> dict[str, Any]:
        """The json-able part."""
        return {
            "outer_step": self.outer_step,
            "tokens": self.tokens,
            "inner_step": self.inner_step,
            "t": self.optimizer.t,
            "orders": self.orders,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The flat buffers by name, live."""
        return {"anchor": self.anchor, **self.optimizer.state_tensors()}

    def take_counters(self, counters: dict[str, Any]) -> None:
        """Take over `counters` of another island or of a checkpoint."""
        self.outer_step = counters["outer_step"]
        self.tokens = counters["tokens"]
        self.inner_step = counters["inner_step"]
        self.optimizer.t = counters["t"]
        self.orders = list(counters["orders"])

    def digest(self) -> int:
        """64-bit digest of anchor and outer state of this rank."""
        return self.optimizer.digest(self.anchor)


@dataclass
class RoundResult:
    """What became of one round.

    Attributes:
        committed: the anchor has moved.
        void: an exchange or a vote failed; nothing has changed and the same can be offered again.
        healed: this island received the outer state of another.
        decision: what the islands agreed on; None if they did not come that far.
        gates: gate of each contributor.
        bytes: payload that this rank sent or received.
        seconds: wall time.
        digest: of the outer state of this island after the round, over all its ranks.
        reason: why a round is void or empty.
    """

    committed: bool = False
    void: bool = False
    healed: bool = False
    decision: Decision | None = None
    gates: list[float] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
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
        state: anchor and outer optimizer.
        data_digest: of the corpora, compared between islands.
    """

    def __init__(
        self,
        config: Config,
        island: int,
        group: IslandGroup,
        seat: Membership,
        state: OuterState,
        data_digest: int = 0,
    ) -> None:
        self._config, self._island, self._group, self._seat = config, island, group, seat
        self.state = state
        self.settled = False
        self.schedule = config.schedule
        self._merged = torch.zeros(state.layout.total, dtype=torch.float32)
        self._incoming = torch.empty(
            min(state.anchor.numel(), max(1, config.sync.bucket_bytes // 4)), dtype=torch.float32
        )
        self._data_number = data_digest
        self._config_number = int(config.digest()[:15], 16)
        self._outvoted = False
        self._island_digest = 0
        self.refresh_digest()

    def refresh_digest(self) -> int:
        """Digest the outer state anew after it changed; equal on all ranks of the island."""
        mine = to_int64(self.state.digest())
        shards = [row[0] for row in self._group.gather([mine])]
        self._island_digest = combine_digests([*shards, *(o["number"] for o in self.state.orders)])
        return self._island_digest

    def run_round(
        self,
        contribution: Contribution | None,
        inner_step: int,
        withdraw: Callable[[Decision], bool] | None = None,
        order: Order | None = None,
    ) -> RoundResult:
        """Run one round, from quorum to the stepped anchor.

        Args:
            contribution: this rank's part of the island's; None to meet the others empty-handed.
            inner_step: inner steps of the run, as this island counts them.
            withdraw: asked, on all ranks alike, once it is known who takes part; True makes the round void.
            order: to be proposed to the others; equal on all ranks of the island.

        Raises:
            IslandError: the islands cannot work together.
        """
        result = RoundResult()
        started, bytes_before = time.perf_counter(), self._seat.bytes_moved
        try:
            self._attempt(contribution, inner_step, withdraw, order, result)
        except ExchangeError as e:
            result.void, result.reason = True, str(e)
        result.bytes = self._seat.bytes_moved - bytes_before
        result.seconds = time.perf_counter() - started
        result.digest = self._island_digest
        return result

    def _attempt(
        self,
        contribution: Contribution | None,
        inner_step: int,
        withdraw: Callable[[Decision], bool] | None,
        order: Order | None,
        result: RoundResult,
    ) -> None:
        self._seat.start_round(self.state.outer_step)
        if order is not None and any(o["number"] == order.number for o in self.state.orders):
            order = None
        decision = result.decision = self._agree(contribution, inner_step, order)
        if withdraw is not None and withdraw(decision):
            self._seat.vote(False)
            raise ExchangeError("withdrawn: the run is being stopped")
        if self._island in decision.healed:
            self._note_outvoted(decision)
        if decision.healed:
            self._heal(decision)
            result.healed = self._island in decision.healed
        if not decision.contributors:
            result.reason = "nothing to merge"
            return
        gates = [age_gate(self._config.outer, tau) for tau in decision.staleness]
        coefficients = merge_coefficients(gates, [1.0] * len(gates))
        well, why, ordered = True, "", None
        try:
            if decision.proposer is not None:
                ordered = self._take_order(decision, order)
            self._exchange(decision, coefficients, contribution)
        except ExchangeError as e:
            well, why = False, str(e)
        if not self._commit(well, why):
            raise ExchangeError(why or "a peer could not commit")
        self._step(decision)
        if ordered is not None:
            self.state.orders.append({**ordered, "step": decision.inner_step})
        self.refresh_digest()
        result.committed = True
        result.gates = gates

    def _agree(self, contribution: Contribution | None, inner_step: int, order: Order | None) -> Decision:
        """Exchange the islands' numbers; every rank of every island draws the same decision."""
        finite = contribution is None or contribution.finite
        finite = self._group.all_agree(finite)
        report = Report(
            island=self._island,
            outer_step=self.state.outer_step,
            digest=self._island_digest,
            config=self._config_number,
            data=self._data_number,
            ranks=self._group.size,
            settled=int(self.settled),
            contributes=int(contribution is not None),
            finite=int(finite),
            base=contribution.base if contribution else self.state.outer_step,
            steps=contribution.steps if contribution else 0,
            tokens=contribution.tokens if contribution else 0,
            inner_step=inner_step,
            order=order.number if order else 0,
        )
        problem, rows = "", []
        try:
            rows = self._seat.gather(report.numbers())
        except ExchangeError as e:
            problem = str(e)
        if not self._group.all_agree(not problem):
            self._seat.vote(False)  # makes torchft reconfigure the group
            raise ExchangeError(problem or "another rank of this island could not agree")
        return decide([Report.from_numbers(row) for row in rows], self.settled)

    def _note_outvoted(self, decision: Decision) -> None:
        """A state that went wrong at an equal step is healed once; twice means broken hardware."""
        if decision.report(self._island).outer_step < decision.outer_step:
            return
        if self._outvoted:
            raise IslandError(
                f"island {self._island}",
                "the outer state of the majority",
                "a different one for the second time",
                "Suspect memory or disk of this island; restart it with --resume on other hardware.",
            )
        self._outvoted = True
        log.error("outer state differs from the majority at step %d: healing", decision.outer_step)

    def _heal(self, decision: Decision) -> None:
        """The leader sends its outer state over the group; the healed overwrite theirs."""
        assert decision.source is not None
        place = decision.place(decision.source)
        receiving = self._island in decision.healed
        problem = ""
        counters: dict[str, Any] = self.state.counters()
        try:
            counters = broadcast_json(self._seat, counters, place, receiving=receiving)
            for name, tensor in sorted(self.state.tensors().items()):
                log.debug("healing %s", name)
                broadcast_flat(self._seat, tensor, place, self._config.sync.bucket_bytes)
        except ExchangeError as e:
            problem = str(e)
        whole = self._group.all_agree(not problem)
        if receiving:
            self.state.optimizer.forget_digest()  # a broadcast writes where torch does not see it
            if whole:
                self.state.take_counters(counters)
            else:
                # Torn by the failure: stand behind everybody until a healing succeeds.
                self.state.outer_step = -1
            self.refresh_digest()
        if not whole:
            self._seat.vote(False)
            raise ExchangeError(f"healing: {problem or 'another rank of this island failed'}")

    def _take_order(self, decision: Decision, own: Order | None) -> dict[str, Any]:
        """The order of the proposer, json-able, on every rank of every island."""
        assert decision.proposer is not None
        mine = decision.proposer == self._island
        sent = {**own.model_dump(mode="json"), "number": own.number} if mine and own else None
        return dict(broadcast_json(self._seat, sent, decision.place(decision.proposer), receiving=not mine))

    def _exchange(
        self, decision: Decision, coefficients: list[float], contribution: Contribution | None
    ) -> None:
        """merged = sum of coefficient x pseudo-gradient, in the order of the island numbers, in fp32."""
        self._merged.zero_()
        whole = True
        for island, coefficient in zip(decision.contributors, coefficients, strict=True):
            own = island == self._island
            for start, end in buckets(self._merged.numel(), self._config.sync.bucket_bytes):
                if own:
                    assert contribution is not None
                    part = contribution.pseudo_gradient[start:end]
                else:
                    part = self._incoming[: end - start]
                self._seat.broadcast(part, decision.place(island))
                fits = native.accumulate(self._merged[start:end], part, coefficient)
                if island == decision.contributors[-1]:  # what is written now is what will be stepped
                    whole = whole and fits
        if not whole:
            raise ExchangeError("the merged pseudo-gradient overflows fp32")

    def _commit(self, well: bool, why: str) -> bool:
        """All ranks of the island well; equal ranks hold the same sum; all ranks again; the vote."""
        if why:
            log.warning("exchange failed: %s", why)
        well = self._group.all_agree(well)
        if self._seat.usable:
            try:
                rows = self._seat.gather([int(well), to_int64(native.digest(self._merged))])
                well = well and all(row == [1, rows[0][1]] for row in rows)
            except ExchangeError as e:
                log.warning("commit failed: %s", e)
                well = False
        else:
            well = False
        well = self._group.all_agree(well)
        return self._seat.vote(well)

    def _step(self, decision: Decision) -> None:
        state = self.state
        scale = rate_scale(self._config, self.schedule, decision)
        state.optimizer.step(state.anchor, self._merged, scale, checked=True)
        state.outer_step = decision.outer_step + 1
        state.tokens += sum(decision.report(i).tokens for i in decision.contributors)
        state.inner_step = decision.inner_step
