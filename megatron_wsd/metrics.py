"""What a run tells while it runs: one json line a fact, the monitor, and the console."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def say(text: str) -> None:
    """One line for the console; `megatron-wsd island` passes on lines with this mark."""
    # In one write: ranks share a pipe, and print writes the end of the line apart.
    sys.stdout.write(f"megatron-wsd: {text}\n")
    sys.stdout.flush()


class Metrics:
    """Appends records to ``metrics.jsonl`` and the numbers among them to DeepSpeed's monitor.

    For one rank of an island; on the others `quiet` makes every call do nothing.

    Args:
        path: of the file; made if it is not there. A torn last line of an earlier process is ended.
        monitor: ``engine.monitor``; None without one.
    """

    def __init__(self, path: Path | None, monitor: Any = None) -> None:
        self._file: TextIO | None = None
        self._monitor = monitor if path is not None else None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        if self._file.tell() and path.read_bytes()[-1:] != b"\n":
            self._file.write("\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; ``time`` is added, numbers that are not finite become null."""
        if self._file is None:
            return
        record = {"kind": kind, "time": time.time(), **fields}
        self._file.write(json.dumps(_finite(record)) + "\n")
        if self._monitor is not None and self._monitor.enabled and "step" in fields:
            label = f"{fields['target']}/{fields['corpus']}" if kind == "eval" else ""
            events = [
                (f"megatron_wsd/{kind}/{label}{name}", float(value), int(fields["step"]))
                for name, value in fields.items()
                if isinstance(value, (int, float)) and name != "step"
            ]
            self._monitor.write_events(events)

    def event(self, event: str, step: int, message: str) -> None:
        """Record something that happened, and say it on the console."""
        if self._file is None:
            return
        self.write("event", event=event, step=step, message=message)
        say(message)

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
