"""Nesterov's momentum, also delayed, against float64; in 8 bits; and its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cgad_reference import Array, U, bits, gradients, layout_of

from megatron_wsd.optim import native
from megatron_wsd.optim.digests import digest_flat
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.momentum import Vector, momentum_step, vector_tensors
from megatron_wsd.optim.native import DigestSum
from megatron_wsd.optim.steps import MomentumStep, SGDStep, Vector8

ISAS = native.build_info()["isa_available"]
SIZES = (1, 255, 0, 256, 257, 70_000, 5)
RMAX = 127


class DelayedNesterov64:
    """Algorithm 3 of arXiv 2401.09135 in float64, c included, as it is printed there; t counts from 0."""

    def __init__(self, p: Array, lr: float, beta: float, period: int, c: float = 0.0) -> None:
        self.p, self.m, self.delta = (
            p.astype(np.float64),
            np.zeros_like(p, np.float64),
            np.zeros_like(p, np.float64),
        )
        self.lr, self.beta, self.n, self.c, self.t = lr, beta, period, c, 0

    def step(self, g: Array, weight_decay: float = 0.0) -> None:
        g = g.astype(np.float64) + weight_decay * self.p
        self.delta = self.delta + g
        if (self.t + 1) % self.n == 0:
            self.m = self.beta * self.m + self.delta / self.n
            share = 1 - self.c * self.n + self.c
            self.delta = np.zeros_like(g)
        else:
            share = self.c
        self.p = self.p - self.lr * (share * self.beta * self.m + g / self.n)
        self.t += 1


def fresh(numel: int, period: int, coded: bool, block_size: int = 256) -> tuple[Vector, Vector | None]:
    def one() -> Vector:
        return Vector8.zeros(numel, block_size) if coded else torch.zeros(numel)

    return one(), one() if period > 1 else None


def values(vector: Vector, block_size: int = 256) -> Array:
    """What a vector stands for, from the definition of its code."""
    if isinstance(vector, torch.Tensor):
        return vector.numpy().astype(np.float64)
    scale = vector.scale.numpy().astype(np.float64).repeat(block_size)[: vector.codes.numel()]
    return vector.codes.numpy() / RMAX * scale


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("period", [1, 2, 3, 4, 7])
def test_fp32_follows_the_algorithm(period: int, weight_decay: float) -> None:
    numel, lr, mu, steps = 1000, 0.1, 0.9, 42
    layout = layout_of(numel)
    p = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    reference = DelayedNesterov64(p.numpy(), lr, mu, period)
    momentum, buffer = fresh(numel, period, coded=False)
    draw = gradients("mild", numel, seed=4)
    largest_g, largest_p = 0.0, 1.0
    for t in range(1, steps + 1):
        g = draw()
        reference.step(g.numpy(), weight_decay)
        numbers = MomentumStep(lr, mu, period, weight_decay, step=t)
        assert momentum_step(p, g, momentum, buffer, layout.table, numbers)
        largest_p = max(largest_p, float(np.abs(reference.p).max()))
        largest_g = max(largest_g, float(g.abs().max()) + weight_decay * largest_p)
    # The mean of a period is at most G and has about 3 roundings a step of it; the momentum is at most 10 G,
    # picks up 3 of its own in a renewal, over 10 effective renewals: (3 * 10 + 3) * 10 G in all. The anchor
    # takes 0.1 * 0.9 of that, and 3 roundings of its own a step. With a weight decay its error enters the
    # gradient again, and damps itself as the anchor does; 2 for what is of second order.
    bound = 2 * steps * U * (lr * mu * 330 * largest_g + 3 * largest_p)
    assert np.abs(p.double().numpy() - reference.p).max() <= bound
    assert np.abs(values(momentum) - reference.m).max() <= 2 * U * 330 * largest_g
    assert bound < 1e-3  # far below any step


def test_period_one_is_nesterov_bit_for_bit() -> None:
    layout = layout_of(*SIZES)
    draw = gradients("heavy", layout.total, seed=2)
    p, q = torch.ones(layout.total), torch.ones(layout.total)
    theirs, (ours, _) = torch.zeros(layout.total), fresh(layout.total, 1, coded=False)
    for t in range(1, 6):
        g = draw()
        native.sgd_step(p, g, theirs, layout.table, SGDStep(0.7, 0.9, True, 0.1, step=t))
        momentum_step(q, g, ours, None, layout.table, MomentumStep(0.7, 0.9, 1, 0.1, step=t))
    assert bits(p, theirs) == bits(q, torch.as_tensor(ours))


@pytest.mark.parametrize("coded", [False, True])
def test_a_period_moves_the_anchor_as_one_step_with_the_mean(coded: bool) -> None:
    # Gradients on a grid that 4 shares and codes hold exactly: the largest of each block is 127 / 64.
    numel, period = 512, 4
    layout = layout_of(numel)
    generator = torch.Generator().manual_seed(0)
    p, nesterov = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    momentum, buffer = fresh(numel, period, coded)
    constant = torch.randint(-127, 128, (numel,), generator=generator).float() / 64
    constant[::256] = RMAX / 64
    for t in range(1, period + 1):
        momentum_step(p, constant, momentum, buffer, layout.table, MomentumStep(0.5, 0.5, period, step=t))
    nesterov -= 0.5 * (constant + 0.5 * constant)
    # 4 sums of at most 2 with a rounding each.
    assert (p - nesterov).abs().max() <= 4 * 2 * 2 * U
    assert np.abs(values(momentum) - constant.numpy()).max() <= 2 * 4 * U


@pytest.mark.parametrize("kind", ["mild", "heavy", "lognormal", "outlier", "sparse"])
@pytest.mark.parametrize("period", [1, 3])
def test_8_bits_stay_within_their_roundings(period: int, kind: str) -> None:
    """Every vector that is stored is off by less than a step, its block's largest magnitude / 127."""
    numel, lr, mu, steps = 4096, 0.4, 0.9, 30
    layout = layout_of(numel)
    p = torch.zeros(numel)
    reference = DelayedNesterov64(p.numpy(), lr, mu, period)
    momentum, buffer = fresh(numel, period, coded=True)
    draw = gradients(kind, numel, seed=4)
    error_m = error_d = error_p = np.zeros(numel)
    slack = 0.0
    for t in range(1, steps + 1):
        g = draw()
        reference.step(g.numpy())
        momentum_step(p, g, momentum, buffer, layout.table, MomentumStep(lr, mu, period, step=t, seed=5))
        slack = max(slack, float(np.abs(reference.m).max()), float(np.abs(reference.p).max()))
        if t % period == 0:
            error_m = mu * error_m + error_d / period
            error_p = error_p + lr * mu * error_m
            error_m = error_m + steps_of(momentum)
            error_d = np.zeros(numel)
        else:
            error_d = error_d + steps_of(buffer)
        # fp32's own roundings: a dozen a step, of numbers no larger than these.
        own = 12 * t * U * max(slack, float(g.abs().max()) * period)
        assert (np.abs(values(momentum) - reference.m) <= error_m + own).all()
        if buffer is not None:
            assert (np.abs(values(buffer) - reference.delta) <= error_d + own).all()
        assert (np.abs(p.double().numpy() - reference.p) <= error_p + own).all()
    # Stochastic rounding: the errors cancel. Their root mean square is far below what they could add up to.
    off = p.double().numpy() - reference.p
    assert 0 < np.sqrt((off**2).mean()) < 0.25 * np.sqrt((error_p**2).mean())


def steps_of(vector: Vector | None) -> Array:
    assert isinstance(vector, Vector8)
    # (1 + 2^-20): the scale, its inverse and two products are rounded.
    return (vector.scale.double().numpy() / RMAX * (1 + 2.0**-20)).repeat(256)[: vector.codes.numel()]


@pytest.mark.parametrize("vector", ["momentum", "buffer"])
def test_rounding_is_to_a_neighbour_and_right_on_average(vector: str) -> None:
    numel = 1 << 17
    layout = layout_of(numel)
    g = torch.rand(numel, generator=torch.Generator().manual_seed(0)) * 2 - 1
    period = 1 if vector == "momentum" else 2
    momentum, buffer = fresh(numel, period, coded=True)
    numbers = MomentumStep(1.0, 0.5, period, seed=1)
    momentum_step(torch.zeros(numel), g, momentum, buffer, layout.table, numbers)
    stored = momentum if vector == "momentum" else buffer
    assert isinstance(stored, Vector8)
    step = steps_of(stored)
    off = (values(stored) - g.double().numpy()) / step
    assert np.abs(off).max() < 1
    assert np.abs(off).max() > 0.99  # not to nearest
    # An error between -1 and 1 of a step has a deviation of at most 1/2; 4.5 standard errors of the mean.
    assert abs(off.mean()) < 4.5 * 0.5 / np.sqrt(numel)
    # The fixed point has 2^-15 of a code, so a fraction f goes up with a chance within 2^-15 of f. Exact
    # codes, among them that of each block's largest, stay.
    fraction = np.mod(g.double().numpy() / (step / (1 + 2.0**-20)), 1)
    exact = np.abs(fraction - np.rint(fraction)) < 2.0**-15
    for low in np.arange(0, 1, 0.1):
        some = (fraction >= low) & (fraction < low + 0.1) & ~exact
        up = (off[some] > 0).mean()
        expected = fraction[some].mean()
        assert abs(up - expected) < 4.5 * 0.5 / np.sqrt(some.sum()) + 2.0**-15


def test_what_never_had_a_gradient_does_not_move_and_tiny_blocks_are_zero() -> None:
    layout = layout_of(512)
    p = torch.ones(512)
    momentum, buffer = fresh(512, 2, coded=True)
    assert isinstance(momentum, Vector8) and isinstance(buffer, Vector8)
    g = torch.zeros(512)
    g[:128] = torch.randn(128, generator=torch.Generator().manual_seed(0))
    g[256:] = 1e-32  # below 2^-100
    for t in range(1, 9):
        momentum_step(p, g, momentum, buffer, layout.table, MomentumStep(0.1, 0.9, 2, step=t))
    assert bool((p[128:256] == 1).all()) and bool((momentum.codes[128:] == 0).all())
    assert float(momentum.scale[0]) > 0 and float(momentum.scale[1]) == 0
    assert bool((p[:128] != 1).all())


def test_a_coasting_momentum_dies_away() -> None:
    layout = layout_of(1000)
    p, g = torch.zeros(1000), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (momentum, _) = fresh(1000, 1, coded=True)
    assert isinstance(momentum, Vector8)
    momentum_step(p, g, momentum, None, layout.table, MomentumStep(0.1, 0.9, step=1))
    start, first = momentum.scale.clone(), values(momentum)
    for t in range(2, 102):
        momentum_step(p, torch.zeros(1000), momentum, None, layout.table, MomentumStep(0.1, 0.9, step=t))
    # The largest of a block has the last code and stays there; 4 roundings a step.
    assert torch.allclose(momentum.scale / start, torch.tensor(0.9**100), rtol=4 * 100 * U * 2, atol=0)
    # The rest decays on average: over the sum of signs, errors of at most a step in each of 100 roundings.
    there = values(momentum) / 0.9**100
    noise = float(start.max()) / RMAX * 0.5 * np.sqrt(100)
    assert abs((there - first).mean()) < 4.5 * noise / np.sqrt(1000)


def run_all(layout: FlatLayout, threads: int = 1, steps: int = 4) -> list[bytes]:
    """All forms of the step; the bytes of everything written."""
    n, table, written, digests = layout.total, layout.table, [], DigestSum("all")
    draw = gradients("heavy", n, seed=7)
    grads = [draw() for _ in range(steps)]
    for coded in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            for period in (1, 3):
                p, copy = torch.linspace(-1, 1, n).to(dtype), torch.zeros(n, dtype=torch.bfloat16)
                state = fresh(n, period, coded, layout.block_size)
                for t, g in enumerate(grads, 1):
                    numbers = MomentumStep(0.1, 0.9, period, 0.1, step=t, seed=11)
                    options = {"threads": threads, "copy": copy, "digest": digests}
                    assert momentum_step(p, g, *state, table, numbers, **options)
                written += [p, copy, *vector_tensors(*state).values()]
    return [*bits(*(t.view(torch.uint8) for t in written)), digests.total.to_bytes(8, "little")]


@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_instruction_sets_and_threads_agree(block_size: int) -> None:
    layout = layout_of(*SIZES, block_size=block_size)
    with native.forced_isa("scalar"):
        expected = run_all(layout)
    for isa in ISAS:
        for threads in (1, 2, 3):
            with native.forced_isa(isa):
                assert run_all(layout, threads) == expected, (isa, threads)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("period", [1, 2])
def test_padding_is_neither_read_nor_written_and_the_digest_is_that_of_memory(
    period: int, coded: bool
) -> None:
    layout = layout_of(*SIZES)
    n = layout.total
    inside = torch.zeros(n, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    results = []
    for poison, code in ((0.0, 0), (float("nan"), 0x55)):
        p, g = torch.linspace(-1, 1, n), gradients("mild", n, seed=1)()
        state = fresh(n, period, coded)
        named = vector_tensors(*state)
        for t in (p, g, *(t for name, t in named.items() if not name.endswith("_scale"))):
            t[~inside] = code if t.dtype == torch.int8 else poison
        for t in range(1, 4):
            digest = DigestSum("part")
            momentum_step(p, g, *state, layout.table, MomentumStep(0.1, 0.9, period, step=t), digest=digest)
        read = DigestSum("part")
        digest_flat(layout.table, {"anchor": p, **named}, read)
        assert read.total == digest.total
        for t in (p, *(t for name, t in named.items() if not name.endswith("_scale"))):
            outside = t[~inside]
            kept = outside == code if t.dtype == torch.int8 else (outside.isnan() if poison else outside == 0)
            assert bool(kept.all())
        flat = [p, *(t for name, t in named.items() if not name.endswith("_scale"))]
        scales = [t for name, t in named.items() if name.endswith("_scale")]
        results.append(bits(*(t[inside] for t in flat), *scales))
    assert results[0] == results[1]


def test_another_cut_of_a_parameter_rounds_alike() -> None:
    key, numel = parameter_key("w"), 2**33 + 100
    whole = FlatLayout([Segment("w", key, 1024, numel, True)])
    halves = FlatLayout([Segment("w", key, 512, numel, True), Segment("w", key, 512, numel + 512, True)])
    results = []
    for layout in (whole, halves):
        p = torch.zeros(1024, dtype=torch.bfloat16)
        state = fresh(1024, 2, coded=True)
        draw = gradients("mild", 1024, seed=3)
        for t in range(1, 6):
            momentum_step(p, draw(), *state, layout.table, MomentumStep(0.1, 0.9, 2, step=t, seed=9))
        results.append(bits(p.view(torch.uint8), *vector_tensors(*state).values()))
    assert results[0] == results[1]
