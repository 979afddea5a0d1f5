"""What a run tells while it runs: one json line a fact, the monitor, and the console."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from megatron_wsd.monitors import Monitors


def say(text: str) -> None:
    """One line for the log, with island and rank; `megatron-wsd island` passes it on to the console.

    Errors name island and rank themselves.
    """
    # In one write: ranks share a pipe, and print writes the end of the line apart.
    try:
        sys.stdout.write(_line(text))
        sys.stdout.flush()
    except BrokenPipeError:  # the launcher is gone: what is under way is to be saved all the same
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def say_at_once(text: str) -> None:
    """`say` for a signal handler: what it interrupts may be a print, which cannot be entered twice."""
    with contextlib.suppress(OSError):
        os.write(1, _line(text).encode())


def _line(text: str) -> str:
    island, rank = os.environ.get("MEGATRON_WSD_ISLAND"), os.environ.get("RANK", "0")
    who = "" if island is None or text.startswith("error: ") else f"[island {island} rank {rank}] "
    return f"megatron-wsd: {who}{text}\n"


def set_up_logging(island: str, rank: int) -> None:
    """Log lines with island and rank, each warning once, and those of frameworks on rank 0 alone.

    Args:
        island: number of the island.
        rank: inside the island.
    """
    logging.basicConfig(
        level=os.environ.get("MEGATRON_WSD_LOG", "INFO"),
        format=f"%(asctime)s [island {island} rank {rank}] %(levelname)s %(name)s: %(message)s",
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Once())
    logging.getLogger("megatron").setLevel(logging.WARNING)
    for noisy in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Python's own warnings become log lines of one line each; every rank would say the same ones.
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    warnings.formatwarning = lambda text, kind, *_: f"{kind.__name__}: {' '.join(str(text).split())}"
    warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex are not installed.*")


class _Once(logging.Filter):
    """Lets every text of a warning through once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = f"{record.name}: {record.getMessage()}"
        new = text not in self._said
        if len(self._said) < 10_000:  # texts with numbers in them are all new
            self._said.add(text)
        return new


class Metrics:
    """Appends records to ``metrics.jsonl`` and the numbers among them to DeepSpeed's monitor.

    For one rank of an island; on the others `quiet` makes every call do nothing.

    Args:
        path: of the file; made if it is not there. A torn last line of an earlier process is ended.
        monitors: that are told the numbers; None without any.

    Attributes:
        position: tells where the island stands in the schedule, which asynchronous islands do not count by
            steps of their own. None: the step of each record is that position.
    """

    def __init__(self, path: Path | None, monitors: Monitors | None = None) -> None:
        self.position: Callable[[], int] | None = None
        self._file: TextIO | None = None
        self._monitors = monitors if path is not None else None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        if self._file.tell() and path.read_bytes()[-1:] != b"\n":
            self._file.write("\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; ``time`` and ``position`` are added, numbers that are not finite become null."""
        if self._file is None:
            return
        fields = {"step": fields["step"], "position": self.at(fields["step"]), **fields}
        record = {"kind": kind, "time": time.time(), **fields}
        self._file.write(json.dumps(_finite(record)) + "\n")
        if self._monitors is not None:
            self._monitors.tell(kind, fields)

    def at(self, step: int) -> int:
        """The position of the schedule at ``step``, an inner step of the island that it has just reached."""
        return step if self.position is None else self.position()

    def event(self, event: str, step: int, message: str, **fields: Any) -> None:
        """Record something that happened, and say it on the console."""
        if self._file is None:
            return
        self.write("event", event=event, step=step, message=message, **fields)
        say(message)

    def tell(self, text: str) -> None:
        """Say it on the console, once an island."""
        if self._file is not None:
            say(text)

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return value
