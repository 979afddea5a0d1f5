"""Where a step runs: the CPU extension with threads, or the CUDA extension with a stream."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.digests import Column
from megatron_wsd.optim.extension import cuda_extension, extension
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.segments import cpu_segments, thread_count
from megatron_wsd.optim.steps import CodedState, State8

CUDA_BLOCK = 256  # a warp of 32 takes a block, 8 elements a lane


class Backend(Protocol):
    """What a step needs of the device that it runs on.

    Attributes:
        device: of all buffers.
        module: the extension.
        segments: the table as the extension takes it.
    """

    device: torch.device
    module: Any
    segments: Any

    def codec(self, state: CodedState) -> int:
        """The number of the codec of `state`."""

    def gradient_ok(self, grad: int) -> bool:
        """Whether a step can take the gradient at this address."""

    def step_call(self, anchor: int, bf16: bool, grad: int, copy: int, columns: list[Column]) -> Any:
        """The buffers that all steps have, as the extension takes them."""

    def digest_of(self, call: Any, returned: Any) -> int:
        """The digest of a step that was launched with `call` and returned `returned`."""


class CpuBackend:
    """The CPU extension.

    Raises:
        NativeError: the extension is not built, or the table or the thread count is wrong.
    """

    def __init__(self, table: SegmentTable, threads: int | None) -> None:
        self.device = torch.device("cpu")
        self.module = extension()
        self.segments = cpu_segments(table)
        self._threads = thread_count(threads)

    def codec(self, state: CodedState) -> int:
        return state.CODEC

    def gradient_ok(self, grad: int) -> bool:
        return bool(self.module.gradient_ok(self.segments, grad, self._threads))

    def step_call(self, anchor: int, bf16: bool, grad: int, copy: int, columns: list[Column]) -> Any:
        return self.module.StepCall(
            anchor=anchor, bf16=bf16, grad=grad, copy=copy, columns=columns, threads=self._threads
        )

    def digest_of(self, call: Any, returned: Any) -> int:
        return int(returned)


class CudaBackend:
    """The CUDA extension, on torch's current stream of the device.

    Raises:
        NativeError: the extension is not there, or the table cannot be used on a device.
    """

    def __init__(self, table: SegmentTable, device: torch.device) -> None:
        self.device = device
        self.module = cuda_extension()
        if table.block_size != CUDA_BLOCK:
            raise NativeError("block_size", f"{CUDA_BLOCK} on a CUDA device", table.block_size)
        if device not in table.on_devices:
            table.on_devices[device] = self._upload(table)
        self.segments = table.on_devices[device][0]
        self._stream = torch.cuda.current_stream(device).cuda_stream
        self._result = torch.zeros(1, dtype=torch.int64, device=device)

    def _upload(self, table: SegmentTable) -> tuple[Any, list[torch.Tensor]]:
        # The CPU extension checks the table, leaves empty segments out, and counts its blocks.
        columns = [torch.tensor(column, dtype=torch.int64) for column in cpu_segments(table).columns()]
        copies = [column.to(self.device) for column in columns]
        blocks = int(columns[-1][-1])
        segments = self.module.Segments(
            device=self.device.index,
            num_blocks=blocks,
            columns=[c.data_ptr() for c in copies],
            count=columns[0].numel(),
        )
        return segments, copies

    def codec(self, state: CodedState) -> int:
        if not isinstance(state, State8):
            raise NativeError("state", "the ratio codec (State8) on a CUDA device", type(state).__name__)
        return state.CODEC

    def gradient_ok(self, grad: int) -> bool:
        self.module.gradient_flaws(self.segments, grad, self._result.data_ptr(), self._stream)
        return int(self._result.item()) == 0

    def step_call(self, anchor: int, bf16: bool, grad: int, copy: int, columns: list[Column]) -> Any:
        salts = [salt for *_, salt in columns]
        self._result.zero_()
        return self.module.StepCall(
            anchor=anchor,
            bf16=bf16,
            grad=grad,
            copy=copy,
            salts=salts,
            digest=self._result.data_ptr(),
            stream=self._stream,
        )

    def digest_of(self, call: Any, returned: Any) -> int:
        return int(self._result.item()) % 2**64


def backend_of(tensor: Any, table: SegmentTable, threads: int | None) -> Backend:
    """The backend for the device of `tensor`; the CPU's for what is no CUDA tensor, which its checks refuse.

    Raises:
        NativeError: the extension for it is not there, or the table or the thread count is wrong.
    """
    if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
        return CudaBackend(table, tensor.device)
    return CpuBackend(table, threads)
