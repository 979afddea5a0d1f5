"""Where kernels run: the CPU extension with threads, or the CUDA extension with a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.buffers import BufferCheck
from megatron_wsd.optim.extension import cuda_extension, extension
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.segments import cpu_segments, thread_count
from megatron_wsd.optim.steps import CodedState, State8

CUDA_BLOCK = 256  # a warp of 32 takes a block, 8 elements a lane
Column: TypeAlias = tuple[int, int, bool, int]  # address, bytes an entry, one entry a block, salt


class Backend(Protocol):
    """What the way to a kernel needs of the device that it runs on.

    Attributes:
        device: of all buffers.
        module: the extension; its functions have the same names and arguments everywhere, but for the last.
        segments: the table as the extension takes it; None without one.
        on_gpu: the kernels are those of CUDA.
    """

    device: torch.device
    module: Any
    segments: Any
    on_gpu: bool

    def check(self) -> BufferCheck:
        """A check of the buffers of one call."""

    def codec(self, state: CodedState) -> int:
        """The number of the codec of `state`."""

    def gradient_ok(self, grad: int) -> bool:
        """Whether a step can take the gradient at this address."""

    def step_call(self, anchor: int, bf16: bool, grad: int, copy: int, columns: list[Column]) -> Any:
        """The buffers that all steps have, as the extension takes them."""

    def digest_of(self, returned: Any) -> int:
        """The digest of the step that was launched last and returned `returned`."""

    def digest_flat(self, columns: list[Column]) -> int:
        """The digest of these columns."""

    def digest(self, address: int, nbytes: int, salt: int) -> int:
        """The digest of a plain array."""

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        """Call a function of `module`."""

    def fits(self, kernel: Callable[..., Any], *args: Any) -> bool:
        """Call one, and tell whether a step can take what it wrote."""

    def place(self, numbers: torch.Tensor) -> torch.Tensor:
        """A small tensor of the CPU, where kernels can read it."""

    def segment_sumsq(self, x: int, count: int) -> torch.Tensor:
        """Sums of squares of the flat buffer at this address: float64 [count], on the CPU."""


class CpuBackend:
    """The CPU extension.

    Raises:
        NativeError: the extension is not built, or the table or the thread count is wrong.
    """

    on_gpu = False

    def __init__(self, table: SegmentTable | None, threads: int | None) -> None:
        self.device = torch.device("cpu")
        self.module = extension()
        self.segments = None if table is None else cpu_segments(table)
        self._table, self._threads = table, thread_count(threads)

    def check(self) -> BufferCheck:
        return BufferCheck(self._table)

    def codec(self, state: CodedState) -> int:
        return state.CODEC

    def gradient_ok(self, grad: int) -> bool:
        return bool(self.module.gradient_ok(self.segments, grad, self._threads))

    def step_call(self, anchor: int, bf16: bool, grad: int, copy: int, columns: list[Column]) -> Any:
        return self.module.StepCall(
            anchor=anchor, bf16=bf16, grad=grad, copy=copy, columns=columns, threads=self._threads
        )

    def digest_of(self, returned: Any) -> int:
        return int(returned)

    def digest_flat(self, columns: list[Column]) -> int:
        return int(self.module.digest_flat(self.segments, columns, self._threads))

    def digest(self, address: int, nbytes: int, salt: int) -> int:
        return int(self.module.digest64(address, nbytes, salt, self._threads))

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        kernel(*args, self._threads)

    def fits(self, kernel: Callable[..., Any], *args: Any) -> bool:
        return bool(kernel(*args, self._threads))

    def place(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def segment_sumsq(self, x: int, count: int) -> torch.Tensor:
        sums = torch.zeros(count, dtype=torch.float64)
        self.module.segment_sumsq(self.segments, x, sums.data_ptr(), self._threads)
        return sums


class CudaBackend:
    """The CUDA extension, on torch's current stream of the device.

    A kernel is launched and not waited for, unless its caller is told something of what it did.

    Raises:
        NativeError: the extension is not there, or the table cannot be used on a device.
    """

    on_gpu = True

    def __init__(self, table: SegmentTable | None, device: torch.device) -> None:
        self.device = device
        self.module = cuda_extension()
        self._table = table
        self._index = device.index or 0
        self.segments = None if table is None else self._uploaded(table)
        self._stream = torch.cuda.current_stream(device).cuda_stream
        self._result = torch.zeros(1, dtype=torch.int64, device=device)

    def check(self) -> BufferCheck:
        return BufferCheck(self._table, self.device, 16)  # a warp reads 16 bytes a lane

    def _uploaded(self, table: SegmentTable) -> Any:
        if table.block_size != CUDA_BLOCK:
            raise NativeError("block_size", f"{CUDA_BLOCK} on a CUDA device", table.block_size)
        if self.device not in table.on_devices:
            # Of two threads that come here at once the first one's copy stays: nobody reads one that goes.
            table.on_devices.setdefault(self.device, self._upload(table))
        return table.on_devices[self.device][0]

    def _upload(self, table: SegmentTable) -> tuple[Any, list[torch.Tensor]]:
        # The CPU extension checks the table, leaves empty segments out, and counts its blocks.
        columns = [torch.tensor(column, dtype=torch.int64) for column in cpu_segments(table).columns()]
        # From memory that is not pinned: these copies are waited for, so every stream may read them.
        copies = [column.to(self.device) for column in columns]
        blocks = int(columns[-1][-1])
        segments = self.module.Segments(
            device=self._index,
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
        return self.fits(self.module.gradient_flaws, self.segments, grad)

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

    def digest_of(self, returned: Any) -> int:
        return int(self._result.item()) % 2**64

    def digest_flat(self, columns: list[Column]) -> int:
        self._result.zero_()
        self.run(self.module.digest_flat, self.segments, columns, self._result.data_ptr())
        return self.digest_of(None)

    def digest(self, address: int, nbytes: int, salt: int) -> int:
        self._result.zero_()
        self.run(self.module.digest64, address, nbytes, salt, self._result.data_ptr())
        return int(self.module.digest_finish(self.digest_of(None), nbytes, salt))

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        kernel(*args, self._index, self._stream)

    def fits(self, kernel: Callable[..., Any], *args: Any) -> bool:
        self.run(kernel, *args, self._result.data_ptr())
        return int(self._result.item()) == 0

    def place(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self.device)

    def segment_sumsq(self, x: int, count: int) -> torch.Tensor:
        assert self._table is not None
        sums, blocks = (
            torch.zeros(n, dtype=torch.float64, device=self.device) for n in (count, self._table.num_blocks)
        )
        self.run(self.module.segment_sumsq, self.segments, x, sums.data_ptr(), blocks.data_ptr())
        return sums.cpu()


def is_cuda(tensor: Any) -> bool:
    """Whether this is a tensor on a CUDA device."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


def backend_of(tensor: Any, table: SegmentTable | None = None, threads: int | None = None) -> Backend:
    """The backend for the device of `tensor`; the CPU's for what is no CUDA tensor, which its checks refuse.

    Args:
        tensor: one of the buffers of a call.
        table: where the segments lie, for a call that has some.
        threads: of the CPU; by default torch's.

    Raises:
        NativeError: the extension for it is not there, or the table or the thread count is wrong.
    """
    if is_cuda(tensor):
        return CudaBackend(table, tensor.device)
    return CpuBackend(table, threads)
