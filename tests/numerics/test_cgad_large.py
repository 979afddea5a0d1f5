"""Flat buffers of more than 2^31 elements. Memory that nobody touches is not there, so this needs little."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cgad_reference import bits, gradients, numbers

from megatron_wsd.optim import native
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.native import DigestSum
from megatron_wsd.optim.steps import State8

START = 2**31 + 3 * 256  # beyond what 32 bits with a sign can count
NUMEL = 5 * 256 + 7


def table_at(offset: int) -> SegmentTable:
    return SegmentTable(
        offset=np.array([offset], dtype=np.int64),
        numel=np.array([NUMEL], dtype=np.int64),
        key=np.array([9], dtype=np.uint64),
        element0=np.array([2**32 - 300], dtype=np.int64),
        block_size=256,
    )


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(numel, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"this machine does not promise memory that is not used: {error}")


def test_a_segment_beyond_two_to_the_31_steps_as_one_at_the_start() -> None:
    results = []
    for offset in (0, START):
        table = table_at(offset)
        p, g, copy = (empty(table.padded, t) for t in (torch.float32, torch.float32, torch.bfloat16))
        blocks = table.num_blocks
        state = State8(
            empty(table.padded, torch.int8),
            empty(table.padded, torch.uint8),
            empty(blocks, torch.float32),
            empty(blocks, torch.float32),
        )
        here, own = slice(offset, offset + NUMEL), slice(offset // 256, blocks)
        for t in (p, state.r_codes, state.s_codes):
            t[here] = 0
        state.r_scale[own], state.s_scale[own] = 0.0, 0.0
        draw = gradients("heavy", NUMEL, seed=1)
        for step in (1, 2, 3):
            g[here] = draw()
            found = DigestSum()
            assert native.cgad_step8(p, g, state, table, numbers(step), copy=copy, digest=found)
            again = DigestSum()
            native.digest_flat(table, {"anchor": p, **state.tensors()}, again)
            assert again.total == found.total
        written = (p[here], state.r_codes[here], state.s_codes[here], state.r_scale[own], state.s_scale[own])
        results.append(bits(*written, copy[here].view(torch.uint8)))
        g[offset + NUMEL - 1] = float("nan")
        assert not native.gradient_ok(g, table)
    assert results[0] == results[1]
