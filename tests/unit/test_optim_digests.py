"""Digests of flat states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim import native
from megatron_wsd.optim.digests import column_salt
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.native import DigestSum

MASK = 2**64 - 1
SHARDS = (1, 255, 0, 256, 300)


def layout_of(*numels: int, block_size: int = 256) -> FlatLayout:
    return FlatLayout([Segment(f"p{i}", i, n, 0, True) for i, n in enumerate(numels)], block_size)


def found(layout: FlatLayout, part: str = "", **tensors: torch.Tensor) -> int:
    digest = DigestSum(part)
    native.digest_flat(layout.table, tensors, digest)
    return digest.total


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def expected(layout: FlatLayout, part: str, name: str, tensor: torch.Tensor) -> int:
    """Written from the definition in csrc/digest.h, in Python integers."""
    salt, total, size = column_salt(part, name), 0, layout.block_size
    for offset, numel in zip(layout.table.offset.tolist(), layout.table.numel.tolist(), strict=True):
        for start in range(offset, offset + numel, size):
            base = mix64(salt ^ mix64((start // size + 0x9E3779B97F4A7C15) & MASK))
            if name.endswith("_scale"):
                words = [int(tensor[start // size : start // size + 1].view(torch.int32)) & 0xFFFFFFFF, 0]
            else:
                true = tensor[start : min(start + size, offset + numel)].clone().view(torch.uint8).numpy()
                data = true.tobytes().ljust(size * tensor.element_size(), b"\0")
                words = np.frombuffer(data, dtype="<u4").tolist()
            for j in range(len(words) // 2):
                x = words[j] ^ ((base + j * 0x9E3779B1) & 0xFFFFFFFF)
                y = words[len(words) // 2 + j] ^ (((base >> 32) + j * 0x85EBCA77) & 0xFFFFFFFF)
                total += x * y + ((x + 3 * y) << 32)
    return total & MASK


@pytest.mark.parametrize("block_size", [64, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_is_what_it_says(dtype: torch.dtype, block_size: int) -> None:
    layout = layout_of(*SHARDS, block_size=block_size)
    x = (torch.randn(layout.total, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    assert found(layout, "part", x=x) == expected(layout, "part", "x", x)
    scale = torch.randn(layout.table.num_blocks)
    assert found(layout, "", r_scale=scale) == expected(layout, "", "r_scale", scale)
    both = (expected(layout, "", "x", x) + expected(layout, "", "r_scale", scale)) & MASK
    assert found(layout, x=x, r_scale=scale) == both


def test_every_bit_position_name_and_part_counts() -> None:
    layout = layout_of(300)
    x = torch.randint(0, 256, (300,), dtype=torch.uint8)
    seen = {found(layout, x=x), found(layout, "other", x=x), found(layout, y=x)}
    for i in range(300):
        for bit in range(8):
            changed = x.clone()
            changed[i] ^= 1 << bit
            seen.add(found(layout, x=changed))
    assert len(seen) == 3 + 2400


def test_moved_and_swapped_numbers_count() -> None:
    layout = layout_of(1024)
    x = torch.randn(1024)
    seen = {found(layout, x=x)}
    for shift in (1, 2, 128, 256, 512):
        seen.add(found(layout, x=x.roll(shift)))
    for a, b in ((0, 1), (0, 128), (3, 259), (5, 1000)):
        swapped = x.clone()
        swapped[a], swapped[b] = x[b], x[a]
        seen.add(found(layout, x=swapped))
    assert len(seen) == 10


def test_the_same_flip_in_two_numbers_is_seen() -> None:
    # Sums of plain words would miss a sign that flips in two numbers every second time.
    layout = layout_of(512)
    x = torch.randn(512, generator=torch.Generator().manual_seed(2))
    before = found(layout, x=x)
    for bit in (31, 30, 23, 0):
        for a, b in ((0, 1), (7, 135), (100, 356), (511, 2)):
            flipped = x.view(torch.int32).clone()
            for i in (a, b):
                flipped[i] ^= -(2**31) if bit == 31 else 1 << bit
            assert found(layout, x=flipped.view(torch.float32)) != before


def test_padding_does_not_count() -> None:
    layout = layout_of(*SHARDS)
    x = torch.randn(layout.total)
    before = found(layout, x=x)
    inside = torch.zeros(layout.total, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    x[~inside] = float("nan")
    assert found(layout, x=x) == before


def test_refuses_what_does_not_fit() -> None:
    layout, digest = layout_of(300), DigestSum()
    for bad in (
        {"x": torch.zeros(200)},
        {"x": torch.zeros(600)[::2]},
        {"x": torch.zeros(300, device="meta")},
        {"r_scale": torch.zeros(300)},
        {"r_scale": torch.zeros(2, dtype=torch.float64)},
        {f"x{i}": torch.zeros(300) for i in range(6)},
    ):
        with pytest.raises((NativeError, ValueError)):
            native.digest_flat(layout.table, bad, digest)
    assert digest.total == 0
