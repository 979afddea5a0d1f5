"""How often a run goes through its corpora: against counting sample by sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wsd.config import Config, parse_config
from megatron_wsd.data.consumption import amounts as consumed
from megatron_wsd.data.corpus import open_source
from megatron_wsd.data.epochs import Amount, _drawn, _reached, amount_of, passages
from megatron_wsd.data.mix import split_corpus
from megatron_wsd.data.prepare import prepare
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.data.tokenizer import ByteTokenizer
from megatron_wsd.errors import DataError

TINY = Path(__file__).resolve().parents[2] / "launch" / "configs" / "tiny_cpu.json"
MIXES = {"stable": {"broad": 1.0}, "decay": {"high_quality": 0.75, "broad": 0.25}}


def config(**schedule: Any) -> Config:
    """Two islands of two ranks, 16 samples of 128 tokens a step; by default a decay from 260 to 320."""
    raw = json.loads(TINY.read_text())
    raw["scheduler"]["params"] = schedule or {"warmup_steps": 20, "decay_start": 260, "decay_steps": 60}
    raw["megatron_wsd"]["data"]["mixes"] = MIXES
    return parse_config(raw, islands=2, ranks=2)


AMOUNTS = {"broad": Amount(128 * 1000 + 2), "high_quality": Amount(128 * 100 + 2, exact=False)}


def test_epochs_to_the_end_are_those_that_the_sampler_draws() -> None:
    made = config()
    sizes = {name: split_corpus(name, a.tokens, 128, 0.05).train_samples for name, a in AMOUNTS.items()}
    drawn = {}
    for island in range(2):
        sampler = MixSampler(sizes, MIXES, seed=1, islands=2, island=island)
        sampler.switch(260 * 8, "decay")
        drawn[island] = sampler.drawn(0, 320 * 8)
    found = {p.corpus: p for p in passages(made, AMOUNTS, schedule=made.schedule)}
    for corpus, passage in found.items():
        epochs = sum(
            consumed(d, sizes, 128)["corpora"].get(corpus, {"epochs": 0})["epochs"] for d in drawn.values()
        )
        # a mix is spread to within (C + 1) / 2 = 1.5 samples, on each of two islands
        assert passage.epochs == pytest.approx(epochs, abs=3 / sizes[corpus])
        assert passage.tokens == sizes[corpus] * 128 and passage.end == 320


def test_more_than_four_epochs_are_warned_of_with_the_numbers() -> None:
    made = config()
    broad, high = passages(made, AMOUNTS, schedule=made.schedule)
    assert high.epochs == pytest.approx(0.75 * 60 * 16 / 95)
    assert high.warning.startswith(
        "corpus high_quality: at least 7.58 epochs to step 320, of at most 12,160 tok"
    )
    assert "arXiv 2305.16264" in high.warning
    assert broad.epochs == pytest.approx((260 + 0.25 * 60) * 16 / 950) and broad.epochs > 4
    fewer = passages(made, AMOUNTS, schedule=made.schedule, steps=200)
    assert [p.corpus for p in fewer] == ["broad"] and fewer[0].warning == "", "it stops before the decay"
    assert str(fewer[0]) == "3.37 epochs"


def test_without_an_end_it_is_told_when_a_corpus_is_through_once() -> None:
    made = config(warmup_steps=20)
    (only,) = passages(made, AMOUNTS, schedule=made.schedule)
    assert (only.corpus, only.epochs, only.end, only.warning) == ("broad", None, None, "")
    assert only.through == 60 == -(-950 // 16) and str(only) == "through once after step 60"


def test_a_mix_that_an_order_named_counts() -> None:
    made = config(warmup_steps=20)
    assert made.schedule is not None
    decided = made.schedule.begin_decay(100, 40)
    order = {"kind": "decay", "data_mix": "stable", "step": 100, "at": None}
    named = passages(made, AMOUNTS, schedule=decided, orders=[order])
    assert [p.corpus for p in named] == ["broad"]
    assert [p.corpus for p in passages(made, AMOUNTS, schedule=decided)] == ["broad", "high_quality"]


@given(
    starts=st.sets(st.integers(1, 60), max_size=3),
    rates=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.25]), min_size=4, max_size=4),
    samples=st.integers(1, 120),
)
def test_the_step_by_which_samples_are_drawn_is_the_first_of_all(
    starts: set[int], rates: list[float], samples: int
) -> None:
    line = list(zip(sorted({0, *starts}), rates, strict=False))
    first = next((n for n in range(400) if _drawn(line, n) >= samples), None)
    assert _reached(line, samples, None) == first
    if first is not None:
        assert _reached(line, samples, first) == first and _reached(line, samples, first - 1) is None


def test_text_is_no_less_than_its_tokens(tmp_path: Path) -> None:
    (text := tmp_path / "text").mkdir()
    (text / "a.txt").write_text("one\ntwo\n")
    (text / "b.md").write_text("# three")
    exact = amount_of(f"text:{text}", "byte")
    made, _ = prepare(f"text:{text}", ByteTokenizer(), tmp_path / "out" / "x")
    assert exact.exact and exact.tokens == made["tokens"] == 8 + 7 + 2
    (text / "c.jsonl").write_text('{"text": "é", "id": 1}\n\n{"text": ""}\n{"text": "four"}\n')
    at_most = amount_of(f"text:{text}", "byte")
    made, _ = prepare(f"text:{text}", ByteTokenizer(), tmp_path / "out" / "y")
    assert not at_most.exact and at_most.tokens >= made["tokens"]
    assert not amount_of(f"text:{text / 'a.txt'}", "hf:somewhere").exact
    assert amount_of(str(tmp_path / "out" / "x"), "byte") == Amount(exact.tokens)
    assert amount_of("builtin:pydoc", "byte").tokens > 100_000


def test_what_a_folder_holds_besides_is_counted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.jsonl", "c.html", "sub/d.html", "e.json.gz", "README"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (tmp_path / "empty.txt").touch()
    source = open_source(f"text:{tmp_path}")
    assert source.told_skipped() == (
        "2 of 7 files are read (*.jsonl, *.md, *.py, *.txt); "
        "skipped: 2 .html, 1 .gz, 1 .txt (empty), 1 without a suffix"
    )
    assert open_source(f"text:{tmp_path / 'c.html'}").told_skipped() == "", "a file by its name is read"
    (tmp_path / "a.txt").unlink()
    (tmp_path / "sub" / "b.jsonl").unlink()
    with pytest.raises(DataError, match=r"nothing of the kind, but 1 \.gz, 2 \.html"):
        open_source(f"text:{tmp_path}")
