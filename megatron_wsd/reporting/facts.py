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
from megatron_wsd.config.compare import flat
from megatron_wsd.control import ControlFolder, told
from megatron_wsd.curves import of_one
from megatron_wsd.data.phases import planned_mixes
from megatron_wsd.errors import MegatronWSDError
from megatron_wsd.lineage import own_orders
from megatron_wsd.picture import start_times, stretches
from megatron_wsd.records import Record, anchors, is_void, of_kind, position, read_islands
from megatron_wsd.rundir import RunDir

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
        step: of the run, at which the islands agreed on it.
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
        step: of the run, where that island stood.
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

    @property
    def asynchronous(self) -> bool:
        """Whether training went on while rounds were under way, and islands counted steps of their own."""
        return bool(self.summary["asynchronous"])

    @cached_property
    def steps(self) -> dict[int, list[Record]]:
        """The logged inner steps of each island."""
        return {i: of_kind(records, "step") for i, records in self.islands.items()}

    @cached_property
    def stretches(self) -> dict[int, list[list[Record]]]:
        """The logged inner steps of each island, cut where it was away."""
        return {
            i: stretches(steps, start_times(self.islands[i], self.asynchronous))
            for i, steps in self.steps.items()
        }

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

    @property
    def begun_step(self) -> int:
        """Step of the run at which it began: 0, but for a branch."""
        spans = self.summary["phases"]
        return int(spans[0]["first_step"]) - 1 if spans else 0

    @cached_property
    def _positions(self) -> tuple[list[int], list[float]]:
        known: dict[int, float] = {}
        for record in (r for steps in self.steps.values() for r in steps):
            known[position(record)] = max(known.get(position(record), 0.0), float(record["tokens"]))
        at = sorted(known)
        # What a lost island had trained since the last round is no longer counted: tokens never run back.
        return at, list(accumulate((known[step] for step in at), max))

    def tokens(self, step: int) -> float:
        """Tokens over all islands at a step of the run, between logged ones by a straight line."""
        at, tokens = self._positions
        begun = self.begun_step
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
        spans = [(p["phase"], p["first_step"], p["last_step"]) for p in self.summary["phases"]]
        return [(name, self.tokens(first - 1), self.tokens(last)) for name, first, last in spans]

    @cached_property
    def extent(self) -> tuple[float, float]:
        """Tokens where the run began, and the most that were logged or validated."""
        validated = (tokens for points in self.anchors.values() for tokens, _ in points)
        return self.tokens(self.begun_step), max((self._positions[1] or [1.0])[-1], *validated, 1.0)

    @cached_property
    def anchors(self) -> dict[str, list[tuple[float, float | None]]]:
        """(committed tokens, loss) of the validations of the anchor by corpus, one for each round."""
        found = anchors([r for records in self.islands.values() for r in records])
        return {
            corpus: [(float(r.get("tokens", self.tokens(position(r)))), r["loss"]) for r in validated]
            for corpus, validated in found.items()
        }

    @cached_property
    def decisions(self) -> list[Decision]:
        """Orders and switches of the data mix, by step; all islands say the same of one."""
        said: dict[int, dict[str, None]] = {}
        for records in self.islands.values():
            for record in records:
                if record["kind"] == "event" and record["event"] in ("order", "mix"):
                    step, text = _step_and_text(record["message"])
                    said.setdefault(position(record) if step is None else step, {})[text] = None
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
                    text = f"{'resumed' if record.get('resumed') else 'fresh'} at step {position(record)}"
                seconds = record.get("time", self.begun) - self.begun
                where, what = position(record), _step_and_text(text)[1]
                found.append(Fault(seconds, island, where, _FAULTS[kind], what))
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

    @cached_property
    def decided(self) -> dict[str, str]:
        """The schedule with everything that was decided, the mixes and the orders, in words by name.

        Empty if the folder tells no WSD schedule.
        """
        run = RunDir(self.folder)
        try:
            curve = of_one(run, self.name)
        except (MegatronWSDError, OSError):
            return {}
        found = {"peak": f"{curve.peak:g}", "warm-up": f"{curve.schedule.warmup_steps:,}"}
        for i, decay in enumerate(curve.schedule.decays, 1):
            name = f"decay {i}" if len(curve.schedule.decays) > 1 else "decay"
            found[f"{name}: start"] = f"{decay.start:,}"
            found[f"{name}: length"] = f"{decay.length:,}"
            found[f"{name}: shape"] = decay.shape
            found[f"{name}: minimum, of the peak"] = f"{decay.min_lr_ratio:g}"
            found[f"{name}: then"] = decay.then
        mixes = self.config["megatron_wsd"].get("data", {}).get("mixes", {})
        switches = planned_mixes(curve.schedule, ControlFolder(self.folder).accepted(), mixes)
        found["data mix"] = ", ".join(["stable", *(f"{mix} from {start:,}" for start, mix in switches)])
        orders = [f"step {order['step']}: {told(order)}" for order in own_orders(run)]
        found["orders"] = "; ".join(orders) or "none"
        return found

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


def _step_and_text(text: str) -> tuple[int | None, str]:
    """20 and ``island 1 is gone`` of ``step 20: island 1 is gone``: the step has a column of its own."""
    head, colon, rest = text.partition(": ")
    told_step = colon and head.startswith("step ") and head[5:].isdigit()
    return (int(head[5:]), rest) if told_step else (None, text)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def differences(runs: list[RunFacts]) -> list[tuple[str, list[str]]]:
    """The fields of the configs that are not the same in all runs: dotted name, and the value in each."""
    each = [{name: json.dumps(value) for name, value in flat(run.config).items()} for run in runs]
    return _differing(each, sorted({name for config in each for name in config}))


def decided_differently(runs: list[RunFacts]) -> list[tuple[str, list[str]]]:
    """What of schedule, mixes and orders is not the same in all runs: its name, and what it is in each."""
    each = [run.decided for run in runs]
    return _differing(each, list(dict.fromkeys(name for run in each for name in run)))


def _differing(each: list[dict[str, str]], names: list[str]) -> list[tuple[str, list[str]]]:
    rows = [(name, [one.get(name, "(absent)") for one in each]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def thinned(points: list[tuple[float, float]], most: int = 800) -> list[tuple[float, float]]:
    """At most about ``most`` points: means of neighbours, so that long runs make small pages."""
    if len(points) <= most:
        return points
    width = math.ceil(len(points) / most)
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]
