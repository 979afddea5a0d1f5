"""Reading back ``metrics.jsonl``, one json record a line, as the trainer of each island writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_KEYS = ("target", "corpus", "fragment")


def read_metrics(path: str | Path) -> list[Record]:
    """All records of a file that still hold, in the order they were written; [] if there is no file.

    A run that was killed leaves a torn last line, and one that resumes does some steps again. Lines that
    cannot be read are left out. What was said again after a later ``start`` record (the same kind, step or
    round, target, corpus and fragment) replaces what was said before it; within one start everything is kept,
    so a round that is void and commits at the next try counts as both. Events are always kept. A loss that
    was not finite is None.
    """
    file = Path(path)
    if not file.exists():
        return []
    begun = 0
    newest: dict[tuple[Any, ...], int] = {}
    found: list[tuple[int, tuple[Any, ...], Record]] = []
    for line in file.read_text(errors="replace").splitlines():
        record = parse_record(line)
        if record is None:
            continue
        begun += record["kind"] == "start"
        key = (record["kind"], _which(record), *(record.get(k) for k in _KEYS))
        newest[key] = begun
        found.append((begun, key, record))
    return [r for start, key, r in found if r["kind"] in ("start", "event") or newest[key] == start]


def _which(record: Record) -> int | None:
    """What a record is about: a step of its island, or a round.

    An asynchronous island that is restarted does steps again, but no round.
    """
    if record["kind"] == "round":
        return int(record["outer_step"]) + (not record["committed"])
    return record.get("step")


def parse_record(line: str | bytes) -> Record | None:
    """The record that a line holds; None if it is torn or something else."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


class Follow:
    """Reads a growing ``metrics.jsonl``, each line once.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def poll(self) -> list[Record]:
        """What was appended since the last call. A line that is not whole yet waits for its end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:  # not there yet, or a shared disk that is away for a moment
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.splitlines() if (record := parse_record(line)) is not None]


def running(run_dir: str | Path) -> list[tuple[float, float]]:
    """When any island of a run was up: (begin, end) in Unix seconds, apart from each other and ascending.

    An island is up from the first record of each start to the last one before the next start; nobody can tell
    when a killed one ended.
    """
    each: list[tuple[float, float]] = []
    for folder in island_folders(run_dir).values():
        fresh = True
        for record in Follow(folder / "metrics.jsonl").poll():
            fresh = fresh or record["kind"] == "start"
            if "time" in record:
                begin = record["time"] if fresh else each.pop()[0]
                each.append((begin, record["time"]))
                fresh = False
    found: list[tuple[float, float]] = []
    for begin, end in sorted(each):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def island_folders(run_dir: str | Path) -> dict[int, Path]:
    """The folders of the islands of a run that are on this disk, by island number."""
    numbered = {
        int(match[1]): folder
        for folder in Path(run_dir).glob("island_*")
        if (match := re.fullmatch(r"island_(\d+)", folder.name))
    }
    return dict(sorted(numbered.items()))


def read_islands(run_dir: str | Path) -> dict[int, list[Record]]:
    """The records of each island of a run that has any, by island number."""
    found = {i: read_metrics(folder / "metrics.jsonl") for i, folder in island_folders(run_dir).items()}
    return {number: records for number, records in found.items() if records}


def of_kind(records: list[Record], kind: str) -> list[Record]:
    """The records of one kind by step, in written order within a step."""
    return sorted((r for r in records if r["kind"] == kind), key=lambda r: r["step"])


def position(record: Record) -> int:
    """Where the island stood in the schedule, in inner steps of the run.

    In synchronous mode, and in records that do not tell it, that is the step of the island.
    """
    return int(record["position"] if "position" in record else record["step"])


def anchors(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The validations of the anchor of each corpus, by round; what several islands found of one is one.

    Args:
        records: of any islands.
    """
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        if record["kind"] == "eval" and record["target"] == "anchor":
            # records without a round have the step, at which synchronous islands stand together
            which = record["outer_step"] if "outer_step" in record else record["step"]
            found.setdefault(record["corpus"], {}).setdefault(which, record)
    return {corpus: [each[k] for k in sorted(each)] for corpus, each in sorted(found.items())}


def is_void(record: Record) -> bool:
    """Whether a ``round`` record tells of a failure.

    One with contributors that did not commit was skipped by agreement, since all their gates were 0.
    """
    return not record.get("committed") and not record.get("contributors")


def begun_at(records: list[Record]) -> int:
    """Position at which a run began: 0, but for a branch."""
    # An island that joins a branch later starts from nothing; island 0 has been there from the beginning.
    return next((position(r) for r in records if r["kind"] == "start"), 0)


def phases(steps: list[Record], begun: int = 0) -> list[tuple[str, int, int]]:
    """The phases of the schedule that ``step`` records pass, as (name, first position, last position).

    The trainer logs the last step of every phase, whatever the interval. The position of an asynchronous
    island passes the end of a phase by what the others have committed meanwhile.

    Args:
        steps: the records, by step.
        begun: position at which the run began; more than 0 for a branch.
    """
    spans: list[tuple[str, int, int]] = []
    for record in steps:
        if "phase" not in record:  # of a script whose scheduler has none
            continue
        name, step = record["phase"], position(record)
        if spans and spans[-1][0] == name:
            spans[-1] = (name, spans[-1][1], step)
        else:
            spans.append((name, spans[-1][2] + 1 if spans else begun + 1, step))
    return spans
