"""How many bytes a step must move for one parameter. Pure."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 256
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes between memory and processor for one parameter, if every operand crosses once each way.

    A contender that makes several passes over its operands moves more, and gets no credit for it: GB/s and
    the fraction of the floor are of the bytes that the step *must* move.

    Attributes:
        key: names the floor with the same mix of streams.
        read: bytes read.
        written: bytes written. All of them are to lines that were just read, so that no other line has to be
            fetched in order to be overwritten.
        reason: what is counted.
    """

    key: str
    read: float
    written: float
    reason: str

    @property
    def total(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


def adam8(block_size: int = BLOCK_SIZE) -> Traffic:
    """AdamW with fp32 parameter and gradient, and two 8-bit moments with one fp32 scale a block each."""
    state = 2 * 1 + 2 * FLOAT_BYTES / block_size
    codes = f"two codes 2, two scales 8/{block_size}"
    return Traffic(
        key="adam8",
        read=2 * FLOAT_BYTES + state,
        written=FLOAT_BYTES + state,
        reason=f"read p 4, g 4, {codes}; write p 4, {codes}",
    )


def adam32() -> Traffic:
    """AdamW with fp32 parameter, gradient and moments."""
    return Traffic(
        key="adam32",
        read=4 * FLOAT_BYTES,
        written=3 * FLOAT_BYTES,
        reason="read p 4, g 4, m 4, v 4; write p 4, m 4, v 4",
    )
