"""The 8-bit step held against the fp32 step, and what must hold exactly."""

from __future__ import annotations

import pytest
import torch
from cgad_reference import KINDS, bits, gradients, layout_of, numbers, state_bits

from megatron_wsd.optim import native
from megatron_wsd.optim.steps import State8

BLOCKS = 32
N = 256 * BLOCKS
LAYOUT = layout_of(N)


def updates(
    kind: str, steps: int, keep: int, betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `keep` updates of the 8-bit and of the fp32 step, [keep, N]: anchors at 0, lr 1."""
    state, m, v = State8.zeros(N, 256), torch.zeros(N), torch.zeros(N)
    draw = gradients(kind, N, seed=5)
    kept8, kept32 = [], []
    for t in range(1, steps + 1):
        g, p8, p32 = draw(), torch.zeros(N), torch.zeros(N)
        n = numbers(t, lr=1.0, betas=betas)
        native.cgad_step8(p8, g, state, LAYOUT.table8, n)
        native.cgad_step32(p32, g, m, v, LAYOUT.table, n)
        if t > steps - keep:
            kept8.append(p8)
            kept32.append(p32)
    return torch.stack(kept8), torch.stack(kept32)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_stay_close_to_fp32(kind: str) -> None:
    # Levels of s lie 3/64 to 3/32 apart, 0.066 in the mean; a stochastic rounding between them has a standard
    # deviation of at most half of that, and 1/sqrt(6) = 0.41 of it in the mean: 0.027. v remembers
    # 1 / (1 - b2^2) = 10 of them, m = r (s + eps) as a product 1 / (1 - b1^2) = 5: at most
    # 0.027 (sqrt(10) + sqrt(5)) = 0.15, and less where they partly cancel. r adds 1/127 of a block's largest.
    coded, exact = updates(kind, steps=1000, keep=100, betas=(0.9, 0.95))
    relative = (coded - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert 0.001 < relative < 0.16
    assert coded.abs().max() <= 1.2 * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_largest_update_with_long_memory(kind: str) -> None:
    # b2 = 0.999 sums the squares of 500 roundings of s; still nothing may blow up.
    coded, exact = updates(kind, steps=1000, keep=1000, betas=(0.9, 0.999))
    assert coded.abs().max() <= 1.2 * exact.abs().max()


def test_momentum_survives_where_eps_dominates() -> None:
    # With eps 1 and gradients of 1e-3 the ratio is m over eps sqrt(bc2), which grows by two fifths from
    # step 1 to 2: decoding must use the eps of the step that encoded. A code is 1/127 of the block's largest
    # r, at most 5 times the root mean square; three roundings stand in m by then.
    state, m, v = State8.zeros(N, 256), torch.zeros(N), torch.zeros(N)
    draw = gradients("mild", N, seed=8)
    for t in range(1, 5):
        g, p8, p32 = draw() * 1e-3, torch.zeros(N), torch.zeros(N)
        hyper = numbers(t, lr=1.0, eps=1.0)
        native.cgad_step8(p8, g, state, LAYOUT.table8, hyper)
        native.cgad_step32(p32, g, m, v, LAYOUT.table, hyper)
        relative = (p8 - p32).pow(2).mean().sqrt() / p32.pow(2).mean().sqrt()
        assert relative <= 5 / 127 * 3**0.5


def test_tiny_second_moment_beside_a_large_one_does_not_blow_up() -> None:
    # v of 1 and of 1e-9 in one block: s spans 15 octaves of the 24 that the codes reach.
    g = torch.ones(N)
    g[1::256] = 1e-9**0.5
    state = State8.zeros(N, 256)
    for t in range(1, 300):
        p = torch.zeros(N)
        native.cgad_step8(p, g, state, LAYOUT.table8, numbers(t, lr=1.0))
        # A constant gradient has update 1; the codes may be off by one level of s (9.4%) and of r (0.8%) a
        # step, which 1 / (1 - b1) steps of memory average rather than add.
        assert 0.6 < float(-p.max()) <= float(-p.min()) < 1.4


def test_parameter_without_gradient_does_not_move_by_one_bit() -> None:
    start = torch.randn(N, generator=torch.Generator().manual_seed(0))
    start[::7] = -0.0
    dead = torch.zeros(N, dtype=torch.bool)
    dead[: N // 2 : 3] = True  # beside live ones in the same block
    dead[N // 2 :] = True  # and whole blocks
    p, state = start.clone(), State8.zeros(N, 256)
    draw = gradients("heavy", N, seed=1)
    for t in range(1, 301):
        g = draw()
        g[dead] = -0.0 if t % 2 else 0.0
        native.cgad_step8(p, g, state, LAYOUT.table8, numbers(t))
    assert bits(p[dead]) == bits(start[dead])
    assert not torch.equal(p[~dead], start[~dead])
    assert bool((state.r_codes[dead] == 0).all())


def test_parameter_whose_gradient_stops_comes_to_rest() -> None:
    draw = gradients("mild", N, seed=1)
    stops = torch.zeros(N, dtype=torch.bool)
    stops[1::2] = True
    p, state = torch.zeros(N), State8.zeros(N, 256)
    for t in range(1, 401):
        g = draw()
        if t > 100:
            g[stops] = 0.0
        if t == 301:
            rest = p.clone()
        native.cgad_step8(p, g, state, LAYOUT.table8, numbers(t, lr=1.0))
    # In fp32 the update falls by 0.9 / sqrt(0.95) a step: to 1e-7 of itself in 200 steps, where the codec's
    # fixed point of 2^-15 codes has long made it exactly 0. So nothing moves any more.
    assert bits(p[stops]) == bits(rest[stops])


def test_weight_decay_alone_shrinks_the_anchor() -> None:
    p, state = torch.ones(N), State8.zeros(N, 256)
    native.cgad_step8(p, torch.zeros(N), state, LAYOUT.table8, numbers(1, lr=0.5, weight_decay=0.5))
    assert torch.equal(p, torch.full((N,), 0.75))


def test_closed_gate_is_a_zero_gradient() -> None:
    results = []
    for gate, g in ((0.0, torch.randn(N)), (1.0, torch.zeros(N))):
        p, state = torch.zeros(N), State8.zeros(N, 256)
        draw = gradients("mild", N, seed=9)
        for t in range(1, 6):
            native.cgad_step8(p, draw(), state, LAYOUT.table8, numbers(t))
        native.cgad_step8(p, g, state, LAYOUT.table8, numbers(6, gate=gate))
        results.append(bits(p) + state_bits(state))
    assert results[0] == results[1]


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-8, 1e8, 9e18])
def test_extreme_magnitudes_stay_finite(scale: float) -> None:
    p, state = torch.zeros(N), State8.zeros(N, 256)
    draw = gradients("mild", N, seed=2)
    for t in range(1, 50):
        g = (draw() * scale).clamp(-(2.0**63), 2.0**63)
        assert native.cgad_step8(p, g, state, LAYOUT.table8, numbers(t))
    assert bool(torch.isfinite(p).all()) and bool(torch.isfinite(state.s_scale).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
@pytest.mark.parametrize("where", [0, 255, 256, N - 1])
def test_unusable_gradient_leaves_everything_as_it_was(poison: float, where: int) -> None:
    draw = gradients("mild", N, seed=3)
    p, m, v, state = torch.zeros(N), torch.zeros(N), torch.zeros(N), State8.zeros(N, 256)
    native.cgad_step8(p, draw(), state, LAYOUT.table8, numbers(1))
    before = bits(p, m, v) + state_bits(state)
    g = draw()
    g[where] = poison
    for threads in (1, 2):
        assert not native.cgad_step8(p, g, state, LAYOUT.table8, numbers(2), threads=threads)
        assert not native.cgad_step32(p, g, m, v, LAYOUT.table, numbers(2), threads=threads)
    assert bits(p, m, v) + state_bits(state) == before
