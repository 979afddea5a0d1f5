"""What was consumed: counted by arithmetic, compared with sample by sample."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_wsd import report
from megatron_wsd.data.consumption import Drawn, Ledger, amounts, committed, total
from megatron_wsd.data.sampler import MixSampler, resized
from megatron_wsd.rundir import RunDir

SIZES = {"broad": 400, "good": 50, "code": 100}
MIXES = {"stable": {"broad": 0.7, "code": 0.3}, "decay": {"broad": 0.2, "good": 0.8}, "code": {"code": 1.0}}


def sampler(switches: list[tuple[int, str]], islands: int = 2, island: int = 0) -> MixSampler:
    made = MixSampler(SIZES, MIXES, seed=7, islands=islands, island=island)
    for k, mix in switches:
        made.switch(k, mix)
    return made


def by_hand(one: MixSampler, first: int, end: int) -> Drawn:
    """The same, by locating every sample."""
    found: Drawn = {}
    for k in range(first, end):
        mix = [name for start, name in one.history if start <= k][-1]
        corpora = found.setdefault(mix, {})
        corpus, _ = one.locate(k)
        corpora[corpus] = corpora.get(corpus, 0) + 1
    return found


SWITCHES = st.lists(st.tuples(st.integers(0, 900), st.sampled_from(sorted(MIXES))), max_size=4).map(sorted)


@settings(deadline=None, max_examples=40)
@given(SWITCHES, st.lists(st.integers(0, 2500), min_size=2, max_size=2).map(sorted), st.booleans())
def test_counting_equals_locating(switches: list[tuple[int, str]], span: list[int], changed: bool) -> None:
    one = sampler(switches)
    if changed:
        one = MixSampler.from_state(resized([one.state_dict()] * 2, [300, 250], [300, 250, 300]), 1)
    assert one.drawn(*span) == by_hand(one, *span)
    before = {corpus: n for corpus, n in one.before(span[1]).items() if n}
    whole = total([{"": corpora} for corpora in by_hand(one, 0, span[1]).values()]).get("", {})
    assert before == whole


@settings(deadline=None, max_examples=30)
@given(SWITCHES, st.lists(st.integers(1, 200), min_size=1, max_size=8), st.data())
def test_a_ledger_counts_every_committed_sample_once(
    switches: list[tuple[int, str]], lengths: list[int], data: st.DataObject
) -> None:
    one, ledger, k, told = sampler(switches), Ledger(), 0, []
    counted: set[int] = set()
    for length in lengths:
        k += data.draw(st.integers(-100, 100))  # told twice, as of fragments in turn, or moved past
        k = max(0, k)
        if (record := ledger.commit(one, k, k + length)) is not None:
            told.append({"kind": "data", "outer_step": len(told), **record})
            assert record["first"] == max(k, min([k, *counted]), max(counted, default=-1) + 1)
            counted |= set(range(record["first"], record["end"]))
        k += length
        again = Ledger()
        again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
        assert (again.drawn, again.until) == (total([ledger.drawn]), ledger.until)
    expected = total(by_hand(one, k, k + 1) for k in counted)
    assert ledger.drawn == expected == committed(told)


def data(first: int, end: int, outer_step: int, mix: str = "stable") -> dict[str, Any]:
    drawn = {mix: {"broad": end - first}}
    return {
        "kind": "data",
        "time": 1.0,
        "step": end,
        "outer_step": outer_step,
        "first": first,
        "end": end,
        "drawn": drawn,
    }


def start(step: int) -> dict[str, Any]:
    told = {"parameters": 1, "epoch_samples": {"broad": 400}, "seq_length": 32}
    return {"kind": "start", "time": 1.0, "step": step, **told}


def test_what_a_restart_does_again_is_counted_once_and_what_was_rolled_back_never() -> None:
    run = [start(0), data(0, 8, 1), data(8, 16, 2), data(16, 24, 3)]
    assert committed(run) == {"stable": {"broad": 24}}
    assert committed(run, until=16) == committed(run, until=23) == {"stable": {"broad": 16}}
    # All went back to sample 8, and ended at 12.
    assert committed([*run, start(8), data(8, 12, 2)]) == {"stable": {"broad": 12}}
    # One was killed, came back with an older checkpoint and was moved past the others' steps.
    assert committed([*run, start(8), data(40, 48, 6)]) == {"stable": {"broad": 32}}
    # One was told by the others that it had committed up to 24.
    assert committed([*run, start(8), data(8, 24, 6), data(24, 32, 7)]) == {"stable": {"broad": 32}}
    assert committed([start(0)]) == {}


def test_amounts_are_samples_tokens_and_epochs() -> None:
    drawn = {"stable": {"broad": 300}, "decay": {"broad": 100, "good": 25}}
    found = amounts(drawn, SIZES, seq_length=32)
    assert found["mixes"]["decay"]["good"] == {"samples": 25, "tokens": 800, "epochs": 0.5}
    assert found["corpora"]["broad"] == {"samples": 400, "tokens": 12800, "epochs": 1.0}
    assert amounts({}, SIZES, 32) == {"mixes": {}, "corpora": {}}


@pytest.fixture
def branch(tmp_path: Path) -> Path:
    """Two islands of a branch that inherited 600 samples; island 1 was away for a round."""
    for i, records in enumerate(
        ([start(10), data(80, 96, 3), data(96, 112, 4, "late")], [start(10), data(80, 96, 3)])
    ):
        folder = tmp_path / f"island_{i}"
        folder.mkdir()
        step = {
            "kind": "step",
            "time": 2.0,
            "step": 14,
            "loss": 1.0,
            "lr": 1e-3,
            "phase": "decay",
            "tokens": 9,
        }
        lines = [json.dumps(r) + "\n" for r in [*records, step]]
        (folder / "metrics.jsonl").write_text("".join(lines))
    consumed = {"0": {"stable": {"broad": 320}}, "1": {"stable": {"broad": 280}}}
    RunDir(tmp_path).run_json.write_text(json.dumps({"parent": {"consumed": consumed}}))
    return tmp_path


def test_a_branch_reports_its_own_part_beside_what_it_inherited(branch: Path) -> None:
    out = io.StringIO()
    found = report.write(branch, Console(file=out, width=160))["data"]
    assert json.loads((branch / "summary.json").read_text())["data"] == found
    assert found["inherited"]["all"]["corpora"]["broad"] == {"samples": 600, "tokens": 19200, "epochs": 1.5}
    assert found["own"]["all"]["mixes"] == {
        "late": {"broad": {"samples": 16, "tokens": 512, "epochs": 0.04}},
        "stable": {"broad": {"samples": 32, "tokens": 1024, "epochs": 0.08}},
    }
    assert found["own"]["islands"]["1"]["corpora"]["broad"]["samples"] == 16
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines()]
    assert ["inherited: all mixes", "broad", "600", "19,200", "1.500", "320 + 280"] in rows
    assert ["own: late", "broad", "16", "512", "0.040", "16 + 0"] in rows
    assert ["own: all mixes", "broad", "48", "1,536", "0.120", "32 + 16"] in rows


def test_a_run_that_tells_nothing_of_its_data_has_no_such_table(branch: Path) -> None:
    for i in range(2):
        file = branch / f"island_{i}" / "metrics.jsonl"
        lines = [line for line in file.read_text().splitlines() if '"start"' not in line]
        file.write_text("\n".join(lines) + "\n")
    out = io.StringIO()
    assert report.write(branch, Console(file=out, width=160))["data"] == {}
    assert "Data committed" not in out.getvalue()
