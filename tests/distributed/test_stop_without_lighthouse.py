"""Islands that are told to stop while nothing can begin, since the lighthouse is gone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_runner import Islands, config

from megatron_wsd.cli.lighthouse import lighthouse_command
from megatron_wsd.cli.process import free_port
from megatron_wsd.config import parse_config
from megatron_wsd.diloco.lighthouse import check_lighthouse
from megatron_wsd.records import of_kind, read_metrics

PATIENCE_S = 3600.0  # a round would wait so long for a lighthouse


def rounds(islands: Islands, island: int) -> list[dict[str, Any]]:
    metrics = islands.run_dir / f"island_{island}" / "metrics.jsonl"
    return of_kind(read_metrics(metrics), "round") if metrics.exists() else []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_they_save_and_leave(tmp_path: Path, mode: str) -> None:
    raw = config(mode, islands={"join_timeout_s": PATIENCE_S})
    islands = Islands(tmp_path, "", 2, raw, 10**6)
    port = free_port()
    islands._address = f"http://127.0.0.1:{port}"
    command = lighthouse_command(parse_config(raw, islands=2, ranks=1).islands, f"127.0.0.1:{port}")
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as lighthouse:
        try:
            check_lighthouse(islands._address, 60.0)
            started = [islands.start(i) for i in (0, 1)]
            give_up = time.monotonic() + 60
            while len(rounds(islands, 0)) < 2 and time.monotonic() < give_up:
                time.sleep(0.05)
        finally:
            lighthouse.kill()
    before = [len(rounds(islands, i)) for i in (0, 1)]
    assert min(before) >= 2
    time.sleep(1.0)  # now they wait for it, or begin a round at once if they do not yet
    for process in started:
        process.terminate()
    found = [islands.result(process, timeout=120) for process in started]
    assert [r["stopped"] for r in found] == [True, True]
    assert found[0]["digest"] == found[1]["digest"]
    assert all((tmp_path / f"island_{i}" / "checkpoint" / "manifest.json").exists() for i in (0, 1))
