"""Batches against a reading of the token stream done by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_wsd.data.loader import Corpora, HeldOut, TrainStream, open_corpora
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.errors import DataError

SEQ, FRACTION = 8, 0.1
MIXES = {"stable": {"broad": 3.0, "good": 1.0}, "decay": {"good": 1.0}}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    specs = {}
    for name, count in {"broad": 5000, "good": 1200}.items():
        (folder / f"{name}.txt").write_bytes(random.integers(0, 256, count, dtype=np.uint8).tobytes())
        specs[name] = f"text:{folder / f'{name}.txt'}"
    return open_corpora(specs, folder / "cache", "byte")


def stream(
    corpora: Corpora, *, ranks: int, rank: int, accum: int, islands: int = 1, island: int = 0
) -> TrainStream:
    sizes = {name: split.train_samples for name, split in corpora.splits(SEQ, FRACTION).items()}
    sampler = MixSampler(sizes, MIXES, seed=3, islands=islands, island=island)
    return TrainStream(corpora, sampler, SEQ, ranks, rank, micro_batch=2, grad_accum=accum)


def step_rows(corpora: Corpora, step: int, *, ranks: int, accum: int, **island: int) -> list[list[int]]:
    """All samples of a step, in the order of the island's stream."""
    rows = []
    for micro in range(accum):
        for rank in range(ranks):
            one = stream(corpora, ranks=ranks, rank=rank, accum=accum, **island)
            tokens, labels = one.batch(step, micro)
            assert tokens.shape == labels.shape == (2, SEQ)
            assert tokens.dtype == labels.dtype == torch.int64
            assert tokens.is_contiguous() and labels.is_contiguous()
            assert torch.equal(tokens[:, 1:], labels[:, :-1])
            rows += torch.cat([tokens, labels[:, -1:]], 1).tolist()
    return rows


def test_a_step_reads_the_samples_that_the_sampler_names(corpora: Corpora) -> None:
    one = stream(corpora, ranks=2, rank=0, accum=3)
    assert one.island_batch == 12
    expected = []
    for k in range(5 * 12, 6 * 12):
        corpus, sample = one.sampler.locate(k)
        file = corpora.files[corpus]
        whole = file.tokens(0, file.num_tokens)
        expected.append(whole[sample * SEQ : sample * SEQ + SEQ + 1].tolist())
    assert step_rows(corpora, 5, ranks=2, accum=3) == expected


def test_ranks_and_accumulation_only_deal_out_the_same_samples(corpora: Corpora) -> None:
    rows = step_rows(corpora, 4, ranks=1, accum=6)
    assert step_rows(corpora, 4, ranks=6, accum=1) == rows
    assert step_rows(corpora, 4, ranks=2, accum=3) == rows


def test_no_sample_meets_another_rank_island_or_step_and_none_is_held_out(corpora: Corpora) -> None:
    # 20 steps * 4 samples * 2 islands * 3/4 = 120 of broad (561 samples) and 40 of good (134).
    rows = [
        tuple(row)
        for step in range(20)
        for island in range(2)
        for row in step_rows(corpora, step, ranks=2, accum=1, islands=2, island=island)
    ]
    # The text is random bytes: two different samples of 9 tokens are equal with odds of 2**-57.
    assert len(set(rows)) == len(rows) == 160
    training = set()
    for name, split in corpora.splits(SEQ, FRACTION).items():
        tokens = corpora.files[name].tokens(0, split.valid_tokens[0]).tolist()  # what is not held out
        training |= {tuple(tokens[i : i + SEQ + 1]) for i in range(0, len(tokens) - SEQ, SEQ)}
    assert set(rows) <= training


def test_a_switch_by_samples_changes_the_next_step(corpora: Corpora) -> None:
    one, plain = (stream(corpora, ranks=1, rank=0, accum=1) for _ in range(2))
    one.sampler.switch(10 * one.island_batch, "decay")
    assert torch.equal(one.batch(9)[0], plain.batch(9)[0])
    locations = [one.sampler.locate(k)[0] for k in range(20, 40)]
    assert set(locations) == {"good"}
    resumed = stream(corpora, ranks=1, rank=0, accum=1)
    resumed.sampler.load_state_dict(json.loads(json.dumps(one.sampler.state_dict())))
    for step in (12, 10, 9, 11):
        for a, b in zip(one.batch(step), resumed.batch(step), strict=True):
            assert torch.equal(a, b)


def test_held_out_batches_are_fixed_dealt_to_ranks_and_from_the_held_out_part(corpora: Corpora) -> None:
    held = HeldOut(corpora, SEQ, FRACTION)
    split = held.splits["broad"]
    assert split.valid_samples == 62  # a tenth of 624
    file = corpora.files["broad"]
    allowed = {tuple(file.tokens(split.valid_start(i), SEQ + 1).tolist()) for i in range(split.valid_samples)}
    rows = []
    for rank in range(2):
        batches = list(held.batches("broad", 5, 3, ranks=2, rank=rank))
        again = list(held.batches("broad", 5, 3, ranks=2, rank=rank))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))
        assert len(batches) == 5
        for tokens, labels in batches:
            assert tokens.shape == (3, SEQ) and torch.equal(tokens[:, 1:], labels[:, :-1])
            rows += [tuple(row) for row in torch.cat([tokens, labels[:, -1:]], 1).tolist()]
    assert len(set(rows)) == len(rows) == 30 and set(rows) <= allowed


def test_a_short_held_out_part_gives_every_rank_the_same_number_of_batches(corpora: Corpora) -> None:
    held = HeldOut(corpora, SEQ, FRACTION)  # good: 15 of 149 samples
    for ranks, micro_batch, expected in [(2, 3, 2), (2, 16, 1)]:
        counts = [len(list(held.batches("good", 9, micro_batch, ranks, rank))) for rank in range(ranks)]
        assert counts == [expected] * ranks


def test_unigram_entropy_is_that_of_the_held_out_tokens(tmp_path: Path) -> None:
    # Training part: one byte. Held-out part: "ab" with 3 a's to every b, entropy known in closed form.
    (tmp_path / "t.txt").write_bytes(b"x" * 801 + b"aaab" * 50 + b"yyyyyy")
    corpora = open_corpora({"t": f"text:{tmp_path / 't.txt'}"}, tmp_path, "byte")
    held = HeldOut(corpora, 8, 0.2)
    start, length = held.splits["t"].valid_tokens
    assert (start, length) == (801, 201)
    # 200 tokens of the pattern and the first y.
    p = [150 / 201, 50 / 201, 1 / 201]
    # float64 sum of three terms below 1: a few units of 2**-53.
    assert held.unigram_entropy("t") == pytest.approx(-math.fsum(q * math.log(q) for q in p), abs=1e-14)


def test_a_run_without_corpora_or_with_too_short_ones_is_refused(corpora: Corpora, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one corpus"):
        open_corpora({}, tmp_path, "byte")
    with pytest.raises(DataError, match=r"data\.corpora\.good: .* got 1201 tokens"):
        HeldOut(corpora, 1000, FRACTION)


def test_text_without_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no text in any of its files"):
        open_corpora({"a": f"text:{tmp_path / 'blank.jsonl'}"}, tmp_path / "cache", "byte")
    assert not (tmp_path / "cache").exists()


def test_opening_a_prefix_writes_nothing(corpora: Corpora, tmp_path: Path) -> None:
    prefix = corpora.files["good"].prefix
    opened = open_corpora({"good": f"{prefix}"}, tmp_path / "cache", "byte")
    assert opened.fingerprints()["good"] == corpora.fingerprints()["good"]
    assert not (tmp_path / "cache").exists()


def test_the_room_imports_neither_torch_nor_megatron() -> None:
    check = (
        "import sys, megatron_wsd.data, megatron_wsd.data.mix, megatron_wsd.data.prepare, "
        "megatron_wsd.data.tokenizer; sys.exit(any(m.split('.')[0] in "
        "('torch', 'megatron', 'transformers') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
