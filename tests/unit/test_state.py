"""The state that all islands hold alike: its counters, its digests, and what is read off them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from outer_states import advance, state_of

from megatron_wsd.diloco.state import OuterState

FRAGMENTS = (("a.weight", "b.weight"), ("c.weight",), ("d.weight", "e.weight"))
KINDS = ("cgad", "sgd", "nesterov", "delayed_nesterov")


def copy_into(target: OuterState, source: OuterState) -> None:
    """As a healing does it: tensors, then counters that went through json."""
    for name, tensor in target.tensors().items():
        tensor.copy_(source.tensors()[name])
    target.take_counters(json.loads(json.dumps(source.counters())))


def made(kind: str = "cgad") -> OuterState:
    """With fragments at different versions, and orders."""
    state = state_of(*FRAGMENTS, steps=2, kind=kind)
    advance(state.fragments[1], 99)
    state.outer_step += 1
    state.orders = [{"number": 7, "kind": "decay", "step": 12}, {"number": 8, "step": 15}]
    return state


# ---- counters ----


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_back_from_tensors_and_json(kind: str) -> None:
    mine, other = made(kind), state_of(*FRAGMENTS, steps=0, kind=kind)
    assert other.digest() != mine.digest() and other.counter_digest() != mine.counter_digest()
    copy_into(other, mine)
    assert other.counters() == mine.counters()
    assert other.digest() == mine.digest() and other.counter_digest() == mine.counter_digest()
    assert [f.taken for f in other.fragments] == [{0: 20, 1: 21}, {0: 30, 1: 31}, {0: 20, 1: 21}]
    # And they step alike from there: the optimizers count from the same step.
    assert [f.optimizer.t for f in other.fragments] == [2, 3, 2]
    for state in (mine, other):
        for i, fragment in enumerate(state.fragments):
            advance(fragment, 200 + i)
    assert other.digest() == mine.digest() and other.counter_digest() == mine.counter_digest()


def test_counters_do_not_depend_on_the_order_in_which_islands_came() -> None:
    one, other = made(), made()
    other.fragments[0].taken = dict(reversed(other.fragments[0].taken.items()))
    assert json.dumps(one.counters()) == json.dumps(other.counters())


def test_orders_that_come_later_are_not_those_that_were_taken_over() -> None:
    mine, other = made(), state_of(*FRAGMENTS, steps=0)
    other.take_counters(mine.counters())
    other.orders.append({"number": 9, "step": 20})
    assert len(mine.orders) == 2


def test_counters_of_other_fragments_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        made().take_counters(state_of(*FRAGMENTS[:2]).counters())


# ---- digests ----


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_every_tensor_counts(kind: str) -> None:
    state = made(kind)
    before, seen = state.digest(), set()
    tensors = {name: tensor for name, tensor in state.tensors().items() if tensor.numel()}
    assert {name.split(".")[0] for name in tensors} == {"0", "1", "2"}
    for tensor in tensors.values():
        for bit in (0, 7):
            first = tensor.view(torch.uint8)[:1]
            first ^= 1 << bit
            seen.add(state.digest())
            first ^= 1 << bit
        assert state.digest() == before
    assert before not in seen and len(seen) == 2 * len(tensors)


def test_what_torch_does_not_see_is_told() -> None:
    state = made()
    before = state.digest()
    state.fragments[2].anchor.numpy()[3] += 1.0  # as a collective writes
    assert state.digest() == before
    state.forget_digest()
    assert state.digest() != before


def test_padding_does_not_count() -> None:
    state = made()
    before = state.digest()
    state.fragments[1].anchor[5000:] = 3.0
    assert state.digest() == before


def test_fragments_in_another_order_are_another_state() -> None:
    # Alike in all but the place of their contents.
    names = ("a.weight",)
    mine, other = state_of(names, names), state_of(names, names)
    assert mine.digest() == other.digest()
    assert mine.fragments[0].anchor[0] != mine.fragments[1].anchor[0]
    other.fragments = other.fragments[::-1]
    assert mine.digest() != other.digest()


def test_one_fragment_has_the_digest_of_its_optimizer() -> None:
    state = state_of(FRAGMENTS[0])
    only = state.fragments[0]
    assert state.digest() == only.optimizer.digest(only.anchor)


def test_the_step_of_an_optimizer_is_in_both_digests() -> None:
    state = made()
    before = state.digest(), state.counter_digest()
    state.fragments[0].optimizer.t += 1
    assert state.digest() != before[0] and state.counter_digest() != before[1]


def _taken(state: OuterState) -> None:
    state.fragments[2].taken[1] += 1


def _newcomer(state: OuterState) -> None:
    state.fragments[0].taken[5] = 0


def _version(state: OuterState) -> None:
    state.fragments[1].version += 1


def _turn(state: OuterState) -> None:
    state.fragments[1].turn += 1


def _tokens(state: OuterState) -> None:
    state.fragments[0].tokens += 1


def _steps(state: OuterState) -> None:
    state.fragments[0].steps += 1


def _moved(state: OuterState) -> None:  # the sum stays
    state.fragments[0].steps += 1
    state.fragments[1].steps -= 1


def _outer_step(state: OuterState) -> None:
    state.outer_step += 1


def _inner_step(state: OuterState) -> None:
    state.inner_step += 1


def _new_order(state: OuterState) -> None:
    state.orders.append({"number": 9, "step": 20})


def _fewer_orders(state: OuterState) -> None:
    state.orders.pop()


def _other_order(state: OuterState) -> None:
    state.orders[0]["number"] += 1


def _swapped_orders(state: OuterState) -> None:
    state.orders.reverse()


CHANGES = (
    _taken,
    _newcomer,
    _version,
    _turn,
    _tokens,
    _steps,
    _moved,
    _outer_step,
    _inner_step,
    _new_order,
    _fewer_orders,
    _other_order,
    _swapped_orders,
)


@pytest.mark.parametrize("change", CHANGES)
def test_every_counter_counts(change: Callable[[OuterState], None]) -> None:
    state = made()
    tensors, counters = state.digest(), state.counter_digest()
    change(state)
    assert state.counter_digest() != counters
    assert state.digest() == tensors, "what the ranks of an island share is not in the digest of one"


def test_why_an_order_was_refused_does_not_count() -> None:
    # Each island says it in its own words, or knows it a moment later.
    state = made()
    before = state.counter_digest()
    state.orders[1]["refused"] = "the decay has begun"
    assert state.counter_digest() == before


# ---- what is read off them ----


def test_tokens_and_steps_are_the_mean_over_the_fragments() -> None:
    state = state_of(*FRAGMENTS, steps=0)
    for fragment, tokens, steps in zip(state.fragments, (1000, 700, 301), (30, 20, 5), strict=True):
        fragment.tokens, fragment.steps = tokens, steps
    assert state.tokens == 667 and isinstance(state.tokens, int)  # whole tokens of 2001 / 3
    assert state.steps == pytest.approx(55 / 3, rel=1e-15)


def test_an_island_has_come_as_far_as_its_newest_contribution_of_any_fragment() -> None:
    state = state_of(*FRAGMENTS, steps=0)
    assert state.cursor(0) == 0
    state.fragments[0].taken = {0: 30, 1: 12}
    state.fragments[1].taken = {0: 20}
    state.fragments[2].taken = {1: 22, 4: 5}
    assert [state.cursor(i) for i in range(6)] == [30, 22, 0, 0, 5, 0]
