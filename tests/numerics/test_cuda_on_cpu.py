"""The CUDA extension itself, built by a C++ compiler and run warp by warp in lockstep, against the CPU.

`cuda_on_cpu/cuda_runtime.h` stands in for CUDA's. What this cannot show is nvcc's own translation and the
memory model of a device; tests/gpu does where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import emulated
import numpy as np
import pytest
import torch
from cgad_reference import bits, copy8, gradients, numbers, state_bits
from emulated import everything_on_gpu

from megatron_wsd.errors import NativeError
from megatron_wsd.optim import native
from megatron_wsd.optim.backend import CudaBackend
from megatron_wsd.optim.digests import digest_flat
from megatron_wsd.optim.layout import FlatLayout, Segment, SegmentTable
from megatron_wsd.optim.momentum import Vector, momentum_step, vector_tensors
from megatron_wsd.optim.native import DigestSum
from megatron_wsd.optim.outer import OuterHyper, make_outer
from megatron_wsd.optim.steps import DynamicState8, MomentumStep, SGDStep, State8, Vector8

# Whole and partial blocks, one element, empty, odd starts, an element index that passes 2^32 inside a block.
SHARDS = (
    (1, 0),
    (255, 3),
    (0, 0),
    (256, 0),
    (257, 1),
    (5000, 2**32 - 100),
    (300, 2**33 - 7),
    (5, 2**40 + 17),
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def cuda(emulated_cuda: Path) -> ModuleType:
    return emulated.load(emulated_cuda)


def layout_of_shards() -> FlatLayout:
    return FlatLayout([Segment(f"p{i}", 1000 + i, n, start, True) for i, (n, start) in enumerate(SHARDS)])


def inside(layout: FlatLayout) -> torch.Tensor:
    """True where there are elements, False in the padding."""
    found = torch.zeros(layout.total, dtype=torch.bool)
    for view in layout.views(found):
        view.fill_(True)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bits(a.view(torch.uint8)) == bits(b.view(torch.uint8))


def special(kind: str, n: int) -> Callable[[], torch.Tensor]:
    """Gradients of the named kind, with denormals, zeros and signs of zero among them."""
    draw = gradients("heavy" if kind == "denormal" else kind, n, seed=13)

    def make() -> torch.Tensor:
        g = draw()
        if kind == "denormal":
            g[::3] *= 1e-41
            g[1::5] = -0.0
            g[2::7] = 0.0
        return g

    return make


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mild", "outlier", "sparse", "denormal"])
def test_eight_bit_step_gives_the_bits_of_the_cpu_path(
    cuda: ModuleType, kind: str, dtype: torch.dtype
) -> None:
    layout = layout_of_shards()
    n, table = layout.total, layout.table
    anchor = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
    state, copy = State8.zeros(n, 256), torch.full((n,), 7.0, dtype=torch.bfloat16)
    theirs, their_state, their_copy = anchor.clone(), copy8(state), copy.clone()
    draw = special(kind, n)
    for t in range(1, 7):
        g, hyper = draw(), numbers(t, weight_decay=0.1, gate=0.7, seed=5)
        here, there = DigestSum("coded"), DigestSum("coded")
        assert native.cgad_step8(anchor, g, state, table, hyper, copy=copy, digest=here)
        with everything_on_gpu(cuda):
            assert native.cgad_step8(theirs, g, their_state, table, hyper, copy=their_copy, digest=there)
        assert same(theirs, anchor) and same(their_copy, copy)
        assert state_bits(their_state) == state_bits(state)
        assert there.total == here.total


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_fp32_step_gives_the_bits_of_the_cpu_path(cuda: ModuleType, dtype: torch.dtype) -> None:
    layout = layout_of_shards()
    n, table = layout.total, layout.table
    anchor = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype)
    mine = [anchor, torch.zeros(n), torch.zeros(n)]
    theirs = [t.clone() for t in mine]
    draw = special("denormal", n)
    for t in range(1, 5):
        g, hyper = draw(), numbers(t, weight_decay=0.1, seed=6)
        here, there = DigestSum("plain"), DigestSum("plain")
        native.cgad_step32(mine[0], g, mine[1], mine[2], table, hyper, digest=here)
        with everything_on_gpu(cuda):
            native.cgad_step32(theirs[0], g, theirs[1], theirs[2], table, hyper, digest=there)
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))
        assert there.total == here.total


def vectors(n: int, coded: bool, delayed: bool) -> tuple[Vector, Vector | None]:
    def zeros() -> Vector:
        return Vector8.zeros(n, 256) if coded else torch.zeros(n)

    return zeros(), zeros() if delayed else None


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("coded", [False, True], ids=["plain", "coded"])
@pytest.mark.parametrize("period", [1, 3])
def test_momentum_gives_the_bits_of_the_cpu_path(
    cuda: ModuleType, period: int, coded: bool, dtype: torch.dtype
) -> None:
    layout = layout_of_shards()
    n, table = layout.total, layout.table
    anchor = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype)
    mine, copy = vectors(n, coded, period > 1), torch.zeros(n, dtype=torch.bfloat16)
    theirs, their_anchor, their_copy = vectors(n, coded, period > 1), anchor.clone(), copy.clone()
    draw = special("denormal", n)
    for t in range(1, 8):
        g, hyper = draw(), MomentumStep(0.3, 0.9, period, weight_decay=0.1, step=t, seed=4)
        here, there = DigestSum("x"), DigestSum("x")
        assert momentum_step(anchor, g, *mine, table, hyper, copy=copy, digest=here)
        with everything_on_gpu(cuda):
            assert momentum_step(their_anchor, g, *theirs, table, hyper, copy=their_copy, digest=there)
        assert same(anchor, their_anchor) and same(copy, their_copy)
        kept = zip(vector_tensors(*mine).values(), vector_tensors(*theirs).values(), strict=True)
        assert all(same(a, b) for a, b in kept)
        assert there.total == here.total


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_gives_the_bits_of_the_cpu_path(
    cuda: ModuleType, momentum: float, nesterov: bool, dtype: torch.dtype
) -> None:
    layout = layout_of_shards()
    n, table = layout.total, layout.table
    anchor = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype)
    their_anchor = anchor.clone()
    mine, theirs = (torch.zeros(n) if momentum else None for _ in range(2))
    draw = special("denormal", n)
    for t in range(1, 5):
        g, hyper = draw(), SGDStep(0.3, momentum, nesterov, weight_decay=0.1, step=t, seed=4)
        here, there = DigestSum("x"), DigestSum("x")
        assert native.sgd_step(anchor, g, mine, table, hyper, digest=here)
        with everything_on_gpu(cuda):
            assert native.sgd_step(their_anchor, g, theirs, table, hyper, digest=there)
        assert same(anchor, their_anchor) and there.total == here.total
        assert mine is None or (theirs is not None and same(mine, theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["cgad", "sgd", "nesterov", "delayed_nesterov"])
def test_outer_optimizers_hold_the_same_state(cuda: ModuleType, kind: str, dtype: torch.dtype) -> None:
    layout = FlatLayout(
        [Segment(f"p{i}", 1000 + i, n, start, i % 2 == 0) for i, (n, start) in enumerate(SHARDS)]
    )
    hyper = OuterHyper(lr=0.1, momentum=0.0 if kind == "sgd" else 0.9, momentum_period=2, seed=3)
    here, there = (make_outer(kind, layout, hyper, dtype) for _ in range(2))
    anchor, theirs = (torch.zeros(layout.total, dtype=dtype) for _ in range(2))
    draw = special("mild", layout.total)
    for _ in range(4):
        g = draw()
        with everything_on_gpu(cuda):
            digest = there.step(theirs, g)
            there.forget_digest()
            assert there.digest(theirs) == digest
        assert here.step(anchor, g) == digest and same(anchor, theirs)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 511, 512, 513, 1023, 1024, 1025, 3 * 1024, 70_001])
def test_digest_of_a_plain_array(cuda: ModuleType, nbytes: int) -> None:
    array = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    for salt in (0, 2**64 - 1):
        expected = native.digest(array, salt)
        with everything_on_gpu(cuda):
            assert native.digest(array, salt) == expected


def test_digest_of_a_flat_state_does_not_see_the_padding(cuda: ModuleType) -> None:
    layout = layout_of_shards()
    n, draw = layout.total, torch.Generator().manual_seed(9)
    tensors = {
        "floats": torch.randn(n, generator=draw),
        "halves": torch.randn(n, generator=draw).bfloat16(),
        "codes": torch.randint(-128, 128, (n,), generator=draw, dtype=torch.int8),
        "codes_scale": torch.randn(layout.table.num_blocks, generator=draw),
    }
    found = []
    for number in range(2):
        here, there = DigestSum("p"), DigestSum("p")
        digest_flat(layout.table, tensors, here)
        with everything_on_gpu(cuda):
            digest_flat(layout.table, tensors, there)
        assert there.total == here.total
        found.append(here.total)
        for name in ("floats", "halves", "codes"):
            tensors[name][~inside(layout)] = number + 1
    assert found[0] == found[1]


def test_padding_is_neither_read_nor_written(cuda: ModuleType) -> None:
    layout = layout_of_shards()
    n, there = layout.total, inside(layout)
    state, clean_state = State8.zeros(n, 256), State8.zeros(n, 256)
    p, g = torch.zeros(n), gradients("mild", n, seed=3)()
    clean_p, clean_g = p.clone(), g.clone()
    p[~there], g[~there] = float("nan"), float("nan")
    state.r_codes[~there], state.s_codes[~there] = 0x55, 0x55
    with everything_on_gpu(cuda):
        for t in (1, 2):
            poisoned, clean = DigestSum(), DigestSum()
            assert native.cgad_step8(p, g, state, layout.table, numbers(t), digest=poisoned)
            assert native.cgad_step8(clean_p, clean_g, clean_state, layout.table, numbers(t), digest=clean)
            assert poisoned.total == clean.total
        assert native.gradient_ok(g, layout.table)
    assert bits(p[there]) == bits(clean_p[there])
    assert bool(torch.isnan(p[~there]).all()) and bool((state.s_codes[~there] == 0x55).all())
    assert bits(state.r_scale, state.s_scale) == bits(clean_state.r_scale, clean_state.s_scale)


@pytest.mark.parametrize("flaw", [float("nan"), float("inf"), -float("inf"), 1e19, -1e19])
def test_finds_what_a_step_cannot_take(cuda: ModuleType, flaw: float) -> None:
    layout = layout_of_shards()
    good = torch.full((layout.total,), 2.0**63)
    with everything_on_gpu(cuda):
        assert native.gradient_ok(good, layout.table)
        for view in layout.views(torch.arange(layout.total)):
            for where in {int(i) for i in (view[:1].tolist() + view[-1:].tolist())}:
                bad = good.clone()
                bad[where] = flaw
                assert not native.gradient_ok(bad, layout.table)


def test_empty_tables_and_unknown_devices(cuda: ModuleType) -> None:
    empty = FlatLayout([Segment("w", 1, 0, 0, True)])
    nothing, digest = torch.zeros(0), DigestSum()
    with everything_on_gpu(cuda):
        assert native.gradient_ok(nothing, empty.table)
        assert native.cgad_step8(
            nothing, nothing, State8.zeros(0, 256), empty.table, numbers(1), digest=digest
        )
        assert digest.total == 0
        table = FlatLayout([Segment("w", 1, 10, 0, True)]).table
        with pytest.raises(RuntimeError, match="CUDA: invalid argument"):
            CudaBackend(table, torch.device("cpu", 3)).gradient_ok(torch.zeros(256).data_ptr())


def test_refuses_what_the_kernels_are_not_made_for(cuda: ModuleType) -> None:
    layout = layout_of_shards()
    n = layout.total
    p, g, odd = torch.zeros(n), torch.zeros(n), torch.zeros(n + 1)[1:]
    with everything_on_gpu(cuda):
        with pytest.raises(NativeError, match="grad: expected memory that begins at a multiple of 16 bytes"):
            native.cgad_step8(p, odd, State8.zeros(n, 256), layout.table, numbers(1))
        with pytest.raises(NativeError, match="state: expected the ratio codec"):
            native.cgad_step8(p, g, DynamicState8.zeros(n, 256), layout.table, numbers(1))
        other = FlatLayout([Segment("w", 1, 640, 0, True)], block_size=64)
        with pytest.raises(NativeError, match="block_size: expected 256 on a CUDA device"):
            native.gradient_ok(torch.zeros(640), other.table)
        wide: dict[str, torch.Tensor] = {"x": torch.zeros(n, dtype=torch.float64)}
        with pytest.raises(ValueError, match="a column of another width"):
            digest_flat(layout.table, wide, DigestSum())
    assert not bool(p.any())


def test_a_table_with_gaps(cuda: ModuleType) -> None:
    table = SegmentTable(
        np.array([0, 1024, 2048]),
        np.array([300, 0, 700]),
        np.array([1, 2, 3], dtype=np.uint64),
        np.array([0, 0, 5]),
        256,
    )
    g = special("denormal", table.padded)()
    mine, theirs = ([torch.zeros(table.padded) for _ in range(3)] for _ in range(2))
    assert native.cgad_step32(mine[0], g, mine[1], mine[2], table, numbers(1))
    with everything_on_gpu(cuda):
        assert native.cgad_step32(theirs[0], g, theirs[1], theirs[2], table, numbers(1))
    assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))
