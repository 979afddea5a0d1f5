"""What the page of a run tells, as numbers: read once from the run folder, without a chart in sight."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from megatron_wsd import report
from megatron_wsd.control import ControlFolder
from megatron_wsd.records import Record, begun_at, is_void, of_kind, phases, read_islands

_FAULTS = {
    "alone": "island gone",
    "back": "island back",
    "heal": "healed",
    "void": "contribution dropped",
    "start": "started again",
    "round": "round void",
}


@dataclass(frozen=True)
class Decision:
    """Something that the operator or the schedule decided while the run went on.

    Attributes:
        step: inner steps at which it was taken up.
        texts: what was decided there.
    """

    step: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """Something that went wrong, or was mended.

    Attributes:
        seconds: since the run began.
        island: that recorded it.
        step: inner steps of that island.
        what: kind of it, in words.
        text: as recorded.
        count: how often in a row.
    """

    seconds: float
    island: int
    step: int
    what: str
    text: str
    count: int = 1


@dataclass(frozen=True)
class Time:
    """Where an island's time went while it was up, in seconds.

    Attributes:
        up: from the first record after each start to the last one before the next.
        exchange: in outer rounds, void ones included; waiting for slower islands is part of it.
        stopped: of it, the time in which training stood still: all of it in synchronous mode, else that of
            captures and adoptions.
    """

    up: float
    exchange: float
    stopped: float

    @property
    def utilisation(self) -> float | None:
        """Share of the time in which training did not stand still; None if nothing was recorded."""
        return None if self.up <= 0 else max(0.0, 1.0 - self.stopped / self.up)


class RunFacts:
    """One run.

    Args:
        folder: of the run, in which steps are logged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.name = self.folder.name
        self.islands = read_islands(folder)
        self.summary = report.summarise(folder)
        self.about = _json(self.folder / "run.json")
        self.config = _json(self.folder / "config.json")
        self.orders = ControlFolder(self.folder).accepted()

    @property
    def asynchronous(self) -> bool:
        """Whether training went on while rounds were under way."""
        mode = self.config.get("megatron_wsd", {}).get("sync", {}).get("mode")
        return mode == "async"

    @cached_property
    def steps(self) -> dict[int, list[Record]]:
        """The logged inner steps of each island."""
        return {i: of_kind(records, "step") for i, records in self.islands.items()}

    @cached_property
    def rounds(self) -> dict[int, list[Record]]:
        """The outer rounds that each island recorded."""
        return {i: of_kind(records, "round") for i, records in self.islands.items()}

    @cached_property
    def committed(self) -> list[Record]:
        """Every committed round once, in order; what islands recorded of it is the same on all of them."""
        once: dict[tuple[int, Any], Record] = {}
        for records in self.rounds.values():
            for record in records:
                if record["committed"]:
                    once.setdefault((record["outer_step"], record.get("fragment")), record)
        return sorted(once.values(), key=lambda r: r["outer_step"])

    @cached_property
    def begun(self) -> float:
        """Unix time of the first record."""
        return min(
            (r["time"] for records in self.islands.values() for r in records if "time" in r), default=0.0
        )

    @cached_property
    def _begun_step(self) -> int:
        return begun_at([r for records in self.islands.values() for r in records])

    @cached_property
    def _positions(self) -> tuple[list[int], list[float]]:
        known = sorted({r["step"]: r["tokens"] for steps in self.steps.values() for r in steps}.items())
        # What a lost island had trained since the last round is no longer counted: tokens never run back.
        return [step for step, _ in known], list(accumulate((float(t) for _, t in known), max))

    def tokens(self, step: int) -> float:
        """Tokens over all islands at an inner step, between logged ones by a straight line."""
        at, tokens = self._positions
        begun = self._begun_step
        if not at or step <= begun:
            return 0.0 if not at or begun == 0 else tokens[0] * begun / max(at[0], 1)
        i = bisect_left(at, step)
        if i == len(at):
            return tokens[-1]
        left, low = (at[i - 1], tokens[i - 1]) if i else (begun, self.tokens(begun))
        return low + (tokens[i] - low) * (step - left) / (at[i] - left)

    @cached_property
    def _clock(self) -> tuple[list[float], list[float]]:
        known = sorted((r["time"], float(r["tokens"])) for steps in self.steps.values() for r in steps)
        return [time for time, _ in known], list(accumulate((tokens for _, tokens in known), max))

    def tokens_at(self, seconds: float) -> float:
        """Tokens that the island furthest ahead had logged, so many seconds after the run began."""
        at, tokens = self._clock
        i = bisect_right(at, self.begun + seconds)
        return tokens[i - 1] if i else 0.0

    @cached_property
    def phases(self) -> list[tuple[str, float, float]]:
        """Name, and tokens at its beginning and end, of each phase passed."""
        longest = max(self.steps.values(), key=len, default=[])
        spans = phases(longest, self._begun_step)
        return [(name, self.tokens(first - 1), self.tokens(last)) for name, first, last in spans]

    @cached_property
    def decisions(self) -> list[Decision]:
        """Orders and switches of the data mix, by step; what all islands took up at one step is one."""
        said: dict[int, dict[str, None]] = {}
        for records in self.islands.values():
            for record in records:
                if record["kind"] == "event" and record["event"] in ("order", "mix"):
                    said.setdefault(record["step"], {})[_without_step(record["message"])] = None
        return [Decision(step, tuple(texts)) for step, texts in sorted(said.items())]

    @cached_property
    def faults(self) -> list[Fault]:
        """Void rounds, islands that went, came back and were healed, by time; equal ones in a row are one."""
        found: list[Fault] = []
        for island, records in self.islands.items():
            starts = 0
            for record in records:
                kind = record["event"] if record["kind"] == "event" else record["kind"]
                starts += kind == "start"
                if kind not in _FAULTS or (kind == "start" and starts == 1):
                    continue
                if kind == "round" and not is_void(record):
                    continue
                text = record.get("message") or record.get("reason") or ""
                if kind == "start":
                    text = f"{'resumed' if record.get('resumed') else 'fresh'} at step {record['step']}"
                seconds = record.get("time", self.begun) - self.begun
                found.append(Fault(seconds, island, record["step"], _FAULTS[kind], _without_step(text)))
        found.sort(key=lambda f: f.seconds)
        merged = []
        for _, group in groupby(found, key=lambda f: (f.island, f.what, f.text)):
            same = list(group)
            first = same[0]
            merged.append(Fault(first.seconds, first.island, first.step, first.what, first.text, len(same)))
        return merged

    @cached_property
    def staleness(self) -> dict[int, Counter[int]]:
        """How many contributions of each island had which age, in outer rounds."""
        found: dict[int, Counter[int]] = {}
        for record in self.committed:
            for island, age in (record.get("staleness") or {}).items():
                found.setdefault(int(island), Counter())[int(age)] += 1
        return dict(sorted(found.items()))

    @cached_property
    def gates(self) -> dict[int, list[tuple[int, float]]]:
        """(outer step, gate) of the contributions of each island."""
        found: dict[int, list[tuple[int, float]]] = {}
        for record in self.committed:
            for island, gate in (record.get("gates") or {}).items():
                if gate is not None:
                    found.setdefault(int(island), []).append((record["outer_step"], float(gate)))
        return dict(sorted(found.items()))

    @cached_property
    def lags(self) -> dict[int, list[int]]:
        """Versions behind at each adoption; empty for synchronous runs."""
        each = {i: [r["lag"] for r in of_kind(records, "adopt")] for i, records in self.islands.items()}
        return {i: lags for i, lags in each.items() if lags}

    @cached_property
    def times(self) -> dict[int, Time]:
        """Where the time of each island went."""
        return {island: _time(records, self.asynchronous) for island, records in self.islands.items()}

    @property
    def utilisation(self) -> float | None:
        """That of all islands together."""
        up, stopped = sum(t.up for t in self.times.values()), sum(t.stopped for t in self.times.values())
        return Time(up, 0.0, stopped).utilisation

    @property
    def loss(self) -> float | None:
        """Final loss: the mean over corpora of the newest validation of the anchor, else of training."""
        anchor = [a["loss"] for a in self.summary["anchor"].values() if a["loss"] is not None]
        ends = [i["loss_end"] for i in self.summary["islands"] if i["loss_end"] is not None]
        values = anchor or ends
        return sum(values) / len(values) if values else None


def _time(records: list[Record], asynchronous: bool) -> Time:
    """The records of one island, as written: each ``start`` begins another process."""
    up = exchange = 0.0
    first: float | None = None
    last = 0.0
    for record in records:
        if record["kind"] == "start":
            up += last - first if first is not None else 0.0
            first = None
        elif record["kind"] in ("step", "round") and "time" in record:
            # The first record ends its own first round or logged steps, which are not counted at all.
            if first is None:
                first = record["time"]
            elif record["kind"] == "round":
                exchange += record.get("seconds") or 0.0
            last = record["time"]
    up += last - first if first is not None else 0.0
    exchange = min(exchange, up)
    pauses = sum(r.get("seconds") or 0.0 for r in of_kind(records, "adopt"))
    return Time(up, exchange, min(pauses, up) if asynchronous else exchange)


def _without_step(text: str) -> str:
    """``island 1 is gone`` of ``step 20: island 1 is gone``: the step has a column of its own."""
    head, colon, rest = text.partition(": ")
    return rest if colon and head.startswith("step ") and head[5:].isdigit() else text


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def differences(runs: list[RunFacts]) -> list[tuple[str, list[str]]]:
    """The fields of the configs that are not the same in all runs: dotted name, and the value in each."""
    from megatron_wsd.rundir import flat

    each = [flat(run.config) for run in runs]
    names = sorted({name for config in each for name in config})
    rows = [(name, [json.dumps(c[name]) if name in c else "(absent)" for c in each]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def thinned(points: list[tuple[float, float]], most: int = 800) -> list[tuple[float, float]]:
    """At most about ``most`` points: means of neighbours, so that long runs make small pages."""
    if len(points) <= most:
        return points
    width = math.ceil(len(points) / most)
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]
