"""The records of a run, its summary and its picture."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_wsd import report
from megatron_wsd.picture import _smooth, stretches
from megatron_wsd.records import of_kind, phases, read_metrics


def step(n: int, loss: float | None, phase: str = "stable") -> dict[str, Any]:
    return {
        "kind": "step",
        "time": 100.0 + n,
        "step": n,
        "loss": loss,
        "lr": 1e-3,
        "phase": phase,
        "tokens": 10 * n,
    }


def outer(
    n: int, outer_step: int, committed: bool = True, islands: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    return {
        "kind": "round",
        "time": 100.0 + n,
        "step": n,
        "outer_step": outer_step,
        "committed": committed,
        "islands": list(islands),
        "contributors": list(islands) if committed else [],
        "island_bytes": 1000,
    }


def start(n: int = 0) -> dict[str, Any]:
    entropy = {"broad": 3.0, "high_quality": 2.9}
    return {"kind": "start", "time": 100.0 + n, "step": n, "parameters": 1234, "unigram_entropy": entropy}


def evaluated(n: int, loss: float, target: str = "anchor", corpus: str = "broad") -> dict[str, Any]:
    return {"kind": "eval", "time": 100.0 + n, "step": n, "target": target, "corpus": corpus, "loss": loss}


def event(n: int, name: str) -> dict[str, Any]:
    return {"kind": "event", "time": 100.0 + n, "step": n, "event": name, "message": ""}


def write(file: Path, records: list[dict[str, Any]], torn: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(r) + "\n" for r in records) + torn)
    return file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two islands; island 1 was killed after step 20, came back, and was healed at step 40."""
    warm = [step(5, 5.0, "warmup"), step(10, 4.0, "warmup")]
    rounds = [outer(10, 1), outer(20, 1, committed=False), outer(20, 2)]
    late = [
        outer(30, 3, islands=(0,)),
        step(30, 3.0),
        outer(40, 4),
        step(40, 2.0, "decay"),
        event(40, "finish"),
    ]
    evals = [evaluated(20, 3.2), evaluated(40, 2.5), evaluated(40, 2.7, "local")]
    evals += [evaluated(40, 2.95, corpus="high_quality")]
    write(tmp_path / "island_0" / "metrics.jsonl", [start(), *warm, *rounds, step(20, 3.5), *late, *evals])
    back = [start(30), event(40, "heal"), outer(40, 4), step(40, 2.5, "decay")]
    write(
        tmp_path / "island_1" / "metrics.jsonl",
        [start(), *warm, *rounds, step(20, 3.6), *back],
        '{"kind": "st',
    )
    return tmp_path


def test_a_torn_last_line_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "m", [step(1, 5.0)], 'not json\n[1, 2]\n{"step": 3}\n\n{"kind": "step", "st')
    assert read_metrics(file) == [step(1, 5.0)]
    assert read_metrics(tmp_path / "nowhere") == []


def test_what_a_resume_says_again_replaces_what_was_said_before(tmp_path: Path) -> None:
    first = [start(), step(1, 5.0), step(2, 4.0), outer(2, 0, committed=False), outer(2, 1), step(3, 3.0)]
    again = [start(1), step(2, 4.5), outer(2, 1), event(2, "stop")]
    records = read_metrics(write(tmp_path / "m", first + again))
    assert [(r["step"], r["loss"]) for r in of_kind(records, "step")] == [(1, 5.0), (2, 4.5), (3, 3.0)]
    assert len(of_kind(records, "round")) == 1  # the void try belongs to what was done again
    assert len(of_kind(records, "start")) == 2
    within = read_metrics(write(tmp_path / "m", first))
    assert [r["committed"] for r in of_kind(within, "round")] == [False, True]


def test_an_asynchronous_island_that_does_steps_again_does_no_round_again(tmp_path: Path) -> None:
    before = [start(), step(1, 5.0), outer(8, 1), outer(8, 2), step(9, 4.0)]
    again = [start(7), outer(8, 3), step(9, 3.5)]
    records = read_metrics(write(tmp_path / "m", before + again))
    assert [r["outer_step"] for r in of_kind(records, "round")] == [1, 2, 3]
    assert [r["loss"] for r in of_kind(records, "step")] == [5.0, 3.5]


def test_the_time_between_an_end_and_the_next_start_trained_nothing(tmp_path: Path) -> None:
    """Island 0 was up from 100 to 110 s and from 1700 to 1720 s, island 1 from 105 to 140 s."""
    first = [start(), step(10, 5.0), {**start(5), "time": 1700.0}, {**step(20, 4.0), "time": 1720.0}]
    write(tmp_path / "island_0" / "metrics.jsonl", first)
    write(tmp_path / "island_1" / "metrics.jsonl", [{**start(), "time": 105.0}, step(40, 4.0)])
    summary = report.summarise(tmp_path)
    assert (summary["wall_seconds"], summary["running_seconds"]) == (1620.0, 60.0)
    report.print_summary(summary, Console(file=(out := io.StringIO()), width=200))
    assert "400 tokens logged, in 1 min 00 s of running, over 27 min 00 s of wall time" in out.getvalue()


def test_phases_join_without_gaps() -> None:
    steps = [step(5, 1.0, "warmup"), step(10, 1.0), step(15, 1.0), step(20, 1.0, "decay")]
    assert phases(steps) == [("warmup", 1, 5), ("stable", 6, 15), ("decay", 16, 20)]


def test_the_summary_counts_every_round_once_and_every_byte(run: Path) -> None:
    summary = report.summarise(run)
    assert summary["rounds_committed"] == 4  # 1 to 4, of which island 1 was away for one
    assert summary["bytes_exchanged"] == 9 * 1000
    assert summary["parameters"] == 1234 and summary["tokens"] == 400
    assert summary["wall_seconds"] == 40.0
    assert [p["phase"] for p in summary["phases"]] == ["warmup", "stable", "decay"]
    assert summary["anchor"]["broad"] == {"loss": 2.5, "step": 40, "unigram_entropy": 3.0}
    first, second = summary["islands"]
    assert (first["end"], first["rounds_void"], first["rounds_alone"], first["heals"]) == ("finish", 1, 1, 0)
    assert (second["end"], second["starts"], second["heals"]) == ("cut short", 2, 1)
    assert first["loss_start"] == 5.0
    assert first["loss_end"] == 2.0


def test_the_loss_at_the_end_is_the_mean_of_five_logged_steps_or_a_quarter(tmp_path: Path) -> None:
    for count, mean in ((1, 99.0), (8, 92.5), (40, 62.0)):
        steps = [step(n, 100.0 - n) for n in range(1, count + 1)]
        write(tmp_path / "island_0" / "metrics.jsonl", steps)
        assert report.summarise(tmp_path)["islands"][0]["loss_end"] == mean


def test_the_summary_says_whether_the_anchor_beats_the_unigram_model(run: Path) -> None:
    out = io.StringIO()
    report.print_summary(report.summarise(run), Console(file=out, width=200))
    text = out.getvalue()
    assert "loss 2.500 at step 40, below the unigram entropy 3.000" in text
    assert "loss 2.950 at step 40, NOT below the unigram entropy 2.900" in text
    assert "warmup 1-10, stable 11-30, decay 31-40" in text
    assert "4 committed, 1 void" in text
    assert f"run folder: {run}" in text


def test_a_long_path_stays_whole_on_a_narrow_console(run: Path) -> None:
    out = io.StringIO()
    report.print_summary(report.summarise(run), Console(file=out, width=40))
    assert f"picture: {run / 'run.png'}\n" in out.getvalue()


def test_a_run_that_diverged_is_not_made_to_look_well(tmp_path: Path) -> None:
    records = [start(), step(1, 5.0), step(2, None), evaluated(2, None)]  # type: ignore[arg-type]
    write(tmp_path / "island_0" / "metrics.jsonl", records)
    summary = report.write(tmp_path, Console(file=(out := io.StringIO()), width=200))
    assert summary["islands"][0]["loss_end"] is None
    assert "training loss 5.000 -> nan, 2 steps" in out.getvalue()
    assert "loss nan at step 2, NOT below the unigram entropy 3.000" in out.getvalue()
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_losses_that_were_never_finite_and_dropped_contributions_are_told(tmp_path: Path) -> None:
    dropped = [event(n, "void") | {"island": island} for n, island in ((1, 0), (2, 0), (2, 1))]
    records = [start(), step(1, None), step(2, None), *dropped]
    write(tmp_path / "island_0" / "metrics.jsonl", records)
    summary = report.write(tmp_path, Console(file=(out := io.StringIO()), width=200))
    assert (summary["islands"][0]["dropped"], summary["islands"][0]["loss_start"]) == (2, None)
    assert "training loss nan -> nan, 2 steps" in out.getvalue()
    assert "2 contributions dropped for NaN or Inf" in out.getvalue()


@pytest.mark.parametrize("records", [[], [start()], [start(), step(1, 5.0)], [start(), outer(5, 1, False)]])
def test_the_picture_is_drawn_of_whatever_there_is(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    if records:
        write(tmp_path / "island_0" / "metrics.jsonl", records)
    report.draw(tmp_path, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert report.has_steps(tmp_path) == any(r["kind"] == "step" for r in records)
    assert not (tmp_path / "run.tmp.png").exists()


def test_the_picture_has_the_marks_of_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1]
    )
    with (run / "island_0" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event(31, "mix") | {"message": "step 31: data mix is now 'late'"}) + "\n")
    report.draw(run, run / "run.png")
    loss, rate, rounds, exchanged = figures[0].axes
    assert [t.get_text() for t in loss.get_legend().get_texts()] == [
        "island 0, training",
        "island 1, training",
        "anchor, validation on broad (last 2.500)",
        "unigram entropy of broad (3.000)",
        "anchor, validation on high_quality (last 2.950)",
        "unigram entropy of high_quality (2.900)",
        "data mix is now 'late' (step 31)",
    ]
    assert {t.get_text() for t in rate.texts} == {"warmup", "stable", "decay"}
    marks = [t.get_text() for t in rounds.get_legend().get_texts()]
    assert marks == ["4 outer rounds:", "committed", "void", "healed"]
    (area,) = exchanged.collections
    total = report.summarise(run)["bytes_exchanged"]
    unit = {"bytes": 1.0, "kB": 1e3, "MB": 1e6}[exchanged.get_ylabel().split()[-1]]
    whole = [x for x, y in area.get_paths()[0].vertices if y == pytest.approx(total / unit)]
    assert max(whole) > min(whole) == 40  # the bytes of the last round are seen


def test_the_smoothed_curve_keeps_a_straight_line_and_its_ends() -> None:
    line = [10.0 - i for i in range(9)]
    smooth = _smooth(line, 5)
    assert smooth[:7] == line[:7]
    assert smooth[8] == sum(line[6:]) / 3  # cut, not narrowed, at the end
    assert _smooth([], 5) == []


def test_a_curve_is_cut_where_the_island_was_away() -> None:
    steps = [step(n, 1.0) for n in (5, 10, 15, 40, 45, 50)]
    assert [[r["step"] for r in part] for part in stretches(steps)] == [[5, 10, 15], [40, 45, 50]]
    assert stretches(steps[:1]) == [steps[:1]]
