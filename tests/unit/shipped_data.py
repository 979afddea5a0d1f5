"""The files that the shipped configs name, in small: a run is refused where they are not."""

from __future__ import annotations

import struct
from pathlib import Path

TOKENS = 20_000  # a few samples of the longest sequence among the configs, 4096


def lay_data(folder: Path) -> None:
    """``data/`` in ``folder``: two pairs of one sequence of uint16 tokens, and files of a tokenizer."""
    (folder / "data" / "tokenizer").mkdir(parents=True)
    (folder / "data" / "tokenizer" / "tokenizer.json").write_text("{}")
    for name in ("broad_text_document", "high_quality_text_document"):
        # magic, version, code of uint16, one sequence, two boundaries; its length, its offset, the boundaries
        index = struct.pack("<9sQBQQiqqq", b"MMIDIDX\x00\x00", 1, 8, 1, 2, TOKENS, 0, 0, 1)
        (folder / "data" / f"{name}.idx").write_bytes(index)
        (folder / "data" / f"{name}.bin").write_bytes(b"\0" * (2 * TOKENS))
