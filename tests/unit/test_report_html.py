"""The page of a run: what it tells, and that it needs nothing but itself."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.reporting.charts import SERIES
from megatron_wsd.reporting.facts import RunFacts, Time, thinned
from megatron_wsd.reporting.page import page, write_page
from megatron_wsd.reporting.several import differences
from megatron_wsd.reporting.style import STYLE

ROOT = Path(__file__).resolve().parents[2]
_VOID_TAGS = {"meta", "br", "link", "img", "hr"}


class _Checker(HTMLParser):
    """Takes a page apart: tags that do not close, ids, links, text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID_TAGS:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "srcset", "href", "xlink:href", "data", "action"):
                (self.links if (value or "").startswith("#") else self.fetched).append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID_TAGS:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.faulty(tmp_path_factory.mktemp("pages") / "faulty")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.asynchronous(tmp_path_factory.mktemp("pages") / "other")


@pytest.fixture(scope="module")
def both(run: Path, other: Path) -> str:
    """The page of the two."""
    return page([RunFacts(run), RunFacts(other)])


def test_the_page_is_whole_and_fetches_nothing(both: str) -> None:
    text, found = both, _Checker(both)
    assert found.open == []
    assert found.fetched == []
    assert len(found.ids) == len(set(found.ids))
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert "default-src 'none'" in text
    assert "<script" not in text and "@import" not in text
    assert re.findall(r"url\((?!#)[^)]*\)", text) == []


def test_every_colour_of_a_chart_is_one_of_the_page_in_light_and_in_dark(both: str) -> None:
    charts = "".join(re.findall(r"<svg.*?</svg>", both, flags=re.DOTALL))
    used = set(re.findall(r"var\((--[\w-]+)\)", charts))
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    for variable in used | {f"--series-{i}" for i in range(SERIES)}:
        assert f"{variable}:" in light and f"{variable}:" in dark, variable
    # what matplotlib was not told it draws in black, which a dark page would hide
    assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", charts)) == set()


def test_it_tells_decisions_faults_and_validations(run: Path) -> None:
    words = _Checker(page([RunFacts(run)])).words
    for said in (
        "Phases by step of the run: warmup 1-10, stable 11-70, decay 71-100.",
        "1 70 70,000 decay of 30 steps (one_minus_sqrt) from step 70; data mix is now 'decay'",
        "island 1 is gone; going on with [0]",
        "healed by island 0 to round 5",
        "round void (2 x) no answer of island 1 in 60 s",
        "10 committed; 2 void",
        "broad 3.000 100 3.000",
        "820,352 parameters, 2 islands of 2 ranks, synchronous rounds, begun 2023-11-14 22:13 UTC",
        "All were of age 0, where the gate is 1 and CGAD is plain Adam.",
    ):
        assert said in words, said
    assert "Compared runs" not in words and "Data committed" not in words


def test_numbers_behind_the_page(run: Path) -> None:
    facts = RunFacts(run)
    assert facts.tokens(0) == 0 and facts.tokens(7) == 7000 and facts.tokens(100) == 100_000
    assert facts.phases == [("warmup", 0, 10_000), ("stable", 10_000, 70_000), ("decay", 70_000, 100_000)]
    assert [(d.step, len(d.texts)) for d in facts.decisions] == [(70, 2)]
    told = [(f.what, f.island, f.count) for f in facts.faults]
    assert told[:2] == [("island gone", 0, 1), ("started again", 1, 1)]
    assert ("round void", 0, 2) in told and ("round void", 1, 2) in told
    assert facts.staleness == {0: {0: 10}, 1: {0: 8}}
    # Island 0 was up from its first record at 4 s to the last at 200 s, in 10 rounds and 2 void ones of 4 s.
    assert facts.times[0] == Time(up=196.0, exchange=48.0, stopped=48.0)
    # Island 1: 4 s to 60 s with 3 rounds; then from its first record at 119.5 s, which is a round and does
    # not count, to 200 s with 4 rounds and 2 void ones.
    assert facts.times[1] == Time(up=56.0 + 80.5, exchange=12.0 + 24.0, stopped=36.0)
    assert facts.utilisation == pytest.approx(1 - (48 + 36) / (196 + 136.5))
    assert facts.loss == pytest.approx((3.0 + 3.1) / 2)


def test_an_asynchronous_run(other: Path) -> None:
    facts = RunFacts(other)
    assert len(facts.committed) == 30  # once, though three islands recorded each
    assert sum(sum(c.values()) for c in facts.staleness.values()) == 90
    assert max(facts.staleness[0]) == 4
    assert facts.lags == {i: [k % 3 for k in range(1, 31)] for i in range(3)}
    up = facts.times[0].up
    assert facts.times[0].stopped == pytest.approx(30 * 0.05)
    assert facts.utilisation == pytest.approx(1 - 1.5 / up), "what captures and adoptions stopped"
    words = _Checker(page([facts])).words
    assert "asynchronous rounds" in words and "Versions behind at adoption" in words
    assert "island adoptions mean lag largest 0 30 1.00 2" in words
    assert "All were of age 0" not in words


def test_tokens_do_not_run_back_when_an_island_is_lost(tmp_path: Path) -> None:
    """What a lost island trained since the last round was counted while it lived, and is not any more."""
    records = [
        folders.start(0, 0),
        folders.step(1, 3.0),
        folders.step(2, 3.0),
        folders.step(3, 3.0, tokens=1500),
    ]
    facts = RunFacts(folders.write(tmp_path / "r", {0: records}))
    assert [facts.tokens(n) for n in (1, 2, 3)] == [1000, 2000, 2000]


def test_a_branch_begins_where_its_parent_stood(tmp_path: Path) -> None:
    records = [folders.start(50, 0), folders.step(60, 3.0), folders.step(70, 3.0)]
    facts = RunFacts(folders.write(tmp_path / "r", {0: records}))
    assert facts.tokens(50) == 50_000 and facts.tokens(65) == 65_000
    assert facts.phases == [("stable", 50_000, 70_000)]


def test_runs_are_compared_field_by_field(run: Path, other: Path, both: str) -> None:
    changed = dict(differences([RunFacts(run), RunFacts(other)]))
    assert changed == {
        "megatron_wsd.sync.mode": ['"sync"', '"async"'],
        "megatron_wsd.sync.fragments": ["(absent)", "2"],
    }
    assert "megatron_wsd.sync.mode" in _Checker(both).words
    assert "The configs are equal" in _Checker(page([RunFacts(run), RunFacts(run)])).words


def test_equal_names_of_compared_runs_are_told_apart(tmp_path: Path) -> None:
    two = [
        folders.write(tmp_path / d / "run", {0: [folders.start(0, 0), folders.step(1, 3.0)]}) for d in "ab"
    ]
    words = _Checker(page([RunFacts(folder) for folder in two])).words
    assert "a/run" in words and "b/run" in words


def test_names_and_reasons_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    bad = '<script>alert(1)</script> & $x_1$ "'
    records = [
        folders.start(0, 0),
        folders.step(1, 3.0),
        folders.void(10, 1, bad),
        folders.evaluated(1, bad, 2.0),
    ]
    folder = folders.write(tmp_path / "a<b>&$m$", {0: records}, wire=bad)
    text = page([RunFacts(folder), RunFacts(folder)])
    assert "<script" not in text
    found = _Checker(text)
    assert found.open == [] and found.fetched == []
    assert "a<b>&$m$" in found.words and bad in found.words


@pytest.mark.parametrize(
    "records",
    [
        [folders.step(1, 3.0)],
        [folders.start(0, 0), folders.step(1, None)],
        [folders.start(0, 0), folders.step(1, 3.0), folders.void(1, 1, "x")],
        [
            folders.start(0, 0),
            folders.step(1, 3.0),
            folders.outer(1, 1, (0,), gates={"0": 0.0}, committed=False),
        ],
    ],
)
def test_the_page_is_made_of_whatever_there_is(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    folder = folders.write(tmp_path / "r", {0: records, 7: records})
    (folder / "run.json").unlink()
    (folder / "config.json").unlink()
    write_page(folder, tmp_path / "r.html")
    assert _Checker((tmp_path / "r.html").read_text()).open == []


def test_what_was_consumed_has_a_table_if_the_run_recorded_it(run: Path) -> None:
    facts = RunFacts(run)
    n = {"samples": 1200, "tokens": 153_600, "epochs": 0.25}
    part = {"all": {"mixes": {"stable": {"broad": n}}, "corpora": {"broad": n}}, "islands": {}}
    facts.summary = {**facts.summary, "data": {"own": part}}
    words = _Checker(page([facts])).words
    assert "mix corpus samples tokens epochs stable broad 1,200 153,600 0.250" in words


def test_long_runs_make_small_pages(tmp_path: Path) -> None:
    steps = [folders.step(n, 3.0 + math.sin(n)) for n in range(1, 20_001)]
    rounds = [folders.outer(n, n // 4) for n in range(4, 20_001, 4)]
    folder = folders.write(tmp_path / "r", {0: [folders.start(0, 0), *steps, *rounds]})
    write_page(folder, tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 1_500_000
    line = [(float(n), 2.0 * n) for n in range(1001)]
    thin = thinned(line, 100)
    assert len(thin) <= 100 and all(y == 2 * x for x, y in thin)
    assert thinned(line[:100], 100) == line[:100]


# ---- the command ----


def invoke(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_writes_a_page_a_picture_or_the_summary(run: Path, other: Path, tmp_path: Path) -> None:
    code, text = invoke(run, "--compare", other, run, "--out", tmp_path / "report.html")
    assert code == 0 and text.strip() == str(tmp_path / "report.html")
    written = (tmp_path / "report.html").read_text()
    assert "Compared runs" in written and written.count(f"{other.name}</text>") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]
    assert invoke(run, "--out", tmp_path / "p.png")[0] == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert not (run / "summary.json").exists()
    assert invoke(run)[0] == 0
    assert json.loads((run / "summary.json").read_text())["rounds_committed"] == 10
    assert (run / "run.png").exists()


def test_wrong_options_of_the_command(run: Path, other: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ([run, "--out", tmp_path / "r.pdf"], "--out"),
        ([run, "--out", tmp_path / "no" / "r.html"], "--out"),
        ([run, "--compare", other], "--compare"),
        ([run, other], "--compare"),
        ([tmp_path, "--out", tmp_path / "r.html"], "error: RUN: expected"),
        ([run, "--compare", tmp_path, "--out", tmp_path / "r.html"], "error: --compare: expected"),
    ):
        code, text = invoke(*arguments)
        assert code == 2 and text.startswith("megatron-wsd: error:") and said in text, text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("out", "code"), [((), 0), (("--out", "p.png"), 2), (("--out", "p.html"), 2)])
def test_without_matplotlib_the_summary_stays_and_pictures_say_what_to_install(
    run: Path, tmp_path: Path, out: tuple[str, ...], code: int
) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("run.png"))
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from megatron_wsd.cli import app\n"
        f"app({['report', str(copy), *out]!r})"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "pip install 'megatron_wsd[report]'" in (done.stderr if code else done.stdout)
    assert not (copy / "run.png").exists() and not list(tmp_path.glob("p.*"))
    if not code:
        assert json.loads((copy / "summary.json").read_text())["files"]["picture"] is None
