"""What a run tells of its schedule when an island that it counted on is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_wsd.diloco.journal import Journal
from megatron_wsd.metrics import Metrics
from megatron_wsd.records import read_metrics


def test_a_schedule_that_stands_is_told_once_each_time(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.position = lambda: 211
    no_state: Any = None
    journal = Journal(metrics, 2, no_state)
    for ahead in (3, 7, 8, 12, 9, 2, 1, 0, 5, 7, 30, 4):
        journal.note_ahead(ahead, 8, 190)
    metrics.close()
    told = [r["message"] for r in read_metrics(tmp_path / "metrics.jsonl") if r["event"] == "schedule"]
    assert [text.split(":")[:2] for text in told] == [
        ["step 211", " the rate stays where it is for 8 steps of the run"],
        ["step 211", " the rate stays where it is for 30 steps of the run"],
    ]
