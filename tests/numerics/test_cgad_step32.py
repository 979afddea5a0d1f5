"""The fp32 step against float64, against torch's AdamW, and SGD against both."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cgad_reference import AdamW64, U, bits, gradients, layout_of, numbers

from megatron_wsd.optim import native
from megatron_wsd.optim.steps import SGDStep

STEPS = 50
LR, EPS = 1e-2, 1e-8


def error_bound(betas: tuple[float, float], largest_p: float) -> float:
    """Worst-case rounding error of p after STEPS steps, in fp32.

    Relative errors in units of U = 2^-24. m is a sum of terms (1 - b1) b1^k g_k: constant, product and
    running sum cost 4 a step, over an effective 1 / (1 - b1) steps, relative to A = sum |terms|. By Cauchy
    A <= s (1 - b1) / sqrt(1 - b2) / sqrt(1 - b1^2 / b2). v is a sum of positive terms: 3 / (1 - b2) + 6 in v,
    half of it in s. Quotient, eps and constants: 6 more. Each step then rounds p three times.
    """
    b1, b2 = betas
    a = (1 - b1) / math.sqrt(1 - b2) / math.sqrt(1 - b1 * b1 / b2)
    relative = a * (4 / (1 - b1) + (3 / (1 - b2) + 6) / 2 + 6)
    largest_rate = LR * max(math.sqrt(1 - b2**t) / (1 - b1**t) for t in range(1, STEPS + 1))
    return STEPS * U * (largest_rate * relative + 3 * largest_p)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["mild", "heavy", "sparse"])
def test_agrees_with_float64(betas: tuple[float, float], weight_decay: float, kind: str) -> None:
    layout = layout_of(1000, 256, 1, 4096)
    p = torch.zeros(layout.total)
    for view in layout.views(p):
        view.normal_(generator=torch.Generator().manual_seed(view.numel()))
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    reference = AdamW64(p.numpy())
    draw = gradients(kind, layout.total, seed=3)
    largest = float(p.abs().max()) + STEPS * LR * 2
    for t in range(1, STEPS + 1):
        g = torch.zeros(layout.total)
        noise = draw()
        for into, source in zip(layout.views(g), layout.views(noise), strict=True):
            into.copy_(source)
        gate = 1.0 if t % 3 else 0.25
        n = numbers(t, lr=LR, betas=betas, eps=EPS, weight_decay=weight_decay, gate=gate)
        assert native.cgad_step32(p, g, m, v, layout.table, n)
        reference.step(g.numpy(), LR, betas, EPS, weight_decay, gate)
    assert np.abs(p.numpy() - reference.p).max() <= error_bound(betas, largest)
    assert np.abs(p.numpy() - reference.p).max() > 0  # fp32 did round: the bound was needed
    # v only adds positive terms: relative error 3 / (1 - b2) + 6 at most, and at most 3 a step taken.
    relative = U * (3 * min(1 / (1 - betas[1]), STEPS) + 6)
    np.testing.assert_allclose(v.numpy(), reference.v, rtol=relative, atol=1e-37)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_staleness_zero_is_torch_adamw(weight_decay: float) -> None:
    layout = layout_of(4096)
    start = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([theirs], lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=weight_decay)
    p, m, v = start.clone(), torch.zeros(4096), torch.zeros(4096)
    draw = gradients("mild", 4096, seed=1)
    for t in range(1, STEPS + 1):
        g = draw()
        theirs.grad = g.clone()
        adamw.step()
        native.cgad_step32(p, g, m, v, layout.table, numbers(t, lr=LR, eps=EPS, weight_decay=weight_decay))
    # Both round, each within the bound.
    assert (p - theirs.detach()).abs().max() <= 2 * error_bound((0.9, 0.95), 5.0)


def test_first_step_with_decay() -> None:
    # p = g = 1, lr = wd = 0.1: 1 - 0.01 - 0.1 / (1 + eps) = 0.89 within eps and a few roundings.
    layout = layout_of(1)
    p, g = torch.ones(1), torch.ones(1)
    n = numbers(1, lr=0.1, weight_decay=0.1)
    native.cgad_step32(p, g, torch.zeros(1), torch.zeros(1), layout.table, n)
    assert abs(float(p) - 0.89) <= 0.1 * 1e-8 + 8 * U


def test_closed_gate_is_a_zero_gradient() -> None:
    layout = layout_of(1000)
    results = []
    for g, gate in ((torch.randn(1000), 0.0), (torch.zeros(1000), 1.0)):
        p = torch.linspace(-1, 1, 1000)
        m, v = torch.linspace(-1, 1, 1000), torch.linspace(0, 1, 1000)
        native.cgad_step32(p, g, m, v, layout.table, numbers(5, gate=gate))
        results.append((p, m, v))
    for closed, zero in zip(*results, strict=True):
        assert torch.equal(closed, zero)


def test_constant_staleness_cancels_as_eps_vanishes() -> None:
    # m and sqrt(v) shrink alike. A gate of 2^-4 scales every number exactly in binary, and eps 1e-20 is lost
    # beside sqrt(v): not one bit differs.
    layout = layout_of(1000)
    anchors = []
    for gate in (1.0, 2.0**-4):
        p, m, v = torch.ones(1000), torch.zeros(1000), torch.zeros(1000)
        draw = gradients("mild", 1000, seed=2)
        for t in range(1, 20):
            native.cgad_step32(p, draw(), m, v, layout.table, numbers(t, eps=1e-20, gate=gate))
        anchors.append(p)
    assert bits(anchors[0]) == bits(anchors[1])


@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_torch_sgd(momentum: float, nesterov: bool, weight_decay: float) -> None:
    layout = layout_of(1000)
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(start.double())
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    p = start.clone()
    buffer = torch.zeros(1000) if momentum else None
    draw = gradients("mild", 1000, seed=4)
    largest = 1.0
    for _ in range(20):
        g = draw()
        theirs.grad = g.double()
        sgd.step()
        assert native.sgd_step(p, g, buffer, layout.table, SGDStep(0.1, momentum, nesterov, weight_decay))
        largest = max(largest, float(theirs.detach().abs().max()))
    # The buffer is at most |g| / (1 - mu) = 10 |g| <= 60 and picks up 4 roundings a step, over 10 effective
    # steps; p takes 0.1 of that and 3 roundings of its own, over 20 steps.
    bound = 20 * U * (0.1 * 2 * 60 * 4 * 10 + 3 * largest)
    assert (p.double() - theirs.detach()).abs().max() <= bound


def test_sgd_at_rate_one_takes_the_step_exactly() -> None:
    # Numbers on a grid of 2^-10 subtract without rounding: the anchor becomes the parameters, bit by bit.
    layout = layout_of(1000)
    base = torch.randint(-1024, 1024, (1000,)).float() / 1024
    local = torch.randint(-1024, 1024, (1000,)).float() / 1024
    p = base.clone()
    native.sgd_step(p, base - local, None, layout.table, SGDStep(1.0))
    assert torch.equal(p, local)


def test_accumulate_rounds_product_then_sum() -> None:
    out = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    expected = out.numpy() + np.float32(0.3) * x.numpy()  # numpy does not fuse
    native.accumulate(out, x, 0.3)
    assert out.numpy().tobytes() == expected.tobytes()
