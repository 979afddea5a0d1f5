"""Islands that committed different rounds under one number, and islands without records here, are named."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
from rich.console import Console

from megatron_wsd import report
from megatron_wsd.histories import apart, committed_digests
from megatron_wsd.picture import _title
from megatron_wsd.reporting.facts import RunFacts
from megatron_wsd.reporting.page import page
from megatron_wsd.reporting.several import gone_apart, of_one_run


def digest(k: int, history: str = "a") -> str:
    return f"{history * 8}{k:08x}"


def rounds(
    first: int, last: int, history: str = "a", islands: tuple[int, ...] = (0, 1)
) -> list[dict[str, Any]]:
    """Rounds of 10 steps as an island records them, with a step logged before each."""
    found = []
    for k in range(first, last + 1):
        found += [folders.step(10 * k, 3.0), folders.outer(10 * k, k, islands, digest=digest(k, history))]
    return found


def start(k: int) -> dict[str, Any]:
    return {**folders.start(10 * k, 20.0 * k, resumed=k > 0), "outer_step": k}


STRAY = [start(0), *rounds(1, 4), start(4), *rounds(5, 9, "b", (1,)), folders.event("stop", 90)]
OTHERS = [start(0), *rounds(1, 4), *rounds(5, 8, "a", (0,)), folders.event("finish", 80)]


def told(*each: list[dict[str, Any]]) -> str:
    return str(apart({i: committed_digests(records) for i, records in enumerate(each)}) or "")


def test_an_island_that_went_on_alone_has_a_history_of_its_own() -> None:
    assert told(OTHERS, STRAY) == "islands 0 and 1 have different histories from round 5 on"
    assert told(OTHERS, OTHERS, STRAY) == (
        "islands 0, 1 against island 2: different histories from round 5 on"
    )
    other = [start(0), *rounds(1, 6), *rounds(7, 8, "c", (2,))]
    assert told(OTHERS, STRAY, other) == "islands 0, 1 and 2 have different histories from round 5 on"


@pytest.mark.parametrize(
    ("what", "each"),
    [
        ("one history", (OTHERS, [start(0), *rounds(1, 8)])),
        ("healed later, whatever it had committed", ([start(0), *rounds(1, 20)], [*STRAY, *rounds(12, 20)])),
        (
            "started again from before it went apart",
            ([start(0), *rounds(1, 8)], [*STRAY, start(4), *rounds(5, 5)]),
        ),
        (
            "all did rounds again, and one has not told of all of them",
            (
                [start(0), *rounds(1, 6), start(3), *rounds(4, 6, "b")],
                [start(0), *rounds(1, 6), start(3), *rounds(4, 5, "b")],
            ),
        ),
        ("no common round", ([start(0), *rounds(1, 3)], [start(3), *rounds(4, 6, "b")])),
        ("one that died is together with whoever shares its last round", (OTHERS, OTHERS[:7])),
        ("nothing recorded", ([], [start(0)])),
    ],
)
def test_what_is_no_other_history(what: str, each: tuple[list[dict[str, Any]], ...]) -> None:
    assert told(*each) == "", what


def test_void_rounds_and_old_records_without_a_digest_do_not_count() -> None:
    void = folders.void(50, 4, "no answer") | {"digest": digest(4, "z")}
    old = {k: v for k, v in folders.outer(10, 1).items() if k != "digest"}
    assert committed_digests([start(0), old, *rounds(2, 4), void]) == {k: digest(k) for k in (2, 3, 4)}


def test_the_report_warns_of_two_histories_in_one_folder(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "run", {0: OTHERS, 1: STRAY})
    text = page([RunFacts(folder)])
    assert (
        '<p class="warning" role="alert"><strong>Islands 0 and 1 have different histories from round 5 on '
        "(island 0 to round 8, finished; island 1 to round 9, stopped and saved).</strong>"
    ) in text
    assert "Take the anchor of those who finished first." in text
    summary = report.summarise(folder)
    assert summary["apart"] == "islands 0 and 1 have different histories from round 5 on"
    report.print_summary(summary, Console(file=(out := io.StringIO()), width=500))
    assert (
        "WARNING: islands 0 and 1 have different histories from round 5 on. They committed" in out.getvalue()
    )
    whole = folders.write(tmp_path / "whole", {0: OTHERS, 1: OTHERS})
    assert report.summarise(whole)["apart"] == "" and 'role="alert"' not in page([RunFacts(whole)])


def one_island(folder: Path, island: int, records: list[dict[str, Any]]) -> RunFacts:
    """The folder of a cluster: run.json tells of two islands, and one has records."""
    folders.write(folder, {island: records})
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "islands": 2}))
    return RunFacts(folder)


def test_folders_of_several_clusters_are_held_against_each_other(tmp_path: Path) -> None:
    here, there = one_island(tmp_path / "a" / "run", 0, OTHERS), one_island(tmp_path / "b" / "run", 1, STRAY)
    assert of_one_run([here, there]) == [here, there]
    assert str(gone_apart([here, there])) == "islands 0 and 1 have different histories from round 5 on"
    text = page([here, there])
    assert "Islands 0 and 1 have different histories from round 5 on (island 0 to round 8" in text
    assert "b/run holds island 1 of the run of this page." in text
    assert gone_apart([here]) is None


def test_another_run_is_not_another_history_of_this_one(tmp_path: Path) -> None:
    here = one_island(tmp_path / "a", 0, OTHERS)
    foreign = [start(0), *rounds(1, 9, "b")]
    again = one_island(tmp_path / "again", 0, [start(0), *rounds(1, 4), *rounds(5, 9, "b")])
    config = one_island(tmp_path / "config", 1, STRAY)
    config.about["config_digest"] = "cd34"
    for other in (one_island(tmp_path / "b", 1, foreign), again, config):
        assert of_one_run([here, other]) == [here] and gone_apart([here, other]) is None
        assert 'role="alert"' not in page([here, other])


def test_islands_without_records_here_are_named(tmp_path: Path) -> None:
    run = one_island(tmp_path / "run", 0, OTHERS)
    assert run.summary["elsewhere"] == [{"island": 1, "rounds_committed": 4}]
    text = page([run])
    assert "2 islands of 2 ranks, no records here of island 1, synchronous rounds" in text
    assert "all ranks with records here, sent and received" in text
    assert '<td class="short">no records here</td>' in text
    report.print_summary(run.summary, Console(file=(out := io.StringIO()), width=200))
    assert "no records here; in 4 of 8 rounds" in out.getvalue() and "over all ranks here" in out.getvalue()
    assert _title(run.folder, run.islands).startswith("run: 1 of 2 islands")
    both = folders.write(tmp_path / "both", {0: OTHERS, 1: OTHERS})
    assert report.summarise(both)["elsewhere"] == [] and "no records here" not in page([RunFacts(both)])
