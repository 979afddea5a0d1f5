"""The wire on a device, its kernels run by the CPU warp by warp, against the wire of the CPU, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import emulated
import numpy as np
import pytest
import torch
from cgad_reference import bits, layout_of
from emulated import everything_on_gpu
from test_wire_codec import FORMATS, KINDS, inputs
from test_wire_segments import padded_to_groups, run_all

from megatron_wsd.errors import NativeError
from megatron_wsd.optim import wire
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.wire import WireFormat


@pytest.fixture(scope="module")
def cuda(emulated_cuda: Path) -> ModuleType:
    return emulated.load(emulated_cuda)


def poisoned(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Memory in which everything must be overwritten."""
    return torch.full((nbytes,), 0x5A, dtype=torch.uint8, device=device)


def run_chunk(fmt: WireFormat, x: torch.Tensor, coefficient: float) -> list[bytes]:
    """All that is done with one chunk; the bytes of what was written."""
    n = x.numel()
    payload = wire.encode(fmt, x, poisoned(fmt.encoded_bytes(n), x.device))
    decoded = wire.decode(fmt, payload, torch.full_like(x, torch.nan))
    merged = torch.linspace(-1, 1, n).to(x.device)
    fits = wire.accumulate(fmt, payload, merged, coefficient)
    left, in_place = torch.full_like(x, torch.nan), x.clone()
    wire.residual(fmt, x, payload, left)
    wire.residual(fmt, in_place, payload, in_place)
    return [*bits(*(t.cpu() for t in (payload, decoded, merged, left, in_place))), bytes([fits])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_chunk_has_the_bits_of_the_cpu(cuda: ModuleType, name: str, kind: str) -> None:
    fmt = WireFormat.of(name)
    # None, one, fewer and more groups than the warps that share them (16 of them, two blocks of 8).
    for groups in (0, 1, 15, 16, 17, 50):
        x = inputs(kind, 256 * groups)
        expected = run_chunk(fmt, x, 0.3)
        with everything_on_gpu(cuda):
            assert run_chunk(fmt, x, 0.3) == expected, groups


@pytest.mark.parametrize(
    "numels", [(1,), (1, 255, 0, 256, 257, 5000, 5, 1, 3300), (0, 0, 300), (256, 512), (0,)]
)
def test_segments_have_the_bits_of_the_cpu(cuda: ModuleType, numels: tuple[int, ...]) -> None:
    layout = layout_of(*numels)
    expected = run_all(layout, 1)
    with everything_on_gpu(cuda):
        assert run_all(layout, 1) == expected


def test_chunks_that_cut_segments_and_leave_the_padding_alone(cuda: ModuleType) -> None:
    layout = layout_of(1, 700, 0, 255, 2000, 40, 256, 1)
    n, x = layout.total, inputs("uneven", layout.total)
    factors = torch.linspace(-2, 2, len(layout.segments))

    def by_chunks(fmt: WireFormat, step: int) -> list[bytes]:
        merged = torch.full((n,), 3.5)
        told = []
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            chunk = x[part].contiguous()
            payload = wire.encode(fmt, chunk, poisoned(fmt.encoded_bytes(chunk.numel())))
            told.append(wire.accumulate_segments(fmt, payload, merged[part], start, layout.table, factors))
        padding = torch.ones(n, dtype=torch.bool)
        for view in layout.views(padding):
            view.fill_(False)
        assert bool((merged[padding] == 3.5).all())
        return [*bits(merged), bytes(told)]

    for name in FORMATS:
        fmt = WireFormat.of(name)
        for step in (256, 512, 1280, n):
            expected = by_chunks(fmt, step)
            with everything_on_gpu(cuda):
                assert by_chunks(fmt, step) == expected, (name, step)


def test_a_table_with_gaps(cuda: ModuleType) -> None:
    table = SegmentTable(
        np.array([256, 1024, 1024, 2048]),
        np.array([300, 0, 1, 700]),
        np.arange(4, dtype=np.uint64),
        np.zeros(4, dtype=np.int64),
        256,
    )
    fmt, x = WireFormat.of("int8"), inputs("gauss", table.padded)
    factors = torch.tensor([0.5, 9.0, -1.0, 2.0], dtype=torch.float64)

    def everything() -> list[bytes]:
        payload = wire.encode(fmt, x, poisoned(fmt.encoded_bytes(table.padded)))
        merged, scaled = torch.ones(table.padded), x.clone()
        fits = wire.accumulate_segments(fmt, payload, merged, 0, table, factors)
        wire.scale_segments(scaled, table, factors)
        return [*bits(payload, merged, scaled, wire.segment_sumsq(x, table)), bytes([fits])]

    expected = everything()
    with everything_on_gpu(cuda):
        assert everything() == expected


@pytest.mark.parametrize("flaw", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_stepped_is_told(cuda: ModuleType, name: str, flaw: float) -> None:
    fmt, layout = WireFormat.of(name), layout_of(700)
    n = padded_to_groups(layout)
    for where in (0, 130, 255, 256, 699):
        x = torch.zeros(n)
        x[where] = flaw
        with everything_on_gpu(cuda):
            payload = wire.encode(fmt, x, poisoned(fmt.encoded_bytes(n)))
            ones = torch.ones(1)
            assert not wire.accumulate(fmt, payload, torch.zeros(n), 1.0)
            assert not wire.accumulate_segments(fmt, payload, torch.zeros(n), 0, layout.table, ones)
            assert not wire.scale_segments(x.clone(), layout.table, ones)
            assert not bool(torch.isfinite(wire.segment_sumsq(x, layout.table)).all())
    with everything_on_gpu(cuda):  # 2^63 can be stepped, the next number cannot
        x = torch.full((n,), 2.0**62)
        payload = wire.encode(fmt, x, poisoned(fmt.encoded_bytes(n)))
        exact = wire.decode(fmt, payload, torch.zeros(n))
        assert wire.accumulate(fmt, payload, torch.zeros(n), 2.0**63 / float(exact.max()))
        assert not wire.accumulate(
            fmt, payload, torch.zeros(n), 2.0**63 / float(exact.max()) * (1 + 2.0**-20)
        )


def test_chunks_begin_where_a_lane_can_read(cuda: ModuleType) -> None:
    x = inputs("gauss", 512)
    with everything_on_gpu(cuda):
        for name, alignment in (("fp32", 16), ("bf16", 8), ("int8", 4), ("int4", 4)):
            fmt = WireFormat.of(name)
            room = poisoned(fmt.encoded_bytes(512) + 16)
            for shift in (4, 8, 16):
                out = room[shift : shift + fmt.encoded_bytes(512)]
                if shift % alignment:
                    with pytest.raises(NativeError, match=f"at a multiple of {alignment} bytes"):
                        wire.encode(fmt, x, out)
                else:
                    wire.encode(fmt, x, out)
        fmt, table = WireFormat.of("int8"), layout_of(700).table
        payload = wire.encode(fmt, x, poisoned(fmt.encoded_bytes(512)))
        with pytest.raises(NativeError, match="on a CUDA device a multiple of 256, got 128"):
            wire.accumulate_segments(fmt, payload, torch.zeros(512), 128, table, torch.ones(1))
