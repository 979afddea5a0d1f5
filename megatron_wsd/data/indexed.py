"""A Megatron .bin/.idx pair as one long stream of tokens."""

from __future__ import annotations

import hashlib
import struct
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np

from megatron_wsd.errors import DataError

# The .idx of Megatron-LM: magic, version (u64), dtype code (u8), number of sequences and of document
# boundaries (u64 each), then lengths (i32), byte offsets (i64) and boundaries (i64).
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_REBUILD = "The pair is torn or mixed up: copy both files again, or write them anew with prepare-data."
_CHUNK = 2**22  # elements looked at at a time: 32 MiB as int64


def megatron_indexed_dataset() -> ModuleType:
    """megatron-core's ``indexed_dataset``, imported when first needed (it imports torch; seconds).

    It needs no GPU. Its complaints about absent Transformer Engine and Apex have nothing to do with data.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def bin_path(prefix: str | Path) -> Path:
    """The file of tokens of ``prefix`` (which may have dots of its own)."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file of sequence lengths and offsets of ``prefix``."""
    return Path(f"{prefix}.idx")


def check_pair(spec: str | Path) -> Path:
    """The prefix that ``spec`` names, after a quick look at both files; reads a few bytes, no torch.

    Args:
        spec: path without ".bin" or ".idx"; either ending is tolerated.

    Raises:
        DataError: a file that is missing, empty, no Megatron index, cut short, or belonging to another
            partner; names the file, the sizes and the remedy.
    """
    text = str(Path(spec).expanduser())
    prefix = Path(text[: -len(".bin")] if text.endswith((".bin", ".idx")) else text)
    idx, data = idx_path(prefix), bin_path(prefix)
    missing = [path for path in (idx, data) if not path.is_file()]
    if missing:
        both = f", nor at {data}" if len(missing) > 1 else ""
        raise DataError(str(missing[0]), "a file", f"nothing there{both}", _missing_remedy(prefix))
    for path in (idx, data):
        if path.stat().st_size == 0:
            raise DataError(str(path), "a file with something in it", "0 bytes", _REBUILD)
    idx_bytes = idx.stat().st_size
    with idx.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[: len(_MAGIC)] != _MAGIC:
        got = f"{idx_bytes} bytes that begin with {head[: len(_MAGIC)]!r}"
        raise DataError(str(idx), f"a Megatron index, which begins with {_MAGIC!r}", got, _REBUILD)
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != 1 or code not in _TOKEN_DTYPES:
        raise DataError(
            str(idx),
            f"version 1 with token ids of a code in {sorted(_TOKEN_DTYPES)}",
            f"version {version} with code {code}",
            "Convert it with Megatron's own tools first.",
        )
    expected = _HEADER.size + (4 + 8) * sequences + 8 * boundaries
    # A multimodal index has one more byte a sequence; its tokens read the same.
    if sequences == 0 or idx_bytes not in (expected, expected + sequences):
        raise DataError(
            str(idx), f"{expected} bytes for its {sequences} sequences", f"{idx_bytes} bytes", _REBUILD
        )
    with idx.open("rb") as file:
        file.seek(_HEADER.size + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 4 * sequences + 8 * (sequences - 1))
        (offset,) = struct.unpack("<q", file.read(8))
    end = offset + length * np.dtype(_TOKEN_DTYPES[code]).itemsize
    if end != data.stat().st_size:
        expected_end = f"{end} bytes, as {idx.name} says"
        raise DataError(str(data), expected_end, f"{data.stat().st_size} bytes", _REBUILD)
    return prefix


def pair_tokens(prefix: Path) -> int:
    """How many tokens a pair holds that `check_pair` has looked at."""
    with idx_path(prefix).open("rb") as file:
        _, _, code, _, _ = _HEADER.unpack(file.read(_HEADER.size))
    return bin_path(prefix).stat().st_size // np.dtype(_TOKEN_DTYPES[code]).itemsize


def _missing_remedy(prefix: Path) -> str:
    if prefix.exists():
        return f"{prefix} itself is there: to read it as text, write text:{prefix}."
    return "Write it with megatron-wsd prepare-data, or correct the path (without .bin or .idx)."


class TokenFile:
    """An existing PREFIX.bin and PREFIX.idx, memory-mapped and never written.

    Sequences lie back to back in the .bin, so the corpus is read as one stream; the ends of documents are
    in it as the tokenizer's end-of-document id.

    Args:
        prefix: path without ".bin" or ".idx"; either ending is tolerated.

    Raises:
        DataError: a file that is missing, empty, no Megatron index, cut short, or belonging to another
            partner; names the file, the sizes and the remedy.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = check_pair(prefix)
        self._dataset = megatron_indexed_dataset().IndexedDataset(str(self.prefix), mmap=True)
        self._dtype: type[np.integer] = self._dataset.index.dtype
        self._itemsize = np.dtype(self._dtype).itemsize
        self.num_sequences = int(self._dataset.index.sequence_count)
        self.num_tokens = bin_path(self.prefix).stat().st_size // self._itemsize
        self._check_offsets()

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream, [length] int64, a copy.

        Raises:
            IndexError: the range leaves the stream.
        """
        return self._read(start, length).astype(np.int64)

    def id_range(self, max_tokens: int | None = None) -> tuple[int, int]:
        """Smallest and largest id among the tokens.

        Args:
            max_tokens: look at about this many, in evenly spaced chunks, when there are more.
        """
        starts = range(0, self.num_tokens, _CHUNK)
        if max_tokens is not None and max_tokens < self.num_tokens:
            keep = max(1, max_tokens // _CHUNK)
            starts = range(0, self.num_tokens, -(-len(starts) // keep) * _CHUNK)
        low, high = [], []
        for start in starts:
            chunk = self._read(start, min(_CHUNK, self.num_tokens - start))
            low.append(int(chunk.min()))
            high.append(int(chunk.max()))
        return min(low), max(high)

    def fingerprint(self) -> str:
        """A digest that tells two corpora apart at little cost, whatever their size.

        sha256, in hex, of the number of tokens and of 64 evenly spaced blocks of 4,096 tokens: all of a small
        corpus, a sample of a large one. It does not depend on the dtype in the file.
        """
        digest = hashlib.sha256(str(self.num_tokens).encode())
        for block in range(64):
            start = block * self.num_tokens // 64
            digest.update(self.tokens(start, min(4096, self.num_tokens - start)).astype("<i8").tobytes())
        return digest.hexdigest()

    def _read(self, start: int, length: int) -> np.ndarray:
        # A view of the map, of the dtype in the file: it must not outlive this object.
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(
                f"tokens [{start}, {start + length}) of {self.prefix}, which holds {self.num_tokens}"
            )
        return self._dataset.bin_reader.read(dtype=self._dtype, count=length, offset=start * self._itemsize)

    def _check_offsets(self) -> None:
        # Every length and offset is looked at (about 1 ns each): a stream with a hole would train on junk.
        index, end = self._dataset.index, 0
        for first in range(0, self.num_sequences, _CHUNK):
            part = slice(first, first + _CHUNK)
            lengths = index.sequence_lengths[part].astype(np.int64) * self._itemsize
            ends = end + np.cumsum(lengths)
            good = (lengths >= 0) & (index.sequence_pointers[part] == ends - lengths)
            if not good.all():
                raise DataError(
                    str(idx_path(self.prefix)),
                    "sequences stored back to back",
                    f"sequence {first + int(np.argmin(good))} elsewhere",
                    _REBUILD,
                )
            end = int(ends[-1])
        bin_bytes = bin_path(self.prefix).stat().st_size
        if end != bin_bytes:
            raise DataError(
                str(bin_path(self.prefix)),
                f"{end} bytes, as {idx_path(self.prefix).name} says",
                f"{bin_bytes} bytes",
                _REBUILD,
            )
