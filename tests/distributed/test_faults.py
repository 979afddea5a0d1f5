"""Islands that fail at every point of a round, in every way, and what the others promise then.

Real processes, the real outer half and real torchft on plain tensors; timeouts of seconds. `fault_matrix`
says what is injected and what is checked after it. Run as a program it writes the tables of docs/failures.md:

    python tests/distributed/test_faults.py --table
"""

from __future__ import annotations

import copy
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fault_history import check
from fault_matrix import (
    HEARTBEAT_S,
    ISLANDS,
    JOIN_S,
    Lane,
    Row,
    ends,
    matrix_config,
    run_matrix,
    table,
    whole_matrix,
)
from loop_runner import Islands, config, lighthouse

DOCS = Path(__file__).parents[2] / "docs" / "failures.md"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return run_matrix(tmp_path_factory.mktemp("matrix"), whole_matrix())


def test_every_fault_at_every_point_is_survived(
    matrix: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """The promises are checked in each lane; here, that every cell was run, and what became of it."""
    with capsys.disabled():
        print("\n\n" + table(matrix))
    assert {(r.mode, r.cell) for r in matrix} == {(p.mode, c) for p in whole_matrix() for c in p.cells}
    for row in matrix:
        assert row.ended == ends(row.cell, row.mode), row
        assert row.dropped == (row.cell.how == "nan"), row
        # The server that forked a process says 255 if it was too late to learn more of its end.
        if row.cell.how == "kill":
            assert row.by in (-signal.SIGKILL, 255), row
        if row.cell.how == "hang" and row.ended:
            assert row.by in (1, 255), row  # it ended itself
        if row.cell.how == "exception" and row.cell.at == "step":
            assert row.healed, row


def test_the_page_has_the_cells_that_are_run() -> None:
    page = DOCS.read_text()
    for mode in ("async", "sync"):
        names = {c.name for p in whole_matrix() if p.mode == mode for c in p.cells}
        part = page[page.index(f"| {mode} |") :].split("\n\n")[0]
        assert set(re.findall(r"^\| ([a-z_, ]+?) \|", part, re.M)) - {mode} == names


# ---- the checks can fail ----


def history() -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Two islands, one fragment, two commits: what `check` takes."""
    first = {
        "kind": "commit",
        "time": 1.0,
        "pid": 1,
        "outer_step": 1,
        "fragment": 0,
        "offers": {"0": [0, 4, 4, 400], "1": [0, 3, 3, 300]},
        "versions": [1],
        "taken": [{"0": 4, "1": 3}],
        "fragment_tokens": [700],
        "fragment_steps": [7],
    }
    second = {
        **first,
        "outer_step": 2,
        "offers": {"0": [1, 8, 4, 400]},
        "versions": [2],
        "taken": [{"0": 8, "1": 3}],
        "fragment_tokens": [1100],
        "fragment_steps": [11],
    }
    life = {"kind": "life", "time": 0.0, "outer_step": 0, "moved": [False], "errors": [0.5]}
    traces = [[copy.deepcopy(x) | {"island": i} for x in (life, first, second)] for i in (0, 1)]
    rounds = [
        {"kind": "round", "committed": True, "outer_step": n, "digest": f"d{n}", "tokens": tokens}
        for n, tokens in ((1, 700), (2, 1100))
    ]
    result = {
        "stopped": False,
        "met_at": 0,
        "outer_step": 2,
        "versions": [2],
        "taken": [{"0": 8, "1": 3}],
        "fragment_tokens": [1100],
        "digest": 5,
        "holds_anchor": True,
    }
    results = [{**copy.deepcopy(result), "fed_back": fed} for fed in ([[0, 4], [0, 8]], [[0, 3]])]
    return traces, [copy.deepcopy(rounds) for _ in (0, 1)], results


def test_an_honest_history_passes() -> None:
    check(*history())


def _counted_twice(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    for trace in traces:
        trace[2]["offers"]["0"] = [1, 8, 5, 400]  # the steps 4 to 8, and 4 was told before


def _lost(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    for trace in traces:
        trace[2]["fragment_tokens"] = [400]


def _two_histories(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    traces[1][2]["offers"] = {"1": [1, 7, 4, 400]}


def _two_digests(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    records[1][1]["digest"] = "d3"


def _counted_later(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    records[1][0]["tokens"] = 1100


def _went_back(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    traces[0].append(traces[0][1])


def _other_end(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    results[1]["digest"] = 6


def _fed_back_twice(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    results[0]["fed_back"].append([0, 8])


def _old_errors(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    traces[1][0]["moved"] = [True]


def _gave_up(traces: list[Any], records: list[Any], results: list[Any]) -> None:
    results[0] = {"error": "GaveUp"}


@pytest.mark.parametrize(
    "spoil",
    [
        _counted_twice,
        _lost,
        _two_histories,
        _two_digests,
        _counted_later,
        _went_back,
        _other_end,
        _fed_back_twice,
        _old_errors,
        _gave_up,
    ],
)
def test_a_broken_promise_is_seen(spoil: Callable[[list[Any], list[Any], list[Any]], None]) -> None:
    found = history()
    spoil(*found)
    with pytest.raises(AssertionError):
        check(*found)


# ---- faults of what is around the islands ----


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[Callable[..., Lane]]:
    """Starts lanes, and leaves none behind."""
    started: list[Lane] = []

    def start(address: str, mode: str, **sync: Any) -> Lane:
        lane = Lane(tmp_path / f"lane_{len(started)}", address, mode, matrix_config(mode, **sync))
        started.append(lane)
        return lane

    yield start
    for lane in started:
        lane.abandon()


def outer_step(lane: Lane, island: int) -> int:
    commits = lane.commits(island)
    return int(commits[-1]["outer_step"]) if commits else 0


def stands_still(lane: Lane, seconds: float, gone: tuple[int, ...] = ()) -> bool:
    """Whether nothing is committed for a while, though everybody lives who is not ``gone``."""
    alive = [i for i in ISLANDS if i not in gone]
    before = [outer_step(lane, i) for i in alive]
    time.sleep(seconds)
    assert all(lane.processes[i].poll() is None for i in alive)
    return [outer_step(lane, i) for i in alive] == before


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_after_the_lighthouse_restarts_fewer_islands_wait_for_the_rest_or_the_operator(
    lanes: Callable[..., Lane], mode: str
) -> None:
    with lighthouse(heartbeat_s=HEARTBEAT_S, join_s=JOIN_S) as address:
        port = int(address.rsplit(":", 1)[1])
        lane = lanes(address, mode)
        lane.steady("before the lighthouse dies")
    with lighthouse(port, HEARTBEAT_S, JOIN_S):
        lane.steady("with the new lighthouse")  # all are back: they go on by themselves
    lane.processes[1].kill()
    with lighthouse(port, HEARTBEAT_S, JOIN_S):
        gone = (1,)
        why = "the lighthouse was restarted and islands are missing"
        waits = lambda i: any(why in r.get("reason", "") for r in lane.records(i))  # noqa: E731
        if mode == "async":
            lane.until("the others to miss island 1", lambda: waits(0) and waits(2), gone)
        else:  # there a round is told of when it is over
            said = b"the lighthouse was restarted and islands [1] are not back yet"
            logs = [lane.islands.log(i) for i in (0, 2)]
            lane.until("island 1 to be missed", lambda: any(said in p.read_bytes() for p in logs), gone)
        assert stands_still(lane, 3.0, gone)
        control = lane.run_dir / "control"
        control.mkdir(exist_ok=True)
        (control / "go-on").touch()
        before = outer_step(lane, 0)
        lane.until("the others to go on", lambda: all(outer_step(lane, i) > before for i in (0, 2)), gone)
        lane.processes[1] = lane.start(1)
        lane.finish()


def test_a_lone_island_of_three_cannot_commit_and_goes_on_with_a_second(lanes: Callable[..., Lane]) -> None:
    with lighthouse(heartbeat_s=HEARTBEAT_S, join_s=JOIN_S) as address:
        lane = lanes(address, "async")
        lane.steady("at first")
        lane.processes[0].kill()
        lane.processes[2].kill()
        gone = (0, 2)
        lane.until(
            "island 1 to be alone",
            lambda: any("at least 2 must be" in r.get("reason", "") for r in lane.records(1)),
            gone,
        )
        assert stands_still(lane, 2.0, gone)
        before = outer_step(lane, 1)
        lane.processes[0] = lane.start(0)
        lane.until("two to commit", lambda: min(outer_step(lane, i) for i in (0, 1)) > before, (2,))
        lane.processes[2] = lane.start(2, fresh=True)
        lane.finish()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_island_that_is_told_to_stop_leaves_at_the_cost_of_a_heartbeat_timeout(
    lanes: Callable[..., Lane], mode: str
) -> None:
    with lighthouse(heartbeat_s=HEARTBEAT_S, join_s=JOIN_S) as address:
        lane = lanes(address, mode)
        lane.steady("at first")
        leaving, since = lane.processes[1], time.time()
        leaving.terminate()
        result = lane.islands.result(leaving)
        assert result["stopped"] and "error" not in result
        before = outer_step(lane, 0)
        gone = lambda i: any(c["islands"] == [0, 2] for c in lane.commits(i) if c["time"] > since)  # noqa: E731
        lane.until("the others to go on", lambda: gone(0) and gone(2), (1,))
        assert outer_step(lane, 0) > before
        lane.processes[1] = lane.start(1)
        lane.steady("with all again")
        times = [c["time"] for c in lane.commits(0) if c["time"] > since]
        worst = max(b - a for a, b in zip([since, *times], times, strict=False))
        # Less than a quorum that waits for an island which is thought to live.
        assert worst < HEARTBEAT_S + JOIN_S, worst
        lane.finish()


def test_a_stalled_process_that_was_replaced_ends_itself_when_it_wakes_up(lanes: Callable[..., Lane]) -> None:
    """As on a machine that was cut off, and whose island was started again elsewhere meanwhile."""
    with lighthouse(heartbeat_s=HEARTBEAT_S, join_s=JOIN_S) as address:
        # It must not be ended for having hung.
        lane = lanes(address, "async", islands={"hang_timeout_s": 120.0})
        lane.steady("at first")
        old, since = lane.processes[1], time.time()
        old.signal(signal.SIGSTOP)
        lane.until(
            "the others to go on",
            lambda: any(c["islands"] == [0, 2] for c in lane.commits(0) if c["time"] > since),
        )
        lane.processes[1] = lane.start(1, fresh=True, save_every=0)  # here both have one disk
        lane.steady("with the new process")
        old.signal(signal.SIGCONT)
        result = lane.islands.result(old)
        assert result["error"] == "IslandError" and "has taken its place" in result["text"]
        lane.steady("without the old process")
        lane.finish()


@pytest.mark.parametrize(
    "other, expected",
    [
        ({"without": "layers.1.weight"}, "the same fragments"),
        ({"config": config("async", fragments=3)}, "the same config"),
        ({"weight_seed": 1}, "the same initial weights"),
    ],
)
def test_islands_that_do_not_fit_are_refused_at_the_start(
    tmp_path: Path, other: dict[str, Any], expected: str
) -> None:
    with lighthouse() as address:
        islands = Islands(tmp_path, address, 2, config("async", fragments=2), 20)
        for result in islands.together([{}, other]):
            assert result["error"] == "IslandError" and expected in result["text"]


def write_table() -> None:
    """Run the matrix, and put its table where the page has the old one."""
    with tempfile.TemporaryDirectory() as folder:
        rows = run_matrix(Path(folder), whole_matrix())
    text = table(rows)
    print(text)
    begin, end = "<!-- table: begin -->", "<!-- table: end -->"
    page = DOCS.read_text()
    before, rest = page.split(begin)
    DOCS.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--table"]:
        raise SystemExit(__doc__)
    write_table()
