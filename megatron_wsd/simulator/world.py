"""The islands of a simulation, and the one outer state that all of them hold.

Between real islands the outer state is the same on all of them after every round. Here it exists once, and a
round is what `diloco` makes of it: the same decision, the same sum in the same order, the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_wsd.config import Config
from megatron_wsd.diloco.agree import Decision, Report, Rules, combine_digests, decide, to_int64
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.faults import NO_FAULTS
from megatron_wsd.diloco.fragments import SyncPoints, plan_fragments
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.merge import add_up, begin_merge, payload_sumsq, step_fragment
from megatron_wsd.diloco.state import make_state
from megatron_wsd.diloco.wire import Chunk, cut
from megatron_wsd.errors import ConfigError, ExchangeError, IslandError
from megatron_wsd.optim import native, wire
from megatron_wsd.records import Record
from megatron_wsd.simulator.islands import TrainableIsland

Pending = Mapping[int, Contribution]  # by fragment


class SimulatedIsland:
    """One island: what it trains, and how far it is.

    Attributes:
        number: of the island.
        local: its side of the fragments.
        inner_step: inner steps that it has trained.
        position: of the schedule, in inner steps of the run.
        ending: its training is over.
        done: and it has nothing left to offer.
    """

    def __init__(self, number: int, trained: TrainableIsland, local: Local) -> None:
        self.number, self._trained, self.local = number, trained, local
        self.inner_step = self.position = 0
        self.ending = self.done = False

    def train(self) -> None:
        """One inner step."""
        tokens = self._trained.train_step(self.inner_step)
        self.inner_step += 1
        self.local.count(tokens)

    def capture(self, i: int, now_s: float) -> None:
        """A turn of a fragment in asynchronous mode: at most one contribution is in flight."""
        f = self.local.fragments[i]
        if f.flight is None and f.steps:
            f.flight = self.local.encode(self.local.capture(i, self.inner_step))
            f.flight.offered_at = now_s

    @property
    def pending(self) -> dict[int, Contribution]:
        """Contributions that no round has settled, in asynchronous mode."""
        flights = ((i, f.flight, f.published) for i, f in enumerate(self.local.fragments))
        return {i: c for i, c, published in flights if c is not None and published is None}


class World:
    """All islands of a simulation.

    Attributes:
        state: anchors and outer optimizers.
        islands: by number.
        points: after which inner steps each fragment is due.

    Args:
        config: of the run; ``islands.count`` must be the number of ``trained``.
        trained: the islands, all with the same weights. Training begins from the anchor, which differs from
            these with ``outer.anchor_dtype`` ``bf16``.

    Raises:
        ConfigError: more islands or fewer than the config says, or fragments that do not fit the model.
        IslandError: the islands hold different weights.
    """

    def __init__(self, config: Config, trained: Sequence[TrainableIsland]) -> None:
        if len(trained) != config.islands.count:
            raise ConfigError(
                "megatron_wsd.islands.count",
                f"{len(trained)}, the islands that are given",
                config.islands.count,
                "Pass islands=N to parse_config.",
            )
        first = trained[0].shards
        plan = plan_fragments(first.shards, config.sync.fragments, config.sync.fragment_order)
        for number, other in enumerate(trained):
            if _values(other) != _values(trained[0]):
                raise IslandError(
                    f"islands 0 and {number}",
                    "the same initial weights",
                    "different ones",
                    "Seed torch alike before each model is built, or load one state into all.",
                )
        self.config = config
        self.state = make_state(config, first, plan)
        self.points = SyncPoints(config.sync.inner_steps, len(plan))
        self.islands = [
            SimulatedIsland(number, one, Local(one.shards, plan, self.state, config, NO_FAULTS))
            for number, one in enumerate(trained)
        ]
        if config.outer.anchor_dtype == "bf16":
            self.adopt_all()
        sync = config.sync
        self._rules = Rules(sync.mode == "sync", sync.quorum, round(1000 * sync.grace_s))
        self._fmt = wire.WireFormat.of(sync.wire)
        self._chunks = [cut(self._fmt, f.layout.total, sync.bucket_bytes) for f in self.state.fragments]
        self._room = torch.zeros(max(f.layout.total for f in self.state.fragments))

    def decide(self, pending: Sequence[Pending], now_s: float = 0.0) -> Decision:
        """What the islands would decide if they met now.

        Args:
            pending: of each island, what it offers.
            now_s: on the clock of the contributions' ``offered_at``.
        """
        reports = []
        for island, own in zip(self.islands, pending, strict=True):
            offers = []
            for i, f in enumerate(self.state.fragments):
                c, turn = own.get(i), self.points.turns(i, island.position)
                if c is None:
                    offers.append(f.offer(turn))
                else:
                    waiting_ms = round(1000 * (now_s - c.offered_at))
                    offers.append(f.offer(turn, c, c.finite, waiting_ms))
            reports.append(
                Report(
                    island=island.number,
                    outer_step=self.state.outer_step,
                    digest=0,
                    config=0,
                    data=0,
                    ranks=1,
                    settled=1,
                    ending=int(island.ending),
                    done=int(island.done),
                    inner_step=island.position,
                    offers=tuple(offers),
                )
            )
        return decide(reports, True, self._rules)

    def payload_bytes(self, decision: Decision) -> int:
        """What travels in a round, sent once by whoever contributes and received by all others."""
        if decision.fragment is None:
            return 0
        size = self._fmt.encoded_bytes(self.state.fragments[decision.fragment].layout.total)
        return size * len(decision.contributors)

    def run(self, decision: Decision, pending: Sequence[Pending]) -> Record:
        """One round: merge and step.

        Args:
            decision: with contributors.
            pending: what it was drawn from.

        Returns:
            What the real loop records of a round, as far as it means anything here.

        Raises:
            ExchangeError: the sum overflows fp32; such a round would be void at every attempt.
        """
        number = decision.fragment
        assert number is not None
        layout, chunks = self.state.fragments[number].layout, self._chunks[number]
        offered = [pending[island][number].payload for island in decision.contributors]

        def norms(place: int) -> torch.Tensor:
            return payload_sumsq(self._fmt, layout, chunks, offered[place]).sqrt()

        def payload(place: int, chunk: Chunk) -> torch.Tensor:
            return offered[place][chunk.first_byte : chunk.last_byte]

        gates, merge = begin_merge(self.config, decision, self._fmt, layout, self._room)
        if merge is not None:
            fits = add_up(merge, chunks, norms, payload)
            merge.finish(lambda sumsq: sumsq)
            if not fits or (merge.radial and not native.gradient_ok(merge.merged, layout.table)):
                raise ExchangeError("the merged pseudo-gradient overflows fp32")
            step_fragment(self.config, self.config.schedule, self.state, decision, merge.merged)
            for island in decision.contributors:
                self.islands[island].local.committed(pending[island][number])
        names = [str(i) for i in decision.contributors]
        return {
            "kind": "round",
            "step": decision.inner_step,
            "outer_step": self.state.outer_step,
            "committed": merge is not None,
            "fragment": number,
            "version": self.state.fragments[number].version,
            "fragment_age": decision.fragment_age,
            "islands": list(decision.islands),
            "contributors": list(decision.contributors),
            "staleness": dict(zip(names, decision.staleness, strict=True)),
            "gates": dict(zip(names, gates, strict=True)),
            "bytes": self.payload_bytes(decision) if merge is not None else 0,
            "digest": f"{self.digest():016x}",
        }

    def publish(self, decision: Decision, *, committed: bool) -> None:
        """In asynchronous mode, put the result of a round where the islands that it settles will find it."""
        assert decision.fragment is not None
        for number in decision.contributors:
            self.islands[number].local.publish(decision.fragment, committed=committed, reset=False)
        for number in decision.dropped:
            self.islands[number].local.publish(decision.fragment, committed=False, reset=True)

    def adopt_all(self) -> None:
        """All islands hold the anchor."""
        for island in self.islands:
            for i in range(len(self.state.fragments)):
                island.local.adopt(i)

    def digest(self) -> int:
        """Of the outer state, as islands of one rank compare it."""
        return combine_digests([to_int64(self.state.digest()), self.state.counter_digest()])


def _values(island: TrainableIsland) -> list[tuple[str, int]]:
    """Names and digests of the parameters of an island."""
    flats = [torch.zeros(s.numel) for s in island.shards.shards]
    island.shards.read(flats)
    return [(s.name, native.digest(flat)) for s, flat in zip(island.shards.shards, flats, strict=True)]
