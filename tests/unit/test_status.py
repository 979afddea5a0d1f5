"""The status of a run: from its files alone, while they grow, when they are torn, and when all is over."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.cli import app
from megatron_wsd.cli.status import render
from megatron_wsd.control import Order
from megatron_wsd.errors import ConfigError
from megatron_wsd.records import Follow
from megatron_wsd.reporting.prometheus import exposition, make_server
from megatron_wsd.reporting.status import RunStatus
from megatron_wsd.rundir import held

ROOT = Path(__file__).resolve().parents[2]
NOW = 1000.0


def start(time: float, step: int = 0) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "outer_step": 0, "parameters": 1234}


def step(n: int, time: float, **more: Any) -> dict[str, Any]:
    base = {"loss": 3.0 - n / 100, "lr": 1e-3, "phase": "stable", "tokens": 100 * n, "tokens_per_s": 50.0}
    return {"kind": "step", "time": time, "step": n, "grad_norm": 0.5, **base, **more}


def outer(n: int, k: int, time: float, islands: tuple[int, ...] = (0, 1), **more: Any) -> dict[str, Any]:
    each = {"staleness": {str(i): i for i in islands}, "gates": {str(i): 1.0 - i / 10 for i in islands}}
    told = {"islands": list(islands), "contributors": list(islands), **each, "island_bytes": 500}
    return {"kind": "round", "time": time, "step": n, "outer_step": k, "committed": True, **told, **more}


def void(n: int, k: int, time: float, reason: str) -> dict[str, Any]:
    none: dict[str, Any] = {"contributors": [], "staleness": {}, "gates": {}}
    return outer(n, k, time, committed=False, reason=reason, **none)


def event(name: str, n: int, time: float) -> dict[str, Any]:
    return {"kind": "event", "time": time, "step": n, "event": name, "message": ""}


def append(run: Path, island: int, *records: dict[str, Any], torn: str = "") -> None:
    file = run / f"island_{island}" / "metrics.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write("".join(json.dumps(r) + "\n" for r in records) + torn)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two islands that have just done round 2 of 10 inner steps each."""
    folder = tmp_path / "first"
    folder.mkdir()
    facts = {"version": "0.1.0", "islands": 2, "ranks": 2, "created": "2026", "config_digest": "x"}
    (folder / "run.json").write_text(json.dumps(facts))
    config = {"megatron_wsd": {"sync": {"mode": "sync", "inner_steps": 10}}}
    (folder / "config.json").write_text(json.dumps(config))
    for island in (0, 1):
        append(folder, island, start(NOW - 60), step(10, NOW - 31), outer(10, 1, NOW - 30))
        append(folder, island, step(20, NOW - 5), outer(20, 2, NOW - 4), step(24 - island, NOW - 1))
    return folder


def look(run: Path, now: float = NOW) -> dict[str, Any]:
    found = RunStatus(run).look(now)
    json.dumps(found, allow_nan=False)
    return found


def states(found: dict[str, Any]) -> list[str]:
    return [i["state"] for i in found["islands"]]


@contextmanager
def at_it(lock: Path, since: float = NOW - 90) -> Iterator[None]:
    """This process holds a lock file, as if it had done so for a while."""
    with held(lock, "test"):
        os.utime(lock, (since, since))
        yield


def test_a_run_under_way(run: Path) -> None:
    found = look(run)
    assert (found["state"], found["outer_step"], found["phase"], found["tokens"]) == (
        "running",
        2,
        "stable",
        2400,
    )
    assert found["tokens_per_s"] == 100.0 and found["bytes"] == 2000
    first, second = found["islands"]
    assert (first["state"], first["step"], first["outer_step"], first["age_s"]) == ("running", 24, 2, 1.0)
    assert (first["loss"], first["lr"], first["bytes"]) == (3.0 - 0.24, 1e-3, 1000)
    assert (second["staleness"], second["gate"]) == (1, 0.9)
    assert found["waiting_for"] == [
        "round 3 at step 30: 7 inner steps to go, island 1 is the furthest behind"
    ]


def test_only_what_is_new_is_read_and_a_torn_line_waits_for_its_end(run: Path) -> None:
    status = RunStatus(run)
    assert status.look(NOW)["islands"][0]["bytes"] == 1000
    whole = json.dumps(outer(30, 3, NOW + 1))
    append(run, 0, torn=whole[:25])
    assert status.look(NOW)["islands"][0]["outer_step"] == 2
    append(run, 0, torn=whole[25:] + "\n")
    island = status.look(NOW + 2)["islands"][0]
    assert (island["outer_step"], island["bytes"], island["rounds_committed"]) == (3, 1500, 3)
    assert status.look(NOW + 2)["islands"][0]["bytes"] == 1500


def test_follow_leaves_out_what_is_no_record(tmp_path: Path) -> None:
    follow = Follow(tmp_path / "m")
    assert follow.poll() == []
    (tmp_path / "m").write_bytes(b'{"kind": "x"}\nno json\n[1]\n\xff\xfe\n{"kind": "y"}\n{"ki')
    assert [r["kind"] for r in follow.poll()] == ["x", "y"]
    assert follow.poll() == []


def test_an_island_that_the_others_leave_out_is_lost_before_its_records_are_old(run: Path) -> None:
    append(run, 0, outer(30, 3, NOW + 3, islands=(0,)), step(30, NOW + 3))
    found = look(run, NOW + 4)
    assert states(found) == ["running", "lost"] and found["state"] == "running"
    assert found["notes"] == [
        f"island 1 is lost, and the others go on; --resume starts it again: {run}/island_1/log.txt"
    ]
    assert not any("island 1" in sentence for sentence in found["waiting_for"])
    config = {"megatron_wsd": {"sync": {"inner_steps": 10}, "islands": {"min_islands": 2}}}
    (run / "config.json").write_text(json.dumps(config))
    found = look(run, NOW + 4)
    assert found["notes"] == []
    ended = f"island 1: it ended without a word; {run}/island_1/log.txt tells why; --resume goes on"
    assert ended in found["waiting_for"], "too few are left to go on"


def test_a_process_here_tells_running_from_lost_and_silence_from_death(run: Path) -> None:
    late = NOW + 500
    assert states(look(run, late)) == ["lost", "lost"] and look(run, late)["state"] == "lost"
    with at_it(run / "island_0" / "lock"):
        found = look(run, late)
    assert states(found) == ["silent", "lost"]
    assert found["islands"][0]["process"] is not None
    assert "island 0: it is there, but silent for 8 min" in found["waiting_for"]
    # the lock file stays, with the number of a process that does not hold it
    assert states(look(run, late)) == ["lost", "lost"]


def test_to_look_at_a_lock_never_takes_it(run: Path) -> None:
    lock = run / "island_0" / "lock"
    with held(lock, "island 0"):
        pass
    before = lock.stat()
    look(run)
    assert (lock.stat().st_mtime_ns, lock.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_a_launch_on_this_machine_knows_its_islands_at_once(run: Path) -> None:
    with at_it(run / "launch.lock"), at_it(run / "island_1" / "lock"):
        assert states(look(run)) == ["lost", "running"]


def test_a_process_of_this_machine_that_is_gone_is_lost_at_once(run: Path) -> None:
    """However young its records are; of another machine or container only silence tells."""
    lock = run / "island_1" / "lock"
    with at_it(lock):
        assert states(look(run)) == ["running", "running"]
    assert states(look(run)) == ["running", "lost"]
    words = lock.read_text().split()
    for elsewhere in ([words[0], "another-host", *words[2:]], [words[0], words[1], "pid:[1]"]):
        lock.write_text(" ".join(elsewhere))
        os.utime(lock, (NOW - 90, NOW - 90))
        assert states(look(run)) == ["running", "running"]
    append(run, 1, event("stop", 23, NOW))
    lock.write_text(" ".join(words))
    os.utime(lock, (NOW - 90, NOW - 90))
    assert states(look(run)) == ["running", "stopped"]


def test_a_killed_process_is_gone_also_while_nobody_has_reaped_it(run: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from megatron_wsd.rundir import held\n"
        "with held(Path(sys.argv[1]), 'x'): print('held', flush=True); time.sleep(300)"
    )
    lock = run / "island_0" / "lock"
    command = [sys.executable, "-c", program, str(lock)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        os.utime(lock, (NOW - 90, NOW - 90))
        assert states(look(run)) == ["running", "running"]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
        assert states(look(run)) == ["lost", "running"]


def test_a_run_that_is_started_again_is_starting_before_it_has_told_anything(run: Path) -> None:
    for island in (0, 1):
        append(run, island, event("stop", 24, NOW))
    assert look(run)["state"] == "stopped"
    with at_it(run / "launch.lock", NOW + 5):
        assert states(look(run, NOW + 6)) == ["starting", "starting"]
        with at_it(run / "island_0" / "lock", NOW + 7):
            found = look(run, NOW + 8)
            assert states(found) == ["starting", "starting"] and found["state"] == "starting"
            assert "island 0: it is starting, and has recorded nothing yet" in found["waiting_for"]
            append(run, 0, start(NOW + 9), step(25, NOW + 9))
            assert states(look(run, NOW + 10)) == ["running", "starting"]
        append(run, 0, event("stop", 25, NOW + 11))
    # one that ends before it has recorded anything has failed, whatever it had recorded before
    with at_it(run / "island_1" / "lock", NOW + 20):
        pass
    assert states(look(run, NOW + 21)) == ["stopped", "failed"]


def test_a_run_that_counted_past_the_end_of_its_schedule_says_where_that_was(run: Path) -> None:
    for island in (0, 1):
        append(run, island, {**event("finish", 24, NOW), "position": 25 - island, "end": 24})
    found = look(run)
    assert found["end"] == 24 and "step 25 (the schedule ended at 24), round 2" in shown(found)
    for island in (0, 1):
        append(run, island, start(NOW, 24), {**event("finish", 24, NOW + 1), "end": 24})
    found = look(run)
    assert found["position"] == 24 and "step 24, round 2" in shown(found)


def test_an_island_that_is_started_after_the_run_is_over_does_not_make_it_go_on(run: Path) -> None:
    for island in (0, 1):
        append(run, island, event("finish", 24, NOW))
    append(run, 1, start(NOW + 10, 24))
    found = look(run, NOW + 11)
    assert (states(found), found["state"]) == (["finished", "starting"], "finished")
    assert found["waiting_for"] == []
    over = "the run is over (island 0 finished): nobody is left for island 1 to meet"
    assert found["notes"] == [over] and f"note       {over}" in shown(found, 200)


def test_who_waits_says_for_whom(run: Path) -> None:
    append(run, 1, event("stop", 21, NOW))
    append(run, 0, event("stop", 21, NOW), start(NOW + 1, 20))
    said = "island 0: it has begun, and waits for island 1 (stopped): start with --resume"
    assert said in look(run, NOW + 2)["waiting_for"]


def test_slow_rounds_are_not_silence(run: Path) -> None:
    """200 s between records is usual for this run, so 400 s are borne and 700 s are not."""
    for island in (0, 1):
        append(run, island, step(30, NOW + 200), step(40, NOW + 400))
    assert states(look(run, NOW + 800)) == ["running", "running"]
    assert states(look(run, NOW + 1100)) == ["lost", "lost"]


def test_a_finished_a_stopped_and_a_resumed_run(run: Path) -> None:
    append(run, 0, event("finish", 24, NOW))
    append(run, 1, event("stop", 23, NOW))
    found = look(run, NOW + 10**6)
    assert states(found) == ["finished", "stopped"]
    assert (found["state"], found["waiting_for"]) == ("finished", [])
    append(run, 0, start(NOW + 10, 20))
    append(run, 1, start(NOW + 10, 20))
    found = look(run, NOW + 200)
    assert states(found) == ["starting", "starting"] and found["islands"][1]["loss"] is None
    assert found["state"] == "starting"
    assert "island 1: it has begun, and waits for the others or its first step" in found["waiting_for"]
    append(run, 1, step(21, NOW + 210))
    assert states(look(run, NOW + 211)) == ["starting", "running"]
    assert states(look(run, NOW + 1000)) == ["lost", "lost"]


def test_void_rounds_are_told_with_their_reason_and_skipped_ones_are_none(run: Path) -> None:
    append(run, 0, void(30, 2, NOW, "peer <1> & co"), void(30, 2, NOW + 1, "timeout after 60 s"))
    found = look(run, NOW + 2)
    assert found["islands"][0]["rounds_void"] == 2
    said = "island 0: a round that commits (2 void in a row: timeout after 60 s)"
    assert said in found["waiting_for"]
    append(run, 0, outer(30, 2, NOW + 2, committed=False, reason="all gates are 0"))
    found = look(run, NOW + 3)
    assert found["islands"][0]["rounds_void"] == 2 and said not in found["waiting_for"]


def test_a_lighthouse_that_is_away_is_what_the_run_waits_for(run: Path) -> None:
    said = "the lighthouse does not answer (refused); no round can begin until it does"
    append(run, 0, event("lighthouse", 30, NOW) | {"answers": False, "message": said})
    assert f"island 0: {said}" in look(run, NOW + 1)["waiting_for"]
    append(run, 0, event("lighthouse", 30, NOW + 2) | {"answers": True, "message": "it answers"})
    assert not any("lighthouse does" in told for told in look(run, NOW + 3)["waiting_for"])


def test_asynchronous_rounds_have_fragments_versions_and_adoptions(run: Path) -> None:
    config = {"megatron_wsd": {"sync": {"mode": "async", "inner_steps": 10}}}
    (run / "config.json").write_text(json.dumps(config))
    one = {"islands": (0, 1), "fragment": 0, "version": 2, "staleness": {"0": 3}, "gates": {"0": 0.5}}
    two = {"islands": (0, 1), "fragment": 1, "version": 1, "staleness": {"1": 5}, "gates": {"1": 0.25}}
    for island in (0, 1):
        append(run, island, outer(25, 3, NOW, **one), outer(27, 4, NOW + 1, **two))
    adopt = {"kind": "adopt", "time": NOW + 2, "step": 28, "fragment": 1, "version": 1, "lag": 2}
    append(run, 1, {**adopt, "waited_steps": 6})
    found = look(run, NOW + 3)
    assert (found["mode"], found["outer_step"]) == ("async", 4)
    assert [(f["fragment"], f["version"]) for f in found["fragments"]] == [(0, 2), (1, 1)]
    assert [(i["staleness"], i["gate"], i["lag"]) for i in found["islands"]] == [(3, 0.5, None), (5, 0.25, 2)]
    assert found["waiting_for"] == []  # no island waits for a round in this mode
    assert "0: v2, 1: v1" in shown(found)


def taken_order(step: int, refused: str | None = None, **fields: Any) -> dict[str, Any]:
    """An order as the islands note it once they have committed it."""
    order = Order(nonce=f"{step}", **fields)
    entry = {**order.model_dump(mode="json"), "number": order.number, "step": step}
    return entry if refused is None else {**entry, "refused": refused}


def test_orders_that_wait_and_those_that_were_taken(run: Path) -> None:
    control = run / "control"
    control.mkdir()
    (control / "order.json").write_text(json.dumps({"kind": "decay", "length": 50}))
    taken = [taken_order(10, kind="cancel"), taken_order(20, length=5, at=15, refused="too late")]
    taken.append(taken_order(30, kind="cancel", refused="it has begun"))
    (control / "accepted.json").write_text(json.dumps(taken))
    found = look(run)
    assert found["orders"]["pending"]["length"] == 50 and len(found["orders"]["accepted"]) == 3
    text = shown(found, 200)
    waits = "decay of 50 steps (one_minus_sqrt) from where all islands agree; pending, for the next round"
    assert f"order      {waits}\n" in text
    assert "decay of 5 steps (one_minus_sqrt) from step 15: refused: too late; at step 20\n" in text
    assert "order      the decay that had not begun is withdrawn; agreed at step 10\n" in text
    assert "order      withdrawal of a decay: refused: it has begun; at step 30\n" in text
    late = {"kind": "decay", "length": 50, "at": 70, "then": "stable"}
    (control / "order.json").write_text(json.dumps(late))
    text = shown(look(run, NOW + 1000), 200)
    assert "from step 70, then stable; pending, until the run goes on\n" in text
    (control / "order.json").write_text(json.dumps({"kind": "cancel"}))
    assert "order      withdrawal of a decay; pending, for the next round\n" in shown(look(run), 200)
    (control / "order.json").write_text('{"kind": "nonsense"}')
    found = look(run)
    assert found["orders"]["pending"]["kind"] == "unreadable"
    assert "order      cannot be read: " in shown(found, 200)


def test_the_newest_whole_checkpoint_counts_and_one_under_way_is_told(run: Path) -> None:
    store = CheckpointStore(run / "island_0" / "checkpoints", 3)
    for n in (10, 20):
        store.begin(n, 0)
        (store.staging(n) / "x").write_text("x")
        store.complete(n, {"outer_step": n // 10})
    (store.folder(20) / "x").unlink()
    store.staging(24).mkdir()
    found = look(run)
    assert found["islands"][0]["checkpoint"]["step"] == 10
    assert found["islands"][1]["checkpoint"] is None
    assert "island 0: it is writing the checkpoint of step 24" in found["waiting_for"]


def test_an_island_whose_folder_is_on_another_disk(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "islands": 4}))
    append(run, 0, outer(30, 3, NOW, islands=(0, 1, 2)))
    found = look(run, NOW + 1)
    assert states(found) == ["running", "running", "elsewhere", "absent"]
    assert found["islands"][2]["staleness"] == 2
    assert found["notes"] == ["island 3 has no folder here and is in no recent round"]
    assert "elsewhere" in shown(found)


def test_before_the_first_round_an_island_without_a_folder_is_waited_for(run: Path) -> None:
    (run / "island_1" / "metrics.jsonl").unlink()
    (run / "island_1").rmdir()
    (run / "island_0" / "metrics.jsonl").write_text(json.dumps(start(NOW - 5)) + "\n")
    found = look(run)
    assert (states(found), found["notes"]) == (["starting", "absent"], [])
    assert "island 1: it has no folder here, and there was no round yet" in found["waiting_for"]


def test_the_age_of_the_newest_commit_and_a_round_that_is_late(run: Path) -> None:
    for island in (0, 1):
        append(run, island, outer(30, 3, NOW + 20), step(33 - 2 * island, NOW + 24))
    found = look(run, NOW + 25)
    assert found["last_commit_age_s"] == 5.0
    assert "step 33, round 3 (5 s ago), sync" in shown(found)
    late = [s for s in found["waiting_for"] if s.startswith("a round: ")]
    assert late == []  # one every 25 s is usual: (24 + 26 + 24 + 26) / 4
    with at_it(run / "island_0" / "lock"), at_it(run / "island_1" / "lock"):
        assert not any("usual" in s for s in look(run, NOW + 90)["waiting_for"])
        found = look(run, NOW + 100)
        assert (
            "a round: the last was committed 80 s ago, one every 25 s is usual; "
            "what is missing is step 40 on island 1, last seen at 31"
        ) in found["waiting_for"]
        for island in (0, 1):
            append(run, island, step(40, NOW + 99))
        text = " ".join(look(run, NOW + 100)["waiting_for"])
        assert "; all have trained to step 40, so it is the exchange: their logs tell why" in text
    assert look(run, NOW + 1000)["waiting_for"] == [
        f"island {i}: it ended without a word; {run}/island_{i}/log.txt tells why; --resume goes on"
        for i in (0, 1)
    ]


def test_no_commit_has_no_age(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"islands": 1, "ranks": 1}))
    append(tmp_path, 0, start(NOW), step(1, NOW))
    found = look(tmp_path, NOW + 1)
    assert found["last_commit_age_s"] is None and "round 0, sync" in shown(found)


def test_a_run_of_which_nothing_is_recorded_yet(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"islands": 1, "ranks": 1}))
    assert look(tmp_path)["state"] == "not started"
    (tmp_path / "island_0").mkdir()
    log = tmp_path / "island_0" / "log.txt"
    log.write_text("=== megatron-wsd island 0\n")
    assert look(tmp_path, log.stat().st_mtime + 30)["state"] == "starting"
    assert look(tmp_path, log.stat().st_mtime + 3000)["state"] == "lost"


def test_an_island_that_failed_before_its_first_record_says_so_and_where_to_read_on(run: Path) -> None:
    for island in (0, 1):
        (run / f"island_{island}" / "metrics.jsonl").unlink()
    log = run / "island_1" / "log.txt"
    log.write_text("=== megatron-wsd island 1: now\nmegatron-wsd: error: island 1 rank 0: no such corpus\n")
    soon = log.stat().st_mtime + 5
    with held(run / "island_1" / "lock", "island 1"):
        assert states(look(run, soon))[1] == "starting"
    found = look(run, soon)
    assert states(found)[1] == "failed" and found["state"] == "failed"
    assert f"island 1: it failed at its start, before any record; all it said: {log}" in found["waiting_for"]
    assert "island 1   | no such corpus" in shown(found, 200)
    # the lock of another machine says nothing about its processes there
    (run / "island_1" / "lock").write_text("1 another-host")
    assert states(look(run, soon))[1] == "starting"
    append(run, 0, start(soon), step(1, soon))
    assert look(run, soon + 1)["state"] == "running"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RUN: expected a run folder"):
        RunStatus(tmp_path)


# ---- the command ----


def shown(found: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(found))
    return out.getvalue()


def test_the_table_fits_eighty_columns(run: Path) -> None:
    big = {"tokens": 123_456_789_012, "tokens_per_s": 98_765.0, "loss": 2.3456}
    append(run, 0, step(123_456, NOW, **big), outer(123_456, 12_345, NOW, island_bytes=123_456_789_012))
    text = shown(look(run))
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    row = next(line for line in text.splitlines() if line.split()[:2] == ["0", "running"])
    expected = "0 running 0 s 123456 12345 0 1.00 2.346 98,765 123.5 GB"
    assert " ".join(row.split()) == expected


def test_what_no_terminal_reads_is_neither_wrapped_nor_cut(run: Path) -> None:
    deep = run.parent / ("a-run-with-a-long-name" * 8)
    run.rename(deep)
    append(deep, 0, void(30, 2, NOW, "a reason " * 30))
    environment = {**os.environ, "COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron_wsd", "status", str(deep)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"{deep.name}: lost ({deep})"
    assert any(line.split()[:2] == ["0", "lost"] and line.rstrip().endswith("1.5 kB") for line in lines)
    assert any(line.endswith(f"{deep}/island_0/log.txt tells why; --resume goes on") for line in lines)


def invoke(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["status", *map(str, arguments)])
    return result.exit_code, result.output


def test_json_is_one_line_a_look_and_watching_ends_with_the_run(run: Path) -> None:
    for island in (0, 1):
        append(run, island, event("finish", 24, NOW))
    code, text = invoke(run, "--json", "--watch", "--interval", "0.2")
    assert code == 0 and json.loads(text)["state"] == "finished"
    code, text = invoke(run, "--watch")
    assert code == 0 and "finished" in text


def test_errors_of_the_command(run: Path, tmp_path: Path) -> None:
    assert invoke(tmp_path / "nowhere")[0] == 2
    for address in ("port", "host:", "1.2.3.4:70000"):
        code, text = invoke(run, "--prometheus", address)
        assert code == 2 and "--prometheus" in text


def test_the_command_imports_nothing_slow(run: Path) -> None:
    program = (
        "import sys; from megatron_wsd.cli import app\n"
        f"app(['status', {str(run)!r}], standalone_mode=False)\n"
        "slow = {'torch', 'deepspeed', 'megatron.core', 'torchft', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {slow}' if slow else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "first" in done.stdout


# ---- Prometheus ----


def test_the_exposition_has_a_type_for_every_family_and_escapes_labels(run: Path) -> None:
    append(
        run, 0, {"kind": "eval", "time": NOW, "step": 20, "target": "anchor", "corpus": 'a"b\\', "loss": 2.5}
    )
    append(run, 1, step(25, NOW, loss=None))
    lines = exposition(look(run)).splitlines()
    assert 'megatron_wsd_step{run="first",island="0"} 24' in lines
    assert 'megatron_wsd_exchanged_bytes_total{run="first",island="1"} 1000' in lines
    assert 'megatron_wsd_phase{run="first",island="0",phase="stable"} 1' in lines
    assert 'megatron_wsd_anchor_loss{run="first",corpus="a\\"b\\\\"} 2.5' in lines
    assert not any(line.startswith('megatron_wsd_loss{run="first",island="1"') for line in lines)
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {line.partition("{")[0] for line in lines if not line.startswith("#")} <= typed


def test_the_endpoint_answers_with_the_state_at_that_moment(run: Path) -> None:
    with make_server(RunStatus(run), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{url}/metrics", timeout=10) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                assert 'megatron_wsd_outer_step{run="first",island="0"} 2\n' in answer.read().decode()
            append(run, 0, outer(30, 3, NOW))
            with opener.open(f"{url}/metrics", timeout=10) as answer:
                assert 'megatron_wsd_outer_step{run="first",island="0"} 3\n' in answer.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="404"):
                opener.open(f"{url}/other", timeout=10)
        finally:
            server.shutdown()
