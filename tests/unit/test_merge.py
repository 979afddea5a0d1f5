"""Gate and merge, against an independent float64 implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from island_reports import empty, offer, report
from outer_states import config_of

from megatron_wsd.config import OuterConfig
from megatron_wsd.diloco.agree import Decision, decide
from megatron_wsd.diloco.merge import (
    CANCELLED,
    Merge,
    age_gate,
    decision_coefficients,
    merge_coefficients,
)
from megatron_wsd.diloco.wire import cut
from megatron_wsd.optim import wire
from megatron_wsd.optim.gate import staleness_gate
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.wire import WireFormat

U = 2.0**-24  # unit roundoff of fp32
FORMATS = ("fp32", "bf16", "int8", "int4")
EMBEDDING = "model.embedding.word_embeddings.weight"
# Uneven, one element, none, longer than a block; both parts of the layout.
SIZES = {EMBEDDING: 700, "layers.0.w": 2000, "layers.0.bias": 1, "layers.1.w": 257, "layers.1.none": 0}
Array = npt.NDArray[np.float64]
Parts = list[torch.Tensor]  # one tensor a parameter


def layout_of(sizes: dict[str, int]) -> FlatLayout:
    return FlatLayout([Segment(n, parameter_key(n), size, 0, size == 2000) for n, size in sizes.items()])


LAYOUT = layout_of(SIZES)


def flat_of(layout: FlatLayout, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = torch.zeros(layout.total)
    for view, part in zip(layout.views(flat), parts, strict=True):
        view.copy_(part)
    return flat


def contributions(count: int, sizes: dict[str, int] = SIZES, seed: int = 0) -> list[Parts]:
    """Pseudo-gradients of very different lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [10.0 ** (k - 1) for k in range(count)]
    return [[torch.randn(n, generator=draw) * length for n in sizes.values()] for length in lengths]


def run(
    kind: str,
    given_: Sequence[Parts],
    coefficients: Sequence[float],
    *,
    wire_name: str = "fp32",
    bucket_bytes: int = 1 << 30,
    sizes: dict[str, int] = SIZES,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Merged as a round does it, on a rank that holds whole parameters; and what each payload decodes to."""
    layout, fmt = layout_of(sizes), WireFormat.of(wire_name)
    merged = torch.full((layout.total,), 7.0)  # must be overwritten
    merge = Merge(kind, fmt, layout, merged, coefficients)
    chunks, decoded = cut(fmt, layout.total, bucket_bytes), []
    for place, parts in enumerate(given_):
        flat, out = flat_of(layout, parts), torch.zeros(layout.total)
        payloads = []
        for c in chunks:
            payload = torch.zeros(c.last_byte - c.first_byte, dtype=torch.uint8)
            payloads.append(wire.encode(fmt, flat[c.start : c.end], payload))
            wire.decode(fmt, payload, out[c.start : c.end])
        decoded.append(out)
        norms = wire.segment_sumsq(out, layout.table).sqrt() if merge.radial else None
        factors = merge.factors(place, norms)
        for c, payload in zip(chunks, payloads, strict=True):
            assert merge.add(c, payload, place, factors)
    merge.finish(lambda sumsq: sumsq)
    return merged, decoded


def by_parameter(flat: torch.Tensor, sizes: dict[str, int] = SIZES) -> dict[str, Array]:
    return {n: v.double().numpy() for n, v in zip(sizes, layout_of(sizes).views(flat), strict=True)}


def weighted_mean(parts: Sequence[Array], coefficients: Sequence[float]) -> tuple[Array, Array]:
    """sum_k c_k g_k in float64, and how far fp32 may be from it.

    Each term carries the roundings of its coefficient and of the product, and of the additions that follow
    it, at most K - 1 (the first is to 0, and exact): (K + 1) U of its magnitude, and a hundredth of that for
    products of roundings.
    """
    exact = sum(c * g for c, g in zip(coefficients, parts, strict=True))
    size = sum(abs(c * g) for c, g in zip(coefficients, parts, strict=True))
    return np.asarray(exact), 1.01 * (len(parts) + 1) * U * np.asarray(size)


def radial_mean(parts: Sequence[Array], coefficients: Sequence[float]) -> tuple[Array, Array]:
    """Radial-directional averaging of one parameter in float64, and how far fp32 may be from it.

    The sum of directions D is a weighted mean with c_k / |g_k| for coefficients, and as far off. Scaling it
    by R / |D| adds the error of |D|, which is at most the length of D's error, and two roundings: of the
    factor and of the product. A thousandth more for products of these.
    """
    norms = [float(np.sqrt((g**2).sum())) for g in parts]
    reach = sum(c * n for c, n in zip(coefficients, norms, strict=True))
    agreement = sum(coefficients)
    units = [c / n if n else 0.0 for c, n in zip(coefficients, norms, strict=True)]
    direction, off = weighted_mean(parts, units)
    length = float(np.sqrt((direction**2).sum()))
    if length < CANCELLED * agreement:
        return reach / agreement * direction, reach / agreement * (off + 2 * U * abs(direction)) * 1.001
    if length == 0.0:
        return direction, off
    exact = reach / length * direction
    relative = float(np.sqrt((off**2).sum())) / length
    return exact, 1.001 * (reach / length * off + abs(exact) * (2 * U + relative))


def check(kind: str, merged: torch.Tensor, decoded: Sequence[torch.Tensor], c: Sequence[float]) -> None:
    mine, theirs = by_parameter(merged), [by_parameter(d) for d in decoded]
    for name, found in mine.items():
        radial = kind == "radial" and name != EMBEDDING
        expected, off = (radial_mean if radial else weighted_mean)([d[name] for d in theirs], c)
        assert np.all(abs(found - expected) <= off), name
    padding = torch.ones(LAYOUT.total, dtype=torch.bool)
    for view in LAYOUT.views(padding):
        view.fill_(False)
    assert not merged[padding].any()


# ---- coefficients ----


def test_merge_divides_by_the_weights_without_the_gates() -> None:
    # tests/cases/first_round.json, "two_ages": (0.2 gate(0) + 0.4 gate(8)) / 2
    cgad = OuterConfig()
    c = merge_coefficients([age_gate(cgad, 0), age_gate(cgad, 8)], [1.0, 1.0])
    assert 0.2 * c[0] + 0.4 * c[1] == pytest.approx(0.1344658914966628, abs=1e-15)
    weighted = merge_coefficients([age_gate(cgad, 0), age_gate(cgad, 4)], [3.0, 1.0])
    assert weighted == pytest.approx([0.75, 0.25 * staleness_gate(4)], abs=1e-15)


def test_each_outer_optimizer_has_its_own_view_of_age() -> None:
    ages = (0, 8, 40)
    assert [age_gate(OuterConfig(optimizer="cgad"), t) for t in ages] == [1.0, staleness_gate(8), 0.0]
    exponential = [age_gate(OuterConfig(optimizer="adam_decay"), t) for t in ages]
    assert exponential == pytest.approx([1.0, math.exp(-1.6), math.exp(-8.0)], rel=1e-15)
    for name in ("adam", "sgd", "nesterov", "delayed_nesterov"):
        assert [age_gate(OuterConfig(optimizer=name), t) for t in ages] == [1.0, 1.0, 1.0]


def aged(bases: Sequence[int], tokens: Sequence[int], turn: int = 6) -> Decision:
    """Of a fragment after 5 commits, with a contribution of each base."""
    both = enumerate(zip(bases, tokens, strict=True))
    return decide([report(i, empty(), offer(base=b, tokens=n, turn=turn)) for i, (b, n) in both])


def test_a_decision_gates_by_the_age_of_the_fragment_too_and_weighs_by_its_tokens() -> None:
    decision = aged((5, 3, 5), (100, 300, 0), turn=7)  # one turn was missed
    assert decision.ages == (1, 2, 1)
    expected = [staleness_gate(1), staleness_gate(2), staleness_gate(1)]
    gates, equal = decision_coefficients(config_of(), decision)
    assert gates == expected and equal == pytest.approx([g / 3 for g in expected], rel=1e-15)
    gates, weighted = decision_coefficients(config_of(sync={"merge": "tokens"}), decision)
    # One without tokens has the weight of a single one: weights are positive.
    shares = [100 / 401, 300 / 401, 1 / 401]
    assert gates == expected
    assert weighted == pytest.approx([g * w for g, w in zip(expected, shares, strict=True)], rel=1e-15)
    radial = decision_coefficients(config_of(sync={"merge": "radial"}), decision)
    assert radial == (expected, equal)


@given(
    bases=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    turn=st.integers(6, 45),
    kind=st.sampled_from(["mean", "tokens", "radial"]),
    optimizer=st.sampled_from(["cgad", "adam_decay"]),
    data=st.data(),
)
def test_age_never_makes_a_coefficient_larger(
    bases: list[int], turn: int, kind: str, optimizer: str, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 1000), min_size=len(bases), max_size=len(bases)))
    config = config_of(sync={"merge": kind}, outer={"optimizer": optimizer})
    _, coefficients = decision_coefficients(config, aged(bases, tokens, turn))
    _, fresh = decision_coefficients(config, aged([5] * len(bases), tokens))
    assert sum(fresh) == pytest.approx(1.0, rel=1e-15)
    assert all(0.0 <= c <= f for c, f in zip(coefficients, fresh, strict=True))
    older = [max(0, b - 1) for b in bases]
    _, smaller = decision_coefficients(config, aged(older, tokens, turn + 1))
    assert all(s <= c for s, c in zip(smaller, coefficients, strict=True))


# ---- sums ----


@pytest.mark.parametrize("kind", ["mean", "tokens", "radial"])
@pytest.mark.parametrize("wire_name", FORMATS)
@pytest.mark.parametrize("coefficients", [[0.2, 0.3, 0.5], [1 / 3, 0.0, 1e-6], [0.9, 0.04, 0.01]])
def test_merged_is_what_float64_makes_of_the_payloads(
    kind: str, wire_name: str, coefficients: list[float]
) -> None:
    merged, decoded = run(kind, contributions(3), coefficients, wire_name=wire_name)
    check(kind, merged, decoded, coefficients)


@pytest.mark.parametrize("kind", ["mean", "radial"])
@pytest.mark.parametrize("wire_name", FORMATS)
@pytest.mark.parametrize("bucket_bytes", [1, 1024, 2000])
def test_how_it_is_cut_changes_no_bit(kind: str, wire_name: str, bucket_bytes: int) -> None:
    fmt = WireFormat.of(wire_name)
    assert len(cut(fmt, LAYOUT.total, bucket_bytes)) > 1
    c = [0.2, 0.5, 0.3]
    whole, _ = run(kind, contributions(3), c, wire_name=wire_name)
    pieces, _ = run(kind, contributions(3), c, wire_name=wire_name, bucket_bytes=bucket_bytes)
    assert torch.equal(whole.view(torch.int32), pieces.view(torch.int32))


@pytest.mark.parametrize("kind", ["mean", "radial"])
def test_merged_beyond_fp32_is_told(kind: str) -> None:
    fmt, layout = WireFormat.of("fp32"), layout_of({EMBEDDING: 300})
    merge = Merge(kind, fmt, layout, torch.zeros(layout.total), [1.0, 1.0])
    (chunk,) = cut(fmt, layout.total, 1 << 20)
    for place, fits in enumerate((True, False)):  # 2^63 can be stepped, and 2^64 cannot
        flat = flat_of(layout, [torch.full((300,), 2.0**63)])
        norms = wire.segment_sumsq(flat, layout.table).sqrt()
        assert merge.add(chunk, flat.view(torch.uint8), place, merge.factors(place, norms)) is fits


GATES = st.lists(st.integers(0, 40).map(staleness_gate), min_size=3, max_size=3)


@given(
    gates=GATES,
    weights=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("kind", ["mean", "radial"])
def test_gates_never_lengthen_what_is_merged(
    kind: str, gates: list[float], weights: list[float], seed: int
) -> None:
    """No parameter moves further than the weighted mean of the lengths, each taken by its gate."""
    parts, c = contributions(3, seed=seed), merge_coefficients(gates, weights)
    found = by_parameter(run(kind, parts, c)[0])
    ungated = merge_coefficients([1.0] * 3, weights)
    for i, name in enumerate(SIZES):
        lengths = [float(p[i].double().norm()) for p in parts]
        reach = sum(a * n for a, n in zip(c, lengths, strict=True))
        assert reach <= sum(a * n for a, n in zip(ungated, lengths, strict=True)) * (1 + 1e-15)
        # mean: 4 roundings of each term at most; radial: 2 of each element.
        assert np.linalg.norm(found[name]) <= reach * (1 + 4.04 * U)


@given(gates=GATES, smaller=st.floats(0, 1))
@pytest.mark.parametrize("kind", ["mean", "radial"])
def test_where_all_agree_a_lower_gate_only_shortens(kind: str, gates: list[float], smaller: float) -> None:
    first = contributions(1)[0]
    parts = [[p * length for p in first] for length in (1.0, 2.0, 0.5)]
    lower = [gates[0] * smaller, *gates[1:]]
    one, other = (by_parameter(run(kind, parts, merge_coefficients(g, [1.0] * 3))[0]) for g in (gates, lower))
    for name in SIZES:
        # 4 roundings on either side, as above.
        assert np.linalg.norm(other[name]) <= np.linalg.norm(one[name]) * (1 + 8.08 * U)


# ---- radial ----


def test_radial_has_the_mean_length_and_the_mean_direction() -> None:
    sizes = {"layers.0.w": 2}
    parts = [[torch.tensor([3.0, 0.0])], [torch.tensor([0.0, 1.0])]]
    merged = by_parameter(run("radial", parts, [0.5, 0.5], sizes=sizes)[0], sizes)["layers.0.w"]
    # Length (3 + 1) / 2, half-way between the axes; the mean itself would be (1.5, 0.5), shorter and turned.
    assert merged == pytest.approx([2 / math.sqrt(2)] * 2, rel=4 * U)


def test_the_length_of_a_radial_mean_is_the_mean_of_the_lengths() -> None:
    c = [0.2, 0.3, 0.4]
    merged, decoded = run("radial", contributions(3), c)
    theirs = [by_parameter(d) for d in decoded]
    for name, found in by_parameter(merged).items():
        if name == EMBEDDING or not found.size:
            continue
        reach = sum(a * np.linalg.norm(d[name]) for a, d in zip(c, theirs, strict=True))
        # The length of what is in memory is made right: two roundings are left, of factor and product.
        assert np.linalg.norm(found) == pytest.approx(reach, rel=2.02 * U)


def test_embeddings_are_averaged_with_the_bits_of_the_mean() -> None:
    c = [0.2, 0.3, 0.5]
    mean, radial = (by_parameter(run(kind, contributions(3), c)[0]) for kind in ("mean", "radial"))
    assert np.array_equal(radial[EMBEDDING], mean[EMBEDDING])
    assert not np.allclose(radial["layers.0.w"], mean["layers.0.w"], rtol=0.1)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-30, 1e12])
@pytest.mark.parametrize("coefficient", [1.0, 1e-5])
def test_a_lone_contribution_comes_back_times_its_coefficient(scale: float, coefficient: float) -> None:
    parts = [[p * scale for p in contributions(1)[0]]]
    merged, (alone,) = run("radial", parts, [coefficient])
    for name, found in by_parameter(merged).items():
        # Three roundings of an element: of the product that makes it a direction, of the factor that gives it
        # its length, and of their product; and the first one again, in the length that it is divided by.
        # (That of the direction's own factor cancels.) Below 2^-126 fp32 has fewer bits: half of the last.
        expected = coefficient * by_parameter(alone)[name]
        assert np.all(abs(found - expected) <= 4.04 * U * abs(expected) + 2.0**-150), name


def test_a_contribution_of_zeros_counts_in_the_length_alone() -> None:
    one, nothing = contributions(1)[0], [torch.zeros(n) for n in SIZES.values()]
    c = [0.5, 0.25]  # powers of two
    for share, parts in ((0.5, [one, nothing]), (0.25, [nothing, one])):
        merged, decoded = run("radial", parts, c)
        check("radial", merged, decoded, c)
        for found, own in zip(LAYOUT.views(merged), one, strict=True):
            # As far off as a lone one.
            assert torch.all((found - share * own).abs() <= 4.04 * U * share * own.abs())


def test_nothing_but_zeros_stays_zero() -> None:
    nothing = [torch.zeros(n) for n in SIZES.values()]
    assert not run("radial", [nothing, nothing], [0.5, 0.5])[0].any()
    assert not run("radial", contributions(2), [0.0, 0.0])[0].any()


@pytest.mark.parametrize(("angle", "cancel"), [(0.0199, True), (0.0201, False)])
def test_directions_that_cancel_are_not_blown_up(angle: float, cancel: bool) -> None:
    # Unit vectors at an angle of pi - angle have a mean of length sin(angle / 2), a hundredth at 0.02.
    sizes = {"layers.0.w": 2}
    away = [torch.tensor([-math.cos(angle), math.sin(angle)]) * 4.0]
    c = [0.4, 0.4]  # what counts is their share in each other, not their sum
    merged, decoded = run("radial", [[torch.tensor([2.0, 0.0])], away], c, sizes=sizes)
    length = float(merged.double().norm())
    assert length == pytest.approx(2.4 * (math.sin(angle / 2) if cancel else 1.0), rel=1e-4)
    parts = [by_parameter(d, sizes)["layers.0.w"] for d in decoded]
    expected, off = radial_mean(parts, c)
    assert np.all(abs(by_parameter(merged, sizes)["layers.0.w"] - expected) <= off)


def test_opposite_contributions_cancel_to_zero() -> None:
    one = contributions(1)[0]
    merged, _ = run("radial", [one, [-p for p in one]], [0.5, 0.5])
    assert not merged.any()


@pytest.mark.parametrize("split", [1, 999, 1999, 2000])
def test_a_parameter_on_two_ranks_is_merged_as_a_whole(split: int) -> None:
    """Norms and lengths are of whole parameters; a rank may hold any part of one, or none."""
    name, c, fmt = "layers.0.w", [0.2, 0.3, 0.5], WireFormat.of("fp32")
    whole = [parts[1] for parts in contributions(3)]
    ranks = []
    for numel in (split, 2000 - split):
        layout = FlatLayout([Segment(name, parameter_key(name), numel, 0, False)])
        ranks.append(Merge("radial", fmt, layout, torch.zeros(layout.total), c))
    for place, given_ in enumerate(whole):
        parts = (given_[:split], given_[split:])
        flats = [flat_of(rank.layout, [part]) for rank, part in zip(ranks, parts, strict=True)]
        one, other = (wire.segment_sumsq(f, r.layout.table) for f, r in zip(flats, ranks, strict=True))
        for rank, flat in zip(ranks, flats, strict=True):
            factors = rank.factors(place, (one + other).sqrt())
            for chunk in cut(fmt, rank.layout.total, 1 << 20):
                assert rank.add(chunk, flat.view(torch.uint8), place, factors)
    one, other = (wire.segment_sumsq(rank.merged, rank.layout.table) for rank in ranks)
    for rank, mine in zip(ranks, (one.clone(), other.clone()), strict=True):
        asked: list[torch.Tensor] = []
        rank.finish(lambda sums, asked=asked: asked.append(sums) or one + other)  # type: ignore[misc, func-returns-value]
        assert [a.tolist() for a in asked] == [mine.tolist()]
    expected, off = radial_mean([g.double().numpy() for g in whole], c)
    found = torch.cat([rank.layout.views(rank.merged)[0] for rank in ranks])
    assert np.all(abs(found.double().numpy() - expected) <= off)
