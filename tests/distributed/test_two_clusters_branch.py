"""A branch of a run on two clusters, by the steps of docs/two-clusters.md.

Both clusters are folders of this machine: each island is started by island.sh with a run folder of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_hostfile import PATIENCE_S, ROOT, answers, free_port, wait_for
from test_main_job import config, digests, records, say

from megatron_wsd.cli.lighthouse import lighthouse_command
from megatron_wsd.config import load_config

pytestmark = pytest.mark.launch


def train(clusters: list[Path], lines: list[list[object]]) -> None:
    """Run a line for island.sh on each of the clusters, with one lighthouse, until both have ended well."""
    port = free_port()
    timeouts = load_config(clusters[0] / "config.json", islands=2, ranks=1).islands
    meeting = lighthouse_command(timeouts, f"127.0.0.1:{port}")
    started: list[subprocess.Popen[bytes]] = [subprocess.Popen(meeting, stderr=subprocess.DEVNULL)]
    try:
        wait_for("the lighthouse answers", lambda: answers(port))
        # without a .venv in the checkout island.sh takes the python3 that it finds
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for cluster, line in zip(clusters, lines, strict=True):
            words = [str(w).replace("HOST:PORT", f"127.0.0.1:{port}") for w in line]
            with (cluster / "console").open("w") as console:
                started.append(
                    subprocess.Popen(
                        words, cwd=cluster, env=environment, stdout=console, stderr=subprocess.STDOUT
                    )
                )
        ends = [process.wait(PATIENCE_S) for process in started[1:]]
        assert ends == [0, 0], [(cluster / "console").read_text() for cluster in clusters]
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_branch_is_made_on_one_cluster_and_begins_on_both(tmp_path: Path, mode: str) -> None:
    clusters = [tmp_path / "here", tmp_path / "there"]
    for cluster in clusters:
        cluster.mkdir()
        path = config(cluster, checkpoint={"interval_steps": 4, "keep": 4})
        raw: dict[str, Any] = json.loads(path.read_text())
        raw["scheduler"]["params"] = {"warmup_steps": 3}
        raw["megatron_wsd"]["sync"].update(mode=mode, **({"poll_s": 0.1} if mode == "async" else {}))
        (cluster / "config.json").write_text(json.dumps(raw))
    here, there = (cluster / "run" for cluster in clusters)
    flags = ["--islands", 2, "--ranks", 1, "--lighthouse", "http://HOST:PORT", "--interface", "lo"]
    begin = [
        [ROOT / "launch/island.sh", "--island", i, *flags, "--config", "config.json", "--run-dir", "run"]
        for i in range(2)
    ]
    train(clusters, [[*line, "--steps", 12] for line in begin])
    assert not (here / "island_1").exists() and not (there / "island_0").exists()
    before = [digests(here), digests(there)]

    if mode == "async":  # 'find ... | tar c | tar x' of the page
        copy = (
            f"cd {shlex.quote(str(clusters[1]))} && find run/island_1/checkpoints -name '*.json' | tar c -T -"
        )
        subprocess.run(f"sh -c {shlex.quote(copy)} | tar x", shell=True, check=True, cwd=clusters[0])
        assert not list((here / "island_1").rglob("*.pt"))
    told = say("branch", here, "--name", "late", "--decay-steps", 6, "--shape", "linear")
    shutil.rmtree(here / "island_1", ignore_errors=True)
    copy = "tar c run-late run/branches/late.json"
    subprocess.run(
        f"{copy} | tar x -C {shlex.quote(str(clusters[1]))}", shell=True, check=True, cwd=clusters[0]
    )

    lines = [shlex.split(line) for line in told.splitlines() if "island.sh" in line]
    assert [line[line.index("--island") + 1] for line in lines] == ["0", "1"], told
    for cluster, line in zip(clusters, lines, strict=True):  # as told: the paths of its cluster
        line[line.index("--config") + 1] = str(cluster / "run" / "config.json")
        line[line.index("--run-dir") + 1] = str(cluster / "run-late")
    train(clusters, [[*line, "--interface", "lo"] for line in lines])

    parent = json.loads((here.with_name("run-late") / "run.json").read_text())["parent"]
    anchors = []
    for i, run in enumerate((here.with_name("run-late"), there.with_name("run-late"))):
        start = next(r for r in records(run, i, "start"))
        assert start["resumed"] and start["outer_step"] > 0, "from its own checkpoint, with its inner moments"
        events = [e["message"] for e in records(run, i, "event")]
        if mode == "sync":  # else the island whose newest round is older is healed by the other
            assert not any("healed" in e for e in events), events
        assert (
            f"step {parent['position']}: decay of 6 steps (linear) from step {parent['position']}" in events
        )
        assert records(run, i, "event")[-1]["event"] == "finish"
        newest = max((run / f"island_{i}" / "checkpoints").glob("step_*"))
        anchors.append(json.loads((newest / "outer" / "manifest.json").read_text())["digests"])
    assert anchors[0] == anchors[1] and len(anchors[0]) == 1
    for run, was in zip((here, there), before, strict=True):
        now = digests(run)
        assert {name: now[name] for name in was} == was, "the parent is left as it is"
