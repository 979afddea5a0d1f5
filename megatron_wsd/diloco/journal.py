"""What a run tells of its rounds: who took part, how old their work was, who went and came back."""

from __future__ import annotations

from typing import Any

from megatron_wsd.control import told
from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.round import RoundResult
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.metrics import Metrics


class Journal:
    """Records rounds in the metrics of an island and says them on the console.

    Methods take the inner step of the island; what they say names the step of the run, see `Metrics.at`.

    Args:
        metrics: of the island; silent on all ranks but the first.
        islands: how many the run has.
        state: what rounds have committed.
    """

    def __init__(self, metrics: Metrics, islands: int, state: OuterState) -> None:
        self._metrics, self._state = metrics, state
        self._here = tuple(range(islands))
        self._standing = False

    def note(self, result: RoundResult, inner_step: int) -> None:
        """Record one round that was not void."""
        if result.decision is None:
            return
        self._note_members(result.decision, inner_step)
        self._note_heal(result, inner_step)
        for island in result.decision.dropped:
            what = f"the pseudo-gradient of island {island} holds NaN or Inf; it was dropped"
            self._event("void", inner_step, what, island=island)
        if result.committed or result.skipped:
            self._note_round(result, result.decision, inner_step)

    def note_void(self, result: RoundResult, inner_step: int, outer_step: int) -> None:
        """Record a round that was not committed."""
        self._note_heal(result, inner_step)
        self._metrics.write(
            "round",
            step=inner_step,
            outer_step=outer_step,
            committed=False,
            fragment=result.fragment,
            islands=list(result.decision.islands) if result.decision else [],
            contributors=[],
            staleness={},
            gates={},
            bytes=result.bytes,
            island_bytes=result.bytes,
            seconds=result.seconds,
            exchange_s=result.exchange_s,
            digest=f"{result.digest:016x}",
            reason=result.reason,
        )

    def note_order(self, entry: dict[str, Any], step: int) -> None:
        """Record an order of the operator that all islands have committed, or refused alike.

        Args:
            entry: its entry in the outer state.
            step: inner step of this island at which it obeys.
        """
        self._metrics.event("order", step, f"step {entry['step']}: {told(entry)}")

    def note_ahead(self, ahead: int, least: int, step: int) -> None:
        """Record, once each time, that the schedule stands until as much is committed as it has counted on.

        Args:
            ahead: steps of the run by which the schedule is further than what is known now.
            least: from which on it is told: a few are usual, as islands differ in speed.
            step: inner step of the island.
        """
        if ahead >= least and not self._standing:
            why = "islands that it counted on have committed less; it goes on when that is made up"
            self._event("schedule", step, f"the rate stays where it is for {ahead} steps of the run: {why}")
        self._standing = ahead > 0 and (self._standing or ahead >= least)

    def _event(self, event: str, step: int, what: str, **fields: Any) -> None:
        """One that is told with the step of the run at which it happened."""
        self._metrics.event(event, step, f"step {self._metrics.at(step)}: {what}", **fields)

    def _note_heal(self, result: RoundResult, step: int) -> None:
        if result.healed and result.decision is not None:
            source, rounds = result.decision.source, result.decision.outer_step
            self._event("heal", step, f"healed by island {source} to round {rounds}")

    def _note_members(self, decision: Decision, step: int) -> None:
        here = decision.islands
        for island in sorted(set(self._here) - set(here)):
            self._event("alone", step, f"island {island} is gone; going on with {list(here)}")
        for island in sorted(set(here) - set(self._here)):
            self._event("back", step, f"island {island} is back")
        self._here = here

    def note_adopted(
        self,
        step: int,
        fragment: int,
        version: int,
        lag: int,
        waited: int,
        discarded: int,
        missed: int,
        seconds: float,
    ) -> None:
        """Record that the island trains on from a new version of a fragment.

        Args:
            step: inner step of the island.
            fragment: its number.
            version: adopted.
            lag: versions that were committed since.
            waited: inner steps since its contribution was captured.
            discarded: of these, how many are given up, in whole or in part.
            missed: turns of the fragment that passed meanwhile.
            seconds: for which training stood still, to capture and to adopt.
        """
        self._metrics.write(
            "adopt",
            step=step,
            fragment=fragment,
            version=version,
            lag=lag,
            waited_steps=waited,
            steps_discarded=discarded,
            turns_missed=missed,
            seconds=seconds,
        )

    def _note_round(self, result: RoundResult, decision: Decision, step: int) -> None:
        names = [str(i) for i in decision.contributors]
        staleness = dict(zip(names, decision.staleness, strict=True))
        outer_step = decision.outer_step + int(result.committed)
        self._metrics.write(
            "round",
            step=step,
            position=decision.inner_step,  # equal on all islands, also on one that hears of it late
            outer_step=outer_step,
            committed=result.committed,
            tokens=result.tokens,  # of then: an asynchronous island may hear of it when others have followed
            fragment=result.fragment,
            version=result.version,
            fragment_age=decision.fragment_age,
            islands=list(decision.islands),
            contributors=list(decision.contributors),
            staleness=staleness,
            gates=dict(zip(names, result.gates, strict=True)),
            bytes=result.bytes,
            island_bytes=result.island_bytes,
            seconds=result.seconds,
            exchange_s=result.exchange_s,
            digest=f"{result.digest:016x}",
            reason=result.reason,
        )
        ages = " ".join(f"{i}:{tau}" for i, tau in staleness.items())
        which = f" of fragment {result.fragment}" if len(self._state.fragments) > 1 else ""
        moved = f"{result.island_bytes / 1e6:.2f} MB, {result.seconds:.2f} s"
        self._metrics.tell(
            f"round {outer_step}{which} at step {decision.inner_step}: islands {list(decision.islands)}, "
            f"staleness {ages}, {moved}, digest {result.digest:016x}"
        )
