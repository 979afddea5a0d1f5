"""The asynchronous job through the real launcher, with five faults injected on its way, and a branch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_main_job import command, config, digests, ranks_of, records, run_job, say, wait_for

pytestmark = pytest.mark.launch

FAULTS = (
    "island=1 at=commit round=2 how=exception rank=1",
    "island=1 at=capture round=4 how=nan rank=0",
    "island=0 at=within_exchange round=6 how=slow seconds=1",
    "island=1 at=agree round=8 how=hang rank=1",
)


def asynchronous(folder: Path) -> Path:
    path = config(folder, checkpoint={"interval_steps": 10, "keep": 8})
    raw = json.loads(path.read_text())
    raw["scheduler"]["params"] = {"warmup_steps": 3}  # no end date
    job = raw["megatron_wsd"]
    job["islands"] = {"heartbeat_timeout_s": 3.0, "join_timeout_s": 12.0, "hang_timeout_s": 18.0}
    job["sync"] = {
        "mode": "async",
        "inner_steps": 6,
        "fragments": 2,
        "wire": "int8",
        "grace_s": 0.5,
        "poll_s": 0.1,
        "timeout_s": 8.0,
        "bucket_bytes": 8192,
    }
    job["model"]["num_layers"] = 2
    job["log"]["eval_interval"] = 10
    path.write_text(json.dumps(raw))
    return path


def newest(run: Path, island: int) -> int:
    return max((r["outer_step"] for r in records(run, island, "round") if r["committed"]), default=0)


def wait_until(what: str, true: Callable[[], bool], timeout: float = 200) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.2)


def commits_more(run: Path, island: int, more: int) -> None:
    """Wait until an island has committed so many rounds after the newest that any has now."""
    goal = max(newest(run, i) for i in range(2)) + more
    wait_until(f"round {goal} on island {island}", lambda: newest(run, island) >= goal)


def test_asynchronous_islands_survive_what_happens_to_them(tmp_path: Path) -> None:
    path, run = asynchronous(tmp_path), tmp_path / "run"
    inject = [word for fault in FAULTS for word in ("--inject", fault)]
    output = open(tmp_path / "output.txt", "w")  # noqa: SIM115
    job = subprocess.Popen(command("launch", path, run, *inject), stdout=output, stderr=output)
    children: list[subprocess.Popen[bytes]] = []

    def restart(*more: str) -> subprocess.Popen[bytes]:
        lighthouse = json.loads((run / "run.json").read_text())["lighthouse"]
        again = [*command("island", path, run), "--island", "1", "--resume", "--lighthouse", lighthouse]
        children.append(subprocess.Popen([*again, *more], stdout=output, stderr=output))
        return children[-1]

    try:
        wait_until("a round", lambda: (run / "island_0/metrics.jsonl").exists() and newest(run, 0) > 0)
        address = json.loads((run / "run.json").read_text())["lighthouse"].removeprefix("http://")
        lighthouses = [p for p in psutil.process_iter() if address in p.cmdline()]
        assert lighthouses
        for process in lighthouses:
            process.kill()
        wait_for(run, 0, '"event": "alone"')  # the rank that hung has ended itself, and its island with it
        wait_until("the end of island 1", lambda: "island 1 failed" in (tmp_path / "output.txt").read_text())
        commits_more(run, 0, 2)
        killed = restart("--inject", f"island=1 at=step round={newest(run, 0) + 6} how=kill rank=0")
        wait_until("its end by the injected fault", lambda: killed.poll() is not None)
        assert killed.returncode != 0
        commits_more(run, 0, 2)
        back = restart()
        commits_more(run, 1, 4)
        wait_until("a checkpoint", lambda: any((run / "island_1" / "checkpoints").glob("step_????????")))
        order = [
            sys.executable,
            "-m",
            "megatron_wsd",
            "decay-now",
            str(run),
            "--steps",
            "12",
            "--wait",
            "120",
        ]
        done = subprocess.run(order, capture_output=True, text=True, timeout=180)
        assert "Agreed by all islands at step" in done.stdout, done.stdout + done.stderr
        assert back.wait(200) == 0
        job.wait(200)
    finally:
        for process in (job, *children):
            process.kill()
        for island in range(2):
            for rank in ranks_of(run, island):
                rank.kill()
        output.close()
    output_text = (tmp_path / "output.txt").read_text()
    assert "the lighthouse has ended: starting it again" in output_text
    for fault in FAULTS:
        assert fault in output_text, f"{fault} did not happen"

    # Whatever happened, both agree on every round that both know, and nobody went back.
    seen: dict[int, dict[int, dict[str, Any]]] = {}
    for island in range(2):
        for r in records(run, island, "round"):
            if r["committed"]:
                seen.setdefault(r["outer_step"], {})[island] = r
    both = [rounds for rounds in seen.values() if len(rounds) == 2]
    assert len(both) > 10
    assert all(rounds[0]["digest"] == rounds[1]["digest"] for rounds in both)
    steps = [r["outer_step"] for r in records(run, 0, "round") if r["committed"]]
    assert steps == sorted(set(steps)) and steps == list(range(1, len(steps) + 1))
    events = records(run, 0, "event") + records(run, 1, "event")
    assert any(e["event"] == "void" and "NaN" in e["message"] and "island 1" in e["message"] for e in events)
    assert any(r for r in records(run, 0, "round") if not r["committed"]), "the exception voided a round"
    assert any(
        tau > 0 for rounds in seen.values() for r in rounds.values() for tau in r["staleness"].values()
    )

    # The end: one anchor, held by both; the decay was one schedule on both.
    finals = [
        {(e["corpus"]): e["loss"] for e in records(run, i, "eval") if e["target"] == "anchor"}
        for i in range(2)
    ]
    assert finals[0] == finals[1]
    # Whoever validates the anchor of a round finds the same, and says the same of it.
    told: dict[tuple[int, str], set[tuple[Any, ...]]] = {}
    for e in (e for i in range(2) for e in records(run, i, "eval") if e["target"] == "anchor"):
        what = (e["loss"], e["tokens"], e["position"])
        told.setdefault((e["outer_step"], e["corpus"]), set()).add(what)
    assert all(len(said) == 1 for said in told.values()), told
    summary = json.loads((run / "summary.json").read_text())
    spans = [(p["phase"], p["last_step"] - p["first_step"] + 1) for p in summary["phases"]]
    assert spans[0] == ("warmup", 3) and spans[-1] == ("decay", 12)
    for island in range(2):
        assert records(run, island, "event")[-1]["event"] == "finish"
        assert not ranks_of(run, island)

    _a_branch_begins_where_each_island_stood(run, tmp_path / "branch")


def _a_branch_begins_where_each_island_stood(run: Path, branch: Path) -> None:
    """Off checkpoints of the stable phase, which each island has saved after steps and rounds of its own."""
    stable = json.loads((run / "control" / "accepted.json").read_text())[0]["step"] - 1
    before = digests(run)
    flags = ("--decay-steps", 6, "--shape", "linear", "--run-dir", branch)
    say("branch", f"{run}@{stable}", "--name", "late", *flags)
    parent = json.loads((branch / "run.json").read_text())["parent"]
    begins, batch = parent["position"], 8
    assert 0 < begins <= stable
    for i in "01":
        assert (run / f"island_{i}" / "checkpoints" / f"step_{parent['steps'][i]:08d}").is_dir()
        assert parent["consumed"][i]["stable"]["broad"] == parent["cursors"][i] * batch
    run_job(branch / "config.json", branch, "--resume")
    assert {k: v for k, v in digests(run).items() if not k.startswith("branches/")} == before

    anchors = []
    for island in range(2):
        events = records(branch, island, "event")
        assert events[-1]["event"] == "finish"
        orders = [e["message"] for e in events if e["event"] == "order"]
        assert orders == [f"step {begins}: decay of 6 steps (linear) from step {begins}"], orders
        newest = max((branch / f"island_{island}" / "checkpoints").glob("step_*"))
        anchors.append(json.loads((newest / "outer" / "manifest.json").read_text())["digests"])
        steps = records(branch, island, "step")
        assert {r["phase"] for r in steps} == {"decay"} and steps[0]["lr"] <= 2e-3
        assert steps[-1]["position"] >= begins + 6
    assert anchors[0] == anchors[1] and len(anchors[0]) == 2
