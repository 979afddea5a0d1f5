"""The outer optimizers behind their one interface."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_wsd.config import OuterConfig
from megatron_wsd.errors import CheckpointError, FieldError, NativeError
from megatron_wsd.optim import OuterHyper, OuterOptimizer, make_outer, staleness_gate
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key

CASE = json.loads((Path(__file__).parents[1] / "cases" / "first_round.json").read_text())
KINDS = ("cgad", "adam", "adam_decay", "sgd", "nesterov", "delayed_nesterov")
HYPER = OuterHyper(lr=0.1, momentum=0.9, momentum_period=2, seed=3)


def mixed_layout() -> FlatLayout:
    shards = [("a", 300, True), ("norm", 10, False), ("b", 1000, True), ("e", 500, False)]
    return FlatLayout([Segment(n, parameter_key(n), numel, 0, q) for n, numel, q in shards])


def merged(layout: FlatLayout, seed: int) -> torch.Tensor:
    flat = torch.zeros(layout.total)
    for view in layout.views(flat):
        view.normal_(generator=torch.Generator().manual_seed(seed + view.numel()))
    return flat


DTYPES = (torch.float32, torch.bfloat16)


def run(outer: OuterOptimizer, anchor: torch.Tensor, steps: range) -> None:
    for i in steps:
        outer.step(anchor, merged(outer.layout, i))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    "kind,hyper,expected",
    [
        ("sgd", OuterHyper(lr=1.0), CASE["anchor_after"]["sgd_lr1_momentum0"]),
        ("nesterov", OuterHyper(lr=0.7, momentum=0.9), CASE["anchor_after"]["nesterov_lr0.7_momentum0.9"]),
        ("cgad", OuterHyper(lr=0.1, eps=1e-8), CASE["anchor_after"]["cgad_lr0.1_eps1e-8_wd0"]),
        ("adam", OuterHyper(lr=0.1, eps=1e-8), CASE["anchor_after"]["cgad_lr0.1_eps1e-8_wd0"]),
    ],
)
def test_first_round(kind: str, hyper: OuterHyper, expected: float, quantised: bool) -> None:
    layout = FlatLayout([Segment("w", 1, 1, 0, quantised)])
    anchor, pseudo = torch.zeros(layout.total), torch.zeros(layout.total)
    layout.views(anchor)[0].fill_(1.0)
    layout.views(pseudo)[0].fill_(CASE["merged"])
    make_outer(kind, layout, hyper).step(anchor, pseudo)
    # A handful of roundings of numbers up to 1, and eps against sqrt(v) = 0.07: 0.1 * 1e-8 / 0.3.
    assert float(layout.views(anchor)[0]) == pytest.approx(expected, abs=8 * 2.0**-24)


def test_first_round_with_two_ages() -> None:
    gates = [staleness_gate(0), staleness_gate(8)]
    value = sum(g * w for g, w in zip(gates, CASE["pseudo_gradients"], strict=True)) / 2
    assert value == pytest.approx(CASE["two_ages"]["merged"], rel=1e-12)


def test_adamw_first_step() -> None:
    case = CASE["adamw_first_step"]
    layout = FlatLayout([Segment("w", 1, 1, 0, True)])
    anchor, pseudo = torch.zeros(layout.total), torch.zeros(layout.total)
    anchor[0], pseudo[0] = case["p"], case["g"]
    hyper = OuterHyper(lr=case["lr"], eps=case["eps"], weight_decay=case["weight_decay"])
    make_outer("cgad", layout, hyper).step(anchor, pseudo)
    assert float(anchor[0]) == pytest.approx(case["p_after"], abs=0.1 * case["eps"] + 8 * 2.0**-24)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_stays_zero(kind: str) -> None:
    layout = mixed_layout()
    outer, anchor = make_outer(kind, layout, HYPER), torch.zeros(layout.total)
    run(outer, anchor, range(5))
    inside = torch.zeros(layout.total, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    assert bool((anchor[~inside] == 0).all())
    assert bool((anchor[inside] != 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_state_moves_to_another_optimizer_bit_for_bit(kind: str) -> None:
    layout = mixed_layout()
    whole, cut = make_outer(kind, layout, HYPER), make_outer(kind, layout, HYPER)
    anchor = torch.zeros(layout.total)
    run(whole, anchor, range(3))
    saved = {name: t.clone() for name, t in whole.state_tensors().items()}
    resumed = anchor.clone()
    cut.load_state(saved, whole.t)
    assert cut.digest(resumed) == whole.digest(anchor)
    run(whole, anchor, range(3, 6))
    assert cut.digest(resumed) != whole.digest(anchor)
    run(cut, resumed, range(3, 6))
    assert torch.equal(anchor, resumed) and cut.t == whole.t == 6
    assert cut.digest(resumed) == whole.digest(anchor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_digest_of_a_step_is_that_of_its_contents(kind: str, dtype: torch.dtype) -> None:
    layout = mixed_layout()
    outer, anchor = make_outer(kind, layout, HYPER, dtype), torch.zeros(layout.total, dtype=dtype)
    other = make_outer(kind, layout, HYPER, dtype)
    seen = set()
    for i in range(3):
        returned = outer.step(anchor, merged(layout, i))
        assert outer.digest(anchor) == returned
        other.load_state({name: t.clone() for name, t in outer.state_tensors().items()}, outer.t)
        assert other.digest(anchor.clone()) == returned
        outer.forget_digest()
        assert outer.digest(anchor) == returned
        seen.add(returned)
    assert len(seen) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_digest_after_a_step_reads_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = mixed_layout()
    outer, anchor = make_outer(kind, layout, HYPER), torch.zeros(layout.total)
    outer.step(anchor, merged(layout, 1))

    def read(*_: object) -> None:
        raise AssertionError("memory was read")

    monkeypatch.setattr("megatron_wsd.optim.native.digest_flat", read)
    outer.digest(anchor)
    for change in (
        lambda: anchor.add_(1),
        outer.forget_digest,
        lambda: setattr(outer, "t", outer.t),
        *((lambda t=t: t.zero_()) for t in outer.state_tensors().values()),
    ):
        monkeypatch.undo()
        outer.digest(anchor)
        monkeypatch.setattr("megatron_wsd.optim.native.digest_flat", read)
        change()
        with pytest.raises(AssertionError, match="memory was read"):
            outer.digest(anchor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checked_step_is_the_same_step_and_writes_the_copy(kind: str, dtype: torch.dtype) -> None:
    layout = mixed_layout()
    results = []
    for checked in (False, True):
        outer, anchor = make_outer(kind, layout, HYPER, dtype), torch.zeros(layout.total, dtype=dtype)
        copy = torch.zeros(layout.total, dtype=torch.bfloat16)
        outer.step(anchor, merged(layout, 1), checked=checked, copy=copy)
        assert torch.equal(copy, anchor.to(torch.bfloat16))
        results.append(outer.digest(anchor))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bf16_run_repeats_itself_and_resumes(kind: str) -> None:
    layout = mixed_layout()
    anchors = []
    for _ in range(2):
        outer = make_outer(kind, layout, HYPER, torch.bfloat16)
        anchor = torch.zeros(layout.total, dtype=torch.bfloat16)
        run(outer, anchor, range(3))
        resumed = make_outer(kind, layout, HYPER, torch.bfloat16)
        resumed.load_state({name: t.clone() for name, t in outer.state_tensors().items()}, outer.t)
        again = anchor.clone()
        run(outer, anchor, range(3, 6))
        run(resumed, again, range(3, 6))
        assert torch.equal(anchor, again)
        anchors.append(anchor)
    assert torch.equal(*anchors)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_anchors_and_copies_of_other_dtypes(kind: str) -> None:
    layout = mixed_layout()
    good, zeros = merged(layout, 1), torch.zeros(layout.total)
    for dtype, wrong in (DTYPES, DTYPES[::-1]):
        outer = make_outer(kind, layout, HYPER, dtype)
        anchor = zeros.to(dtype)
        before = outer.digest(anchor)
        with pytest.raises(NativeError, match=f"anchor: expected dtype {dtype}, got {wrong}"):
            outer.step(zeros.to(wrong), good)
        for copy in (zeros.clone(), zeros.to(torch.bfloat16)[:-1], zeros.to(torch.float16)):
            with pytest.raises(NativeError, match="copy: expected"):
                outer.step(anchor, good, copy=copy)
        if dtype == torch.bfloat16:
            with pytest.raises(NativeError, match="memory of its own, apart from anchor"):
                outer.step(anchor, good, copy=anchor)
        assert outer.digest(anchor) == before and outer.t == 0
    with pytest.raises(FieldError, match=r"anchor_dtype: expected torch\.float32 or torch\.bfloat16"):
        make_outer(kind, layout, HYPER, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_state_tensors_are_live_and_in_the_digest(kind: str) -> None:
    layout = mixed_layout()
    outer, anchor = make_outer(kind, layout, HYPER), torch.zeros(layout.total)
    run(outer, anchor, range(2))
    seen = {outer.digest(anchor)}
    for tensor in outer.state_tensors().values():
        tensor.view(torch.uint8)[5] ^= 1
        seen.add(outer.digest(anchor))
    anchor[7] += 1
    seen.add(outer.digest(anchor))
    outer.t += 1
    seen.add(outer.digest(anchor))
    assert len(seen) == len(outer.state_tensors()) + 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [0, 299, 1300, -2])
def test_non_finite_input_changes_nothing(kind: str, where: int) -> None:
    layout = mixed_layout()
    outer, anchor = make_outer(kind, layout, HYPER), torch.zeros(layout.total)
    run(outer, anchor, range(2))
    before = outer.digest(anchor)
    bad = merged(layout, 9)
    # -2: the last true element of the fp32 part, which would be stepped last.
    view = layout.views(bad)[3] if where == -2 else bad
    view[-1 if where == -2 else where] = float("nan")
    assert not outer.accepts(bad)
    with pytest.raises(FieldError, match="pseudo-gradient: expected finite numbers"):
        outer.step(anchor, bad)
    assert outer.digest(anchor) == before and outer.t == 2


@pytest.mark.parametrize("kind", KINDS)
def test_refused_buffers_change_nothing(kind: str) -> None:
    layout = mixed_layout()
    outer, anchor = make_outer(kind, layout, HYPER), torch.zeros(layout.total)
    before = outer.digest(anchor)
    good = merged(layout, 1)
    for a, g in ((anchor.double(), good), (anchor, good[:-256].clone()), (good, good)):
        with pytest.raises(NativeError):
            outer.step(a, g)
    with pytest.raises(NativeError, match="lr: expected a finite number"):
        outer.step(anchor, good, lr_scale=float("nan"))
    assert outer.digest(anchor) == before and outer.t == 0


@pytest.mark.parametrize("kind", KINDS)
def test_lr_scale_scales_the_step(kind: str) -> None:
    layout = mixed_layout()
    anchors = []
    for scale in (1.0, 0.5):
        anchor = torch.zeros(layout.total)
        make_outer(kind, layout, HYPER).step(anchor, merged(layout, 1), lr_scale=scale)
        anchors.append(anchor)
    # Halving the rate halves a first step from 0 without rounding.
    assert torch.equal(anchors[0] * 0.5, anchors[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_coasting_step_counts_and_moves_only_what_has_momentum(kind: str, dtype: torch.dtype) -> None:
    layout = mixed_layout()
    nothing = torch.zeros(layout.total)
    outer, anchor = make_outer(kind, layout, HYPER, dtype), torch.zeros(layout.total, dtype=dtype)
    for view in layout.views(anchor):
        view.fill_(1.0)
    before = anchor.clone()
    fresh = outer.digest(anchor)
    for t in (1, 2, 3):
        assert outer.step(anchor, nothing) != fresh and outer.t == t
    assert torch.equal(anchor, before)
    run(outer, anchor, range(2))
    moved = anchor.clone()
    for _ in range(40):
        outer.step(anchor, nothing)
        assert bool(torch.isfinite(anchor).all())
    assert not torch.equal(anchor, moved)
    before = anchor.clone()
    make_outer("sgd", layout, OuterHyper(lr=0.1), dtype).step(anchor, nothing)
    assert torch.equal(anchor, before)  # without momentum a gradient of 0 is no step


def test_hyper_parameters_from_the_config() -> None:
    for kind, momentum in (("cgad", 0.0), ("sgd", 0.0), ("nesterov", 0.8), ("delayed_nesterov", 0.8)):
        outer = OuterConfig(optimizer=kind, lr=0.3, momentum=0.8, momentum_period=7, betas=(0.8, 0.9))  # type: ignore[arg-type]
        hyper = OuterHyper.from_config(outer, seed=5)
        assert hyper == OuterHyper(0.3, (0.8, 0.9), 1e-8, 0.0, momentum, 7, 5)
        make_outer(kind, mixed_layout(), hyper)


def test_state_sizes_of_momentum() -> None:
    layout = mixed_layout()
    coded = {"codes": (torch.int8, 1536), "scale": (torch.float32, 6)}
    expected: dict[str, object] = {}
    for kind, name in (("nesterov", "momentum"), ("delayed_nesterov", "buffer")):
        expected |= {f"{name}_{part}": size for part, size in coded.items()} | {name: (torch.float32, 768)}
        state = make_outer(kind, layout, HYPER).state_tensors()
        assert {n: (t.dtype, t.numel()) for n, t in state.items()} == expected
    plain = FlatLayout([replace(s, quantised=False) for s in layout.segments])
    state = make_outer("delayed_nesterov", plain, HYPER).state_tensors()
    assert state["momentum_codes"].numel() == 0 and state["momentum"].numel() == plain.total


def test_state_sizes() -> None:
    layout = mixed_layout()
    state = make_outer("cgad", layout, HYPER).state_tensors()
    assert {n: (t.dtype, t.numel()) for n, t in state.items()} == {
        "r_codes": (torch.int8, 1536),
        "s_codes": (torch.uint8, 1536),
        "r_scale": (torch.float32, 6),
        "s_scale": (torch.float32, 6),
        "m": (torch.float32, 768),
        "v": (torch.float32, 768),
    }
    assert make_outer("sgd", layout, OuterHyper(lr=1.0)).state_tensors() == {}


def test_load_refuses_what_does_not_fit() -> None:
    layout = mixed_layout()
    outer = make_outer("cgad", layout, HYPER)
    good = {name: t.clone() for name, t in outer.state_tensors().items()}
    for bad in (
        {k: v for k, v in good.items() if k != "m"},
        {**good, "extra": torch.zeros(1)},
        {**good, "r_codes": good["r_codes"].float()},
        {**good, "m": good["m"][:-1]},
    ):
        with pytest.raises(CheckpointError, match="outer state"):
            outer.load_state(bad, 1)
    assert outer.t == 0


def test_empty_shards() -> None:
    layout = FlatLayout([Segment("w", 1, 0, 0, True)])
    for kind in KINDS:
        outer = make_outer(kind, layout, HYPER)
        outer.step(torch.zeros(0), torch.zeros(0))
        assert outer.t == 1


def test_refuses_kinds_and_numbers() -> None:
    layout = mixed_layout()
    with pytest.raises(FieldError, match=r"outer\.optimizer: expected cgad"):
        make_outer("lion", layout, HYPER)
    with pytest.raises(NativeError, match="eps: expected"):
        make_outer("cgad", layout, OuterHyper(lr=0.1, eps=float("nan")))
    with pytest.raises(NativeError, match=r"momentum: expected a number in \(0, 1\), got 0.0"):
        make_outer("nesterov", layout, OuterHyper(lr=0.1))
