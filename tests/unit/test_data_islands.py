"""The number of islands changes: what nobody has taken is dealt anew, nothing twice and nothing left out."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wsd.data.deal import dealt, free_number, taken_below
from megatron_wsd.data.sampler import MixSampler, resized
from megatron_wsd.errors import DataError

SIZES = {"broad": 97, "good": 20, "code": 61}
MIXES = {
    "stable": {"broad": 0.7, "code": 0.3},
    "decay": {"broad": 0.2, "code": 0.1, "good": 0.7},
    "code": {"code": 1.0},
}
DRAWS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def first_state(islands: int) -> dict[str, Any]:
    return MixSampler(SIZES, MIXES, seed=7, islands=islands).state_dict()


# --- the deal, against sets


@given(DRAWS)
def test_free_numbers_are_found_as_by_crossing_out(draws: list[int]) -> None:
    islands = len(draws)
    taken = {j * islands + i for i, t in enumerate(draws) for j in range(t)}
    free = [x for x in range(islands * 40 + 60) if x not in taken]
    assert [free_number(n, draws) for n in range(len(free) - 1)] == free[:-1]
    for x in range(islands * 41):
        assert taken_below(x, draws) == sum(y < x for y in taken)


@given(st.lists(DRAWS, max_size=3), st.integers(1, 4))
def test_layers_are_found_as_by_crossing_out_again_and_again(before: list[list[int]], islands: int) -> None:
    left = list(range(1000))
    for draws in before:
        dealt_out = {j * len(draws) + i for i, t in enumerate(draws) for j in range(t)}
        left = [x for place, x in enumerate(left) if place not in dealt_out]
    for place in range(60):
        assert dealt(place // islands, place % islands, islands, before) == left[place]


def test_the_deal_is_exact_for_huge_numbers() -> None:
    # Whole rows taken: they only shift the order. 10^15 rows of 7, and a ragged front on top.
    rows, ragged = 10**15, [3, 0, 2, 9, 1, 0, 4]
    huge = [rows + t for t in ragged]
    for n in (0, 1, 5, 17, 60, 10**18):
        assert free_number(n, huge) == 7 * rows + free_number(n, ragged)
    assert dealt(10**17, 2, 3, [huge]) == 7 * rows + sum(ragged) + 3 * 10**17 + 2


# --- the sampler


class Run:
    """A run that is told what happens to it, and notes every sample that was committed."""

    def __init__(self, islands: int) -> None:
        self.samplers = [MixSampler(SIZES, MIXES, seed=7, islands=islands, island=i) for i in range(islands)]
        self.cursors = [0] * islands
        self.numbers: dict[str, list[int]] = {name: [] for name in SIZES}
        self.seen: dict[str, list[int]] = {name: [] for name in SIZES}

    def go(self, island: int, steps: int) -> None:
        sampler, cursor = self.samplers[island], self.cursors[island]
        for k in range(cursor, cursor + steps):
            corpus, number = sampler.number(k)
            self.numbers[corpus].append(number)
            self.seen[corpus].append(sampler.locate(k)[1])
        self.cursors[island] = cursor + steps

    def resize(self, islands: int) -> None:
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in self.samplers]
        last = max(self.cursors)
        starts = [*self.cursors[:islands], *[last] * (islands - len(self.cursors))]
        state = json.loads(json.dumps(resized(states, self.cursors, starts)))
        fresh = [MixSampler(SIZES, MIXES, seed=7, islands=islands, island=i) for i in range(islands)]
        for i, sampler in enumerate(fresh):
            # An island that stays keeps its own switches, which need not be those of the others.
            own = states[i] if i < len(states) else state
            for _ in range(2):
                sampler.load_state_dict({**state, "history": own["history"]})
        self.samplers, self.cursors = fresh, starts


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("go"), st.integers(0, 4), st.integers(0, 60)),
        st.tuples(st.just("islands"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("mix"), st.sampled_from(sorted(MIXES)), st.integers(0, 4)),
        st.tuples(st.just("mix of all"), st.sampled_from(sorted(MIXES)), st.just(0)),
    ),
    max_size=14,
)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), EVENTS)
def test_nothing_twice_and_nothing_left_out_whatever_happens(islands: int, events: list[Any]) -> None:
    run = Run(islands)
    for what, value, more in events:
        count = len(run.samplers)
        if what == "go":
            run.go(value % count, more)
        elif what == "islands":
            run.resize(value)
        else:
            chosen = range(count) if what == "mix of all" else [more % count]
            for i in chosen:
                run.samplers[i].switch(run.cursors[i], value)
    for name, numbers in run.numbers.items():
        assert len(set(numbers)) == len(numbers), f"a number of {name} was dealt twice"
    # One island takes what is left: the ragged front closes, and what was drawn is a beginning of the order.
    run.resize(1)
    run.samplers[0].switch(run.cursors[0], "decay")
    front = max((max(n, default=0) for n in run.numbers.values()), default=0)
    run.go(0, 1024 + 11 * front)  # of code the mix has a tenth
    for name, numbers in run.numbers.items():
        assert sorted(numbers) == list(range(len(numbers))), f"a number of {name} was left out"
        alone = MixSampler({name: SIZES[name]}, {"stable": {name: 1}}, seed=7)
        expected = Counter(alone.locate(k)[1] for k in range(len(numbers)))
        assert Counter(run.seen[name]) == expected
        assert max(expected.values()) - min(expected[i] for i in range(SIZES[name])) <= 1


def test_islands_at_one_step_are_followed_without_a_seam() -> None:
    # In synchronous operation: all stand at sample 30, so the new ones simply deal on from number 60.
    state = resized([first_state(2)] * 2, [30, 30], [30, 30, 30])
    one_corpus = {"sizes": {"c": 10**6}, "mixes": {"stable": {"c": 1.0}}}
    state.update(one_corpus, layers=[{"taken": [{"c": 30}, {"c": 30}], "starts": [30, 30, 30]}])
    for island in range(3):
        sampler = MixSampler.from_state(state, island)
        assert [sampler.number(k)[1] for k in range(30, 35)] == [60 + 3 * j + island for j in range(5)]
        if island < 2:
            assert [sampler.number(k)[1] for k in range(30)] == [2 * j + island for j in range(30)]
        else:
            with pytest.raises(IndexError, match="sample 29 of island 2"):
                sampler.number(29)


def test_an_island_that_read_ahead_asks_again_and_needs_no_change() -> None:
    sampler = MixSampler.from_state(resized([first_state(2)] * 2, [30, 44], [30, 44, 44]), 1)
    ahead = [sampler.locate(k) for k in range(44, 90)]
    again = MixSampler.from_state(json.loads(json.dumps(sampler.state_dict())), 1)
    assert [again.locate(k) for k in range(60, 90)] == ahead[16:]


def test_a_mix_that_is_switched_late_still_begins_at_its_sample() -> None:
    # A new island learns of a switch at 50 after it began at 60: draws since 60 count, whatever lies before.
    state = resized([first_state(2)] * 2, [60, 60], [60])
    late, known = (MixSampler.from_state(state, 0) for _ in range(2))
    first = [known.locate(k) for k in range(60, 64)]
    late.locate(61)
    late.switch(50, "code")
    assert [late.number(k)[0] for k in range(60, 70)] == ["code"] * 10
    drawn = state["layers"][0]["taken"]
    taken = sum(t["code"] for t in drawn)
    assert [late.number(k)[1] for k in range(60, 63)] == [taken, taken + 1, taken + 2]
    assert first == [known.locate(k) for k in range(60, 64)]


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(DataError, match="all islands of one run"):
        resized([first_state(2)], [5], [5, 5])
    with pytest.raises(DataError, match="all islands of one run"):
        resized([first_state(2), {**first_state(2), "seed": 8}], [5, 5], [5])
    state = resized([first_state(2)] * 2, [5, 5], [5, 5, 5])
    with pytest.raises(DataError, match="other islands"):
        MixSampler(SIZES, MIXES, seed=7, islands=2).load_state_dict(state)
    with pytest.raises(DataError, match="island"):
        MixSampler.from_state(state, 3)


def test_a_state_from_before_there_were_changes_is_read() -> None:
    state = first_state(2)
    assert state.pop("layers") == []
    old = MixSampler.from_state({**state, "format": 1}, 1)
    assert old.state_dict() == first_state(2)
