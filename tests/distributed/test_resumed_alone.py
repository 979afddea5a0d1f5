"""An island that is resumed and finds nobody there: it may go on if nobody can have gone on without it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_runner import Islands, config, lighthouse

from megatron_wsd.records import of_kind, read_metrics

FAR, FARTHER = 10**6, 40  # steps: no end of its own; how much longer a run goes on


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_only_who_cannot_have_been_left_behind_goes_on_alone(tmp_path: Path, mode: str) -> None:
    with lighthouse() as address:
        islands = Islands(tmp_path, address, 2, config(mode, islands={"start_timeout_s": 4.0}), FAR)
        metrics, stop = tmp_path / "island_0" / "metrics.jsonl", tmp_path / "stop"

        def rounds_of(*here: int) -> list[int]:
            """Positions of the rounds that island 0 has made with just these islands."""
            told = of_kind(read_metrics(metrics), "round") if metrics.exists() else []
            return [r["position"] for r in told if r["islands"] == list(here)]

        def wait_for_two(*here: int) -> int:
            give_up = time.monotonic() + 100
            while len(rounds_of(*here)) < 2:
                assert time.monotonic() < give_up
                time.sleep(0.02)
            return rounds_of(*here)[-1]

        first, second = islands.start(0, save_every=1), islands.start(1, save_every=1)
        wait_for_two(0, 1)
        second.terminate()
        left = islands.result(second)
        assert left["stopped"]
        stop.write_text(str(wait_for_two(0) + FARTHER))
        ahead = islands.result(first)
        assert ahead["outer_step"] > left["outer_step"]

        # Island 0 has gone on without it, and ended. Alone it would make other rounds of the same numbers.
        refused = islands.result(islands.start(1, resume=True))
        assert refused["error"] == "IslandError"
        assert "may have gone on without" in refused["text"] and "control/go-on" in refused["text"]
        assert read_metrics(tmp_path / "island_1" / "metrics.jsonl")[-1]["outer_step"] <= left["outer_step"]

        # Who made its newest rounds alone was not left behind by anybody.
        stop.write_text(str(ahead["position"] + FARTHER))
        alone = islands.result(islands.start(0, resume=True))
        assert alone["resumed"] and alone["outer_step"] > ahead["outer_step"]

        consent = tmp_path / "control" / "go-on"
        consent.parent.mkdir(exist_ok=True)
        consent.touch()
        allowed = islands.result(islands.start(1, resume=True))
        assert allowed["resumed"] and allowed["outer_step"] > left["outer_step"]
        assert not consent.exists()
        assert "going on without islands [0], as the operator allows" in islands.log(1).read_text()
