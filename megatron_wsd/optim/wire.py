"""How a contribution is encoded for the network, and what is done with it segment by segment.

A flat buffer travels in chunks: runs of elements, each a multiple of 256. A payload is one encoded chunk,
its codes and then its scales, in one uint8 tensor, and so one message. docs/wire.md has the formats.

Everything here runs where its tensors lie, on the CPU or on a CUDA device (on torch's current stream, and
with blocks of 256), changes only what it says, and gives the same bits for every device, instruction set and
thread count. Rounding is to nearest and never random: what a payload leaves out is `residual`, which the
sender adds to its next contribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_wsd.errors import FieldError, NativeError
from megatron_wsd.optim.backend import Backend, backend_of
from megatron_wsd.optim.buffers import BufferCheck
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.steps import check_number

GROUP = 256  # elements; chunks are multiples of it

# Name -> number in the extension, bytes a group. `int4` is the kind that measured better: see docs/wire.md.
_KINDS = {
    "fp32": (0, 4 * GROUP),
    "bf16": (1, 2 * GROUP),
    "int8": (2, GROUP + 4),  # one fp32 scale for 256 codes
    "int4_linear": (3, GROUP // 2 + 4 * 4),  # one for 64
    "int4_e3m0": (4, GROUP // 2 + 4 * 4),
}
_KINDS["int4"] = _KINDS["int4_linear"]


@dataclass(frozen=True)
class WireFormat:
    """One of the formats; get it with `of`.

    Attributes:
        name: as the config names it.
        number: of the format in the extension.
        group_bytes: codes and scales of 256 elements.
    """

    name: str
    number: int
    group_bytes: int

    @classmethod
    def of(cls, name: str) -> WireFormat:
        """The format of this name: fp32, bf16, int8, int4, or a kind of the last: int4_linear, int4_e3m0.

        Raises:
            FieldError: there is none.
        """
        if name not in _KINDS:
            raise FieldError("wire", f"one of {', '.join(_KINDS)}", name)
        return cls(name, *_KINDS[name])

    @property
    def exact(self) -> bool:
        """Whether decoding gives the very same bits, so that a residual is always 0."""
        return self.name == "fp32"

    def encoded_bytes(self, numel: int) -> int:
        """Bytes of the payload of a chunk.

        Raises:
            FieldError: `numel` is no multiple of 256, or negative.
        """
        return _groups("numel", numel) * self.group_bytes

    def chunk_elements(self, bucket_bytes: int) -> int:
        """The most elements whose payload fits in `bucket_bytes`, a multiple of 256; never less than 256."""
        return max(1, bucket_bytes // self.group_bytes) * GROUP


def encode(
    fmt: WireFormat, source: torch.Tensor, out: torch.Tensor, threads: int | None = None
) -> torch.Tensor:
    """Write the payload of a chunk.

    Args:
        fmt: the format.
        source: fp32 [n], n a multiple of 256; finite. NaN and Inf give some payload, and no error.
        out: uint8 [fmt.encoded_bytes(n)]; overwritten.
        threads: by default torch's.

    Returns:
        `out`.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or they overlap.
    """
    b = backend_of(source, threads=threads)
    check = b.check()
    x = check.buffer("source", source, torch.float32)
    payload = _payload(b, check, fmt, "out", out, source.numel(), written=True)
    check.aliasing()
    b.run(b.module.wire_encode, fmt.number, x, source.numel() // GROUP, payload)
    return out


def decode(
    fmt: WireFormat, payload: torch.Tensor, out: torch.Tensor, threads: int | None = None
) -> torch.Tensor:
    """Write what a payload stands for.

    Args:
        fmt: the format that it was encoded in.
        payload: uint8 [fmt.encoded_bytes(n)].
        out: fp32 [n], n a multiple of 256; overwritten.
        threads: by default torch's.

    Returns:
        `out`.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or they overlap.
    """
    b = backend_of(out, threads=threads)
    check = b.check()
    address = check.buffer("out", out, torch.float32, written=True)
    source = _payload(b, check, fmt, "payload", payload, out.numel())
    check.aliasing()
    b.run(b.module.wire_decode, fmt.number, source, out.numel() // GROUP, address)
    return out


def accumulate(
    fmt: WireFormat,
    payload: torch.Tensor,
    merged: torch.Tensor,
    coefficient: float,
    threads: int | None = None,
) -> bool:
    """merged += coefficient * decode(payload), with the bits of `decode` and then `native.accumulate`.

    Args:
        fmt: the format that it was encoded in.
        payload: uint8 [fmt.encoded_bytes(n)].
        merged: fp32 [n], n a multiple of 256; changed.
        coefficient: rounded to fp32 first; finite.
        threads: by default torch's.

    Returns:
        Whether all that was written is finite and at most 2^63 in magnitude, as a step wants it.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or they overlap.
    """
    b = backend_of(merged, threads=threads)
    check = b.check()
    out = check.buffer("merged", merged, torch.float32, written=True)
    source = _payload(b, check, fmt, "payload", payload, merged.numel())
    check.aliasing()
    check_number("coefficient", coefficient, -3.4e38, 3.4e38)
    return b.fits(b.module.wire_accumulate, fmt.number, source, merged.numel() // GROUP, out, coefficient)


def residual(
    fmt: WireFormat,
    source: torch.Tensor,
    payload: torch.Tensor,
    out: torch.Tensor,
    threads: int | None = None,
) -> torch.Tensor:
    """out = source - decode(payload) in fp32: what error feedback adds to the next contribution.

    Args:
        fmt: the format of the payload.
        source: fp32 [n], n a multiple of 256, as it was encoded.
        payload: uint8 [fmt.encoded_bytes(n)].
        out: fp32 [n]; overwritten. May be `source` itself.
        threads: by default torch's.

    Returns:
        `out`.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or they overlap in part.
    """
    b = backend_of(out, threads=threads)
    check = b.check()
    address = check.buffer("out", out, torch.float32, written=True)
    same = isinstance(source, torch.Tensor) and source.data_ptr() == address
    x = (b.check() if same else check).buffer("source", source, torch.float32)
    if source.numel() != out.numel():
        raise NativeError("source", f"{out.numel()} elements, as out has", str(source.numel()))
    coded = _payload(b, check, fmt, "payload", payload, out.numel())
    check.aliasing()
    b.run(b.module.wire_residual, fmt.number, coded, out.numel() // GROUP, x, address)
    return out


def segment_sumsq(flat: torch.Tensor, table: SegmentTable, threads: int | None = None) -> torch.Tensor:
    """The sum of squares of every segment, in float64.

    Each block is summed in 16 interleaved sums that are added in a fixed tree, then block after block.
    Padding does not count. A NaN or Inf gives a sum that is not finite.

    Args:
        flat: fp32, flat as `table` says.
        table: where the segments lie.
        threads: by default torch's.

    Returns:
        float64 [segments] on the CPU, in the order of the table; 0 where a segment is empty.

    Raises:
        NativeError: the buffer has the wrong device, dtype, layout or size.
    """
    b = backend_of(flat, table, threads)
    x = b.check().flat("flat", flat, torch.float32)
    full = _full(table)
    sums = torch.zeros(len(table.numel), dtype=torch.float64)
    sums[full] = b.segment_sumsq(x, len(full))
    return sums


def accumulate_segments(
    fmt: WireFormat,
    payload: torch.Tensor,
    merged: torch.Tensor,
    start: int,
    table: SegmentTable,
    coefficients: torch.Tensor,
    threads: int | None = None,
) -> bool:
    """merged += coefficient of the segment * decode(payload); as `accumulate`, but padding stays as it is.

    Args:
        fmt: the format of the payload.
        payload: uint8 [fmt.encoded_bytes(n)].
        merged: fp32 [n], n a multiple of 256: the part of the flat buffer from `start` on; changed.
        start: element of the flat buffer at which the chunk begins; on a CUDA device a multiple of 256. It
            may cut segments.
        table: where the segments lie in the flat buffer.
        coefficients: [segments] on the CPU, fp32 or float64 (rounded to fp32); finite.
        threads: by default torch's.

    Returns:
        Whether all that was written is finite and at most 2^63 in magnitude.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, they overlap, or a coefficient is
            not finite.
    """
    b = backend_of(merged, table, threads)
    check = b.check()
    out = check.buffer("merged", merged, torch.float32, written=True)
    source = _payload(b, check, fmt, "payload", payload, merged.numel())
    check.aliasing()
    if start < 0 or (b.on_gpu and start % GROUP):
        raise NativeError("start", f"an element from 0, on a CUDA device a multiple of {GROUP}", start)
    weights = b.place(_per_segment("coefficients", coefficients, table))
    groups = merged.numel() // GROUP
    kernel = b.module.wire_accumulate_segments
    return b.fits(kernel, fmt.number, b.segments, source, groups, start, out, weights.data_ptr())


def scale_segments(
    flat: torch.Tensor, table: SegmentTable, factors: torch.Tensor, threads: int | None = None
) -> bool:
    """Multiply every segment by its factor, in fp32, in place; padding stays as it is.

    Args:
        flat: fp32, flat as `table` says; changed.
        table: where the segments lie.
        factors: [segments] on the CPU, fp32 or float64 (rounded to fp32); finite.
        threads: by default torch's.

    Returns:
        Whether all that was written is finite and at most 2^63 in magnitude, as a step wants it.

    Raises:
        NativeError: the buffer has the wrong device, dtype, layout or size, or a factor is not finite.
    """
    b = backend_of(flat, table, threads)
    x = b.check().flat("flat", flat, torch.float32, written=True)
    weights = b.place(_per_segment("factors", factors, table))
    return b.fits(b.module.scale_segments, b.segments, x, weights.data_ptr())


def _groups(name: str, numel: int) -> int:
    if numel < 0 or numel % GROUP:
        raise NativeError(name, f"a multiple of {GROUP} elements", str(numel), "Pad it with zeros.")
    return numel // GROUP


def _payload(
    backend: Backend,
    check: BufferCheck,
    fmt: WireFormat,
    name: str,
    t: torch.Tensor,
    numel: int,
    *,
    written: bool = False,
) -> int:
    # A lane of a warp takes four elements at once; where there are scales, chunks begin at words.
    alignment = {"fp32": 16, "bf16": 8}.get(fmt.name, 4) if backend.on_gpu else 4
    address = check.buffer(name, t, torch.uint8, written=written, alignment=alignment)
    expected = _groups("chunk", numel) * fmt.group_bytes
    if t.numel() != expected:
        raise NativeError(name, f"{expected} bytes, as {numel} elements in {fmt.name} need", str(t.numel()))
    return address


def _full(table: SegmentTable) -> torch.Tensor:
    """Rows of the segments that are not empty: the extension knows no others."""
    return torch.from_numpy(np.flatnonzero(table.numel))


def _per_segment(name: str, t: torch.Tensor, table: SegmentTable) -> torch.Tensor:
    """fp32, one number for every segment that is not empty."""
    if t.dtype not in (torch.float32, torch.float64) or tuple(t.shape) != (len(table.numel),):
        expected = f"fp32 or float64 [{len(table.numel)}], one a segment"
        raise NativeError(name, expected, f"{t.dtype} {list(t.shape)}")
    found = t.to(torch.float32)
    if not bool(torch.isfinite(found).all()):
        raise NativeError(name, "finite numbers within the range of fp32", str(t.tolist()))
    return found[_full(table)]
