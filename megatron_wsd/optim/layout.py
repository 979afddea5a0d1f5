"""The flat, block-aligned buffer in which the outer half keeps all parameter shards of a rank. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_wsd.errors import FieldError

if TYPE_CHECKING:
    import torch

BLOCK_SIZES = (64, 128, 256, 512, 1024)

_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe|output_layer|lm_head)(\.|$)", re.IGNORECASE)
_NORM = re.compile(r"norm|(^|\.)ln_?[0-9a-z]*(\.|$)", re.IGNORECASE)


def parameter_key(name: str) -> int:
    """A stable 64-bit identity of a parameter: the first 8 bytes of blake2b of its name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def wants_8bit(name: str, global_numel: int, shape: Sequence[int], min_numel: int = 4096) -> bool:
    """Whether the moments of a parameter are kept in 8 bits.

    Decided by name and *global* size alone, so that every rank, and every other way to shard, decides alike.
    Embeddings, output projections, norms, biases and all vectors stay in fp32.

    Args:
        name: dotted name of the parameter in the whole model.
        global_numel: its elements over all ranks.
        shape: its global shape.
        min_numel: smaller tensors stay in fp32; there is nothing to save.
    """
    if len(shape) < 2 or global_numel < min_numel or name.endswith("bias"):
        return False
    return not (is_embedding(name) or _NORM.search(name))


def is_embedding(name: str) -> bool:
    """Whether a parameter is an embedding or an output projection, by its name."""
    return _EMBEDDING.search(name) is not None


@dataclass(frozen=True)
class Segment:
    """One parameter's shard on this rank.

    Attributes:
        name: of the parameter in the whole model.
        key: `parameter_key` of it.
        numel: elements of the shard; may be 0.
        element0: index, within the flattened parameter, of the shard's first element.
        quantised: moments in 8 bits.
    """

    name: str
    key: int
    numel: int
    element0: int
    quantised: bool


@dataclass(frozen=True)
class SegmentTable:
    """Segments as the kernels take them: columns of one row per segment, ascending in `offset`.

    Attributes:
        offset: int64, element of the flat buffer at which the segment begins; a multiple of `block_size`.
        numel: int64, true elements.
        key: uint64, identity of the parameter.
        element0: int64, index of the segment's first element within the parameter.
        block_size: elements a block.
    """

    offset: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    element0: npt.NDArray[np.int64]
    block_size: int

    @classmethod
    def build(cls, segments: Sequence[Segment], block_size: int) -> SegmentTable:
        """Lay `segments` one after the other, each from a block boundary."""
        padded = [_padded(s.numel, block_size) for s in segments]
        offsets = np.cumsum([0, *padded], dtype=np.int64)[:-1]
        return cls(
            offset=np.ascontiguousarray(offsets),
            numel=np.array([s.numel for s in segments], dtype=np.int64),
            key=np.array([s.key for s in segments], dtype=np.uint64),
            element0=np.array([s.element0 for s in segments], dtype=np.int64),
            block_size=block_size,
        )

    @property
    def end(self) -> int:
        """One past the last true element."""
        return int((self.offset + self.numel).max(initial=0))

    @property
    def padded(self) -> int:
        """Elements of the flat buffer, padding included."""
        return _padded(self.end, self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the flat buffer; the length of a scale vector."""
        return self.padded // self.block_size

    @cached_property
    def on_devices(self) -> dict[Any, Any]:
        """Copies of this table that CUDA kernels read, by device; kept as long as the table."""
        return {}


class FlatLayout:
    """Where each shard lies in the flat buffer: first all quantised ones, then all fp32 ones.

    Args:
        segments: the shards of this rank, in the caller's order.
        block_size: elements that share a scale; one of `BLOCK_SIZES`.

    Attributes:
        segments: as given.
        offsets: first element of each, in the same order.
        total: elements of the flat buffer, padding included; a multiple of `block_size`.
        quantised_total: of these, in the quantised part, which comes first.
        table: all segments, offsets from the start of the buffer.
        table8: the quantised ones, offsets from the start.
        table32: the fp32 ones, offsets from `quantised_total`.

    Raises:
        FieldError: the block size is not supported, or a segment has a negative size.
    """

    def __init__(self, segments: Sequence[Segment], block_size: int = 256) -> None:
        check_block_size(block_size)
        for s in segments:
            if s.numel < 0 or s.element0 < 0:
                raise FieldError(f"segment {s.name!r}", "numel and element0 >= 0", (s.numel, s.element0))
        self.segments = tuple(segments)
        self.block_size = block_size
        # Stable: within each part the caller's order stays.
        self._order = sorted(range(len(segments)), key=lambda i: not self.segments[i].quantised)
        self.table = SegmentTable.build([self.segments[i] for i in self._order], block_size)
        self.table8 = SegmentTable.build([s for s in segments if s.quantised], block_size)
        self.table32 = SegmentTable.build([s for s in segments if not s.quantised], block_size)
        self.total = self.table.padded
        self.quantised_total = self.table8.padded

    @cached_property
    def ordered(self) -> tuple[Segment, ...]:
        """The segments as they lie in the buffer, which is the order of `table`."""
        return tuple(self.segments[i] for i in self._order)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each segment, in the order in which the segments were given."""
        found = [0] * len(self.segments)
        for place, i in enumerate(self._order):
            found[i] = int(self.table.offset[place])
        return tuple(found)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """1-D views into `flat` of each segment's true elements, in the order the segments were given.

        Args:
            flat: any dtype, [total].

        Raises:
            FieldError: `flat` has another shape.
        """
        if tuple(flat.shape) != (self.total,):
            raise FieldError("flat", f"shape [{self.total}]", tuple(flat.shape))
        return [flat[o : o + s.numel] for o, s in zip(self.offsets, self.segments, strict=True)]


def check_block_size(block_size: int) -> None:
    """Refuse a block size the kernels are not made for.

    Raises:
        FieldError: not one of `BLOCK_SIZES`.
    """
    if isinstance(block_size, bool) or block_size not in BLOCK_SIZES:
        raise FieldError("block_size", f"one of {', '.join(map(str, BLOCK_SIZES))}", block_size)


def _padded(numel: int, block_size: int) -> int:
    return -(-numel // block_size) * block_size
