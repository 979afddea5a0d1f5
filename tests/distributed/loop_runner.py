"""Starts islands of `loop_worker.py` as processes, and reads what they tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_wsd.diloco.faults import VARIABLE, Fault, join_faults
from megatron_wsd.records import Record, of_kind, read_metrics

HEARTBEAT_S = 1.5
WORKER = str(Path(__file__).parent / "loop_worker.py")


@contextmanager
def lighthouse(port: int = 0) -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=20_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * HEARTBEAT_S),
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


class Islands:
    """The islands of one run."""

    def __init__(self, run_dir: Path, address: str, count: int, raw: dict[str, Any], until: int) -> None:
        self.run_dir, self._address, self._count, self._raw, self._until = run_dir, address, count, raw, until
        run_dir.mkdir(parents=True, exist_ok=True)
        self._starts = 0

    def start(
        self, island: int, faults: list[Fault] | None = None, **job: Any
    ) -> tuple[subprocess.Popen[bytes], Path]:
        self._starts += 1
        out = self.run_dir / f"out_{island}_{self._starts}.json"
        full = {
            "island": island,
            "islands": self._count,
            "lighthouse": self._address,
            "config": self._raw,
            "run_dir": str(self.run_dir),
            "until": self._until,
            "out": str(out),
            **job,
        }
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn", VARIABLE: join_faults(faults or [])}
        log = open(self.run_dir / f"island_{island}.log", "ab")  # noqa: SIM115
        process = subprocess.Popen([sys.executable, WORKER, json.dumps(full)], env=env, stdout=log, stderr=log)
        return process, out

    def result(self, process: subprocess.Popen[bytes], out: Path, timeout: float = 120) -> dict[str, Any]:
        try:
            process.wait(timeout)
        finally:
            process.kill()
        if not out.exists():
            logs = [p.read_text(errors="replace")[-3000:] for p in sorted(self.run_dir.glob("island_*.log"))]
            raise AssertionError(f"{out.name} is missing (exit {process.returncode})\n" + "\n----\n".join(logs))
        return dict(json.loads(out.read_text()))

    def together(self, jobs: list[dict[str, Any]] | None = None, timeout: float = 120) -> list[dict[str, Any]]:
        started = [self.start(i, **job) for i, job in enumerate(jobs or [{}] * self._count)]
        return [self.result(*s, timeout=timeout) for s in started]

    def records(self, island: int) -> list[Record]:
        return read_metrics(self.run_dir / f"island_{island}" / "metrics.jsonl")

    def rounds(self, island: int) -> list[Record]:
        """Committed rounds, as the island saw them."""
        return [r for r in of_kind(self.records(island), "round") if r["committed"]]

    def digests(self, island: int) -> dict[int, str]:
        """Outer step -> digest of the island's outer state after it."""
        return {r["outer_step"]: r["digest"] for r in self.rounds(island)}
