"""Norms, coefficients and factors segment by segment; and the same bits from every way to run the codec."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cgad_reference import bits, layout_of
from test_wire_codec import FORMATS, KINDS, inputs, payload_of, round_trip

from megatron_wsd.optim import native, wire
from megatron_wsd.optim.layout import FlatLayout, SegmentTable
from megatron_wsd.optim.wire import WireFormat

ISAS = native.build_info()["isa_available"]
SIZES = (1, 255, 0, 256, 257, 70_000, 5, 1, 33_000)
U64 = 2.0**-53


def padded_to_groups(layout: FlatLayout) -> int:
    return -(-layout.total // 256) * 256


def parts_of(table: SegmentTable) -> list[slice]:
    ends = zip(table.offset.tolist(), table.numel.tolist(), strict=True)
    return [slice(offset, offset + numel) for offset, numel in ends]


def run_all(layout: FlatLayout, threads: int, device: str = "cpu") -> list[bytes]:
    """Everything the module can do on a device; the bytes of all it wrote."""
    n, table = padded_to_groups(layout), layout.table
    coefficients = torch.linspace(-1, 2, len(table.numel), dtype=torch.float64)
    written: list[torch.Tensor] = []
    for kind in ("uneven", "sparse", "tiny", "huge"):
        x = inputs(kind, n).to(device)
        for name in FORMATS:
            fmt = WireFormat.of(name)
            payload = torch.zeros(fmt.encoded_bytes(n), dtype=torch.uint8, device=device)
            out, merged = torch.zeros(n, device=device), torch.linspace(-1, 1, n).to(device)
            split = merged.clone()
            wire.encode(fmt, x, payload, threads)
            wire.decode(fmt, payload, out, threads)
            fits = wire.accumulate(fmt, payload, merged, 0.3, threads)
            fits2 = wire.accumulate_segments(fmt, payload, split, 0, table, coefficients, threads)
            left = wire.residual(fmt, x, payload, torch.zeros_like(x), threads)
            written += [payload, out, merged, split, left, torch.tensor([fits, fits2])]
        flat = x[: layout.total].clone()
        written.append(wire.segment_sumsq(flat, table, threads))
        fits = wire.scale_segments(flat, table, coefficients, threads)
        written += [flat, torch.tensor([fits])]
    return bits(*(t.cpu().view(torch.uint8) for t in written))


@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_instruction_sets_and_threads_agree(block_size: int) -> None:
    layout = layout_of(*SIZES, 60_000, block_size=block_size)
    assert layout.total > 4 << 15  # enough for a fourth thread to get work
    with native.forced_isa("scalar"):
        expected = run_all(layout, 1)
    for isa in ISAS:
        with native.forced_isa(isa):
            for threads in (1, 2, 3, 4):
                assert run_all(layout, threads) == expected, (isa, threads)


def test_flushing_denormals_in_torch_changes_nothing() -> None:
    x = torch.full((256,), 2.0**-100)
    x[1:] = torch.arange(255) * 2.0**-149

    def denormals() -> list[bytes]:
        fmt, merged = WireFormat.of("int8"), torch.zeros(256)
        payload = payload_of(fmt, x)
        wire.accumulate(fmt, payload, merged, 2.0**-40)
        return bits(payload, wire.residual(fmt, x, payload, torch.zeros(256)), merged)

    expected = denormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert denormals() == expected
    finally:
        torch.set_flush_denormal(False)


def sumsq_in_order(x: npt.NDArray[np.float32], block_size: int) -> float:
    """As the documentation says: 16 interleaved sums a block, a tree, block after block."""
    total = 0.0
    for at in range(0, len(x), block_size):
        lanes = np.zeros(16)
        block = x[at : at + block_size].astype(np.float64)
        for row in range(0, len(block), 16):
            part = block[row : row + 16]
            lanes[: len(part)] += part * part
        for half in (8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half : 2 * half]
        total += lanes[0]
    return total


@pytest.mark.parametrize("block_size", [64, 256, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_segment_sumsq(kind: str, block_size: int) -> None:
    layout = layout_of(*SIZES, block_size=block_size)
    x = inputs(kind, padded_to_groups(layout))[: layout.total].contiguous()
    inside = torch.zeros(layout.total, dtype=torch.bool)
    for view in layout.views(inside):
        view.fill_(True)
    x[~inside] = math.nan
    found = wire.segment_sumsq(x, layout.table)
    assert found.dtype == torch.float64 and tuple(found.shape) == (len(SIZES),)
    for part, sumsq in zip(parts_of(layout.table), found.tolist(), strict=True):
        numbers = x[part].numpy()
        assert sumsq == sumsq_in_order(numbers, block_size)
        exact = math.fsum(float(a) ** 2 for a in numbers)  # squares of fp32 are exact in float64
        assert abs(sumsq - exact) <= len(numbers) * U64 * exact
        assert math.isfinite(sumsq)


def test_sumsq_shows_what_is_not_finite_where_it_is() -> None:
    layout = layout_of(300, 300, 300)
    for poison in (math.nan, math.inf, -math.inf):
        x = torch.ones(layout.total)
        x[layout.offsets[1] + 299] = poison
        assert torch.isfinite(wire.segment_sumsq(x, layout.table)).tolist() == [True, False, True]


@pytest.mark.parametrize("block_size", [64, 256, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_accumulate_segments(name: str, block_size: int) -> None:
    """Chunk by chunk, chunks that cut segments, against each segment alone; padding is left alone."""
    fmt, layout = WireFormat.of(name), layout_of(*SIZES, block_size=block_size)
    n, table = padded_to_groups(layout), layout.table
    x, before = inputs("heavy", n), inputs("gauss", n).flip(0)
    coefficients = torch.linspace(-1, 2, len(SIZES), dtype=torch.float64)
    decoded, expected = round_trip(name, x), before.clone()
    for part, c in zip(parts_of(table), coefficients.tolist(), strict=True):
        own = before[part].clone()
        assert native.accumulate(own, decoded[part].clone(), c)
        expected[part] = own
    for chunk in (256, 512, 33_024, n):
        for weights in (coefficients, coefficients.float()):
            merged = before.clone()
            for start in range(0, n, chunk):
                payload = payload_of(fmt, x[start : start + chunk])
                view = merged[start : start + chunk]
                assert wire.accumulate_segments(fmt, payload, view, start, table, weights)
            assert bits(merged) == bits(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_accumulate_segments_tells_what_a_step_can_take(name: str) -> None:
    fmt, layout = WireFormat.of(name), layout_of(1, 300, 40_000)
    n, table, ones = layout.total, layout.table, torch.ones(3)
    for where in (0, 256, 555, 768, 40_767):
        for value, fits in ((2.0**63, True), (2.0**64, False)):
            x = torch.zeros(n)
            x[where] = value
            found = wire.accumulate_segments(fmt, payload_of(fmt, x), torch.zeros(n), 0, table, ones)
            assert found is fits, (where, value)
    # Padding is not looked at, nor is what no segment covers.
    merged = torch.zeros(n)
    merged[1], merged[600] = math.nan, math.inf
    zeros = payload_of(fmt, torch.zeros(n))
    assert wire.accumulate_segments(fmt, zeros, merged, 0, table, ones)
    beyond = payload_of(fmt, torch.ones(512))
    merged = torch.zeros(512)
    assert wire.accumulate_segments(fmt, beyond, merged, n, table, ones)
    assert not bool(merged.any())


def test_scale_segments() -> None:
    layout = layout_of(*SIZES)
    x = inputs("heavy", layout.total)
    factors = torch.linspace(-1, 2, len(SIZES), dtype=torch.float64)
    expected = x.clone()
    for part, factor in zip(parts_of(layout.table), factors.float(), strict=True):
        expected[part] *= factor
    for given in (factors, factors.float()):
        found = x.clone()
        assert wire.scale_segments(found, layout.table, given)
        assert bits(found) == bits(expected)
    too_large = torch.ones(layout.total)
    factors = torch.ones(len(SIZES))
    factors[7] = 2.0**63
    assert wire.scale_segments(too_large, layout.table, factors)
    too_large[layout.offsets[7]] = 2.5
    assert not wire.scale_segments(too_large, layout.table, factors)


def test_an_empty_table_has_nothing_to_do() -> None:
    table = layout_of().table
    none, fmt = torch.zeros(0), WireFormat.of("int8")
    assert tuple(wire.segment_sumsq(none, table).shape) == (0,)
    assert wire.scale_segments(none, table, none)
    merged = torch.zeros(256)
    payload = payload_of(fmt, torch.ones(256))
    assert wire.accumulate_segments(fmt, payload, merged, 0, table, none) and not bool(merged.any())
