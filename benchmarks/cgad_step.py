#!/usr/bin/env python3
"""What one CGAD step costs, beside everyone else's AdamW step and beside moving the same bytes.

    .venv/bin/python benchmarks/cgad_step.py --out runs/bench
    .venv/bin/python benchmarks/cgad_step.py --device cuda --out runs/bench_gpu

Everyone takes turns in one run. Every first step at the smallest size is compared with AdamW in float64.
README.md beside this file says what is counted and keeps the last figures.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from step_bench import contenders, floor, machine, measure, plot, report, results
from step_bench.contenders import AbsentError, Contender
from step_bench.problem import Problem
from step_bench.traffic import adam8, adam32

SIZES = "2^14,2^16,2^18,2^20,2^22,2^24,2^25,2^26"
QUIET_LOAD = 0.3  # processors that others kept busy, on average


def sizes(text: str) -> list[int]:
    """Comma-separated counts of parameters, `2^k` or plain; each a multiple of 256."""
    found = []
    for part in text.split(","):
        base, power, exponent = part.partition("^")
        try:
            n = int(base) ** int(exponent) if power else int(base)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} is neither 2^k nor a count") from error
        if not 4096 <= n <= 2**32 or n % 256:
            raise argparse.ArgumentTypeError(f"{part}: expected a multiple of 256 from 4096 to 2^32")
        found.append(n)
    return sorted(set(found))


def threads(text: str) -> list[int]:
    """Comma-separated thread counts; `all` is every processor this process may use."""
    found = set()
    for part in text.split(","):
        count = machine.threads_of_machine() if part == "all" else int(part) if part.isdigit() else 0
        if count < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is neither 'all' nor a count from 1")
        found.add(count)
    return sorted(found)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=sizes, default=sizes(SIZES), help=f"default {SIZES}")
    parser.add_argument("--threads", type=threads, default=threads("1,all"), help="default 1,all; CPU only")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sample-s", type=float, default=0.1, help="shortest sample, seconds; default 0.1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for json, md and png")
    known = ",".join(c.key for c in contenders.ALL)
    parser.add_argument("--contenders", default=known, help=f"of {known}")
    parser.add_argument(
        "--with-deepspeed-cpu-adam",
        action="store_true",
        help="also measure DeepSpeedCPUAdam, whose kernel takes minutes to build once",
    )
    given = parser.parse_args(argv)
    if given.repetitions < 1 or given.sample_s <= 0:
        parser.error("--repetitions and --sample-s must be positive")
    if unknown := set(given.contenders.split(",")) - set(known.split(",")):
        parser.error(f"--contenders: {', '.join(sorted(unknown))} not among {known}")
    if given.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: this torch sees no CUDA device")
        given.threads = [1]
    return given


class Run:
    """All configurations of one run, one after the other.

    Args:
        given: parsed command line.
        console: for tables and progress.
    """

    def __init__(self, given: argparse.Namespace, console: Console) -> None:
        self.given = given
        self.console = console
        self.device = torch.device(given.device)
        self.results: list[results.Result] = []
        self.floors: list[results.Floor] = []
        self.absent: dict[str, str] = {}  # by key; those of one size only are `failures`
        self.failures: list[dict[str, Any]] = []
        self.timed_s = self.others_s = 0.0  # of the timed parts: wall, and CPU seconds of other processes
        self.chosen = [c for c in contenders.ALL if c.key in given.contenders.split(",")]
        for contender in self.chosen:
            if (
                contender.key == "deepspeed"
                and self.device.type == "cpu"
                and not given.with_deepspeed_cpu_adam
            ):
                self.absent[contender.key] = "left out; --with-deepspeed-cpu-adam builds it"

    def all(self) -> None:
        """Measure every thread count and size."""
        turns = len(self.chosen) + 5  # two ways for each of two floors, and a copy
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            each = turns * self.given.repetitions
            task = progress.add_task("", total=len(self.given.threads) * len(self.given.sizes) * each)
            done = 0
            for count in self.given.threads:
                torch.set_num_threads(count)
                if "torch._dynamo" in sys.modules:
                    torch._dynamo.reset()  # compiled peers bake the thread count in
                for n in self.given.sizes:
                    self._one(n, count, progress, task)
                    gc.collect()
                    done += each
                    progress.update(task, completed=done)

    def _one(self, n: int, count: int, progress: Progress, task: Any) -> None:
        where = f"{report.size_name(n)}, {count} thread{'s' * (count > 1)}"
        problem = Problem.make(n, self.device, count, self.given.seed)
        steps, state_bytes, missing = {}, {}, {}
        for contender in self.chosen:
            progress.update(task, description=f"{where}: makes {contender.key}")
            reason = self.absent.get(contender.key)
            if reason is None:
                try:
                    step, state = contenders.build(contender, problem, checked=n == self.given.sizes[0])
                    steps[contender.key] = _runner(step, problem)
                    state_bytes[contender.key] = contenders.state_bytes(state(), n)
                except AbsentError as error:
                    reason = str(error)
                    self._leave_out(contender, reason, n, count)
            if reason is not None:
                missing[contender.label] = reason
        ways = {(t.key, way): r for t in (adam8(), adam32()) for way, r in floor.runners(problem, t).items()}
        ways[("copy", "copy")] = floor.copy_runner(problem, 4 * n)
        runners = {f"{mix}: {way}": runner for (mix, way), runner in ways.items()} | steps

        def tick(name: str) -> None:
            progress.update(task, advance=1, description=f"{where}: {name}")

        before_s, others_s = time.perf_counter(), machine.others_cpu_s()
        samples = measure.interleaved(runners, self.given.repetitions, self.given.sample_s, self.device, tick)
        self.timed_s += time.perf_counter() - before_s
        self.others_s += machine.others_cpu_s() - others_s
        in_ns = {name: tuple(s / n * 1e9 for s in seconds) for name, seconds in samples.items()}
        floors = []
        for mix, bytes_ in ((adam8().key, adam8().total), (adam32().key, adam32().total), ("copy", 8.0)):
            by_way = {way: in_ns[f"{m}: {way}"] for m, way in ways if m == mix}
            floors.append(results.Floor(mix, n, count, bytes_, by_way))
        rows = [
            results.Result(
                contender=c.key,
                label=c.label,
                ours=c.ours,
                traffic=c.traffic.key,
                n=n,
                threads=count,
                bytes_per_parameter=c.traffic.total,
                state_bytes_per_parameter=state_bytes[c.key],
                samples_ns=in_ns[c.key],
                floor_ns=results.floor_of(floors, c.traffic),
            )
            for c in self.chosen
            if c.key in steps
        ]
        self.floors += floors
        self.results += rows
        self.console.print(report.configuration(rows, floors, missing))

    def _leave_out(self, contender: Contender, reason: str, n: int, count: int) -> None:
        """Out for good if it fails at the first size of all; else only here."""
        if not any(r.contender == contender.key for r in self.results):
            self.absent[contender.key] = reason
        else:
            self.failures.append({"contender": contender.key, "n": n, "threads": count, "reason": reason})

    def document(self, argv: Sequence[str], load_before: float) -> dict[str, Any]:
        """Everything that was measured, as written to json."""
        others = round(self.others_s / self.timed_s, 3) if self.timed_s else 0.0
        labels = {c.key: c.label for c in contenders.ALL}
        all_threads = machine.threads_of_machine() if self.device.type == "cpu" else 1
        judged = results.verdicts(self.results, self.absent, self.device.type, all_threads)
        return {
            "schema": results.SCHEMA,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "benchmarks/cgad_step.py", *argv]),
            "device": self.device.type,
            "seed": self.given.seed,
            "repetitions": self.given.repetitions,
            "sample_s": self.given.sample_s,
            "load_before": load_before,
            "others_cpus": others,
            "quiet": others < QUIET_LOAD,
            "machine": machine.describe(self.device),
            "versions": machine.versions(),
            "floor_method": floor.method(self.device),
            "traffic": [asdict(t) | {"total": t.total} for t in (adam8(), adam32())],
            "floors": [f.as_json() for f in self.floors],
            "results": [r.as_json() for r in self.results],
            "absent": [{"contender": k, "label": labels[k], "reason": r} for k, r in self.absent.items()],
            "failures": self.failures,
            "verdicts": [asdict(v) for v in judged],
        }


def _runner(step: contenders.Step, problem: Problem) -> measure.Runner:
    grads, turn = problem.grads, 0

    def run(calls: int) -> None:
        nonlocal turn
        for _ in range(calls):
            turn += 1
            step(grads[turn % len(grads)])

    return run


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """Write json, markdown and picture of a run; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"cgad_step_{document['device']}.{kind}" for kind in ("json", "md", "png")]
    paths[0].write_text(json.dumps(document, indent=1) + "\n")
    paths[1].write_text(report.markdown(document))
    plot.draw(document, paths[2])
    return paths


def main(argv: Sequence[str]) -> int:
    """Run it; 0 whatever the verdicts are: they are printed, and in the json."""
    given = arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 130)
    load_before = machine.load()
    if load_before >= QUIET_LOAD:
        console.print(f"[yellow]load {load_before}: others may be at work here; see the last lines[/]")
    for key, value in machine.describe(torch.device(given.device)).items():
        console.print(f"[dim]{key:<22}[/]{value}", highlight=False)
    console.print(f"[dim]{'versions':<22}[/]{machine.versions()}", highlight=False)
    console.print(f"[dim]{'floor':<22}[/]{floor.method(torch.device(given.device))}", highlight=False)
    run = Run(given, console)
    run.all()
    document = run.document(argv, load_before)
    console.print(report.judgement([results.Verdict(**v) for v in document["verdicts"]]))
    noise = "" if document["quiet"] else " [yellow](not quiet: do not publish these figures)[/]"
    console.print(f"others kept {document['others_cpus']} processors busy while the clock ran{noise}")
    for path in write(document, given.out):
        console.print(f"wrote {path}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
