"""Figures from what islands saw. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from megatron_wsd.records import Record


def speed(times: Sequence[float], skip: int) -> float:
    """Inner steps per second.

    Args:
        times: end of each step, seconds.
        skip: steps at the beginning that are not counted; the clock starts at the end of the last of them.

    Raises:
        ValueError: no step is left.
    """
    if not 1 <= skip < len(times):
        raise ValueError(f"expected more than {skip} steps and at least 1 to skip, got {len(times)} steps")
    return (len(times) - skip) / (times[-1] - times[skip - 1])


@dataclass(frozen=True)
class Work:
    """What became of one island's contributions.

    Attributes:
        rounds: committed, of all islands.
        staleness: of each contribution of the island that a round took in.
        gates: of each.
    """

    rounds: int
    staleness: list[int]
    gates: list[float]

    @classmethod
    def of(cls, parts: Sequence[Work]) -> Work:
        """Several runs as one."""
        return cls(
            sum(p.rounds for p in parts),
            [age for p in parts for age in p.staleness],
            [gate for p in parts for gate in p.gates],
        )

    @property
    def median_staleness(self) -> float | None:
        """None if nothing was taken in."""
        return median(self.staleness) if self.staleness else None


def work_of(rounds: Sequence[Record], island: int, until_s: float = float("inf")) -> Work:
    """What became of an island's contributions.

    Args:
        rounds: ``round`` records that were committed.
        island: its number.
        until_s: rounds that were recorded later, by their ``time``, do not count.
    """
    counted = [r for r in rounds if r["time"] <= until_s]
    mine = [r for r in counted if island in r["contributors"]]
    name = str(island)
    return Work(len(counted), [r["staleness"][name] for r in mine], [r["gates"][name] for r in mine])


def data_parallel_bytes(islands: int, parameters: int) -> float:
    """Bytes that an island sends in one inner step of plain data parallelism, and receives as well.

    A ring all-reduce of the bf16 gradient: 2 (n - 1) / n * 2 bytes a parameter.
    """
    return 2 * (islands - 1) / islands * 2 * parameters


@dataclass(frozen=True)
class Traffic:
    """Bytes that one of two islands sends a token of its own, and receives as well.

    Attributes:
        wire: format.
        inner_steps: between two rounds.
        bytes_per_parameter: of one contribution.
        bytes_per_token: as recorded.
        data_parallel: the same of plain data parallelism.
    """

    wire: str
    inner_steps: int
    bytes_per_parameter: float
    bytes_per_token: float
    data_parallel: float

    @property
    def ratio(self) -> float:
        """How many times more plain data parallelism moves."""
        return self.data_parallel / self.bytes_per_token


def traffic_of(
    wire: str,
    inner_steps: int,
    rounds: Sequence[Record],
    parameters: int,
    tokens: int,
    tokens_per_step: int,
) -> Traffic:
    """The traffic of a run of two islands.

    Args:
        wire: format.
        inner_steps: between two rounds.
        rounds: committed, as one island recorded them: ``island_bytes`` is what it sent and received.
        parameters: of the model.
        tokens: that these rounds committed, of both islands.
        tokens_per_step: of one island.
    """
    each_way = sum(r["island_bytes"] for r in rounds) / 2
    contributions = sum(len(r["contributors"]) for r in rounds)
    return Traffic(
        wire,
        inner_steps,
        2 * each_way / contributions / parameters,
        each_way / (tokens / 2),
        data_parallel_bytes(2, parameters) / tokens_per_step,
    )


@dataclass(frozen=True)
class Pause:
    """For how long the outer loop keeps training waiting, in milliseconds.

    Attributes:
        capture_ms: median over the steps with a capture.
        adopt_ms: over those with an adoption.
        other_ms: over all others.
        share: of the whole time.
    """

    capture_ms: float
    adopt_ms: float
    other_ms: float
    share: float


def pause_of(
    times: Sequence[float], pauses: Sequence[float], inner_steps: int, adopted: Sequence[int]
) -> Pause:
    """The pauses of one island, by what it did after each inner step.

    Args:
        times: end of each step, seconds.
        pauses: of each, seconds.
        inner_steps: one capture after each so many.
        adopted: inner steps, from 1, after which something was adopted.
    """
    steps = range(inner_steps + 1, len(pauses) + 1)  # the first period warms up
    captures = {n for n in steps if n % inner_steps == 0}
    adoptions = set(adopted) - captures

    def of(chosen: set[int]) -> float:
        return 1000 * median(pauses[n - 1] for n in steps if n in chosen)

    total = times[-1] - times[inner_steps - 1]
    return Pause(
        of(captures),
        of(adoptions),
        of(set(steps) - captures - adoptions),
        sum(pauses[n - 1] for n in steps) / total,
    )


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean (least - most)``; of one value that value."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{fmean(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"
