"""What a run waits for, and what else there is to know of it, in sentences."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_wsd.records import Record
from megatron_wsd.reporting.island import QUIET_S, IslandRecords

_NOT_COMING = ("stopped", "failed", "lost", "absent")
_LATE = 3  # usual gaps between two commits, after which the next one is late


def sentences(
    islands: list[dict[str, Any]],
    seen: dict[int, IslandRecords],
    newest: Record,
    block: dict[str, Any],
    now: float,
) -> tuple[list[str], list[str]]:
    """What has to happen before the run goes on and what happens next; and what is only to be known.

    Args:
        islands: what `RunStatus.look` tells of them.
        seen: the records of those whose folders are here.
        newest: the newest committed round; {} before the first.
        block: of the run's config, with all defaults.
        now: Unix time.
    """
    waiting: list[str] = []
    notes: list[str] = []
    sync = block.get("sync", {})
    alive = [i for i in islands if i["state"] in ("running", "silent")]
    over = [i["island"] for i in islands if i["state"] == "finished"]
    there = len(alive) + sum(i["state"] in ("starting", "elsewhere") for i in islands)
    enough = there >= (block.get("islands", {}).get("min_islands") or 1)
    for island in islands:
        number, state, log = island["island"], island["state"], island["log"]
        record = seen.get(number)
        if state == "starting" and over:
            notes.append(
                f"the run is over ({_names(over)} finished): nobody is left for island {number} to meet"
            )
        elif state == "starting" and record is not None and record.waits:
            away = [f"{i['island']} ({i['state']})" for i in islands if i["state"] in _NOT_COMING]
            others = f"island{'s' * (len(away) > 1)} {', '.join(away)}: start with --resume" if away else ""
            waiting.append(
                f"island {number}: it has begun, and waits for {others or 'the others or its first step'}"
            )
        elif state == "starting":
            waiting.append(f"island {number}: it is starting, and has recorded nothing yet")
        elif state == "failed":
            waiting.append(f"island {number}: it failed at its start, before any record; all it said: {log}")
        elif state == "lost" and alive and enough:
            notes.append(f"island {number} is lost, and the others go on; --resume starts it again: {log}")
        elif state == "lost":
            waiting.append(f"island {number}: it ended without a word; {log} tells why; --resume goes on")
        elif state == "silent":
            waiting.append(f"island {number}: it is there, but silent for {duration(island['age_s'])}")
        elif state == "absent" and not newest and (there or not seen):
            waiting.append(f"island {number}: it has no folder here, and there was no round yet")
        elif state == "absent" and alive:
            notes.append(f"island {number} has no folder here and is in no recent round")
        if record is not None and island in alive:
            waiting += _rounds_and_checkpoints(record, sync)
    running = [i for i in alive if i["state"] == "running"]
    if alive:
        waiting += _late_commit(alive, seen, newest, sync, now)
    if running and sync.get("mode", "sync") == "sync" and sync.get("inner_steps"):
        waiting += _next_round(running, seen, sync["inner_steps"])
    return waiting, notes


def _rounds_and_checkpoints(record: IslandRecords, sync: dict[str, Any]) -> list[str]:
    told = []
    if record.lighthouse.get("answers") is False:
        told.append(f"island {record.number}: {record.lighthouse['message']}")
    if record.void_in_a_row:
        reason = record.round.get("reason") or "no reason told"
        void = f"{record.void_in_a_row} void in a row: {reason}"
        told.append(f"island {record.number}: a round that commits ({void})")
    for part in (record.folder / "checkpoints").glob("step_*.part"):
        own = "own " if sync.get("mode") == "async" else ""
        told.append(f"island {record.number}: it is writing the checkpoint of {own}step {_step_of(part)}")
    return told


def _due(islands: list[dict[str, Any]], seen: dict[int, IslandRecords], inner_steps: int) -> int:
    """The step of the next synchronous round."""
    return inner_steps + max((seen[i["island"]].commit.get("step", 0) for i in islands), default=0)


def _next_round(running: list[dict[str, Any]], seen: dict[int, IslandRecords], inner_steps: int) -> list[str]:
    """Where the islands stand on their way to the next synchronous round."""
    due = _due(running, seen, inner_steps)
    slowest = min(running, key=lambda i: i["step"])
    number = max(i["outer_step"] or 0 for i in running) + 1
    if due <= slowest["step"]:
        return [f"round {number} at step {due}"]
    speed = f", island {slowest['island']} is the furthest behind" if len(running) > 1 else ""
    left = due - slowest["step"]
    return [f"round {number} at step {due}: {left} inner step{'s' * (left != 1)} to go{speed}"]


def _late_commit(
    alive: list[dict[str, Any]],
    seen: dict[int, IslandRecords],
    newest: Record,
    sync: dict[str, Any],
    now: float,
) -> list[str]:
    """That the next committed round is late, and whose fault it may be; nothing if it is not."""
    gaps = [b - a for record in seen.values() for a, b in pairwise(record.commit_times)]
    if not newest or not gaps:
        return []
    age, usual = now - newest["time"], median(gaps)
    if age <= max(QUIET_S, _LATE * usual):
        return []
    late = f"a round: the last was committed {duration(age)} ago, one every {duration(usual)} is usual"
    if sync.get("mode", "sync") != "sync" or not sync.get("inner_steps"):
        return [f"{late}; their logs and lighthouse.log tell why"]
    due = _due(alive, seen, sync["inner_steps"])
    last = min(i["step"] for i in alive)
    if last >= due:
        return [f"{late}; all have trained to step {due}, so it is the exchange: their logs tell why"]
    behind = [i["island"] for i in alive if i["step"] == last]
    return [f"{late}; what is missing is step {due} on {_names(behind)}, last seen at {last}"]


def _names(islands: list[int]) -> str:
    return ("island " if len(islands) == 1 else "islands ") + ", ".join(map(str, islands))


def _step_of(part: Path) -> int:
    return int(part.name.removeprefix("step_").split(".")[0])


def duration(seconds: float) -> str:
    """``42 s``, ``5 min``, ``3.1 h`` or ``2.0 d``."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
