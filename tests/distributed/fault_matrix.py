"""Every way an island can fail at every point of a round, and what becomes of it.

A lane is a run of three one-rank islands that trains on while one fault after the other is injected. After
each the lane waits until all three contribute again. At the end of a lane the traces of all islands, of all
their lives, are replayed against what each of them holds.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fault_history import check
from loop_runner import Islands, Process, config, lighthouse

from megatron_wsd.diloco.faults import KINDS, NAN_POINTS, POINTS, Fault, fail
from megatron_wsd.records import Follow

ISLANDS = (0, 1, 2)
HEARTBEAT_S, MESSAGE_S, JOIN_S, HANG_S = 1.0, 1.5, 2.5, 5.0
SLOW_S = 2.0  # longer than a message may take, shorter than a round waits for a live island
PATIENCE_S = 60.0  # of the test with a lane, on a machine that does other things as well

# An exception ends the island where it is raised on the thread that trains, or leaves nobody to publish.
ENDING_EXCEPTIONS = {"async": ("capture", "offer", "publish", "adopt", "checkpoint"),
                     "sync": ("capture", "offer", "adopt", "checkpoint")}  # fmt: skip

MEANINGLESS = {(point, "nan"): "no tensor of the island's own" for point in POINTS if point not in NAN_POINTS}
SYNC_ONLY_MEANINGLESS = {("publish", how): "no thread to publish to in synchronous mode" for how in KINDS}


@dataclass(frozen=True)
class Cell:
    """One fault: where, how, and whose.

    Attributes:
        at: one of `POINTS`.
        how: one of `KINDS`.
        island: that fails; for healing, 1 is the one that is healed and 0 the one that heals it.
    """

    at: str
    how: str
    island: int = 1

    @property
    def name(self) -> str:
        if self.at == "healing":
            return "healing, the source" if self.island == 0 else "healing, the healed"
        return self.at


@dataclass
class Row:
    """What became of one cell.

    Attributes:
        mode: synchronous or asynchronous.
        cell: which.
        voids: void rounds that a survivor saw because of it.
        ended: the process of the faulty island ended, and was started again.
        by: exit status of that process.
        healed: it took over the outer state of another.
        dropped: its contribution was dropped.
        without_s: longest time between two commits, as the survivors saw it.
        back_s: from the fault, or the new start, to a contribution of the island that was committed.
    """

    mode: str
    cell: Cell
    voids: int = 0
    ended: bool = False
    by: int = 0
    healed: bool = False
    dropped: bool = False
    without_s: float = 0.0
    back_s: float = 0.0

    @property
    def outcome(self) -> str:
        words = ["dropped"] if self.dropped else []
        words += ["void"] if self.voids else []
        words += ["ended"] if self.ended else []
        words += ["healed"] if self.healed else []
        return ", ".join(words) or "completed"


def cells(mode: str, points: Iterable[str] = POINTS, kinds: Iterable[str] = KINDS) -> list[Cell]:
    """All cells that mean something."""
    found = []
    for at in points:
        for how in kinds:
            if (at, how) in MEANINGLESS or (mode == "sync" and (at, how) in SYNC_ONLY_MEANINGLESS):
                continue
            found += [Cell(at, how, island) for island in ((1, 0) if at == "healing" else (1,))]
    return found


def ends(cell: Cell, mode: str) -> bool:
    """Whether the process is expected to end."""
    if cell.how == "hang":
        # Who heals another hangs in a thread that serves that other alone.
        return not (cell.at == "healing" and cell.island == 0)
    return cell.how == "kill" or (cell.how == "exception" and cell.at in ENDING_EXCEPTIONS[mode])


def matrix_config(mode: str, **sync: Any) -> dict[str, Any]:
    patience = {"heartbeat_timeout_s": HEARTBEAT_S, "join_timeout_s": JOIN_S, "hang_timeout_s": HANG_S}
    patience |= sync.pop("islands", {})
    fast = {"grace_s": 0.1, "poll_s": 0.03} if mode == "async" else {}
    return config(
        mode,
        **{
            "inner_steps": 4,
            "fragments": 2,
            "wire": "int8",
            "timeout_s": MESSAGE_S,
            "islands": patience,
            **fast,
            **sync,
        },
    )


def replace_text(path: Path, text: str) -> None:
    """Written at once, as whoever looks for the file sees it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


class Tail:
    """The lines of a growing json-lines file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        """All lines so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


@dataclass
class Lane:
    """One run of three islands.

    Args:
        run_dir: its folder.
        address: of its lighthouse.
        mode: ``async`` or ``sync``.
        raw: the config.
    """

    run_dir: Path
    address: str
    mode: str
    raw: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.islands = Islands(self.run_dir, self.address, len(ISLANDS), self.raw, 10**9)
        self._traces = {i: Tail(self.run_dir / f"island_{i}" / "trace.jsonl") for i in ISLANDS}
        self._records = {i: Follow(self.run_dir / f"island_{i}" / "metrics.jsonl") for i in ISLANDS}
        self._told: dict[int, list[dict[str, Any]]] = {i: [] for i in ISLANDS}
        self.processes: dict[int, Process] = {i: self.start(i) for i in ISLANDS}

    def start(
        self, island: int, faults: list[Fault] | None = None, *, fresh: bool = False, save_every: int = 5
    ) -> Process:
        return self.islands.start(island, faults, step_s=0.02, save_every=save_every, resume=not fresh)

    # ---- looking on ----

    def trace(self, island: int) -> list[dict[str, Any]]:
        return self._traces[island].poll()

    def commits(self, island: int) -> list[dict[str, Any]]:
        return [line for line in self.trace(island) if line["kind"] == "commit"]

    def records(self, island: int) -> list[dict[str, Any]]:
        self._told[island] += self._records[island].poll()
        return self._told[island]

    def injected(self, island: int) -> int:
        log = self.islands.log(island)
        return log.read_bytes().count(b"injected on rank") if log.exists() else 0

    def until(self, what: str, reached: Callable[[], bool], mortal: Sequence[int] = ()) -> None:
        """Wait; nobody but the mortal may end meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while not reached():
            for i, process in self.processes.items():
                if i not in mortal and process.poll() is not None:
                    raise AssertionError(f"island {i} ended ({process.poll()}) {self._where(what)}")
            if time.monotonic() > end:
                raise AssertionError(f"{PATIENCE_S:g} s were not enough {self._where(what)}")
            time.sleep(0.03)

    def _where(self, what: str) -> str:
        tails = [self.islands.log(i).read_text(errors="replace")[-2500:] for i in ISLANDS]
        return f"waiting for {what}; folder {self.run_dir}\n" + "\n-- next island --\n".join(tails)

    def contributed(self, island: int, since: float, times: int = 1) -> bool:
        """Whether every island has committed contributions of ``island`` after a time."""
        return all(
            sum(c["time"] > since and str(island) in c["offers"] for c in self.commits(i)) >= times
            for i in ISLANDS
        )

    def steady(self, what: str) -> None:
        """Wait until all contribute to rounds that all commit."""
        now = time.time()
        self.until(f"all to contribute {what}", lambda: all(self.contributed(i, now) for i in ISLANDS))

    # ---- one fault ----

    def run(self, cell: Cell) -> Row:
        """Inject one fault, and wait until its island contributes again."""
        name = f"after {cell.how} at {cell.name}"
        row = Row(self.mode, cell)
        self.steady(f"before {cell.how} at {cell.name}")
        fault = fail(
            island=cell.island,
            at=cell.at,
            round=0,
            how=cell.how,
            seconds=SLOW_S if cell.how == "slow" else None,
        )
        seconds, before = time.time(), self.injected(cell.island)
        if cell.at == "healing" and cell.island == 1:
            self.lose(1, [fault])
        else:
            target = self.run_dir / f"island_{cell.island}" / "faults"
            replace_text(target, str(fault))
            if cell.at == "healing":
                # Armed before there is somebody to heal.
                self.until("the fault to be taken over", lambda: not target.exists())
                self.lose(1)
        faulty = (cell.island,)
        self.until(f"the fault {cell}", lambda: self.injected(cell.island) > before, faulty)
        begun = time.time()
        since = begun + (SLOW_S if cell.how == "slow" else 0.0)
        if ends(cell, self.mode):
            process = self.processes[cell.island]
            self.until(f"the end of island {cell.island} {name}", lambda: process.poll() is not None, faulty)
            row.ended, row.by = True, process.poll() or 0
            begun = since = time.time()
            self.processes[cell.island] = self.start(cell.island)
        self.until(f"island {cell.island} {name}", lambda: self.contributed(cell.island, since, 2))
        if cell.how == "nan":  # contributions to other fragments may be faster
            self.until(f"somebody to name it {name}", lambda: all(self._named(i, seconds) for i in ISLANDS))
        row.back_s = time.time() - begun
        # Rounds are told of at the next boundary of the thread that trains.
        newest = max(c["outer_step"] for c in self.commits(cell.island))
        self.until(f"the story {name}", lambda: all(self._told_of(i, newest) for i in ISLANDS))
        self._tell(row, seconds)
        self.rows.append(row)
        return row

    def _named(self, island: int, since: float) -> bool:
        return any(r.get("event") == "void" and r["time"] > since for r in self.records(island))

    def _told_of(self, island: int, outer_step: int) -> bool:
        return any(r.get("outer_step", -1) >= outer_step for r in self.records(island))

    def lose(self, island: int, faults: list[Fault] | None = None) -> None:
        """Kill an island and start it from nothing, so that it must be healed."""
        self.processes[island].kill()
        self.processes[island] = self.start(island, faults, fresh=True)

    def _tell(self, row: Row, since: float) -> None:
        survivors = [i for i in ISLANDS if i != row.cell.island and not (row.cell.at == "healing" and i == 1)]
        for i in survivors:
            times = [c["time"] for c in self.commits(i)]
            last = max((t for t in times if t <= since), default=since)
            times = [last, *(t for t in times if t > since)]
            gaps = [b - a for a, b in pairwise(times)]
            row.without_s = max([row.without_s, *gaps])
            new = [r for r in self.records(i) if r["time"] > since]
            voids = sum(r["kind"] == "round" and not r["committed"] and not r["contributors"] for r in new)
            row.voids = max(row.voids, voids)
            row.dropped |= any(r.get("event") == "void" for r in new)
        new = [r for r in self.records(row.cell.island) if r["time"] > since]
        row.healed = any(r.get("event") == "heal" for r in new)

    # ---- the end ----

    def finish(self) -> list[dict[str, Any]]:
        """Let the run end, and check everything that was promised."""
        self.steady("at the end")
        # In synchronous mode all must stop at one step, so at one that nobody has come to yet.
        newest = max(offer[1] for offer in self.commits(0)[-1]["offers"].values())
        replace_text(self.run_dir / "stop", str(newest + 60 if self.mode == "sync" else 0))
        results = [self.islands.result(self.processes[i], PATIENCE_S) for i in ISLANDS]
        check([self.trace(i) for i in ISLANDS], [self.records(i) for i in ISLANDS], results)
        return results

    def abandon(self) -> None:
        for process in self.processes.values():
            process.kill()


# ---- all cells, in several lanes at once ----


@dataclass
class Plan:
    """What is run.

    Attributes:
        mode: ``async`` or ``sync``.
        lanes: runs side by side, each of which takes the next cell when it is through with one.
        cells: to be done by them.
    """

    mode: str
    lanes: int
    cells: list[Cell]


# In synchronous mode what differs: everybody waits, and a contribution is captured and adopted in the round.
SYNC_POINTS = ("capture", "agree", "within_exchange", "step", "commit", "adopt", "healing")


def whole_matrix() -> list[Plan]:
    """Every cell in asynchronous mode; the points of `SYNC_POINTS` in synchronous mode."""
    return [Plan("async", 4, cells("async")), Plan("sync", 2, cells("sync", SYNC_POINTS))]


def run_matrix(folder: Path, plans: Sequence[Plan]) -> list[Row]:
    """Run it; a lane that fails says so at the end, when the others are through.

    Raises:
        AssertionError: a promise was broken, in the first lane in which one was.
    """
    with ThreadPoolExecutor(sum(plan.lanes for plan in plans)) as pool:
        futures = []
        for plan in plans:
            # Those that take longest first: a hang lasts until the process ends itself.
            todo = deque(
                sorted(
                    plan.cells,
                    key=lambda c: ("hang", "slow").index(c.how) if c.how in ("hang", "slow") else 2,
                )
            )
            for n in range(plan.lanes):
                futures.append(pool.submit(run_lane, folder / f"{plan.mode}_{n}", plan.mode, todo))
        wait(futures)
    rows = [row for future in futures for row in future.result()]
    order = {(plan.mode, c): n for plan in plans for n, c in enumerate(plan.cells)}
    return sorted(rows, key=lambda r: (r.mode, order[r.mode, r.cell]))


def run_lane(
    run_dir: Path, mode: str, todo: deque[Cell], tell: Callable[[Row], None] | None = None
) -> list[Row]:
    """One lane from its start to its checks.

    Args:
        run_dir: its folder.
        mode: of all its cells.
        todo: from which it takes cells until none is left.
        tell: called with each row.
    """
    with lighthouse(heartbeat_s=HEARTBEAT_S, join_s=JOIN_S) as address:
        lane = Lane(run_dir, address, mode, matrix_config(mode))
        try:
            while todo:
                row = lane.run(todo.popleft())
                if tell is not None:
                    tell(row)
            lane.finish()
        finally:
            lane.abandon()
    return lane.rows


def table(rows: Sequence[Row]) -> str:
    """Markdown, one table a mode: a row a point, a column a kind of fault."""
    parts = []
    for mode in dict.fromkeys(row.mode for row in rows):
        mine = {(r.cell.name, r.cell.how): r for r in rows if r.mode == mode}
        names = list(dict.fromkeys(name for name, _ in mine))
        lines = [f"| {mode} | " + " | ".join(KINDS) + " |", "| --- " * (1 + len(KINDS)) + "|"]
        for name in names:
            found = [mine.get((name, how)) for how in KINDS]
            said = ["-" if r is None else f"{r.outcome}; {r.without_s:.1f} s" for r in found]
            lines.append(f"| {name} | " + " | ".join(said) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
