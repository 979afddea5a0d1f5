"""Runs side by side: losses by corpus, and a branch against its parent from where they part."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import run_folders as folders
from matplotlib.figure import Figure

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.reporting import checkpoints, comparison
from megatron_wsd.reporting.facts import RunFacts
from megatron_wsd.reporting.page import page
from megatron_wsd.reporting.several import Family, families, origin
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Schedule


def run(
    folder: Path, first: int, last: int, corpora: dict[str, float], branch_of: Path | None = None
) -> RunFacts:
    return RunFacts(folders.validated(folder, first, last, corpora, branch_of))


def tables(text: str) -> dict[str, list[list[str]]]:
    """The tables of a page by caption, as rows of cells."""
    found = {}
    for body in re.findall(r"<table>.*?</table>", text, flags=re.DOTALL):
        caption = re.search(r"<caption>(.*?)</caption>", body)
        rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]
        found[html.unescape(caption[1]) if caption else ""] = rows
    return found


LAST = "Last validation of the anchor, nats a token; differences from {}"


def test_losses_are_compared_by_corpus_and_only_where_both_have_it(tmp_path: Path) -> None:
    parent = run(tmp_path / "base", 0, 120, {"broad": 0.0, "web": 0.2})
    branch = run(tmp_path / "base-code", 80, 100, {"broad": 0.1, "code": -1.0}, parent.folder)
    found = tables(page([parent, branch]))
    assert found[LAST.format("base")] == [
        ["corpus", "base", "base-code", "difference", ""],
        ["broad", "2.800", "3.100", "+0.300", ""],
        ["code", "-", "2.000", "-", "only in base-code"],
        ["web", "3.000", "-", "-", "only in base"],
        ["at step", "120", "100", "", ""],
    ]
    assert found["At step 100, the newest at which all were validated; differences from base"] == [
        ["corpus", "base", "base-code", "difference", ""],
        ["broad", "3.000", "3.100", "+0.100", ""],
        ["code", "-", "2.000", "-", "only in base-code"],
        ["web", "3.200", "-", "-", "only in base"],
    ]
    # No mean over sets of corpora that differ stands anywhere in the comparison.
    section = page([parent, branch]).split('<section id="compare">')[1]
    assert "final loss" not in section and "mean of corpora" not in section


def test_runs_of_the_same_corpora_have_no_column_for_what_is_missing(tmp_path: Path) -> None:
    three = [run(tmp_path / name, 0, 40, {"broad": d}) for name, d in (("a", 0.0), ("b", 0.2), ("c", -0.1))]
    assert tables(page(three))[LAST.format("a")] == [
        ["corpus", "a", "b", "difference", "c", "difference"],
        ["broad", "3.600", "3.800", "+0.200", "3.500", "-0.100"],
        ["at step", "40", "40", "", "40", ""],
    ]
    assert "the newest at which all" not in page(three)


def test_a_run_whose_anchor_was_never_validated(tmp_path: Path) -> None:
    some, none = run(tmp_path / "a", 0, 40, {"broad": 0.0}), run(tmp_path / "b", 0, 40, {})
    assert tables(page([some, none]))[LAST.format("a")][1] == ["broad", "3.600", "-", "-", "only in a"]
    assert "No anchor was validated." in page([none, none])


def test_relatives_are_found_and_where_they_part(tmp_path: Path) -> None:
    base = run(tmp_path / "base", 0, 120, {"broad": 0.0})
    late = run(tmp_path / "late", 100, 110, {"broad": 0.0}, base.folder)
    early = run(tmp_path / "early", 60, 130, {"broad": 0.0}, base.folder)
    again = run(tmp_path / "again", 90, 124, {"broad": 0.0}, early.folder)
    alone = run(tmp_path / "alone", 0, 50, {"broad": 0.0})
    assert origin(again.folder) == [(base.folder, 0), (early.folder, 60), (again.folder, 90)]
    assert families([base, late]) == families([late, base][::-1]) == [Family((0, 1), 100, 110)]
    assert families([late, alone, early]) == [Family((0, 2), 60, 130)], "by their parent, which is not here"
    assert families([early, again]) == [Family((0, 1), 90, 124)], (
        "they are one beyond where both left the base"
    )
    assert families([again, base]) == [Family((0, 1), 60, 124)]
    assert families([base, alone]) == families([base, base]) == families([base]) == []


def test_the_chart_since_they_parted_shows_that_part_alone(tmp_path: Path, monkeypatch: Any) -> None:
    parent = run(tmp_path / "base", 0, 300, {"broad": 0.0, "web": 0.2})
    branch = run(tmp_path / "base-code", 84, 104, {"broad": 0.1, "code": -1.0}, parent.folder)
    drawn: list[Figure] = []
    keep = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (drawn.append(f), keep(f, *a, **k))[1])
    assert families([parent, branch]) == [Family((0, 1), 84, 104)]
    text = comparison.since([parent, branch], ["base", "base-code"], 84, 104, 0)
    training, validated = drawn[0].axes
    for axes in (training, validated):
        left, right = axes.get_xlim()
        assert 82 < left < 84 and 104 < right < 106
    shown = [list(line.get_xdata()) for line in training.get_lines()]
    assert [(x[0], x[-1]) for x in shown] == [(84, 104), (84, 104), (86, 104), (86, 104)]
    # The dotted lines of both begin at the validation that they share, on the corpora that have one.
    points = [(list(line.get_xdata()), round(line.get_ydata()[0], 3)) for line in validated.get_lines()]
    assert points == [([80, 90, 100], 3.2), ([80, 90, 100], 3.2)], "web and code are those of one run alone"
    assert all(f">{said}</text>" in text for said in ("base", "base-code", "anchor, validation on broad"))
    assert "code</text>" not in text.replace("base-code</text>", "")
    assert "The same from step 84 on, where base and base-code part." in page([parent, branch])


def test_a_branch_begins_at_the_validation_that_it_shares_with_its_ancestors(
    tmp_path: Path, monkeypatch: Any
) -> None:
    base = run(tmp_path / "base", 0, 120, {"broad": 0.0})
    early = run(tmp_path / "early", 60, 110, {"broad": 0.1}, base.folder)
    late = run(tmp_path / "late", 90, 110, {"broad": 0.2}, early.folder)
    drawn: list[Figure] = []
    monkeypatch.setattr(comparison, "as_svg", lambda figure, *_: drawn.append(figure) or "")
    comparison.since([base, early, late], ["base", "early", "late"], 60, 110, 0)
    begin = [(line.get_xdata()[0], round(line.get_ydata()[0], 3)) for line in drawn[0].axes[1].get_lines()]
    # not at 90 of the base, which the branch had left by then
    assert begin == [(60, 3.4), (60, 3.4), (90, 3.2)]


def test_a_parent_that_stopped_where_its_branch_begins(tmp_path: Path) -> None:
    parent = run(tmp_path / "base", 0, 80, {"broad": 0.0})
    branch = run(tmp_path / "late", 80, 100, {"broad": 0.1}, parent.folder)
    assert "where base and late part. base did not train on from there." in page([parent, branch])


def test_old_checkpoints_are_folded_but_for_those_that_branches_need(tmp_path: Path) -> None:
    folders.write(tmp_path / "run", {i: [folders.start(0, 0), folders.step(2, 3.0)] for i in range(2)})
    made = RunDir(tmp_path / "run")
    for island in range(2):
        for step in range(10, 101, 10):
            folders.checkpoint(made, island, step, Schedule(5), outer_step=step // 10)
    (made.path / "branches").mkdir()
    note = {"path": "../late", "position": 30, "steps": {"0": 30, "1": 30}}
    (made.path / "branches" / "late.json").write_text(json.dumps(note))
    torn = CheckpointStore(made.island(1) / "checkpoints", 2).folder(90) / "checkpoint.json"
    torn.unlink()
    text = checkpoints.section(RunFacts(made.path))
    shown, folded = text.split("<details>")
    cells = re.findall(r'<td class="n">(\d)</td><td class="n">(\d+)</td>', shown)
    each = [30, 80, 90, 100]
    assert cells == [(str(i), str(step)) for i in range(2) for step in each]
    assert shown.count('<td class="short">late</td>') == 2 and "torn, ignored" in shown
    assert "<summary>12 older ones that no branch needs</summary>" in folded
    few = folders.write(tmp_path / "few", {0: [folders.start(0, 0), folders.step(2, 3.0)]})
    folders.checkpoint(RunDir(few), 0, 10, Schedule(5))
    text = checkpoints.section(RunFacts(few))
    assert "<details>" not in text and "branches" not in text and "Checkpoints on disk" in text
