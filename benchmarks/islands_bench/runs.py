"""Runs islands of `worker.py` as processes, with a lighthouse as `megatron-wsd launch` starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_wsd.cli.lighthouse import lighthouse_command
from megatron_wsd.cli.process import free_port
from megatron_wsd.config import IslandsConfig, parse_config
from megatron_wsd.diloco.faults import VARIABLE, Fault, join_faults
from megatron_wsd.records import Record, of_kind, read_metrics

WORKER = str(Path(__file__).parent / "worker.py")
START_S = 120.0  # longest that all islands may take to start and to end


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all islands of a run have in common.

    Attributes:
        sync: the block ``megatron_wsd.sync``; None to train without an outer loop.
        parameters: about how many.
        tokens_per_step: of one island.
        seconds: of training; or else
        steps: of each island, which is what islands that wait for each other can have in common.
    """

    sync: dict[str, Any] | None
    parameters: int
    tokens_per_step: int = 1
    seconds: float | None = None
    steps: int | None = None

    def config(self) -> dict[str, Any] | None:
        """DeepSpeed's json."""
        if self.sync is None:
            return None
        timeouts = {"heartbeat_timeout_s": 5.0, "join_timeout_s": 60.0, "start_timeout_s": START_S}
        block = {"islands": timeouts, "outer": {"optimizer": "cgad"}, "sync": self.sync}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "megatron_wsd": block,
        }


@dataclass(frozen=True)
class Trace:
    """What one island saw.

    Attributes:
        parameters: exactly.
        times: seconds from the first meeting to the end of each inner step and of what the outer loop did
            after it.
        pauses: seconds of each that the outer loop took.
        ended: when training ended, as records tell the time.
        tokens: committed, of all islands.
        records: of its metrics.jsonl.
    """

    parameters: int
    times: list[float]
    pauses: list[float]
    ended: float
    tokens: int = 0
    records: list[Record] = field(default_factory=list)

    @property
    def rounds(self) -> list[Record]:
        """Committed rounds."""
        return [r for r in of_kind(self.records, "round") if r["committed"]]


def run(
    setting: Setting,
    step_s: Sequence[float],
    folder: Path,
    prefix: Sequence[str] = (),
    faults: Sequence[Fault] = (),
) -> list[Trace]:
    """Run one island for each of ``step_s`` and return what each saw.

    Args:
        setting: of all islands.
        step_s: seconds that each island's inner step sleeps.
        folder: the run folder, which is not there yet.
        prefix: of every command, to run it in another network.
        faults: to be injected.

    Raises:
        RuntimeError: an island failed; with the end of its log.
    """
    folder.mkdir(parents=True)
    config, port = setting.config(), free_port()
    processes: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn", VARIABLE: join_faults(faults)}

    def start(command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (folder / log).open("ab") as file:
            process = subprocess.Popen([*prefix, *command], env=environment, stdout=file, stderr=file)
        processes.append(process)
        return process

    try:
        if config is not None:
            islands: IslandsConfig = parse_config(config, islands=len(step_s), ranks=1).islands
            start(lighthouse_command(islands, f"127.0.0.1:{port}"), "lighthouse.log")
        started = []
        for island, seconds in enumerate(step_s):
            job = {
                "island": island,
                "islands": len(step_s),
                "lighthouse": f"http://127.0.0.1:{port}",
                "run_dir": str(folder),
                "config": config,
                "parameters": setting.parameters,
                "step_s": seconds,
                "tokens_per_step": setting.tokens_per_step,
                "seconds": setting.seconds,
                "steps": setting.steps,
                "out": str(folder / f"out_{island}.json"),
            }
            started.append(start([sys.executable, WORKER, json.dumps(job)], f"island_{island}.log"))
        limit = START_S + 10 * (setting.seconds or max(step_s) * (setting.steps or 0))
        for process in started:
            process.wait(limit)
        return [_trace(folder, island) for island in range(len(step_s))]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _trace(folder: Path, island: int) -> Trace:
    out = folder / f"out_{island}.json"
    if not out.exists():
        log = (folder / f"island_{island}.log").read_text(errors="replace")
        raise RuntimeError(f"island {island} failed:\n{log[-3000:]}")
    found = json.loads(out.read_text())
    records = read_metrics(folder / f"island_{island}" / "metrics.jsonl")
    return Trace(
        parameters=found["parameters"],
        times=found["times"],
        pauses=found["pauses"],
        ended=found["ended"],
        tokens=found.get("tokens", 0),
        records=records,
    )
