"""The order of samples: nothing repeated, nothing lost, whoever asks and in whatever order."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wsd.data.mix import MIX_PERIOD, Mix, permuted, split_corpus
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.errors import DataError

SIZES = {"broad": 700, "good": 90, "code": 313}
MIXES = {"stable": {"broad": 0.7, "code": 0.3}, "decay": {"broad": 0.2, "code": 0.1, "good": 0.7}}
KEY = st.integers(0, 2**64 - 1)


def sampler(**changes: Any) -> MixSampler:
    return MixSampler(**{"sizes": SIZES, "mixes": MIXES, "seed": 7, **changes})


# --- the permutation


@settings(deadline=None)
@given(st.integers(1, 700), st.lists(KEY, min_size=1, max_size=8))
def test_every_key_gives_a_bijection(size: int, keys: list[int]) -> None:
    assert sorted(permuted(i, size, tuple(keys)) for i in range(size)) == list(range(size))


@given(st.integers(1, 2**48), st.data())
def test_a_large_permutation_stays_in_range_without_a_table(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    assert 0 <= permuted(index, size, (1, 2, 3, 4, 5, 6)) < size


def test_the_permutation_mixes() -> None:
    size = 10_000
    order = [permuted(i, size, tuple(range(11, 17))) for i in range(size)]
    # A random permutation has on average 1 fixed point and 2 neighbours that stay neighbours; Poisson, so
    # more than 15 has odds below 1e-8. The keys are fixed: this never varies from run to run.
    assert sum(i == p for i, p in enumerate(order)) <= 15
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) <= 15
    # Any tenth of the order draws from the whole corpus: mean of 1,000 uniform draws, five sigma.
    sigma = size / math.sqrt(12 * 1000)
    for tenth in range(10):
        part = order[tenth * 1000 : (tenth + 1) * 1000]
        assert abs(sum(part) / 1000 - size / 2) < 5 * sigma


# --- the split


@given(st.integers(1, 64), st.integers(0, 5000), st.floats(0.0, 1.0))
def test_training_and_held_out_share_no_token(seq: int, extra: int, fraction: float) -> None:
    num_tokens = 2 * seq + 2 + extra
    split = split_corpus("c", num_tokens, seq, fraction)
    assert split.train_samples >= 1 and split.valid_samples >= 1
    train_end = split.train_start(split.train_samples - 1) + seq + 1
    start, length = split.valid_tokens
    assert train_end == start == split.valid_start(0)
    assert split.valid_start(split.valid_samples - 1) + seq + 1 == start + length <= num_tokens
    assert num_tokens - (start + length) < seq  # less than a sample is left over


def test_the_share_held_out_is_the_fraction() -> None:
    assert split_corpus("c", 64 * 1000 + 2, 64, 0.05).valid_samples == 50


def test_a_corpus_without_room_for_two_samples_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.corpora\.tiny: expected at least 130 tokens.*got 129 tokens"):
        split_corpus("tiny", 129, 64, 0.1)


# --- the mix

WEIGHTS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1e-6, 1e6), min_size=1)


@settings(deadline=None, max_examples=50)
@given(WEIGHTS)
def test_a_mix_keeps_its_weights_and_spreads_them(weights: dict[str, float]) -> None:
    mix = Mix("m", weights)
    assert sum(mix.slots.values()) == MIX_PERIOD and min(mix.slots.values()) >= 1
    total = sum(weights.values())
    quota = {c: w / total * MIX_PERIOD for c, w in weights.items()}
    if min(quota.values()) >= 1:  # no slot had to be given away
        assert all(abs(mix.slots[c] - quota[c]) < 1 + 1e-6 for c in weights)
    counts: Counter[str] = Counter()
    for n in range(MIX_PERIOD):
        assert mix.before(n) == counts
        assert all(
            abs(counts[c] - n * s / MIX_PERIOD) <= (len(weights) + 1) / 2 for c, s in mix.slots.items()
        )
        corpus, ordinal = mix.at(n)
        assert ordinal == counts[corpus]
        counts[corpus] += 1
    assert mix.before(3 * MIX_PERIOD) == {c: 3 * s for c, s in mix.slots.items()}


def test_rounding_is_by_largest_remainder_and_gives_small_weights_a_slot() -> None:
    # 1024/3 = 341.33 each: one slot is left over, and goes to the first.
    assert Mix("m", {"a": 1, "b": 1, "c": 1}).slots == {"a": 342, "b": 341, "c": 341}
    # 0.7 and 0.3 of 1024: 716.8 and 307.2.
    assert Mix("m", {"a": 0.7, "b": 0.3}).slots == {"a": 717, "b": 307}
    assert Mix("m", {"a": 1.0, "b": 1e-9, "c": 0.0}).slots == {"a": 1023, "b": 1}
    assert Mix("m", {"a": 1e308, "b": 1e308}).slots == {"a": 512, "b": 512}


@pytest.mark.parametrize("weights", [{}, {"broad": 0.0}, {"broad": -1.0, "code": 2.0}, {"broad": math.nan}])
def test_unusable_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(DataError, match=r"data\.mixes\.stable"):
        sampler(mixes={"stable": weights})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(DataError, match=r"expected corpora among .* got \['books'\]"):
        sampler(mixes={"stable": {"books": 1.0}})
    with pytest.raises(DataError, match=r"got anneal\. Define this mix"):
        sampler(start="anneal")
    with pytest.raises(DataError, match="anneal"):
        sampler().switch(5, "anneal")
    with pytest.raises(DataError, match="island"):
        sampler(islands=2, island=2)


# --- the order


def draws(islands: int, counts: list[int], **changes: Any) -> list[tuple[str, int]]:
    """What ``islands`` islands see, island i going ``counts[i]`` samples far."""
    samplers = [sampler(islands=islands, island=i, **changes) for i in range(islands)]
    return [s.locate(k) for s, count in zip(samplers, counts, strict=True) for k in range(count)]


@pytest.mark.parametrize("islands", [1, 2, 3])
def test_an_epoch_is_covered_exactly_once(islands: int) -> None:
    size = SIZES["code"] * islands  # of one corpus: every island then takes 313 samples an epoch
    changes = {"sizes": {"code": size}, "mixes": {"stable": {"code": 1.0}}}
    share = size // islands
    seen = draws(islands, [share] * islands, **changes)
    assert sorted(index for _, index in seen) == list(range(size))
    twice = Counter(draws(islands, [2 * share] * islands, **changes))
    assert set(twice.values()) == {2}
    first, second = (
        [sampler(islands=islands, **changes).locate(k + e * share) for k in range(50)] for e in (0, 1)
    )
    assert first != second  # another order in every epoch


def test_an_epoch_is_covered_once_where_it_does_not_divide_by_the_islands() -> None:
    changes = {"sizes": {"c": 101}, "mixes": {"stable": {"c": 1.0}}}
    # 3 islands, 303 = 3 epochs of 101: 101 samples each, epochs ending in mid-turn.
    assert set(Counter(draws(3, [101] * 3, **changes)).values()) == {3}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 120), min_size=2, max_size=4), st.integers(0, 2**63))
def test_islands_of_any_speed_are_disjoint(counts: list[int], seed: int) -> None:
    # 0.7 * 120 * 4 = 336 of 700 and 144 of 313: nobody reaches the second epoch.
    seen = draws(len(counts), counts, seed=seed)
    assert len(set(seen)) == len(seen)


def test_the_seed_decides_the_order_and_nothing_else_does() -> None:
    first = draws(1, [200])
    assert draws(1, [200]) == first != draws(1, [200], seed=8)
    turned = {
        "sizes": dict(reversed(SIZES.items())),
        "mixes": {m: dict(reversed(w.items())) for m, w in MIXES.items()},
    }
    assert draws(1, [200], **turned) == first


def test_the_order_is_the_same_everywhere_and_forever() -> None:
    # Pinned: a resumed run depends on it. A change here breaks the resume of every existing run.
    one = sampler(islands=2, island=1)
    assert [one.locate(k) for k in (0, 1, 2, 1000, 10**12)] == [
        ("broad", 532),
        ("code", 151),
        ("broad", 448),
        ("broad", 271),
        ("broad", 659),
    ]


def test_random_access_equals_sequential() -> None:
    one = sampler()
    one.switch(300, "decay")
    forward = [one.locate(k) for k in range(600)]
    other = sampler()
    other.switch(300, "decay")
    assert [other.locate(k) for k in reversed(range(600))] == forward[::-1]
    with pytest.raises(IndexError):
        one.locate(-1)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(sorted(MIXES))), max_size=5), st.integers(1, 3))
def test_switches_repeat_and_lose_nothing(plan: list[tuple[int, str]], islands: int) -> None:
    end, seen = 90, []
    for island in range(islands):
        one, k = sampler(islands=islands, island=island), 0
        for gap, mix in plan:
            k += gap // 4
            one.switch(k, mix)
        seen += [one.locate(k) for k in range(end)]
    # 3 islands take at most 189 of broad and 81 of code, less than an epoch; of good, one island at most 63.
    for corpus, size in SIZES.items():
        drawn = [index for name, index in seen if name == corpus]
        if islands == 1:
            assert len(set(drawn)) == len(drawn) <= size
            # nothing lost: exactly the first len(drawn) of the corpus's order
            alone = MixSampler({corpus: size}, {"stable": {corpus: 1}}, seed=7)
            assert drawn == [alone.locate(k)[1] for k in range(len(drawn))]
        elif corpus != "good":
            assert len(set(drawn)) == len(drawn)


def test_a_switch_takes_effect_at_its_sample_and_not_before() -> None:
    plain, switched = sampler(), sampler()
    switched.switch(250, "decay")
    assert [plain.locate(k) for k in range(250)] == [switched.locate(k) for k in range(250)]
    shares = Counter(switched.locate(k)[0] for k in range(250, 250 + MIX_PERIOD))
    assert shares == {"good": 717, "broad": 205, "code": 102}
    assert switched.history == [(0, "stable"), (250, "decay")]


def test_switching_to_the_mix_in_use_changes_nothing_and_the_past_is_closed() -> None:
    one = sampler()
    one.switch(250, "decay")
    one.switch(400, "decay")
    assert one.history == [(0, "stable"), (250, "decay")]
    with pytest.raises(DataError, match="expected a switch at sample 250 or later"):
        one.switch(249, "stable")
    one.switch(250, "stable")  # a phase of no samples: as if nothing had happened
    assert [one.locate(k)[0] for k in range(240, 250)] == [sampler().locate(k)[0] for k in range(240, 250)]


# --- state


def test_a_resumed_sampler_goes_on_and_loading_twice_changes_nothing() -> None:
    one = sampler(islands=2, island=1)
    one.switch(100, "decay")
    one.switch(333, "stable")
    state = json.loads(json.dumps(one.state_dict()))
    other = sampler(islands=2, island=1)
    other.switch(5, "decay")  # what it did before is forgotten
    for _ in range(2):
        other.load_state_dict(state)
        assert other.state_dict() == one.state_dict() == state
        assert [other.locate(k) for k in range(500)] == [one.locate(k) for k in range(500)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 8}, "seed"),
        ({"islands": 2}, "islands"),
        ({"sizes": {**SIZES, "broad": 701}}, "sizes"),
        ({"mixes": {**MIXES, "decay": {"good": 1.0}}}, "mixes"),
    ],
)
def test_the_state_of_other_data_is_refused_with_both_shown(changes: dict[str, Any], field: str) -> None:
    saved, other = sampler(), sampler(**changes)
    before = other.state_dict()
    with pytest.raises(DataError, match=f"got other {field}") as caught:
        other.load_state_dict(saved.state_dict())
    key = field
    assert f"saved {saved.state_dict()[key]}" in str(caught.value)
    assert f"given {other.state_dict()[key]}" in str(caught.value)
    assert other.state_dict() == before


def test_a_state_with_an_impossible_history_leaves_the_sampler_as_it_was() -> None:
    one = sampler()
    one.switch(10, "decay")
    before = one.state_dict()
    for history in ([[0, "stable"], [20, "decay"], [10, "stable"]], [[0, "stable"], [5, "gone"]]):
        with pytest.raises(DataError):
            one.load_state_dict({**before, "history": history})
        assert one.state_dict() == before
