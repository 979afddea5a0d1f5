"""What must hold of a tensor before its address goes to the kernels. Pure."""

from __future__ import annotations

from typing import Any

import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.steps import CodedState

_CPU = torch.device("cpu")


class BufferCheck:
    """Collects the buffers of one call; hands out an address for each that is fit to cross.

    Args:
        table: the segments that flat buffers are laid out by; None where there are none.
        device: where every buffer must be.
        alignment: bytes, of a multiple of which every buffer must begin.

    Raises (all methods):
        NativeError: device, dtype, layout, size or aliasing is wrong; names the buffer.
    """

    def __init__(
        self, table: SegmentTable | None = None, device: torch.device = _CPU, alignment: int = 1
    ) -> None:
        self._table = table
        self._device = device
        self._alignment = alignment
        self._ranges: list[tuple[int, int, str, bool]] = []

    def buffer(
        self,
        name: str,
        t: Any,
        dtype: torch.dtype | None,
        *,
        written: bool = False,
        alignment: int | None = None,
    ) -> int:
        """Any contiguous tensor on the device; of any dtype if `dtype` is None."""
        if not isinstance(t, torch.Tensor):
            raise NativeError(name, "a torch tensor", type(t).__name__)
        if t.device != self._device:
            place = "the CPU" if self._device.type == "cpu" else str(self._device)
            remedy = f"Move it with .to({str(self._device)!r}) first."
            raise NativeError(name, f"a tensor on {place}", str(t.device), remedy)
        if t.layout != torch.strided:
            raise NativeError(name, "a dense tensor", str(t.layout), "Convert it with .to_dense().")
        if dtype is not None and t.dtype != dtype:
            raise NativeError(name, f"dtype {dtype}", str(t.dtype), f"Convert it with .to({dtype}).")
        if not t.is_contiguous():
            raise NativeError(name, "a contiguous tensor", f"strides {t.stride()}", "Use .contiguous().")
        start = t.data_ptr()
        size = t.numel() * t.element_size()
        if size and start == 0:
            raise NativeError(name, "a tensor with memory behind it", "one without storage")
        alignment = alignment or self._alignment
        if start % alignment:
            raise NativeError(name, f"memory that begins at a multiple of {alignment} bytes", "a view")
        self._ranges.append((start, start + size, name, written))
        return start

    def flat(self, name: str, t: Any, dtype: torch.dtype | None, *, written: bool = False) -> int:
        """A buffer with one entry an element of the table; the padding after the last may be missing."""
        assert self._table is not None
        address = self.buffer(name, t, dtype, written=written)
        fitting = {self._table.padded, self._table.end}
        if t.numel() not in fitting:
            expected = " or ".join(str(n) for n in sorted(fitting, reverse=True))
            raise NativeError(name, f"{expected} elements, as the segments need", str(t.numel()))
        return address

    def anchor(self, t: Any) -> int:
        """A flat buffer of fp32 or bf16 that is written."""
        dtype = torch.bfloat16 if getattr(t, "dtype", None) == torch.bfloat16 else torch.float32
        return self.flat("anchor", t, dtype, written=True)

    def blocks(self, name: str, t: Any, *, written: bool = False) -> int:
        """fp32, one entry a block of the table."""
        assert self._table is not None
        address = self.buffer(name, t, torch.float32, written=written)
        if t.numel() != self._table.num_blocks:
            raise NativeError(name, f"{self._table.num_blocks} scales, one a block", str(t.numel()))
        return address

    def state(self, state: CodedState, *, written: bool) -> tuple[int, int, int, int]:
        """Codes and scales that fit the table."""
        a, b, *scales = state.tensors().items()
        addresses = [
            self.flat(name, t, dtype, written=written)
            for (name, t), dtype in zip((a, b), state.CODES, strict=True)
        ]
        addresses += [self.blocks(name, t, written=written) for name, t in scales]
        return addresses[0], addresses[1], addresses[2], addresses[3]

    def aliasing(self) -> None:
        """Refuse a written buffer that shares memory with any other."""
        for i, (start, end, name, written) in enumerate(self._ranges):
            for other_start, other_end, other, other_written in self._ranges[:i]:
                if (written or other_written) and start < other_end and other_start < end:
                    raise NativeError(name, f"memory of its own, apart from {other}", "overlapping buffers")
