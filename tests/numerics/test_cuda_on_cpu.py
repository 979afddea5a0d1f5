"""The CUDA kernel file itself, built by a C++ compiler and run warp by warp in lockstep, against the CPU.

`cuda_on_cpu/cuda_runtime.h` stands in for CUDA's. What this cannot show is nvcc's own translation and the
memory model of a device; tests/gpu does where there is one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cgad_reference import bits, copy8, gradients, numbers, state_bits

from megatron_wsd.optim import native
from megatron_wsd.optim.digests import column_salt
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.segments import cpu_segments
from megatron_wsd.optim.steps import AdamStep, State8

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "cuda_on_cpu"
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
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("cuda_on_cpu") / "kernels.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    command = [
        COMPILER,
        *flags,
        f"-I{HERE}",
        f"-I{ROOT / 'csrc'}",
        str(HERE / "driver.cpp"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    for function in (loaded.step8, loaded.step32, loaded.flaws):
        function.restype = ctypes.c_char_p
    return loaded


def layout_of_shards() -> FlatLayout:
    return FlatLayout([Segment(f"p{i}", 1000 + i, n, start, True) for i, (n, start) in enumerate(SHARDS)])


def pointer(t: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if t is None else t.data_ptr())


class Kernel:
    """Calls of the compiled kernels on the segments of one layout."""

    def __init__(self, library: ctypes.CDLL, layout: FlatLayout) -> None:
        self._library = library
        columns = cpu_segments(layout.table).columns()
        self._kept = [torch.tensor(column, dtype=torch.int64) for column in columns]
        addresses = [t.data_ptr() for t in self._kept]
        self._table = (
            (ctypes.c_void_p * 5)(*addresses),
            ctypes.c_int64(len(columns[0])),
            ctypes.c_int64(columns[4][-1]),
        )

    def step(
        self,
        state: dict[str, torch.Tensor],
        anchor: torch.Tensor,
        grad: torch.Tensor,
        hyper: AdamStep,
        copy: torch.Tensor | None,
        part: str,
    ) -> int:
        digest = ctypes.c_uint64(0)
        names = ["anchor", *state]
        salts = (ctypes.c_uint64 * 5)(*(column_salt(part, name) for name in names))
        values = (hyper.lr, *hyper.betas, hyper.eps, hyper.weight_decay, hyper.gate)
        call = self._library.step8 if "r_codes" in state else self._library.step32
        error = call(
            *self._table,
            pointer(anchor),
            int(anchor.dtype == torch.bfloat16),
            pointer(grad),
            pointer(copy),
            ctypes.byref(digest),
            salts,
            (ctypes.c_double * 6)(*values),
            ctypes.c_int64(hyper.step),
            ctypes.c_uint64(hyper.seed),
            *(pointer(t) for t in state.values()),
        )
        assert error is None
        return digest.value

    def flaws(self, grad: torch.Tensor, device: int = 0) -> int:
        found = ctypes.c_uint64(77)
        error = self._library.flaws(*self._table, pointer(grad), ctypes.byref(found), ctypes.c_int(device))
        if error is not None:
            raise RuntimeError(error.decode())
        return found.value


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mild", "outlier", "sparse", "denormal"])
def test_eight_bit_step_gives_the_bits_of_the_cpu_path(
    kernels: ctypes.CDLL, kind: str, dtype: torch.dtype
) -> None:
    layout = layout_of_shards()
    kernel, n = Kernel(kernels, layout), layout.total
    anchor = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
    state, copy = State8.zeros(n, 256), torch.full((n,), 7.0, dtype=torch.bfloat16)
    theirs, their_state, their_copy = anchor.clone(), copy8(state), copy.clone()
    draw = special(kind, n)
    for t in range(1, 7):
        g, hyper = draw(), numbers(t, weight_decay=0.1, gate=0.7, seed=5)
        found = native.DigestSum("coded")
        assert native.cgad_step8(anchor, g, state, layout.table, hyper, copy=copy, digest=found)
        digest = kernel.step(their_state.tensors(), theirs, g, hyper, their_copy, "coded")
        assert bits(theirs.view(torch.uint8)) == bits(anchor.view(torch.uint8))
        assert state_bits(their_state) == state_bits(state)
        assert bits(their_copy.view(torch.uint8)) == bits(copy.view(torch.uint8))
        assert digest == found.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fp32_step_gives_the_bits_of_the_cpu_path(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    layout = layout_of_shards()
    kernel, n = Kernel(kernels, layout), layout.total
    anchor = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype)
    state = {"m": torch.zeros(n), "v": torch.zeros(n)}
    theirs, their_state = anchor.clone(), {name: t.clone() for name, t in state.items()}
    draw = special("denormal", n)
    for t in range(1, 5):
        g, hyper = draw(), numbers(t, weight_decay=0.1, seed=6)
        found = native.DigestSum("plain")
        native.cgad_step32(anchor, g, state["m"], state["v"], layout.table, hyper, digest=found)
        assert kernel.step(their_state, theirs, g, hyper, None, "plain") == found.total
        assert bits(theirs.view(torch.uint8)) == bits(anchor.view(torch.uint8))
        assert bits(*their_state.values()) == bits(*state.values())


def test_padding_is_neither_read_nor_written(kernels: ctypes.CDLL) -> None:
    layout = layout_of_shards()
    kernel, n = Kernel(kernels, layout), layout.total
    inside = torch.zeros(n, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    state, clean_state = State8.zeros(n, 256), State8.zeros(n, 256)
    p, g = torch.zeros(n), gradients("mild", n, seed=3)()
    clean_p, clean_g = p.clone(), g.clone()
    p[~inside], g[~inside] = float("nan"), float("nan")
    state.r_codes[~inside], state.s_codes[~inside] = 0x55, 0x55
    for t in (1, 2):
        poisoned = kernel.step(state.tensors(), p, g, numbers(t), None, "")
        assert poisoned == kernel.step(clean_state.tensors(), clean_p, clean_g, numbers(t), None, "")
    assert bits(p[inside]) == bits(clean_p[inside])
    assert bool(torch.isnan(p[~inside]).all()) and bool((state.s_codes[~inside] == 0x55).all())
    assert bits(state.r_scale, state.s_scale) == bits(clean_state.r_scale, clean_state.s_scale)
    assert kernel.flaws(g) == 0


@pytest.mark.parametrize("flaw", [float("nan"), float("inf"), -float("inf"), 1e19, -1e19])
def test_finds_what_a_step_cannot_take(kernels: ctypes.CDLL, flaw: float) -> None:
    layout = layout_of_shards()
    kernel = Kernel(kernels, layout)
    good = torch.full((layout.total,), 2.0**63)
    assert kernel.flaws(good) == 0
    for view in layout.views(torch.arange(layout.total)):
        for where in {int(i) for i in (view[:1].tolist() + view[-1:].tolist())}:
            bad = good.clone()
            bad[where] = flaw
            assert kernel.flaws(bad) == 1


def test_empty_tables_and_unknown_devices(kernels: ctypes.CDLL) -> None:
    empty = Kernel(kernels, FlatLayout([Segment("w", 1, 0, 0, True)]))
    nothing = torch.zeros(0)
    assert empty.flaws(nothing) == 0
    assert empty.step(State8.zeros(0, 256).tensors(), nothing, nothing, numbers(1), None, "") == 0
    some = FlatLayout([Segment("w", 1, 10, 0, True)])
    with pytest.raises(RuntimeError, match="invalid argument"):
        Kernel(kernels, some).flaws(torch.zeros(256), device=3)
