"""The wire formats' sizes, and what the codec refuses before a pointer crosses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_wsd.errors import FieldError, NativeError
from megatron_wsd.optim import wire
from megatron_wsd.optim.extension import extension
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.wire import WireFormat

N = 1024
NAMES = ("fp32", "bf16", "int8", "int4_linear", "int4_e3m0", "int4")
TABLE = FlatLayout([Segment("a", 1, 300, 0, True), Segment("b", 2, 1, 0, True)]).table


def test_bytes() -> None:
    sizes = {name: WireFormat.of(name).encoded_bytes(N) for name in NAMES}
    assert sizes == {
        "fp32": 4096,
        "bf16": 2048,
        "int8": 1024 + 4 * 4,
        "int4_linear": 512 + 16 * 4,
        "int4_e3m0": 512 + 16 * 4,
        "int4": 512 + 16 * 4,
    }
    assert [WireFormat.of(name).encoded_bytes(0) for name in NAMES] == [0] * len(NAMES)


def test_the_extension_counts_the_same_bytes() -> None:
    groups = extension().wire_group_bytes()
    for name in NAMES:
        fmt = WireFormat.of(name)
        assert groups[fmt.number] == fmt.group_bytes
    assert len(groups) == len({WireFormat.of(name).number for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_the_largest_that_fit(name: str) -> None:
    fmt = WireFormat.of(name)
    for bucket_bytes in (1, 255, 1024, 1025, 5000, 64 << 20):
        n = fmt.chunk_elements(bucket_bytes)
        assert n % 256 == 0 and n >= 256
        assert fmt.encoded_bytes(n) <= bucket_bytes or n == 256
        assert fmt.encoded_bytes(n + 256) > bucket_bytes


def test_formats_compare_and_do_not_change() -> None:
    assert WireFormat.of("int8") == WireFormat.of("int8") != WireFormat.of("bf16")
    with pytest.raises(AttributeError):
        WireFormat.of("int8").name = "fp32"  # type: ignore[misc]
    assert [name for name in NAMES if WireFormat.of(name).exact] == ["fp32"]


@pytest.mark.parametrize("name", ["", "int2", "FP32", "fp16"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(FieldError, match="wire: expected one of fp32, bf16, int8, "):
        WireFormat.of(name)


@pytest.mark.parametrize("numel", [1, 255, 300, -256])
def test_refuses_sizes_that_are_not_whole_groups(numel: int) -> None:
    with pytest.raises(FieldError, match="a multiple of 256 elements"):
        WireFormat.of("int8").encoded_bytes(numel)


CALLS: dict[str, Callable[[WireFormat, torch.Tensor, Any], Any]] = {
    "encode": lambda fmt, x, p: wire.encode(fmt, x, p),
    "decode": lambda fmt, x, p: wire.decode(fmt, p, x),
    "accumulate": lambda fmt, x, p: wire.accumulate(fmt, p, x, 1.0),
    "residual": lambda fmt, x, p: wire.residual(fmt, x, p, torch.zeros(N)),
    "residual, out": lambda fmt, x, p: wire.residual(fmt, torch.zeros(N), p, x),
    "segments": lambda fmt, x, p: wire.accumulate_segments(fmt, p, x, 0, TABLE, torch.ones(2)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_refuses_bad_buffers(call: str, name: str) -> None:
    fmt = WireFormat.of(name)
    size = fmt.encoded_bytes(N)
    x, p = torch.zeros(N), torch.zeros(size, dtype=torch.uint8)
    run = CALLS[call]
    run(fmt, x, p)
    for bad in (
        p[:-1],
        p.repeat(2),
        p.repeat_interleave(2)[::2],
        p.to(torch.int8),
        p.to("meta"),
        p.numpy(),
        torch.zeros(size + 4, dtype=torch.uint8)[1 : size + 1],
    ):
        with pytest.raises(NativeError, match=r"(payload|out): expected"):
            run(fmt, x, bad)
    for bad in (x.double(), x.repeat(2)[::2], x.to("meta"), x[:-1], torch.zeros(2 * N)):
        with pytest.raises(NativeError, match=": expected"):
            run(fmt, bad, p)
    memory = torch.zeros(4 * N + 4 * N, dtype=torch.uint8)
    overlapping = memory[: 4 * N].view(torch.float32), memory[4 * N - 4 : 4 * N - 4 + size]
    if call == "residual":  # reads both
        run(fmt, *overlapping)
    else:
        with pytest.raises(NativeError, match="memory of its own"):
            run(fmt, *overlapping)


def test_residual_takes_the_source_or_memory_apart_from_it() -> None:
    fmt, memory = WireFormat.of("int8"), torch.zeros(N + 256)
    payload = wire.encode(fmt, memory[:N], torch.zeros(fmt.encoded_bytes(N), dtype=torch.uint8))
    wire.residual(fmt, memory[:N], payload, memory[:N])
    with pytest.raises(NativeError, match="memory of its own"):
        wire.residual(fmt, memory[:N], payload, memory[256:])
    with pytest.raises(NativeError, match="source: expected 1024 elements"):
        wire.residual(fmt, memory[: N - 256], payload, memory[:N])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_refuses_numbers_that_fp32_cannot_hold(value: float) -> None:
    fmt, x = WireFormat.of("int8"), torch.zeros(N)
    payload = torch.zeros(fmt.encoded_bytes(N), dtype=torch.uint8)
    weights = torch.tensor([1.0, value], dtype=torch.float64)
    with pytest.raises(NativeError, match="coefficient: expected"):
        wire.accumulate(fmt, payload, x, value)
    with pytest.raises(NativeError, match="coefficients: expected finite"):
        wire.accumulate_segments(fmt, payload, x, 0, TABLE, weights)
    with pytest.raises(NativeError, match="factors: expected finite"):
        wire.scale_segments(torch.zeros(TABLE.padded), TABLE, weights)


def test_refuses_what_does_not_fit_the_table() -> None:
    fmt, x = WireFormat.of("int8"), torch.zeros(N)
    payload = torch.zeros(fmt.encoded_bytes(N), dtype=torch.uint8)
    for weights in (torch.ones(1), torch.ones(2, 1), torch.ones(2, dtype=torch.int64), torch.ones(2).half()):
        with pytest.raises(NativeError, match=r"coefficients: expected fp32 or float64 \[2\]"):
            wire.accumulate_segments(fmt, payload, x, 0, TABLE, weights)
        with pytest.raises(NativeError, match=r"factors: expected fp32 or float64 \[2\]"):
            wire.scale_segments(torch.zeros(TABLE.padded), TABLE, weights)
    with pytest.raises(NativeError, match="start: expected"):
        wire.accumulate_segments(fmt, payload, x, -256, TABLE, torch.ones(2))
    for flat in (torch.zeros(TABLE.padded + 256), torch.zeros(300), torch.zeros(TABLE.padded).double()):
        with pytest.raises(NativeError, match="flat: expected"):
            wire.segment_sumsq(flat, TABLE)
        with pytest.raises(NativeError, match="flat: expected"):
            wire.scale_segments(flat, TABLE, torch.ones(2))


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_refuses_thread_counts(threads: int) -> None:
    fmt = WireFormat.of("fp32")
    with pytest.raises(NativeError, match="threads: expected a count"):
        wire.encode(fmt, torch.zeros(256), torch.zeros(1024, dtype=torch.uint8), threads)
