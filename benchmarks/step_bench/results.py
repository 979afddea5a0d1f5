"""Measured figures and what they must reach. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from step_bench.traffic import Traffic

SCHEMA = 1
OURS = "ours8"
FLOOR_SIZE = 2**26
FP32_SIZES = (2**25, 2**26)
STATE_BYTES = 2.04


@dataclass(frozen=True)
class Result:
    """One contender at one size and thread count.

    Attributes:
        contender: key of it.
        label: as shown.
        ours: built here.
        traffic: key of its byte mix.
        n: parameters.
        threads: of the CPU.
        bytes_per_parameter: that its step must move.
        state_bytes_per_parameter: of optimizer state, as allocated.
        samples_ns: ns a parameter, one number a repetition.
        floor_ns: ns a parameter that moving those bytes takes.
    """

    contender: str
    label: str
    ours: bool
    traffic: str
    n: int
    threads: int
    bytes_per_parameter: float
    state_bytes_per_parameter: float
    samples_ns: tuple[float, ...]
    floor_ns: float

    @property
    def ns(self) -> float:
        """Median ns a parameter."""
        return statistics.median(self.samples_ns)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, of the bytes that must be moved."""
        return self.bytes_per_parameter / self.ns

    @property
    def fraction(self) -> float:
        """Share of the bandwidth that the floor reaches with the same bytes."""
        return self.floor_ns / self.ns

    def as_json(self) -> dict[str, Any]:
        """Fields and derived figures."""
        return asdict(self) | {"ns": self.ns, "gb_per_s": self.gb_per_s, "fraction_of_floor": self.fraction}


@dataclass(frozen=True)
class Floor:
    """What moving the bytes of one mix takes, at one size and thread count.

    Attributes:
        traffic: key of the mix; `copy` is a plain copy of fp32, for reference.
        n: parameters.
        threads: of the CPU.
        bytes_per_parameter: moved.
        samples_ns: ns a parameter, by way of moving.
    """

    traffic: str
    n: int
    threads: int
    bytes_per_parameter: float
    samples_ns: Mapping[str, Sequence[float]]

    @property
    def way(self) -> str:
        """The fastest way of moving."""
        return min(self.samples_ns, key=lambda way: statistics.median(self.samples_ns[way]))

    @property
    def ns(self) -> float:
        """Median ns a parameter of the fastest way."""
        return statistics.median(self.samples_ns[self.way])

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.bytes_per_parameter / self.ns

    def as_json(self) -> dict[str, Any]:
        """Fields and derived figures."""
        return asdict(self) | {"ns": self.ns, "gb_per_s": self.gb_per_s, "way": self.way}


@dataclass(frozen=True)
class Verdict:
    """A figure and what it must reach.

    Attributes:
        what: in words.
        value: measured; None where there is nothing to judge.
        need: bound on it.
        passed: None where there is no value.
        note: why there is no value, or how far the stretch goal is.
    """

    what: str
    value: float | None
    need: str
    passed: bool | None
    note: str = ""


def floor_of(floors: Sequence[Floor], traffic: Traffic) -> float:
    """ns a parameter of the floor for that mix, of one size and thread count."""
    return next(f.ns for f in floors if f.traffic == traffic.key)


def verdicts(
    results: Sequence[Result], absent: Mapping[str, str], device: str, all_threads: int
) -> list[Verdict]:
    """Judge 8-bit CGAD with all threads against the floor and against each peer; nothing is left out.

    Args:
        results: of all sizes and thread counts.
        absent: reasons, by key of the contender.
        device: `cpu` or `cuda`.
        all_threads: results with fewer are not judged.
    """
    at = {(r.contender, r.n): r for r in results if r.threads == all_threads}
    labels = {r.contender: r.label for r in results}
    where = f"all {all_threads} threads" if device == "cpu" else "GPU"
    found = []

    ours = at.get((OURS, FLOOR_SIZE))
    least, stretch = (0.60, 0.85) if device == "cpu" else (0.85, 0.0)
    found.append(
        _judge(
            f"fraction of the floor, 2^26, {where}",
            ours and ours.fraction,
            least,
            stretch,
            absent.get(OURS, "not measured at this size"),
        )
    )
    peers32 = ("deepspeed", "torch_fused") if device == "cpu" else ("torch_fused",)
    for key in peers32:
        for n in FP32_SIZES:
            found.append(_ratio(at, labels, absent, key, n, where, 1.0, 1.5 if device == "cpu" else 0.0))
    for key in ("bitsandbytes8", "torchao8"):
        found.append(
            _ratio(at, labels, absent, key, FLOOR_SIZE, where, 20.0 if device == "cpu" else 1.0, 0.0)
        )

    sizes = [r for (key, _), r in at.items() if key == OURS]
    state = max((r.state_bytes_per_parameter for r in sizes), default=None)
    passed = None if state is None else state <= STATE_BYTES
    found.append(
        Verdict(
            "state of 8-bit CGAD, bytes a parameter",
            state,
            f"<= {STATE_BYTES}",
            passed,
            "" if sizes else absent.get(OURS, "not measured"),
        )
    )
    return found


def _ratio(
    at: Mapping[tuple[str, int], Result],
    labels: Mapping[str, str],
    absent: Mapping[str, str],
    key: str,
    n: int,
    where: str,
    least: float,
    stretch: float,
) -> Verdict:
    ours, peer = at.get((OURS, n)), at.get((key, n))
    size = f"2^{n.bit_length() - 1}"
    what = f"{labels.get(key, key)} / ours, time, {size}, {where}"
    value = peer.ns / ours.ns if ours and peer else None
    return _judge(what, value, least, stretch, absent.get(key, "not measured at this size"))


def _judge(what: str, value: float | None, least: float, stretch: float, missing: str) -> Verdict:
    need = f">= {least:g}"
    if value is None:
        return Verdict(what, None, need, None, missing)
    note = f"stretch {stretch:g} {'reached' if value >= stretch else 'not reached'}" if stretch else ""
    return Verdict(what, value, need, value >= least, note)
