"""When things happen in a simulation: a virtual clock, and the synchronous and the asynchronous order."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_wsd.config import Config
from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.delay import HeldBack, delays
from megatron_wsd.errors import FieldError
from megatron_wsd.records import Record
from megatron_wsd.simulator.islands import TrainableIsland
from megatron_wsd.simulator.world import Pending, SimulatedIsland, World


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How fast one island is.

    Attributes:
        step_s: seconds of an inner step; a sequence is gone through again and again.
        latency_s: what an exchange takes beside its payload.
        bytes_per_s: of its link to the others.

    Raises:
        FieldError: no time can be made of these.
    """

    step_s: float | Sequence[float] = 1.0
    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        steps = self.step_s if isinstance(self.step_s, Sequence) else [self.step_s]
        if not steps or not all(0 < s < math.inf for s in steps):
            raise FieldError("timing.step_s", "seconds above 0", self.step_s)
        if not 0 <= self.latency_s < math.inf:
            raise FieldError("timing.latency_s", "seconds, at least 0", self.latency_s)
        if not self.bytes_per_s > 0:
            raise FieldError("timing.bytes_per_s", "a rate above 0", self.bytes_per_s)

    def step(self, n: int) -> float:
        """Seconds of the inner step from ``n`` completed ones to n + 1."""
        return self.step_s[n % len(self.step_s)] if isinstance(self.step_s, Sequence) else self.step_s


def simulate(
    config: Config,
    islands: Sequence[TrainableIsland],
    until_steps: int,
    timing: Timing | Sequence[Timing] = Timing(),
) -> list[Record]:
    """Train islands as ``config.sync`` says, in one process and on a virtual clock.

    Captures, encoding, decisions, merging, gates, outer steps and adoption are those of the real loop, so the
    same contributions give the same bits. What is simulated is time: when a step, or an exchange, is over. A
    round takes

        max latency_s + payload bytes of all contributors / min bytes_per_s

    and in asynchronous mode the islands look for one whenever something is offered or a grace ends; pauses
    between polls are left out. Nothing fails, nobody leaves, and there are no orders.

    Args:
        config: validated for as many islands of one rank each.
        islands: all with the same weights; when it is over all hold the anchor.
        until_steps: position of the schedule at which an island stops training, as in the real loop.
        timing: for all islands, or of each.

    Returns:
        Records in the order of time, each with ``time_s``: ``round`` as in ``metrics.jsonl``, and ``adopt``
        in asynchronous mode; ``event`` where a contribution was not finite. The last one, ``end``, has
        ``inner_steps`` and ``trained_s``, the time at which training ended, of each island, and the
        ``committed_steps`` and ``tokens`` of all.

    Raises:
        ConfigError: the config does not fit the islands or their model.
        IslandError: the islands begin with different weights.
        FieldError: a timing for fewer islands or more.
        ExchangeError: training has diverged so far that no round can commit.
    """
    if until_steps < 1:
        raise FieldError("until_steps", "at least 1", until_steps)
    each = [timing] * len(islands) if isinstance(timing, Timing) else list(timing)
    if len(each) != len(islands):
        raise FieldError("timing", f"one for each of {len(islands)} islands", f"{len(each)}")
    kind = _Lockstep if config.sync.mode == "sync" else _Decoupled
    run = kind(World(config, islands), each, until_steps)
    run.run()
    end: Record = {
        "kind": "end",
        "inner_steps": [i.inner_step for i in run.world.islands],
        "trained_s": run.trained_s,
        "committed_steps": run.world.state.steps,
        "tokens": run.world.state.tokens,
    }
    run.note(end, run.now)
    return run.records


class _Run(ABC):
    """A simulation under way."""

    def __init__(self, world: World, timing: Sequence[Timing], until: int) -> None:
        self.world, self._timing, self._until = world, timing, until
        self.records: list[Record] = []
        self.trained_s = [0.0] * len(timing)
        self.now = 0.0

    @abstractmethod
    def run(self) -> None:
        """To the end."""

    def note(self, record: Record, at: float) -> None:
        """Keep a record."""
        self.records.append({**record, "time_s": at})

    def note_round(self, decision: Decision, pending: list[Pending]) -> bool:
        """Run a round that is over now, and keep its record; whether the anchor has moved."""
        for island in decision.dropped:
            event = {"kind": "event", "event": "void", "step": decision.inner_step, "island": island}
            self.note(event, self.now)
        if not decision.contributors:
            return False
        record = self.world.run(decision, pending)
        self.note(record, self.now)
        return bool(record["committed"])

    def _exchange_s(self, decision: Decision) -> float:
        slowest = min(t.bytes_per_s for t in self._timing)
        return max(t.latency_s for t in self._timing) + self.world.payload_bytes(decision) / slowest


class _Lockstep(_Run):
    """At a sync point all islands stand still until the round is over; see `diloco.lockstep`."""

    def __init__(self, world: World, timing: Sequence[Timing], until: int) -> None:
        super().__init__(world, timing, until)
        controlled, count = world.config.sync.controlled_delay, len(world.state.fragments)
        self._held = (
            [HeldBack(i.local, count, delays(controlled, i.number)) for i in world.islands]
            if controlled
            else None
        )

    def run(self) -> None:
        world = self.world
        ready = [0.0] * len(world.islands)
        for n in range(self._until):
            for island in world.islands:
                island.train()
                island.position = island.inner_step
                ready[island.number] += self._timing[island.number].step(n)
            self.trained_s = list(ready)
            for fragment in world.points.due(n + 1):
                ready = [self._round(fragment, max(ready))] * len(ready)
        self.now = max(ready)
        for fragment in range(len(world.state.fragments)):
            if world.islands[0].local.fragments[fragment].steps:
                self.now = self._round(fragment, self.now)

    def _round(self, fragment: int, now: float) -> float:
        """A round that begins when the last island is there; when it ends."""
        world = self.world
        contributions = [self._contribution(island, fragment) for island in world.islands]
        pending: list[Pending] = [{} if c is None else {fragment: c} for c in contributions]
        decision = world.decide(pending)
        self.now = now + self._exchange_s(decision)
        self.note_round(decision, pending)
        for island in world.islands:
            island.local.adopt(fragment)
        return self.now

    def _contribution(self, island: SimulatedIsland, i: int) -> Contribution | None:
        if self._held is not None:
            return self._held[island.number].next(i, island.inner_step)
        return island.local.encode(island.local.capture(i, island.inner_step))


_ROUND_ENDS, _LOOK = -1, -2  # what may happen beside an inner step of an island, which is its number


class _Decoupled(_Run):
    """Islands train on while their contributions travel; see `diloco.decoupled` and `diloco.background`."""

    def __init__(self, world: World, timing: Sequence[Timing], until: int) -> None:
        super().__init__(world, timing, until)
        self._events: list[tuple[float, int, int]] = []  # time, number, what happens
        self._made = 0
        self._underway: tuple[Decision, list[Pending]] | None = None

    def _at(self, time: float, what: int) -> None:
        self._made += 1  # what was planned first happens first
        heapq.heappush(self._events, (time, self._made, what))

    def run(self) -> None:
        for island in self.world.islands:
            self._next_step(island)
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                self._happen(heapq.heappop(self._events)[2])
            self._finish_those_over()
            self._begin_round()
        self.world.adopt_all()

    def _happen(self, what: int) -> None:
        if what == _ROUND_ENDS:
            self._end_round()
        elif what != _LOOK:
            self._step(self.world.islands[what])

    def _next_step(self, island: SimulatedIsland) -> None:
        if island.position < self._until:
            self._at(self.now + self._timing[island.number].step(island.inner_step), island.number)
        else:
            island.ending = True
            self.trained_s[island.number] = self.now

    def _step(self, island: SimulatedIsland) -> None:
        island.train()
        for i in self.world.points.due(island.inner_step):
            island.capture(i, self.now)
        self._boundary(island)
        self._next_step(island)

    def _boundary(self, island: SimulatedIsland, last: bool = False) -> None:
        """Adopt what was published, and move the position on."""
        world, state = self.world, self.world.state
        total = sum(f.steps for f in state.fragments)
        total += island.local.uncommitted(island.number)[0] * len(world.islands)
        for i, f in enumerate(island.local.fragments):
            waited = island.inner_step - f.captured_at
            if f.flight is None or f.published is None:
                continue
            if not last and waited < world.config.sync.overlap_steps:
                continue
            lag = state.fragments[i].version - f.published
            discarded = f.steps if f.reset or world.config.sync.adopt == "mix" else 0
            adopted = {
                "kind": "adopt",
                "island": island.number,
                "step": island.inner_step,
                "fragment": i,
                "version": island.local.merge_in(i),
                "lag": lag,
                "waited_steps": waited,
                "steps_discarded": discarded,
            }
            self.note(adopted, self.now)
        island.position = max(island.position, total // (len(world.islands) * len(state.fragments)))

    def _finish_those_over(self) -> None:
        """Islands that train no more offer what is left."""
        for island in self.world.islands:
            if not island.ending or island.done:
                continue
            self._boundary(island, last=True)
            for i in range(len(island.local.fragments)):
                island.capture(i, self.now)
            island.done = not any(f.flight for f in island.local.fragments)

    def _begin_round(self) -> None:
        if self._underway is not None:
            return
        pending: list[Pending] = [island.pending for island in self.world.islands]
        offers = [c for own in pending for c in own.values()]
        if not offers:
            return
        decision = self.world.decide(pending, self.now)
        if decision.fragment is not None:
            self._underway = decision, pending
            self._at(self.now + self._exchange_s(decision), _ROUND_ENDS)
            return
        grace_s = round(1000 * self.world.config.sync.grace_s) / 1000
        for end in {c.offered_at + grace_s for c in offers}:
            if end > self.now:
                self._at(end, _LOOK)

    def _end_round(self) -> None:
        assert self._underway is not None
        decision, pending = self._underway
        self._underway = None
        self.world.publish(decision, committed=self.note_round(decision, pending))
