"""bf16: the copy to nearest, and anchors kept in bf16 with stochastic rounding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from cgad_reference import bits, gradients, layout_of, numbers, state_bits

from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.steps import AdamStep, SGDStep, State8

BF16 = torch.bfloat16


def take_step(
    kind: str, p: torch.Tensor, layout: FlatLayout, step: int = 1, seed: int = 0, **changes: float
) -> None:
    """One step with a zero gradient and a weight decay: p becomes fl(p (1 - lr wd)) before it is rounded."""
    n, zero = layout.total, torch.zeros(layout.total)
    hyper = numbers(step, lr=1.0, seed=seed, **{"weight_decay": 2.0**-10, **changes})
    if kind == "step8":
        assert native.cgad_step8(p, zero, State8.zeros(n, layout.block_size), layout.table, hyper)
    elif kind == "step32":
        assert native.cgad_step32(p, zero, torch.zeros(n), torch.zeros(n), layout.table, hyper)
    else:
        sgd = SGDStep(lr=hyper.lr, weight_decay=hyper.weight_decay, step=step, seed=seed)
        assert native.sgd_step(p, zero, None, layout.table, sgd)


KINDS = ("step8", "step32", "sgd")


def every_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)


def test_copy_is_rounded_to_nearest_as_torch_rounds() -> None:
    # Around each bf16 number and each middle between two, and random bits: NaN, infinities and denormals too.
    centres = np.concatenate(
        [np.arange(2**16, dtype=np.uint32) << 16, (np.arange(2**16, dtype=np.uint32) << 16) + 0x8000]
    )
    near = (centres[:, None] + np.arange(-2, 3, dtype=np.int64)).astype(np.uint32).ravel()
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    p = torch.from_numpy(np.concatenate([near, random]).view(np.float32))
    layout = layout_of(p.numel())
    copy = torch.zeros(p.numel(), dtype=BF16)
    nan = torch.isnan(p)
    # lr 0: the anchor stays, whatever it holds.
    native.cgad_step8(
        p, torch.zeros(p.numel()), State8.zeros(p.numel(), 256), layout.table, numbers(1, lr=0.0), copy=copy
    )
    assert torch.equal(copy.view(torch.int16)[~nan], p.to(BF16).view(torch.int16)[~nan])
    assert bool(torch.isnan(copy[nan]).all())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_copy_is_of_the_anchor_as_it_was_written(dtype: torch.dtype) -> None:
    layout = layout_of(1000, 3)
    p, copy = torch.randn(layout.total).to(dtype), torch.full((layout.total,), 3.0, dtype=BF16)
    g = torch.randn(layout.total)
    native.cgad_step8(p, g, State8.zeros(layout.total, 256), layout.table, numbers(1), copy=copy)
    for ours, anchor in zip(layout.views(copy), layout.views(p), strict=True):
        assert torch.equal(ours, anchor.to(BF16))
    assert int((copy == 3.0).sum()) >= layout.total - 1003  # padding is left alone


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_number_never_moves(kind: str) -> None:
    p = every_bf16()
    finite = torch.isfinite(p)
    start = p.clone()
    take_step(kind, p, layout_of(p.numel()), weight_decay=0.0)
    # p + lr 0 keeps every bit but the sign of -0 in SGD's p + (-lr g), which is 0 + -0 for it.
    same = p.view(torch.int16)[finite] == start.view(torch.int16)[finite]
    assert bool((same | (start[finite] == 0)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_takes_a_neighbour_and_is_unbiased(kind: str) -> None:
    copies, values = 2048, 256
    generator = torch.Generator().manual_seed(3)
    start = (
        torch.randn(values, generator=generator) * torch.exp(3 * torch.randn(values, generator=generator))
    ).to(BF16)
    layout = FlatLayout([Segment(f"p{i}", i, values, 0, True) for i in range(copies)])
    exact = start.float().double() * (1 - 2.0**-10)
    for step, seed in ((1, 0), (7, 1)):
        p = start.repeat(copies)
        take_step(kind, p, layout, step, seed)
        drawn = p.float().double().reshape(copies, values)
        ulp = 2.0 ** (torch.floor(torch.log2(start.float().double().abs())) - 7)
        error = (drawn - exact) / ulp
        # The exact value lies in the binade of the start or one below it, and fp32 rounds it by 2^-17 of a
        # bf16 ulp first. A rounding has a standard deviation of at most 1/2; six of them.
        assert float(error.abs().max()) < 1 + 2.0**-16
        assert float(error.mean(0).abs().max()) <= 6 * 0.5 / copies**0.5
        assert abs(float(error.mean())) <= 6 * 0.5 / error.numel() ** 0.5
        assert float(error.std(0).max()) > 0.3
        z = error[:, error.std(0) > 0.1]
        z = z / z.std(0)
        assert abs(float((z[:, 1:] * z[:, :-1]).mean())) <= 6 / z.numel() ** 0.5
        assert abs(float((z[1:] * z[:-1]).mean())) <= 6 / z.numel() ** 0.5


def test_rounding_of_the_anchor_and_of_its_moments_are_not_correlated() -> None:
    # Same key, element and step: the streams must differ. Gradient, moments and anchor are alike everywhere.
    copies = 4096
    layout = FlatLayout([Segment(f"p{i}", i, 256, 0, True) for i in range(copies)])
    base = torch.linspace(0.4, 0.9, 256).repeat(copies)
    p, state = base.to(BF16), State8.zeros(layout.total, 256)
    native.cgad_step8(p, base * 0.7, state, layout.table, numbers(1, lr=0.003, eps=0.5))
    anchors = p.float().reshape(copies, 256)
    for codes in (state.r_codes, state.s_codes):
        a, c = anchors - anchors.mean(0), codes.float().reshape(copies, 256)
        c = c - c.mean(0)
        live = (a.std(0) > 0) & (c.std(0) > 0)
        assert int(live.sum()) > 100
        z = (a[:, live] / a[:, live].std(0)) * (c[:, live] / c[:, live].std(0))
        assert abs(float(z.mean())) <= 6 / z.numel() ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_repeats_itself_and_depends_on_every_key(kind: str) -> None:
    start = torch.randn(2048, generator=torch.Generator().manual_seed(1)).to(BF16)

    def run(step: int = 3, seed: int = 5, key: int = 9, element0: int = 0) -> list[bytes]:
        p = start.clone()
        take_step(kind, p, FlatLayout([Segment("w", key, 2048, element0, True)]), step, seed)
        return bits(p.view(torch.int16))

    first = run()
    assert run() == first
    for other in (run(step=4), run(seed=6), run(key=10), run(element0=1)):
        assert other != first


@pytest.mark.parametrize("start", [0, 777, 2**32 - 100, 2**33 - 64])
def test_rounding_does_not_depend_on_how_a_parameter_is_cut(start: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(BF16)
    cut_anchors = []
    for cuts in ([], [100, 333, 512]):
        edges = [0, *cuts, 1000]
        parts = [Segment("w", 4, b - a, start + a, True) for a, b in pairwise(edges)]
        layout = FlatLayout(parts, 64)
        p = torch.zeros(layout.total, dtype=BF16)
        for view, a, b in zip(layout.views(p), edges[:-1], edges[1:], strict=True):
            view.copy_(values[a:b])
        take_step("step32", p, layout)
        cut_anchors.append(torch.cat(layout.views(p)))
    assert bits(*(p.view(torch.int16) for p in cut_anchors[:1])) == bits(cut_anchors[1].view(torch.int16))


def test_no_finite_number_becomes_infinite() -> None:
    p = torch.full((4096,), torch.finfo(BF16).max, dtype=BF16)
    p[1::2] *= -1
    # p (1 + 2^-9) lies between the largest bf16 and the largest float.
    g = torch.full((4096,), 1.0)
    hyper = AdamStep(lr=2.0**118, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0, step=1)
    native.cgad_step8(p, g, State8.zeros(4096, 256), layout_of(4096).table, hyper)
    assert bool(torch.isfinite(p).all())


@pytest.mark.parametrize("kind", ["step8", "step32"])
def test_training_goes_on_where_nearest_rounding_would_stop(kind: str) -> None:
    # A quadratic bowl around 1.0 from 0.9 at a rate of 1e-4: a bf16 ulp there is 2^-8, forty times a step, so
    # nearest never leaves the start. In expectation stochastic rounding follows fp32.
    n, steps = 1 << 14, 200
    layout = layout_of(n)
    noise = gradients("mild", n, seed=6)
    anchors = {"bf16": torch.full((n,), 0.9).to(BF16), "fp32": torch.full((n,), 0.9).to(BF16).float()}
    nearest = anchors["bf16"].clone()
    states = {name: (State8.zeros(n, 256), torch.zeros(n), torch.zeros(n)) for name in (*anchors, "nearest")}
    for t in range(1, steps + 1):
        z = noise()
        for name, p in (*anchors.items(), ("nearest", nearest)):
            g = p.float() - 1.0 + 0.01 * z
            used = p.float() if name == "nearest" else p
            coded, m, v = states[name]
            if kind == "step8":
                native.cgad_step8(used, g, coded, layout.table, numbers(t, lr=1e-4))
            else:
                native.cgad_step32(used, g, m, v, layout.table, numbers(t, lr=1e-4))
            if name == "nearest":
                nearest = used.to(BF16)
    start = float(torch.tensor(0.9).to(BF16))
    assert torch.equal(nearest, torch.full((n,), 0.9).to(BF16))
    moved = float(anchors["fp32"].double().mean()) - start
    assert moved > 0.015
    # A mean over 16384 elements of 200 roundings with a deviation of at most half of 2^-8 each.
    deviation = 0.5 * 2.0**-8 * steps**0.5 / n**0.5
    assert abs(float(anchors["bf16"].double().mean()) - start - moved) <= 0.03 * moved + 6 * deviation


def test_unusable_gradient_leaves_a_bf16_anchor_and_its_copy() -> None:
    layout = layout_of(3000)
    p, copy, state = torch.randn(3000).to(BF16), torch.zeros(3000, dtype=BF16), State8.zeros(3000, 256)
    before = bits(p.view(torch.int16), copy.view(torch.int16)) + state_bits(state)
    g = torch.zeros(3000)
    g[2999] = float("inf")
    found = native.DigestSum()
    assert not native.cgad_step8(p, g, state, layout.table, numbers(1), copy=copy, digest=found)
    assert bits(p.view(torch.int16), copy.view(torch.int16)) + state_bits(state) == before
    assert found.total == 0
