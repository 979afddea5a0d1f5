"""Digests of flat states: 64 bits in which every bit of the true elements and its position count.

A step can hand out the digest of what it wrote, from the pass that wrote it; `digest_flat` gives the same
from memory. Both are sums over blocks, so the parts of a state add up, in any order.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch

from megatron_wsd.optim.backend import Column, backend_of
from megatron_wsd.optim.layout import SegmentTable

MASK = 2**64 - 1


@dataclass
class DigestSum:
    """Collects the digests of parts of a state.

    Attributes:
        part: name of the part that is added next; equal columns of different parts count differently.
        total: the sum so far, modulo 2^64.
    """

    part: str = ""
    total: int = 0

    def add(self, value: int) -> None:
        """Take in the sum of a part."""
        self.total = (self.total + value) & MASK


@functools.cache
def column_salt(part: str, name: str) -> int:
    """What tells this column from all others: the first 8 bytes of blake2b of its names."""
    return int.from_bytes(hashlib.blake2b(f"{part}/{name}".encode(), digest_size=8).digest(), "little")


def columns_of(part: str, tensors: dict[str, torch.Tensor]) -> list[Column]:
    """The columns of a flat state; a tensor named `..._scale` has one entry a block."""
    return [
        (t.data_ptr(), t.element_size(), name.endswith("_scale"), column_salt(part, name))
        for name, t in tensors.items()
    ]


def digest_flat(table: SegmentTable, tensors: dict[str, torch.Tensor], digest: DigestSum) -> None:
    """Add to `digest` what a step that wrote `tensors` would add.

    Padding does not count, whatever is in it.

    Args:
        table: where the segments lie.
        tensors: contiguous, on one device, flat as `table` says; those named `..._scale` have one fp32 a
            block.
        digest: changed.

    Raises:
        NativeError: a buffer has the wrong device, layout or size.
    """
    backend = backend_of(next(iter(tensors.values())), table)
    check = backend.check()
    for name, t in tensors.items():
        if name.endswith("_scale"):
            check.blocks(name, t)
        else:
            check.flat(name, t, None)
    digest.add(backend.digest_flat(columns_of(digest.part, tensors)))


def digest(tensor: torch.Tensor, salt: int = 0) -> int:
    """A 64-bit digest of the bytes of a tensor, in which every bit and its position count.

    Args:
        tensor: contiguous, any dtype, on the CPU or a CUDA device.
        salt: another salt, another digest; 0 to 2^64 - 1.
    """
    backend = backend_of(tensor)
    address = backend.check().buffer("tensor", tensor, None)
    return backend.digest(address, tensor.numel() * tensor.element_size(), salt)
