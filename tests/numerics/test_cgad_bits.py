"""The same bits for every instruction set, thread count and way to cut; padding is never touched."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from cgad_reference import bits, gradients, layout_of, numbers

from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.native import DigestSum
from megatron_wsd.optim.steps import DynamicState8, SGDStep, State8

ISAS = native.build_info()["isa_available"]
SIZES = (1, 255, 0, 256, 257, 70_000, 5)


def run_all(layout: FlatLayout, threads: int = 1, steps: int = 4) -> list[bytes]:
    """Every kernel for a few steps; the bytes of everything it wrote."""
    n, table = layout.total, layout.table
    draw = gradients("heavy", n, seed=7)
    written: list[torch.Tensor] = []
    digests = DigestSum("all")
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        anchors = [torch.linspace(-1, 1, n).to(dtype) for _ in range(4)]
        copy = torch.zeros(n, dtype=torch.bfloat16)
        moments = [torch.zeros(n) for _ in range(3)]
        coded = [State8.zeros(n, layout.block_size), DynamicState8.zeros(n, layout.block_size)]
        runs.append((anchors, copy, moments, coded))
        written += [*anchors, copy, *moments, *(t for c in coded for t in c.tensors().values())]
    total = torch.zeros(n)
    for t in range(1, steps + 1):
        g = draw()
        hyper = numbers(t, weight_decay=0.1, gate=0.7, seed=11)
        sgd = SGDStep(0.1, 0.9, True, 0.1, step=t, seed=11)
        for anchors, copy, (m, v, buffer), coded in runs:
            options = {"threads": threads, "copy": copy, "digest": digests}
            for p, state in zip(anchors, coded, strict=False):
                assert native.cgad_step8(p, g, state, table, hyper, **options)
            assert native.cgad_step32(anchors[2], g, m, v, table, hyper, **options)
            assert native.sgd_step(anchors[3], g, buffer, table, sgd, **options)
        native.accumulate(total, g, 0.3)
    _, _, (m, v, _), coded = runs[0]
    for state in coded:
        m8, v8 = torch.zeros(n), torch.zeros(n)
        native.decode8(state, table, hyper, m8, v8)
        again = type(state).zeros(n, layout.block_size)
        native.encode8(m, v, table, hyper, again)
        written += [m8, v8, *again.tensors().values()]
    digest = native.digest(runs[0][0][0])
    return [
        *bits(total, *(t.view(torch.uint8) for t in written)),
        digest.to_bytes(8, "little"),
        digests.total.to_bytes(8, "little"),
    ]


@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_instruction_sets_and_threads_agree(block_size: int) -> None:
    layout = layout_of(*SIZES, block_size=block_size)
    with native.forced_isa("scalar"):
        expected = run_all(layout)
    for isa in ISAS:
        for threads in (1, 2, 3):
            with native.forced_isa(isa):
                assert run_all(layout, threads) == expected, (isa, threads)


def test_environment_forces_the_instruction_set() -> None:
    code = "from megatron_wsd.optim import native; print(native.build_info()['isa'])"
    for isa in ISAS:
        env = {**os.environ, native.ISA_VARIABLE: isa}
        out = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == isa
    env = {**os.environ, native.ISA_VARIABLE: "mmx"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.returncode != 0
    assert "MEGATRON_WSD_ISA: expected one that this processor has: scalar" in out.stderr


def test_flushing_denormals_in_torch_changes_nothing() -> None:
    def tiny_steps() -> list[bytes]:
        layout = layout_of(3000)
        g = torch.full((3000,), 1e-22)  # squares to a denormal
        p, m, v = torch.zeros(3000), torch.zeros(3000), torch.zeros(3000)
        for t in range(1, 4):
            native.cgad_step32(p, g, m, v, layout.table, numbers(t, eps=1e-20))
        return bits(p, m, v)

    expected = tiny_steps()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert tiny_steps() == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("block_size", [64, 256])
def test_padding_is_neither_read_nor_written(block_size: int) -> None:
    layout = layout_of(*SIZES, block_size=block_size)
    n = layout.total
    inside = torch.zeros(n, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    results = []
    for poison, code in ((0.0, 0), (float("nan"), 0x55)):
        p, g = torch.linspace(-1, 1, n), gradients("mild", n, seed=1)()
        m, v, buffer = (torch.zeros(n) for _ in range(3))
        state = State8.zeros(n, block_size)
        for t in (p, g, m, v, buffer):
            t[~inside] = poison
        for c in (state.r_codes, state.s_codes):
            c[~inside] = code
        for step in (1, 2):
            assert native.cgad_step8(p, g, state, layout.table, numbers(step))
            assert native.cgad_step32(p, g, m, v, layout.table, numbers(step))
            assert native.sgd_step(p, g, buffer, layout.table, SGDStep(0.1, 0.9))
        for t in (p, g, m, v, buffer):
            assert bool(torch.isnan(t[~inside]).all()) == (poison != 0.0)
        assert bool((state.r_codes[~inside] == code).all()) and bool((state.s_codes[~inside] == code).all())
        tensors = (p, m, v, buffer, state.r_codes, state.s_codes)
        results.append([*bits(*(t[inside] for t in tensors)), *bits(state.r_scale, state.s_scale)])
    assert results[0] == results[1]


def test_segments_in_one_table_equal_segments_alone() -> None:
    layout = layout_of(*SIZES)
    n = layout.total
    g = gradients("mild", n, seed=1)()
    p, state = torch.zeros(n), State8.zeros(n, 256)
    native.cgad_step8(p, g, state, layout.table8, numbers())
    for segment, offset in zip(layout.segments, layout.offsets, strict=True):
        alone = FlatLayout([segment])
        end = offset + segment.numel
        q, own = torch.zeros(segment.numel), State8.zeros(segment.numel, 256)
        native.cgad_step8(q, g[offset:end].clone(), own, alone.table8, numbers())
        assert torch.equal(q, p[offset:end])
        assert torch.equal(own.r_codes, state.r_codes[offset:end])
        assert torch.equal(own.s_codes, state.s_codes[offset:end])


def codes_when_cut(start: int, cuts: list[int], end: int) -> list[bytes]:
    """Codes of elements start..end of one parameter, cut into segments at `cuts`.

    The moments repeat every 8 elements, so that every block of 8 or more has the same scales.
    """
    edges = [start, *cuts, end]
    parts = [Segment("w", 42, b - a, a, True) for a, b in pairwise(edges)]
    layout = FlatLayout(parts, block_size=64)
    m, v = torch.zeros(layout.total), torch.zeros(layout.total)
    for part, m_view, v_view in zip(parts, layout.views(m), layout.views(v), strict=True):
        place = (torch.arange(part.numel) + part.element0) % 8
        m_view.copy_((place - 3.3) / 7)
        v_view.copy_((1 + place) / 8)
    state = State8.zeros(layout.total, 64)
    native.encode8(m, v, layout.table, numbers(3, seed=5), state)
    return bits(torch.cat(layout.views(state.r_codes)), torch.cat(layout.views(state.s_codes)))


@pytest.mark.parametrize("start", [0, 1000, 2**32 - 100, 2**33 - 64, 2**40 + 17])
def test_rounding_does_not_depend_on_how_a_parameter_is_cut(start: int) -> None:
    whole = codes_when_cut(start, [], start + 1000)
    assert codes_when_cut(start, [start + 512], start + 1000) == whole
    assert codes_when_cut(start, [start + 100, start + 111, start + 333], start + 1000) == whole


def test_counters_differ_beyond_32_bits() -> None:
    assert codes_when_cut(0, [], 1000) != codes_when_cut(2**32, [], 2**32 + 1000)
