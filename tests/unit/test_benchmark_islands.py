"""The parts of benchmarks/islands.py that start no island: figures, tables, command line."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_wsd.config import parse_config
from megatron_wsd.optim.wire import WireFormat

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

islands = importlib.import_module("islands")
figures = importlib.import_module("islands_bench.figures")
link = importlib.import_module("islands_bench.link")
report = importlib.import_module("islands_bench.report")
runs = importlib.import_module("islands_bench.runs")
worker = importlib.import_module("islands_bench.worker")


def committed(contributors: list[int], **more: Any) -> dict[str, Any]:
    names = [str(i) for i in contributors]
    return {
        "contributors": contributors,
        "staleness": dict.fromkeys(names, 0),
        "gates": dict.fromkeys(names, 1.0),
        "time": 0.0,
        **more,
    }


def test_speed_counts_from_the_end_of_the_last_skipped_step() -> None:
    assert figures.speed([5.0, 5.5, 6.0, 7.0], 1) == 1.5
    assert figures.speed([5.0, 5.5, 6.0, 7.0], 3) == 1.0


@pytest.mark.parametrize("skip", [0, 4, 5])
def test_speed_of_nothing_is_refused(skip: int) -> None:
    with pytest.raises(ValueError, match="steps"):
        figures.speed([1.0, 2.0, 3.0, 4.0], skip)


def test_work_is_that_of_one_island_while_training() -> None:
    rounds = [
        committed([0]),
        committed([0, 1], staleness={"0": 0, "1": 3}, gates={"0": 1.0, "1": 0.5}, time=1.0),
        committed([1], staleness={"1": 4}, gates={"1": 0.25}, time=2.0),
        committed([1], staleness={"1": 9}, gates={"1": 0.0}, time=9.0),  # offered when training was over
    ]
    work = figures.work_of(rounds, 1, until_s=2.0)
    assert (work.rounds, work.staleness, work.gates) == (3, [3, 4], [0.5, 0.25])
    assert work.median_staleness == 3.5
    both = figures.Work.of([work, figures.work_of(rounds, 1)])
    assert both == figures.Work(7, [3, 4, 3, 4, 9], [0.5, 0.25, 0.5, 0.25, 0.0])
    assert figures.work_of(rounds, 2).median_staleness is None


def test_data_parallel_sends_a_ring_all_reduce() -> None:
    # reduce-scatter and all-gather: n - 1 messages of a share of 1/n of the bf16 gradient, each
    for n in (2, 3, 8):
        assert figures.data_parallel_bytes(n, 1_000) == pytest.approx(2 * (n - 1) * (2_000 / n))


@pytest.mark.parametrize("wire", islands.WIRES)
def test_traffic_tells_the_bytes_of_the_format(wire: str) -> None:
    parameters, steps, tokens = 1 << 16, 30, 512
    payload = WireFormat.of(wire).encoded_bytes(parameters)
    rounds = [committed([0, 1], island_bytes=2 * payload)] * 4  # each sent its own and received the other's
    found = figures.traffic_of(wire, steps, rounds, parameters, 2 * 4 * steps * tokens, tokens)
    each = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64}[wire]
    assert found.bytes_per_parameter == pytest.approx(each)
    assert found.bytes_per_token == pytest.approx(each * parameters / (steps * tokens))
    # 2 bytes a parameter and step against `each` a parameter and round of 30 steps
    assert found.ratio == pytest.approx(2 * steps / each)


def test_pauses_by_what_was_done() -> None:
    # Two steps a period; the first period is left out. Captures after 4, 6, 8; adoptions after 5 and 7, and
    # one after 8, where a capture was too.
    pauses = [9.0, 9.0, 0.001, 0.010, 0.030, 0.012, 0.050, 0.014]
    times = [float(n) for n in range(1, 9)]
    found = figures.pause_of(times, pauses, 2, [1, 5, 7, 8])
    assert found.capture_ms == pytest.approx(12.0)
    assert found.adopt_ms == pytest.approx(40.0)
    assert found.other_ms == pytest.approx(1.0)
    assert found.share == pytest.approx(sum(pauses[2:]) / 6.0)


def test_spread() -> None:
    assert figures.spread([2.0]) == "2.000"
    assert figures.spread([1.0, 3.0], 1) == "2.0 (1.0 - 3.0)"


def test_settings_are_configs() -> None:
    for sync in (islands.ASYNC, islands.LOCKSTEP):
        raw = runs.Setting(sync=sync, parameters=1, seconds=1.0).config()
        assert parse_config(raw, islands=2, ranks=1).sync.mode == sync["mode"]
    assert runs.Setting(sync=None, parameters=1, seconds=1.0).config() is None


def test_the_tensors_are_read_and_written_as_shards() -> None:
    tensors = worker.Tensors(200_000)
    assert sum(s.numel for s in tensors.shards) == pytest.approx(200_000, rel=0.01)
    values = [torch.full((s.numel,), float(i)) for i, s in enumerate(tensors.shards)]
    tensors.write(values)
    out = [torch.empty(tensors.shards[i].numel) for i in (8, 3)]
    tensors.read(out, [8, 3])
    assert [float(t.mean()) for t in out] == [8.0, 3.0]


def test_a_machine_without_the_tools_makes_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda tool: None if tool == "tc" else f"/{tool}")
    with pytest.raises(link.NoLinkError, match="without tc"), link.thin_link(1.0):
        pass


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sections", "pace,race"], "race"),
        (["--repeats", "0"], "positive"),
        (["--seconds", "3"], "at least 12"),
    ],
)
def test_bad_command_lines(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        islands.arguments(words)
    assert text in capsys.readouterr().err


def test_all_sections_by_default() -> None:
    given = islands.arguments([])
    assert isinstance(given, argparse.Namespace) and given.sections == list(islands.SECTIONS)


DOCUMENT: dict[str, Any] = {
    "date": "2026-01-01",
    "seconds": 1.0,
    "others_cpus": 0.1,
    "load_before": 0.2,
    "command": "python benchmarks/islands.py",
    "machine": {"cpu": "C", "threads": 2, "memory_gib": 8, "system": "S"},
    "versions": {"torch": "1"},
    "pace": {
        "steps_per_s": {"alone": [5.0, 4.8], "fast": [4.9, 4.9], "lockstep_fast": [1.2]},
        "kept": [0.98, 1.02],
        "kept_of_bare": [0.97, 0.97],
        "work": {"rounds": 20, "staleness": [3, 4, 3], "gates": [0.5, 0.4, 0.5]},
    },
    "bytes": {
        "parameters": 1000,
        "tokens_per_step": 10,
        "traffic": [
            {
                "wire": "int8",
                "inner_steps": 30,
                "bytes_per_parameter": 1.016,
                "bytes_per_token": 3.39,
                "data_parallel": 200.0,
                "ratio": 59.1,
            }
        ],
    },
    "pause": {
        "parameters": 8000,
        "inner_steps": 5,
        "step_s": 0.2,
        "pause": {"fp32": {"capture_ms": 20.0, "adopt_ms": 30.0, "other_ms": 0.5, "share": 0.05}},
    },
    "link": {
        "parameters": 1000,
        "inner_steps": 5,
        "step_s": 0.2,
        "runs": {
            "async, thin link": {"link": "16 Mbit/s", "steps_per_s": [4.9, 4.8], "rounds": 4, "round_s": 4.2}
        },
        "async": 0.99,
        "sync": 0.2,
    },
    "verdicts": [
        {"what": "kept", "value": 0.98, "need": ">= 0.95", "passed": True},
        {"what": "age", "value": None, "need": "2 to 4", "passed": None},
        {"what": "gate", "value": 0.0, "need": "> 0", "passed": False},
    ],
}


def test_tables() -> None:
    text = report.markdown(DOCUMENT)
    assert "| fast island alone, async | 4.900 (4.800 - 5.000) |" in text
    assert "20 committed rounds: 2 of age 3, 1 of age 4, gates 0.400 to 0.500." in text
    assert "| `int8` | 1.016 | 3.39 | 59.1 times |" in text
    # 20 + 30 + 28 * 0.5 ms in 30 steps of 0.2 s
    assert "| `fp32` | 20.0 ms | 30.0 ms | 0.50 ms | 5.0% | 1.1% |" in text
    assert "| async, thin link | 16 Mbit/s | 4.90 and 4.80 | 4 | 4.20 |" in text
    assert "| kept | 0.98 | >= 0.95 | pass |" in text
    assert "| age | - | 2 to 4 | not measured |" in text
    assert "| gate | 0 | > 0 | FAIL |" in text


def test_tables_of_some_sections() -> None:
    some = {k: v for k, v in DOCUMENT.items() if k not in ("pace", "pause", "link")}
    text = report.markdown(some)
    assert "data parallel" in text and "steps per second" not in text
