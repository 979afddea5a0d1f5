"""Segment tables and thread counts as the extensions take them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.extension import extension
from megatron_wsd.optim.layout import SegmentTable


def thread_count(threads: int | None) -> int:
    """The threads to use: torch's by default.

    Raises:
        NativeError: not from 1 to 4096.
    """
    if threads is None:
        return torch.get_num_threads()
    if not 1 <= threads <= 4096:
        raise NativeError("threads", "a count from 1 to 4096", threads)
    return threads


def cpu_segments(t: SegmentTable) -> Any:
    """The table, checked and copied by the CPU extension.

    Raises:
        NativeError: no table that `FlatLayout` could have made.
    """
    try:
        return extension().Segments(t.offset, t.numel, t.key, t.element0, t.block_size)
    except (ValueError, TypeError) as error:
        raise NativeError("table", "segments that FlatLayout could have made", str(error)) from error
