"""Starts islands of `loop_worker.py` as processes, and reads what they tell."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_wsd.diloco.faults import Fault, join_faults
from megatron_wsd.records import Record, of_kind, read_metrics

HEARTBEAT_S = 1.5
HERE = str(Path(__file__).parent)


@contextmanager
def lighthouse(port: int = 0, heartbeat_s: float = HEARTBEAT_S, join_s: float = 20.0) -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=int(1000 * join_s),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * heartbeat_s),
    )
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


def config(mode: str, **sync: Any) -> dict[str, Any]:
    outer = sync.pop("outer", {})
    islands = sync.pop("islands", {})
    timeouts = {"heartbeat_timeout_s": HEARTBEAT_S, "join_timeout_s": 20.0, "start_timeout_s": 60.0}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "megatron_wsd": {
            "islands": {**timeouts, **islands},
            "outer": {"optimizer": "cgad", "lr": 0.01, **outer},
            "sync": {
                "mode": mode,
                "inner_steps": 6,
                "timeout_s": 4.0,
                "bucket_bytes": 4096,
                **({"grace_s": 0.3, "poll_s": 0.05} if mode == "async" else {}),
                **sync,
            },
        },
    }


class Process:
    """One island, as a process of its own."""

    def __init__(self, job: dict[str, Any], faults: str, log: Path) -> None:
        from loop_worker import forked

        self.out = Path(job["out"])
        self._process = _context().Process(target=forked, args=(job, faults, str(log)))
        self._process.start()

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def terminate(self) -> None:
        self._process.terminate()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self.poll()


def _context() -> Any:
    """Processes are forked from one that has imported everything: a start takes 0.1 s instead of 2."""
    if HERE not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *sys.path, os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loop_worker"])
    return context


class Islands:
    """The islands of one run."""

    def __init__(self, run_dir: Path, address: str, count: int, raw: dict[str, Any], until: int) -> None:
        self.run_dir, self._address, self._count, self._raw, self._until = run_dir, address, count, raw, until
        run_dir.mkdir(parents=True, exist_ok=True)
        self._starts = 0

    def start(self, island: int, faults: list[Fault] | None = None, **job: Any) -> Process:
        self._starts += 1
        full = {
            "island": island,
            "islands": self._count,
            "lighthouse": self._address,
            "config": self._raw,
            "run_dir": str(self.run_dir),
            "until": self._until,
            "out": str(self.run_dir / f"out_{island}_{self._starts}.json"),
            **job,
        }
        return Process(full, join_faults(faults or []), self.log(island))

    def log(self, island: int) -> Path:
        return self.run_dir / f"island_{island}.log"

    def result(self, process: Process, timeout: float = 120) -> dict[str, Any]:
        try:
            process.wait(timeout)
        finally:
            process.kill()
        if not process.out.exists():
            logs = [p.read_text(errors="replace")[-3000:] for p in sorted(self.run_dir.glob("island_*.log"))]
            raise AssertionError(
                f"{process.out.name} is missing (exit {process.poll()})\n" + "\n----\n".join(logs)
            )
        return dict(json.loads(process.out.read_text()))

    def together(
        self, jobs: list[dict[str, Any]] | None = None, timeout: float = 120
    ) -> list[dict[str, Any]]:
        started = [self.start(i, **job) for i, job in enumerate(jobs or [{}] * self._count)]
        return [self.result(s, timeout) for s in started]

    def records(self, island: int) -> list[Record]:
        return read_metrics(self.run_dir / f"island_{island}" / "metrics.jsonl")

    def rounds(self, island: int) -> list[Record]:
        """Committed rounds, as the island saw them."""
        return [r for r in of_kind(self.records(island), "round") if r["committed"]]

    def digests(self, island: int) -> dict[int, str]:
        """Outer step -> digest of the island's outer state after it."""
        return {r["outer_step"]: r["digest"] for r in self.rounds(island)}
