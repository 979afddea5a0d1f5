"""Fragments: which parameters, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wsd.diloco.fragments import (
    Fragment,
    SyncPoints,
    peak_fraction,
    plan_digest,
    plan_fragments,
)
from megatron_wsd.errors import ConfigError


@dataclass(frozen=True)
class Part:
    name: str
    global_numel: int = 10


def gpt(layers: int) -> list[Part]:
    """Names as megatron-core's GPTModel has them, inside the trainer's module."""
    inside = ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "pre_mlp_layernorm.weight")
    return [
        Part("model.embedding.word_embeddings.weight", 50),
        *(Part(f"model.decoder.layers.{n}.{w}") for n in range(layers) for w in inside),
        Part("model.decoder.final_layernorm.weight", 5),
        Part("model.output_layer.weight", 50),
    ]


def layers_of(plan: list[Fragment], parts: list[Part]) -> list[list[int]]:
    return [
        sorted({int(parts[i].name.split("layers.")[1].split(".")[0]) for i in fragment.members})
        for fragment in plan
        if fragment.name != "outside"
    ]


def test_one_fragment_is_the_whole_model() -> None:
    parts = gpt(3)
    assert plan_fragments(parts, 1) == [Fragment("all", tuple(range(len(parts))))]
    assert plan_fragments([Part("weight")], 1) == [Fragment("all", (0,))]


def test_strided_fragments_span_the_depth_and_the_rest_is_one_more() -> None:
    parts = gpt(7)
    plan = plan_fragments(parts, 3, "strided")
    assert layers_of(plan, parts) == [[0, 3, 6], [1, 4], [2, 5]]
    assert [f.name for f in plan] == ["layers 0, 3, 6", "layers 1, 4", "layers 2, 5", "outside"]
    assert [parts[i].name for i in plan[-1].members] == [
        "model.embedding.word_embeddings.weight",
        "model.decoder.final_layernorm.weight",
        "model.output_layer.weight",
    ]


def test_sequential_fragments_are_neighbours_and_even_in_elements() -> None:
    parts = gpt(7)
    plan = plan_fragments(parts, 3, "sequential")
    assert layers_of(plan, parts) == [[0, 1], [2, 3], [4, 5, 6]]
    # One layer as large as all others together stands alone.
    heavy = [Part(f"layers.{n}.w", 60 if n == 1 else 10) for n in range(7)]
    assert layers_of(plan_fragments(heavy, 3, "sequential"), heavy) == [[0], [1], [2, 3, 4, 5, 6]]


@settings(deadline=None)
@pytest.mark.parametrize("order", ["strided", "sequential"])
@given(layers=st.integers(2, 40), data=st.data())
def test_every_parameter_is_in_one_fragment_and_no_fragment_is_empty(
    order: Literal["strided", "sequential"], layers: int, data: st.DataObject
) -> None:
    fragments = data.draw(st.integers(2, layers))
    parts = gpt(layers)
    plan = plan_fragments(parts, fragments, order)
    assert len(plan) == fragments + 1
    assert sorted(i for f in plan for i in f.members) == list(range(len(parts)))
    sizes = [len(group) for group in layers_of(plan, parts)]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1  # equal layers: as even as it goes
    largest = max(50 + 50 + 5, 30 * max(sizes))
    assert peak_fraction(plan, parts) == pytest.approx(largest / (105 + 30 * layers))


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.{}.self_attention.linear_qkv.weight",
        "layers.{}.w",
        "model.layers.{}.mlp.down_proj.weight",
        "transformer.h.{}.attn.c_attn.weight",
        "h.{}.w",
        "blocks.{}.0.weight",
        "encoder.block.{}.layer.0.SelfAttention.q.weight",
        "module.layers.{}",
    ],
)
def test_names_of_other_models(name: str) -> None:
    # Ten and two: numbers are compared as numbers.
    parts = [Part(name.format(n)) for n in (10, 2, 0, 1)]
    plan = plan_fragments(parts, 2)
    assert [f.members for f in plan] == [(1, 2), (0, 3)]  # in depth: 0, 1, 2, 10


def test_two_stacks_follow_each_other() -> None:
    parts = [Part(f"{stack}.layers.{n}.w") for stack in ("encoder", "decoder") for n in range(3)]
    assert [f.members for f in plan_fragments(parts, 2, "sequential")] == [(0, 1, 2), (3, 4, 5)]
    assert [f.members for f in plan_fragments(parts, 2, "strided")] == [(0, 2, 4), (1, 3, 5)]


def test_more_fragments_than_layers() -> None:
    plan_fragments(gpt(4), 4)
    with pytest.raises(ConfigError) as caught:
        plan_fragments(gpt(4), 5)
    text = str(caught.value)
    assert "megatron_wsd.sync.fragments: expected at most 4, the layers of this model, got 5" in text
    assert "Set it to 4 or less" in text


def test_a_model_without_layers() -> None:
    with pytest.raises(ConfigError, match=r"sync\.fragments: expected 1 for .* such as 0\.weight, fc\.bias"):
        plan_fragments([Part("0.weight"), Part("fc.bias"), Part("players.2.w")], 2)
    with pytest.raises(ConfigError, match="at least 1"):
        plan_fragments(gpt(2), 0)


def test_the_digest_tells_plans_apart() -> None:
    parts = gpt(6)
    plans = [plan_fragments(parts, p, o) for p in (2, 3) for o in ("strided", "sequential")]  # type: ignore[arg-type]
    digests = {plan_digest(plan, parts) for plan in plans}
    assert len(digests) == 4 and all(0 <= d < 2**63 for d in digests)
    other = [Part(p.name, p.global_numel + 1) for p in parts]
    assert plan_digest(plans[0], other) not in digests
    assert plan_digest(plan_fragments(gpt(6), 2), parts) in digests
    # The turns count too.
    assert plan_digest(plans[0][::-1], parts) not in digests


@given(st.integers(1, 60), st.integers(1, 80))
def test_every_fragment_has_exactly_the_period_that_was_asked_for(inner_steps: int, count: int) -> None:
    points = SyncPoints(inner_steps, count)
    due: dict[int, list[int]] = {f: [] for f in range(count)}
    per_step = []
    for n in range(1, 4 * inner_steps + 1):
        now = points.due(n)
        assert now == sorted(now)
        per_step.append(len(now))
        for f in now:
            due[f].append(n)
    for f, steps in due.items():
        assert steps[0] <= inner_steps
        assert all(b - a == inner_steps for a, b in pairwise(steps)), f
        assert len(steps) == 4
    # As even as whole steps allow.
    assert max(per_step) == math.ceil(count / inner_steps)
    assert points.due(0) == []
    assert count - 1 in points.due(inner_steps)


@pytest.mark.parametrize(
    ("inner_steps", "count", "text"),
    [
        (30, 1, "the whole model syncs every 30 steps"),
        (30, 4, "each fragment syncs every 30 steps; 4 fragments, sync points 7 or 8 steps apart"),
        (24, 4, "each fragment syncs every 24 steps; 4 fragments, sync points 6 steps apart"),
        (
            3,
            7,
            "each fragment syncs every 3 steps; 7 fragments, sync points 1 step apart, "
            "2 or 3 fragments at each",
        ),
        (
            1,
            2,
            "each fragment syncs every step; 2 fragments, sync points 1 step apart, 2 fragments at each",
        ),
    ],
)
def test_the_period_in_words(inner_steps: int, count: int, text: str) -> None:
    assert SyncPoints(inner_steps, count).describe() == text


@pytest.mark.parametrize(("inner_steps", "count"), [(1, 1), (6, 1), (6, 3), (7, 3), (3, 7), (5, 5)])
def test_turns_are_the_due_points_that_have_passed(inner_steps: int, count: int) -> None:
    points = SyncPoints(inner_steps, count)
    passed = [0] * count
    for n in range(40):
        for f in points.due(n):
            passed[f] += 1
        assert [points.turns(f, n) for f in range(count)] == passed
