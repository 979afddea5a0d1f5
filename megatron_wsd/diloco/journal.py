"""What a run tells of its rounds: who took part, how old their work was, who went and came back."""

from __future__ import annotations

from typing import Any

from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.round import RoundResult
from megatron_wsd.metrics import Metrics, say


class Journal:
    """Records rounds in the metrics of an island and says them on the console.

    Args:
        metrics: of the island; silent on all ranks but the first.
        group: the ranks of this island.
        islands: how many the run has.
    """

    def __init__(self, metrics: Metrics, group: IslandGroup, islands: int) -> None:
        self._metrics, self._group = metrics, group
        self._here = tuple(range(islands))

    def note(self, result: RoundResult, inner_step: int) -> None:
        """Record one round after it was adopted; all ranks of the island must call it."""
        if result.decision is None:
            return
        self._note_members(result.decision, inner_step)
        self._note_heal(result, inner_step)
        for island in result.decision.dropped:
            text = (
                f"step {inner_step}: the pseudo-gradient of island {island} holds NaN or Inf; it was dropped"
            )
            self._metrics.event("void", inner_step, text)
        if result.committed:
            self._note_commit(result, result.decision, inner_step)

    def note_void(self, result: RoundResult, inner_step: int, outer_step: int) -> None:
        """Record a round that was not committed."""
        self._note_heal(result, inner_step)
        self._metrics.write(
            "round",
            step=inner_step,
            outer_step=outer_step,
            committed=False,
            islands=list(result.decision.islands) if result.decision else [],
            contributors=[],
            staleness={},
            gates={},
            bytes=result.bytes,
            island_bytes=result.bytes,
            seconds=result.seconds,
            digest=f"{result.digest:016x}",
            reason=result.reason,
        )

    def note_order(self, entry: dict[str, Any], step: int) -> None:
        """Record an order of the operator that all islands have committed, or refused alike."""
        if entry["kind"] == "cancel":
            what = "the decay that had not begun is withdrawn"
        elif entry["kind"] == "override":
            what = "schedule changed: " + ", ".join(f"{k} = {v}" for k, v in entry["fields"].items())
        else:
            begins = step if entry["at"] is None else entry["at"]
            what = f"decay of {entry['length']} steps ({entry['shape']}) from step {begins}"
        if "refused" in entry:
            what = f"refused: {entry['refused']}"
        self._metrics.event("order", step, f"step {step}: {what}")

    def _note_heal(self, result: RoundResult, step: int) -> None:
        if result.healed and result.decision is not None:
            source, rounds = result.decision.source, result.decision.outer_step
            self._metrics.event("heal", step, f"step {step}: healed by island {source} to round {rounds}")

    def _note_members(self, decision: Decision, step: int) -> None:
        here = decision.islands
        for island in sorted(set(self._here) - set(here)):
            text = f"step {step}: island {island} is gone; going on with {list(here)}"
            self._metrics.event("alone", step, text)
        for island in sorted(set(here) - set(self._here)):
            self._metrics.event("back", step, f"step {step}: island {island} is back")
        self._here = here

    def _note_commit(self, result: RoundResult, decision: Decision, step: int) -> None:
        moved = sum(row[0] for row in self._group.gather([result.bytes]))
        names = [str(i) for i in decision.contributors]
        staleness = dict(zip(names, decision.staleness, strict=True))
        outer_step = decision.outer_step + 1
        self._metrics.write(
            "round",
            step=step,
            outer_step=outer_step,
            committed=True,
            islands=list(decision.islands),
            contributors=list(decision.contributors),
            staleness=staleness,
            gates=dict(zip(names, result.gates, strict=True)),
            bytes=result.bytes,
            island_bytes=moved,
            seconds=result.seconds,
            digest=f"{result.digest:016x}",
            reason=result.reason,
        )
        if self._group.rank == 0:
            ages = " ".join(f"{i}:{tau}" for i, tau in staleness.items())
            say(
                f"round {outer_step} at step {step}: islands {list(decision.islands)}, staleness {ages}, "
                f"{moved / 1e6:.2f} MB, {result.seconds:.2f} s, digest {result.digest:016x}"
            )
