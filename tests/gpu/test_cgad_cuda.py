"""The CUDA steps against the CPU path, bit for bit, and against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cgad_reference import AdamW64, U, bits, copy8, gradients, numbers, state_bits

from megatron_wsd.errors import NativeError
from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout, Segment, SegmentTable
from megatron_wsd.optim.native import DigestSum
from megatron_wsd.optim.steps import DynamicState8, State8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch"),
]

LAYOUTS = {
    "one": ((1, 0),),
    "partial": ((255, 3), (0, 0), (257, 1), (5, 2**40 + 17)),
    "wrap": ((5000, 2**32 - 100), (300, 2**33 - 7)),
    "small": ((2**16 + 3, 0),),
    "large": ((2**20, 0), (2**21 + 100, 2**31), (2**18 - 1, 5)),
}
DTYPES = [torch.float32, torch.bfloat16]


def layout_named(name: str) -> FlatLayout:
    return FlatLayout([Segment(f"p{i}", 70 + i, n, e, True) for i, (n, e) in enumerate(LAYOUTS[name])])


def on_gpu(state: State8) -> State8:
    return State8(*(t.cuda() for t in state.tensors().values()))


def same(here: torch.Tensor, there: torch.Tensor) -> bool:
    return bits(here.view(torch.uint8)) == bits(there.cpu().view(torch.uint8))


def draws(kind: str, n: int) -> Callable[[], torch.Tensor]:
    """The gradients of tests/numerics, and one kind with denormals and zeros of both signs."""
    draw = gradients("heavy" if kind == "denormal" else kind, -(-n // 256) * 256, seed=13)

    def make() -> torch.Tensor:
        g = draw()[:n].contiguous()
        if kind == "denormal":
            g[::3] *= 1e-41
            g[1::5] = -0.0
            g[2::7] = 0.0
        return g

    return make


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mild", "heavy", "lognormal", "outlier", "sparse", "denormal"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_bit_step_gives_the_bits_of_the_cpu_path(name: str, kind: str, dtype: torch.dtype) -> None:
    layout = layout_named(name)
    n, table = layout.total, layout.table
    anchor = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
    state, copy = State8.zeros(n, 256), torch.full((n,), 7.0, dtype=torch.bfloat16)
    theirs, their_state, their_copy = anchor.cuda(), on_gpu(copy8(state)), copy.cuda()
    draw = draws(kind, n)
    for t in range(1, 6):
        g, hyper = draw(), numbers(t, weight_decay=0.1, gate=0.7, seed=5)
        here, there = DigestSum("x"), DigestSum("x")
        assert native.cgad_step8(anchor, g, state, table, hyper, copy=copy, digest=here)
        assert native.cgad_step8(theirs, g.cuda(), their_state, table, hyper, copy=their_copy, digest=there)
        assert same(anchor, theirs) and same(copy, their_copy)
        for mine, other in zip(state.tensors().values(), their_state.tensors().values(), strict=True):
            assert same(mine, other)
        assert here.total == there.total


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_step_gives_the_bits_of_the_cpu_path(name: str, dtype: torch.dtype) -> None:
    layout = layout_named(name)
    n, table = layout.total, layout.table
    mine = [
        torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype),
        torch.zeros(n),
        torch.zeros(n),
    ]
    theirs = [t.cuda() for t in mine]
    draw = draws("denormal", n)
    for t in range(1, 6):
        g, hyper = draw(), numbers(t, weight_decay=0.1, seed=5)
        here, there = DigestSum("x"), DigestSum("x")
        assert native.cgad_step32(mine[0], g, mine[1], mine[2], table, hyper, digest=here)
        assert native.cgad_step32(theirs[0], g.cuda(), theirs[1], theirs[2], table, hyper, digest=there)
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))
        assert here.total == there.total


def test_fp32_step_agrees_with_float64() -> None:
    # One step from zero moments is p (1 - lr wd) - lr sqrt(bc2) / bc1 m / (sqrt(v) + eps sqrt(bc2)): a dozen
    # roundings in a quotient of about 1, times lr, and three in p; ten steps.
    layout, lr = layout_named("small"), 1e-2
    n = layout.total
    p = torch.randn(n, generator=torch.Generator().manual_seed(3))
    reference = AdamW64(p.numpy())
    ours, m, v = p.cuda(), torch.zeros(n).cuda(), torch.zeros(n).cuda()
    draw = draws("mild", n)
    for t in range(1, 11):
        g = draw()
        assert native.cgad_step32(ours, g.cuda(), m, v, layout.table, numbers(t, lr=lr, weight_decay=0.1))
        reference.step(g.numpy(), lr, (0.9, 0.95), 1e-8, 0.1, 1.0)
    largest = float(p.abs().max()) + 10 * lr * 2
    inside = torch.zeros(n, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    error = np.abs(ours.cpu().numpy() - reference.p)[inside.numpy()].max()
    # m is a sum of up to ten terms of both signs, so its error is relative to the sum of their magnitudes: at
    # most four times sqrt(v) bias-corrected here.
    assert error <= 10 * U * (lr * 4 * (4 * 10 + 3 * 10 / 2 + 12) + 3 * largest)


def test_eight_bit_first_step_agrees_with_float64() -> None:
    layout, lr = layout_named("small"), 1e-2
    n = layout.total
    p, g = torch.randn(n, generator=torch.Generator().manual_seed(3)), draws("mild", n)()
    reference = AdamW64(p.numpy())
    reference.step(g.numpy(), lr, (0.9, 0.95), 1e-8, 0.0, 1.0)
    ours = p.cuda()
    assert native.cgad_step8(ours, g.cuda(), on_gpu(State8.zeros(n, 256)), layout.table, numbers(1, lr=lr))
    numel = layout.segments[0].numel
    error = np.abs(ours.cpu().numpy() - reference.p)[:numel].max()
    assert error <= U * (lr * 16 + 3 * (float(p.abs().max()) + lr))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_unusable_gradient_leaves_everything_as_it_was(poison: float) -> None:
    layout = layout_named("partial")
    n = layout.total
    p, state, copy = torch.randn(n).cuda(), on_gpu(State8.zeros(n, 256)), torch.zeros(n).bfloat16().cuda()
    m, v = torch.zeros(n).cuda(), torch.zeros(n).cuda()
    tensors = (p, m, v, *state.tensors().values())
    before = bits(*(t.cpu() for t in tensors))
    for view in layout.views(torch.arange(n)):
        for where in view[-1:].tolist():
            g = torch.zeros(n).cuda()
            g[where] = poison
            assert not native.gradient_ok(g, layout.table)
            assert not native.cgad_step8(p, g, state, layout.table, numbers(1), copy=copy)
            assert not native.cgad_step32(p, g, m, v, layout.table, numbers(1))
    assert bits(*(t.cpu() for t in tensors)) == before and not bool(copy.any())


def test_padding_is_neither_read_nor_written() -> None:
    layout = layout_named("partial")
    n = layout.total
    inside = torch.zeros(n, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    results = []
    for poison, code in ((0.0, 0), (float("nan"), 0x55)):
        p, g, copy = torch.zeros(n), draws("mild", n)(), torch.zeros(n).bfloat16()
        state = State8.zeros(n, 256)
        for t in (p, g, copy):
            t[~inside] = poison
        for c in (state.r_codes, state.s_codes):
            c[~inside] = code
        p, g, copy, state = p.cuda(), g.cuda(), copy.cuda(), on_gpu(state)
        for step in (1, 2):
            assert native.cgad_step8(p, g, state, layout.table, numbers(step), copy=copy)
        p, copy, back = p.cpu(), copy.cpu(), State8(*(t.cpu() for t in state.tensors().values()))
        for t in (p, copy):
            assert bool(torch.isnan(t[~inside]).all()) == (poison != 0.0)
        assert bool((back.r_codes[~inside] == code).all()) and bool((back.s_codes[~inside] == code).all())
        whole = (p, back.r_codes, back.s_codes, copy.view(torch.int16))
        results.append(bits(*(t[inside] for t in whole), back.r_scale, back.s_scale))
    assert results[0] == results[1]


def test_runs_in_order_on_the_current_stream() -> None:
    layout = layout_named("large")
    n = layout.total
    draw = draws("mild", n)
    grads = [draw() for _ in range(3)]
    expected, state = torch.zeros(n), State8.zeros(n, 256)
    for t, g in enumerate(grads, 1):
        native.cgad_step8(expected, g, state, layout.table, numbers(t), checked=True)
    stream = torch.cuda.Stream()
    ours, their_state = torch.zeros(n).cuda(), on_gpu(State8.zeros(n, 256))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for t, g in enumerate(grads, 1):
            # The gradient is still on its way when the step is launched.
            there = g.pin_memory().to("cuda", non_blocking=True)
            native.cgad_step8(ours, there, their_state, layout.table, numbers(t), checked=True)
    stream.synchronize()
    assert same(expected, ours)
    assert state_bits(State8(*(t.cpu() for t in their_state.tensors().values()))) == state_bits(state)


def test_a_segment_beyond_two_to_the_31() -> None:
    start, numel = 2**31 + 3 * 256, 5 * 256 + 7
    needed = (start + numel) * (4 + 4 + 1 + 1)
    if torch.cuda.mem_get_info()[0] < 1.1 * needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free device memory")
    results = []
    for offset in (0, start):
        table = SegmentTable(
            np.array([offset]), np.array([numel]), np.array([9], dtype=np.uint64), np.array([77]), 256
        )
        n, here = table.padded, slice(offset, offset + numel)
        p, g = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
        state = State8(
            torch.empty(n, dtype=torch.int8, device="cuda"),
            torch.empty(n, dtype=torch.uint8, device="cuda"),
            torch.zeros(table.num_blocks, device="cuda"),
            torch.zeros(table.num_blocks, device="cuda"),
        )
        p[here], g[here] = 0.0, draws("mild", numel)().cuda()
        state.r_codes[here], state.s_codes[here] = 0, 0
        assert native.cgad_step8(p, g, state, table, numbers(1))
        results.append(bits(p[here].cpu(), state.r_codes[here].cpu(), state.s_codes[here].cpu()))
    assert results[0] == results[1]


def test_refuses_what_the_kernels_are_not_made_for() -> None:
    layout = layout_named("small")
    n = layout.total
    p, g, state = torch.zeros(n).cuda(), torch.zeros(n).cuda(), on_gpu(State8.zeros(n, 256))
    cases = [
        ((p, g.cpu(), state, layout.table), "grad: expected a tensor on cuda:0, got cpu"),
        ((p, torch.zeros(n + 1).cuda()[1:], state, layout.table), "grad: expected memory that begins"),
        ((p, g, DynamicState8.zeros(n, 256, "cuda"), layout.table), "state: expected the ratio codec"),
        ((p.cpu(), g, state, layout.table), "grad: expected a tensor on the CPU, got cuda:0"),
    ]
    for arguments, message in cases:
        with pytest.raises(NativeError, match=message):
            native.cgad_step8(*arguments, numbers(1))
    other = FlatLayout([Segment("w", 1, 640, 0, True)], block_size=64)
    with pytest.raises(NativeError, match="block_size: expected 256 on a CUDA device"):
        native.gradient_ok(torch.zeros(640).cuda(), other.table)
    assert not bool(p.any())
