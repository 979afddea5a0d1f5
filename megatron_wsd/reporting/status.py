"""The state of a run as its folder shows it: only files are read, over a shared disk or afterwards too."""

from __future__ import annotations

import json
import math
import socket
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.control import ControlFolder
from megatron_wsd.errors import ConfigError
from megatron_wsd.lineage import own_orders
from megatron_wsd.records import Follow, Record, anchors, is_void, island_folders, position
from megatron_wsd.rundir import RunDir, holder

_QUIET_S = 60.0  # an island silent for longer than this, and than three of its usual gaps, is not going on
_STARTING_S = 600.0  # from the last line of its log to the first record: imports, data, the engine


# What the status says of every island; None is what is not known.
_OF_AN_ISLAND = (
    *("island", "state", "process", "log", "age_s", "step", "position", "outer_step", "loss", "lr", "phase"),
    *("tokens", "tokens_per_s", "grad_norm", "staleness", "gate", "lag", "bytes"),
    *("rounds_committed", "rounds_void", "round_s", "checkpoint"),
)


class RunStatus:
    """Looks at a run folder again and again; every look reads only what is new in the metrics.

    Args:
        run_dir: the run folder.

    Raises:
        ConfigError: it is no run folder.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir).absolute()
        if not (self.path / "run.json").is_file() and not island_folders(self.path):
            raise ConfigError("RUN", "a run folder", f"{run_dir}, which is none", "Check the path.")
        self._islands: dict[int, _Island] = {}

    def look(self, now: float | None = None) -> dict[str, Any]:
        """The status as a json-able dict.

        ``step`` of an island counts inner steps of its own, ``position`` those of the run, which the schedule
        follows; in synchronous mode they are one.
        Ages and times are in seconds, losses in nats a token, bytes over all ranks of an island, sent and
        received.

        Args:
            now: Unix time; the clock by default.
        """
        now = time.time() if now is None else now
        for number, folder in island_folders(self.path).items():
            self._islands.setdefault(number, _Island(number, folder)).read()
        facts, sync = _json(self.path / "run.json"), _sync(self.path)
        seen = dict(sorted(self._islands.items()))
        newest = _newest_round(seen)
        here = holder(self.path / "launch.lock") is not None
        count = max([facts.get("islands") or 0, *(i + 1 for i in seen)])
        offered = _contributions(seen)
        islands = [
            seen[i].status(now, newest, launched_here=here) if i in seen else _elsewhere(i, newest, now)
            for i in range(count)
        ]
        for island in islands:
            record = offered.get(island["island"], {})
            for key, each in (("staleness", "staleness"), ("gate", "gates")):
                island[key] = record.get(each, {}).get(str(island["island"]))
        control, own = ControlFolder(self.path), own_orders(RunDir(self.path))
        inherited = len(control.accepted()) - len(own)
        orders = {"pending": _pending(control), "accepted": own, "inherited": control.accepted()[:inherited]}
        running = [i for i in islands if i["state"] == "running"]
        ahead = max(islands, key=lambda i: i["tokens"] or 0, default={})
        return {
            "run": self.path.name,
            "path": str(self.path),
            "time": now,
            "state": _state(islands),
            "version": facts.get("version"),
            "created": facts.get("created"),
            "ranks": facts.get("ranks"),
            "lighthouse": facts.get("lighthouse"),
            "parent": (facts.get("parent") or {}).get("path"),
            "mode": sync.get("mode", "sync"),
            "outer_step": max((i["outer_step"] for i in islands if i["outer_step"] is not None), default=0),
            "position": max((i["position"] for i in islands if i["position"] is not None), default=0),
            "tokens": ahead.get("tokens"),
            "phase": ahead.get("phase"),
            "lr": ahead.get("lr"),
            "tokens_per_s": sum(i["tokens_per_s"] or 0.0 for i in running),
            "bytes": sum(i["bytes"] for i in islands),
            "anchor": _anchor(seen),
            "fragments": _fragments(seen),
            "islands": islands,
            "orders": orders,
            "waiting_for": _waiting(islands, seen, orders, sync, now),
        }


class _Island:
    """What the records of one island have told so far."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self._follow = Follow(folder / "metrics.jsonl")
        self._times: deque[float] = deque(maxlen=20)
        self._begun: float | None = None
        self.step: Record = {}
        self.round: Record = {}
        self.commit: Record = {}
        self.adopt: Record = {}
        self.last: Record = {}
        self.end: Record = {}
        self.evals: dict[str, Record] = {}
        self.fragments: dict[int, Record] = {}
        self.contributions: dict[int, Record] = {}  # of every island, the newest committed round with one
        self.bytes = self.committed = self.void = self.void_in_a_row = 0

    def read(self) -> None:
        """Take in what was appended since the last call."""
        for record in self._follow.poll():
            kind = record["kind"]
            if kind == "start":
                self._times.clear()
                self.end, self.step, self.void_in_a_row = {}, {}, 0
                self._begun = record.get("time")
            elif kind == "step":
                self.step = record
            elif kind == "adopt":
                self.adopt = record
            elif kind == "eval" and record.get("target") == "anchor":
                self.evals[record["corpus"]] = record
            elif kind == "event" and record.get("event") in ("finish", "stop"):
                self.end = record
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
        self.contributions |= dict.fromkeys(map(int, record.get("staleness") or ()), record)
        if record.get("fragment") is not None:
            self.fragments[record["fragment"]] = record

    @property
    def quiet_s(self) -> float:
        """Seconds of silence from which the island is not going on."""
        return max([_QUIET_S, *(3 * (b - a) for a, b in pairwise(self._times))])

    def status(self, now: float, newest: Record, *, launched_here: bool) -> dict[str, Any]:
        """This island's part of `RunStatus.look`."""
        process = holder(self.folder / "lock")
        age = max(0.0, now - self.last["time"]) if self.last else None
        rounds = [r["outer_step"] for r in (self.commit, self.round) if r.get("outer_step") is not None]
        return {
            "island": self.number,
            "state": self._state(now, age, process, newest, launched_here),
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
            "checkpoint": _newest_checkpoint(self.folder / "checkpoints"),
        }

    def _log_age(self, now: float) -> float:
        try:
            return now - (self.folder / "log.txt").stat().st_mtime
        except OSError:
            return math.inf

    def _state(
        self, now: float, age: float | None, process: int | None, newest: Record, launched_here: bool
    ) -> str:
        if self.end:
            return "finished" if self.end["event"] == "finish" else "stopped"
        if age is None:
            if process is None and _ended_here(self.folder / "lock"):
                return "failed"
            return "starting" if process is not None or self._log_age(now) < _STARTING_S else "lost"
        if process is not None:
            return "running" if age <= self.quiet_s else "silent"
        # On another machine, or gone. A launch that runs here has all its islands here, and the others of a
        # round leave out who does not answer.
        left_out = newest.get("time", 0.0) > self.last["time"] and self.number not in newest["islands"]
        return "lost" if launched_here or left_out or age > self.quiet_s else "running"


def _ended_here(lock: Path) -> bool:
    """Whether a lock file that nobody has open is that of a process of this machine."""
    try:
        return lock.read_text().split()[1:] == [socket.gethostname()]
    except OSError:
        return False


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _sync(run: Path) -> dict[str, Any]:
    """The block ``sync`` of the run's config, which holds all defaults."""
    sync = _json(run / "config.json").get("megatron_wsd", {}).get("sync", {})
    return dict(sync)


def _newest_round(seen: dict[int, _Island]) -> Record:
    """The last committed round that any island has recorded."""
    return max((i.commit for i in seen.values()), key=lambda r: r.get("time", 0.0), default={})


def _contributions(seen: dict[int, _Island]) -> dict[int, Record]:
    """Of every island the newest committed round that it contributed to, whoever recorded it."""
    found: dict[int, Record] = {}
    for island in seen.values():
        for number, record in island.contributions.items():
            if record["outer_step"] >= found.get(number, record)["outer_step"]:
                found[number] = record
    return found


def _elsewhere(number: int, newest: Record, now: float) -> dict[str, Any]:
    """An island whose folder is not on this disk: what the rounds of the others tell of it."""
    here = number in newest.get("islands", ()) and now - newest["time"] <= 10 * _QUIET_S
    return dict.fromkeys(_OF_AN_ISLAND) | {
        "island": number,
        "state": "elsewhere" if here else "absent",
        "bytes": 0,
        "rounds_committed": 0,
        "rounds_void": 0,
    }


def _newest_checkpoint(root: Path) -> dict[str, Any] | None:
    """Step of the island, position, rounds and time of the newest complete checkpoint."""
    store = CheckpointStore(root, 2)
    for folder in sorted(root.glob("step_" + "[0-9]" * 8), reverse=True):
        step = int(folder.name.removeprefix("step_"))
        if (content := store.manifest(step)) is not None:
            written = (folder / "checkpoint.json").stat().st_mtime
            stood = content.get("schedule", {}).get("position", step)
            return {"step": step, "position": stood, "outer_step": content.get("outer_step"), "time": written}
    return None


def _pending(control: ControlFolder) -> dict[str, Any] | None:
    try:
        order = control.pending()
    except (ConfigError, OSError) as e:
        return {"kind": "unreadable", "message": str(e)}
    return None if order is None else order.model_dump(mode="json")


def _anchor(seen: dict[int, _Island]) -> dict[str, dict[str, Any]]:
    found = anchors([record for island in seen.values() for record in island.evals.values()])
    return {c: {"loss": r[-1]["loss"], "step": position(r[-1])} for c, r in found.items()}


def _fragments(seen: dict[int, _Island]) -> list[dict[str, Any]]:
    """The newest commit of every fragment; [] where rounds take the whole model."""
    newest: dict[int, Record] = {}
    for island in seen.values():
        for fragment, record in island.fragments.items():
            if record["time"] >= newest.get(fragment, record)["time"]:
                newest[fragment] = record
    keys = ("fragment", "version", "outer_step", "step", "staleness", "gates")
    return [{key: record.get(key) for key in keys} for _, record in sorted(newest.items())]


def _state(islands: list[dict[str, Any]]) -> str:
    states = {i["state"] for i in islands}
    if states & {"running", "silent"}:
        return "running"
    if "starting" in states:
        return "starting"
    ended = states - {"elsewhere", "absent", "lost"}
    if ended - {"failed"}:
        return "finished" if "finished" in ended else "stopped"
    return next((state for state in ("failed", "lost") if state in states), "not started")


def _waiting(
    islands: list[dict[str, Any]],
    seen: dict[int, _Island],
    orders: dict[str, Any],
    sync: dict[str, Any],
    now: float,
) -> list[str]:
    """What has to happen before the run goes on, and what happens next, a sentence each."""
    told = []
    alive = [i for i in islands if i["state"] in ("running", "silent")]
    for island in islands:
        number, state = island["island"], island["state"]
        record = seen.get(number)
        if state == "starting":
            told.append(f"island {number} is starting and has not recorded anything yet")
        elif state == "failed":
            told.append(f"island {number} failed before its first record; all it said: {island['log']}")
        elif state == "lost" and alive:
            told.append(f"island {number} is lost: start it again with --resume; the others go on if enough")
        elif state == "lost":
            told.append(f"island {number} ended without a word; {island['log']} tells why; --resume goes on")
        elif state == "absent" and (alive or not seen):
            told.append(f"island {number} has no folder here and is in no recent round")
        elif state == "silent":
            told.append(f"island {number} is there but silent for {island['age_s']:.0f} s")
        if record is not None and state in ("running", "silent"):
            if record.void_in_a_row:
                reason = record.round.get("reason") or "no reason told"
                told.append(
                    f"island {number}: a round that commits ({record.void_in_a_row} void in a row: {reason})"
                )
            if not record.step and record.last.get("kind") == "start":
                told.append(f"island {number} has started and waits for the other islands or its first step")
            for part in (record.folder / "checkpoints").glob("step_*.part"):
                own = "own " if sync.get("mode") == "async" else ""
                told.append(f"island {number} is writing the checkpoint of {own}step {_step_of(part)}")
    if orders["pending"] is not None and alive:
        told.append(f"the order that waits ({orders['pending']['kind']}) is taken in the next outer round")
    running = [i for i in alive if i["state"] == "running"]
    if running and sync.get("mode", "sync") == "sync" and sync.get("inner_steps"):
        told += _next_round(running, seen, sync["inner_steps"], now)
    return told


def _next_round(
    running: list[dict[str, Any]], seen: dict[int, _Island], inner_steps: int, now: float
) -> list[str]:
    """Where the islands stand on their way to the next synchronous round."""
    base = max((seen[i["island"]].commit.get("step", 0) for i in running), default=0)
    due = base + inner_steps
    behind = [i for i in running if i["step"] < due]
    slowest = min(behind, key=lambda i: i["step"], default=None)
    number = max(i["outer_step"] or 0 for i in running) + 1
    if slowest is None or due - slowest["step"] <= 0:
        return [f"round {number} at step {due}"]
    speed = f", island {slowest['island']} is the furthest behind" if len(running) > 1 else ""
    return [f"round {number} at step {due}: {due - slowest['step']} inner steps to go{speed}"]


def _step_of(part: Path) -> int:
    return int(part.name.removeprefix("step_").split(".")[0])
