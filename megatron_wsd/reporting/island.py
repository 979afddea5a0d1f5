"""What the files of one island tell of it: its records so far, its process, its newest checkpoint."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.records import Follow, Record, is_void, position
from megatron_wsd.rundir import holder, holder_ended

QUIET_S = 60.0  # an island silent for longer than this, and than three of its usual gaps, is not going on
_STARTING_S = 600.0  # for imports, data, the engine and the meeting, where only files tell of an island


class IslandRecords:
    """What the records of one island have told so far.

    Args:
        number: of the island.
        folder: of the island.

    Attributes:
        step, round, commit, adopt, last: the newest inner step, outer round, committed round, adoption and
            record of any kind.
        end: the ``finish`` or ``stop`` after the newest start; {} without one.
        lighthouse: what it told last of the lighthouse, which it looks after all the time; {} if nothing.
        evals: the newest validation of the anchor, by corpus.
        fragments: the newest commit of each fragment.
        contributions: the newest committed round with a contribution, of every island.
        commit_times: when the newest rounds since the newest start were committed, in Unix seconds.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self._follow = Follow(folder / "metrics.jsonl")
        self._times: deque[float] = deque(maxlen=20)
        self.commit_times: deque[float] = deque(maxlen=20)
        self.step: Record = {}
        self.round: Record = {}
        self.commit: Record = {}
        self.adopt: Record = {}
        self.last: Record = {}
        self.end: Record = {}
        self.lighthouse: Record = {}
        self.evals: dict[str, Record] = {}
        self.fragments: dict[int, Record] = {}
        self.contributions: dict[int, Record] = {}
        self.bytes = self.committed = self.void = self.void_in_a_row = 0

    def read(self) -> None:
        """Take in what was appended since the last call."""
        for record in self._follow.poll():
            kind = record["kind"]
            if kind == "start":
                self._times.clear()
                self.commit_times.clear()
                self.end, self.step, self.lighthouse, self.void_in_a_row = {}, {}, {}, 0
            elif kind == "step":
                self.step = record
            elif kind == "adopt":
                self.adopt = record
            elif kind == "eval" and record.get("target") == "anchor":
                self.evals[record["corpus"]] = record
            elif kind == "event" and record.get("event") in ("finish", "stop"):
                self.end = record
            elif kind == "event" and record.get("event") == "lighthouse":
                self.lighthouse = record
            elif kind == "round":
                self._take_round(record)
            if "time" in record:
                self._times.append(record["time"])
                self.last = record

    def _take_round(self, record: Record) -> None:
        self.round = record
        self.bytes += record.get("island_bytes") or 0
        if not record.get("committed"):
            self.void += is_void(record)
            self.void_in_a_row = self.void_in_a_row + 1 if is_void(record) else 0
            return
        self.committed, self.void_in_a_row = self.committed + 1, 0
        self.commit = record
        if "time" in record:
            self.commit_times.append(record["time"])
        self.contributions |= dict.fromkeys(map(int, record.get("staleness") or ()), record)
        if record.get("fragment") is not None:
            self.fragments[record["fragment"]] = record

    @property
    def quiet_s(self) -> float:
        """Seconds of silence from which the island is not going on."""
        return max([QUIET_S, *(3 * (b - a) for a, b in pairwise(self._times))])

    @property
    def waits(self) -> bool:
        """Whether it has begun, and has told of no step and no round since."""
        return self.last.get("kind") == "start"

    def status(self, now: float, newest: Record, launched: float | None) -> dict[str, Any]:
        """This island's part of `RunStatus.look`.

        Args:
            now: Unix time.
            newest: the newest committed round of the run.
            launched: since when a launch of this machine has the run, in Unix seconds; None without one.
        """
        process = holder(self.folder / "lock")
        age = max(0.0, now - self.last["time"]) if self.last else None
        rounds = [r["outer_step"] for r in (self.commit, self.round) if r.get("outer_step") is not None]
        return {
            "island": self.number,
            "state": self._state(now, process, newest, launched),
            "process": process,
            "log": str(self.folder / "log.txt"),
            "age_s": age,
            "step": max(r.get("step", 0) for r in (self.step, self.last)),
            "position": max((position(r) for r in (self.step, self.last) if r), default=0),
            "outer_step": max(rounds, default=None),
            "loss": self.step.get("loss"),
            "lr": self.step.get("lr"),
            "phase": self.step.get("phase"),
            "tokens": self.end.get("tokens", self.step.get("tokens")),
            "tokens_per_s": self.step.get("tokens_per_s"),
            "grad_norm": self.step.get("grad_norm"),
            "lag": self.adopt.get("lag"),
            "bytes": self.bytes,
            "rounds_committed": self.committed,
            "rounds_void": self.void,
            "round_s": self.round.get("seconds"),
            "checkpoint": newest_checkpoint(self.folder / "checkpoints"),
        }

    def _state(self, now: float, process: int | None, newest: Record, launched: float | None) -> str:
        """The first that applies, from what the machine knows at once to what only silence tells."""
        lock = self.folder / "lock"
        told, came = self.last.get("time", -math.inf), _written(lock)
        ended = process is None and holder_ended(lock)
        if launched is not None and launched > max(told, came):
            return "starting"  # the launch has not come to it yet
        if came > told and (ended or process is not None):
            return "failed" if ended else "starting"  # the newest process has recorded nothing
        if not self.last:
            return "starting" if now - _written(self.folder / "log.txt") < _STARTING_S else "lost"
        if self.end:
            return "finished" if self.end["event"] == "finish" else "stopped"
        if ended:
            return "lost"
        age = now - told
        if self.waits:
            return "starting" if process is not None or age < _STARTING_S else "lost"
        if process is not None:
            return "running" if age <= self.quiet_s else "silent"
        # On another machine, or gone. A launch that runs here has all its islands here, and the others of a
        # round leave out who does not answer.
        left_out = newest.get("time", 0.0) > told and self.number not in newest["islands"]
        return "lost" if launched is not None or left_out or age > self.quiet_s else "running"


def _written(path: Path) -> float:
    """When a file was last written, in Unix seconds; long ago if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return -math.inf


def newest_checkpoint(root: Path) -> dict[str, Any] | None:
    """Step of the island, position, rounds and time of the newest complete checkpoint."""
    store = CheckpointStore(root, 2)
    for folder in sorted(root.glob("step_" + "[0-9]" * 8), reverse=True):
        step = int(folder.name.removeprefix("step_"))
        if (content := store.manifest(step)) is not None:
            written = (folder / "checkpoint.json").stat().st_mtime
            stood = content.get("schedule", {}).get("position", step)
            return {"step": step, "position": stood, "outer_step": content.get("outer_step"), "time": written}
    return None
