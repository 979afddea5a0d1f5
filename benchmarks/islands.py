#!/usr/bin/env python3
"""How fast islands train beside each other, and what travels between them: the outer loop with real torchft.

    .venv/bin/python benchmarks/islands.py --out runs/bench
    .venv/bin/python benchmarks/islands.py --sections pace --repeats 1 --seconds 12    # a quick look

One process is one island whose inner step is a sleep, so that the processor is mostly idle. README.md beside
this file says what is measured and keeps the last figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from islands_bench import figures, link, report
from islands_bench.runs import Setting, Trace, run
from step_bench import machine
from step_bench.results import Verdict

from megatron_wsd.diloco.faults import Fault, fail

FAST_S, SLOW_S = 0.2, 0.8
SMALL, LARGE, LINKED = 200_000, 8_000_000, 1_000_000
H = 5  # inner steps between two rounds: the slow island's period is 4 s, in which the fast one has 4 rounds
WIRE_H = 30  # where bytes are counted, the default
TOKENS = 8192  # of one island and inner step, where bytes are counted
SYNC = {"inner_steps": H, "timeout_s": 30.0}
ASYNC = {**SYNC, "mode": "async", "quorum": 1, "grace_s": 0.3, "poll_s": 0.1, "adopt": "rebase"}
LOCKSTEP = {**SYNC, "mode": "sync"}
WIRES = ("fp32", "bf16", "int8", "int4")
LINK_MBIT = 16.0
LINK_BUCKET = 1 << 18  # a message takes 0.13 s at that rate
_NOW = datetime.datetime.now


class Bench:
    """The sections, one after the other.

    Args:
        given: parsed command line.
        scratch: for run folders.
    """

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self.given, self._scratch, self._runs = given, scratch, 0
        self.verdicts: list[Verdict] = []

    def _run(self, setting: Setting, step_s: Sequence[float], **more: Any) -> list[Trace]:
        self._runs += 1
        return run(setting, step_s, self._scratch / f"run_{self._runs}", **more)

    def _judge(self, what: str, value: float | None, need: str, passes: Callable[[float], bool]) -> None:
        self.verdicts.append(Verdict(what, value, need, None if value is None else passes(value)))

    def pace(self) -> dict[str, Any]:
        """The fast island without an outer loop, alone, beside the slow one, in turn; then in lockstep."""
        bare = Setting(sync=None, parameters=SMALL, seconds=self.given.seconds)
        free = Setting(sync=ASYNC, parameters=SMALL, seconds=self.given.seconds)
        speeds: dict[str, list[float]] = {"bare": [], "alone": [], "fast": [], "slow": []}
        works: list[figures.Work] = []
        for _ in range(self.given.repeats):
            for name, setting, islands in (
                ("bare", bare, [FAST_S]),
                ("alone", free, [FAST_S]),
                ("together", free, [FAST_S, SLOW_S]),
            ):
                traces = self._run(setting, islands)
                names = ("fast", "slow") if name == "together" else (name,)
                for each, trace in zip(names, traces, strict=True):
                    speeds[each].append(figures.speed(trace.times, H))
                if name == "together":
                    works.append(figures.work_of(traces[0].rounds, 1, traces[0].ended))
        steps = round(self.given.seconds / SLOW_S / H + 1) * H
        waiting = self._run(Setting(sync=LOCKSTEP, parameters=SMALL, steps=steps), [FAST_S, SLOW_S])
        lockstep = [figures.speed(t.times, H) for t in waiting]
        work = figures.Work.of(works)
        kept = [a / b for a, b in zip(speeds["fast"], speeds["alone"], strict=True)]
        against = [a / b for a, b in zip(speeds["fast"], speeds["bare"], strict=True)]
        beside = "speed of the fast island beside the slow one"
        self._judge(f"{beside} / alone", median(kept), ">= 0.95", lambda v: v >= 0.95)
        self._judge(f"{beside} / without any outer loop", median(against), ">= 0.95", lambda v: v >= 0.95)
        age, gate = work.median_staleness, min(work.gates, default=None)
        self._judge("median staleness of the slow island's work", age, "2 to 4", lambda v: 2 <= v <= 4)
        self._judge("smallest gate of the slow island's work", gate, "> 0", lambda v: v > 0)
        factor = lockstep[0] * SLOW_S
        self._judge("speed of the fast island in sync mode * 0.8 s", factor, "<= 1", lambda v: v <= 1)
        return {
            "steps_per_s": speeds | {"lockstep_fast": [lockstep[0]], "lockstep_slow": [lockstep[1]]},
            "kept": kept,
            "kept_of_bare": against,
            "work": asdict(work),
        }

    def bytes(self) -> dict[str, Any]:
        """What travels in each wire format, as the records tell it."""
        found = []
        for wire in WIRES:
            sync = {**LOCKSTEP, "inner_steps": WIRE_H, "wire": wire}
            setting = Setting(sync=sync, parameters=LINKED, tokens_per_step=TOKENS, steps=4 * WIRE_H)
            trace = self._run(setting, [0.01, 0.01])[0]
            traffic = figures.traffic_of(
                wire, WIRE_H, trace.rounds, trace.parameters, trace.tokens, setting.tokens_per_step
            )
            found.append(asdict(traffic) | {"ratio": traffic.ratio})
        return {"parameters": trace.parameters, "tokens_per_step": TOKENS, "traffic": found}

    def pause(self) -> dict[str, Any]:
        """For how long a larger model stands still."""
        found = {}
        for wire in ("fp32", "int8"):
            sync = {**ASYNC, "wire": wire}
            seconds = max(self.given.seconds, 4 * H * FAST_S)
            trace = self._run(Setting(sync=sync, parameters=LARGE, seconds=seconds), [FAST_S, FAST_S])[0]
            adopted = [r["step"] for r in trace.records if r["kind"] == "adopt"]
            found[wire] = asdict(figures.pause_of(trace.times, trace.pauses, H, adopted))
        return {"parameters": trace.parameters, "inner_steps": H, "step_s": FAST_S, "pause": found}

    def link(self) -> dict[str, Any]:
        """Both modes over a free link and over a thin one."""
        found: dict[str, Any] = {"inner_steps": H, "step_s": FAST_S, "runs": {}}
        for mode, sync in (("async", ASYNC), ("sync", LOCKSTEP)):
            for thin in (False, True):
                steps = round(self.given.seconds / FAST_S / H) * H
                # In lockstep a thin link makes a round take about 5 s.
                limit = {"steps": max(4 * H, steps // 4 if thin else steps)}
                if mode == "async":
                    limit = {"seconds": self.given.seconds}
                setting = Setting(sync={**sync, "bucket_bytes": LINK_BUCKET}, parameters=LINKED, **limit)
                traces, words = self._linked(setting, thin)
                fast = traces[0]
                found["parameters"] = fast.parameters
                counted = [r for r in fast.rounds if r["time"] <= fast.ended]
                found["runs"][f"{mode}, {'thin' if thin else 'free'} link"] = {
                    "link": words,
                    "steps_per_s": [figures.speed(t.times, H) for t in traces],
                    "rounds": len(counted),
                    "round_s": median(r["seconds"] for r in counted),
                }
        speeds = {name: r["steps_per_s"] for name, r in found["runs"].items()}
        for mode in ("async", "sync"):
            pairs = zip(speeds[f"{mode}, thin link"], speeds[f"{mode}, free link"], strict=True)
            found[mode] = min(thin / free for thin, free in pairs)
        what = "speed of two async islands over the thin link / over the free one, the lower"
        self._judge(what, found["async"], ">= 0.95", lambda v: v >= 0.95)
        return found

    def _linked(self, setting: Setting, thin: bool) -> tuple[list[Trace], str]:
        """Two equal islands over that link, or over one that is imitated where none can be made."""
        pair = [FAST_S, FAST_S]
        if not thin:
            return self._run(setting, pair), "loopback"
        try:
            with link.thin_link(LINK_MBIT) as prefix:
                return self._run(setting, pair, prefix=prefix), f"{LINK_MBIT:g} Mbit/s (tbf)"
        except link.NoLinkError as e:
            seconds = 2 * 4 * LINKED * 8 / (LINK_MBIT * 1e6)
            faults: list[Fault] = [
                fail(island=1, at="within_exchange", round=n, how="slow", seconds=seconds) for n in range(500)
            ]
            words = f"imitated ({e}): every exchange sleeps for {seconds:g} s"
            return self._run(setting, pair, faults=faults), words


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "pace": Bench.pace,
    "bytes": Bench.bytes,
    "pause": Bench.pause,
    "link": Bench.link,
}


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ",".join(SECTIONS)
    parser.add_argument("--sections", default=known, help=f"of {known}")
    parser.add_argument("--repeats", type=int, default=3, help="of the pace section; default 3")
    parser.add_argument("--seconds", type=float, default=24.0, help="of training in a run; default 24")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for json and md")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this one, which is not there yet")
    given = parser.parse_args(argv)
    given.sections = given.sections.split(",")
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(f"--sections: {', '.join(sorted(unknown))} not among {known}")
    if given.repeats < 1 or given.seconds < 3 * H * SLOW_S:
        parser.error(f"--repeats must be positive, --seconds at least {3 * H * SLOW_S:g}")
    return given


def others_cpu_s() -> float:
    """CPU seconds that everything but this process and those it waited for has used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return machine.others_cpu_s() - children.ru_utime - children.ru_stime


def main(argv: Sequence[str]) -> int:
    """Run it; 0 whatever the verdicts are: they are printed, and in the json."""
    given = arguments(argv)
    load, busy, began = machine.load(), others_cpu_s(), time.monotonic()
    document: dict[str, Any] = {
        "date": _NOW(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/islands.py", *argv]),
        "machine": machine.describe(torch.device("cpu")),
        "versions": machine.versions(),
        "sync": ASYNC,
        "load_before": load,
    }
    with nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory() as folder:
        bench = Bench(given, Path(folder))
        for name in given.sections:
            print(f"{name}: {SECTIONS[name].__doc__}", flush=True)
            document[name] = SECTIONS[name](bench)
    seconds = time.monotonic() - began
    document["seconds"] = round(seconds, 1)
    document["others_cpus"] = round((others_cpu_s() - busy) / seconds, 3)
    document["verdicts"] = [asdict(v) for v in bench.verdicts]
    text = report.markdown(document)
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    for kind, content in (("json", json.dumps(document, indent=1) + "\n"), ("md", text)):
        path = given.out / f"islands.{kind}"
        path.write_text(content)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
