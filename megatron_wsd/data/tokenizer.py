"""Bytes to token ids and back."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_wsd.errors import DataError

FIELD = "megatron_wsd.data.tokenizer"
# What makes two Hugging Face tokenizers the same; the weights that may lie beside them do not.
_HF_FILES = ("tokenizer*", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.model")


class Tokenizer(Protocol):
    """What the rest of this package asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is in [0, vocab_size)."""

    @property
    def eod(self) -> int:
        """The id that ends every document."""

    def encode(self, data: bytes) -> np.ndarray:
        """The ids of ``data`` [n], an integer dtype, without ``eod``."""

    def decode(self, ids: np.ndarray) -> bytes:
        """The bytes of ``ids`` [n]; special ids give no bytes."""

    def describe(self) -> dict[str, Any]:
        """What identifies this tokenizer, json-able and free of paths."""


class ByteTokenizer:
    """One id a byte, and 256 as the end of a document."""

    vocab_size = 257
    eod = 256

    def encode(self, data: bytes) -> np.ndarray:
        """The bytes themselves, [len(data)] uint8; shares memory with ``data``."""
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> bytes:
        """The bytes of ``ids``; ``eod`` is left out."""
        ids = np.asarray(ids)
        return ids[ids != self.eod].astype(np.uint8).tobytes()

    def describe(self) -> dict[str, Any]:
        """See ``Tokenizer.describe``."""
        return {**tokenizer_identity("byte"), "vocab_size": self.vocab_size, "eod": self.eod}


class HFTokenizer:
    """A Hugging Face tokenizer in a folder on this disk; never looks anywhere else.

    Args:
        path: the folder that ``save_pretrained`` wrote.

    Raises:
        DataError: transformers is not installed, ``path`` is no folder, the folder holds no tokenizer, or
            the tokenizer has no end-of-text token to put between documents.
    """

    def __init__(self, path: str | Path) -> None:
        self._identity = tokenizer_identity(f"hf:{path}")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                FIELD,
                "the package transformers for a tokenizer hf:PATH",
                f"{type(error).__name__}: {error}",
                "Install it (pip install transformers), or use the tokenizer 'byte'.",
            ) from error
        folder = Path(path).expanduser()
        try:
            # A folder may carry code of its own; it is never run.
            self._tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise DataError(
                FIELD,
                "a folder written by save_pretrained",
                f"{folder}: {error}",
                "Give the folder that holds tokenizer.json or tokenizer_config.json.",
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                FIELD,
                "a tokenizer with an eos_token, which ends every document",
                f"{folder} without one",
                "Set eos_token in its tokenizer_config.json.",
            )
        self.eod = int(self._tokenizer.eos_token_id)
        self.vocab_size = len(self._tokenizer)

    def encode(self, data: bytes) -> np.ndarray:
        """The ids of ``data`` read as UTF-8 (bytes that are not become U+FFFD), [n] int64."""
        text = data.decode("utf-8", errors="replace")
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of ``ids`` as UTF-8, special tokens left out."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True).encode()

    def describe(self) -> dict[str, Any]:
        """See ``Tokenizer.describe``."""
        return {**self._identity, "vocab_size": self.vocab_size, "eod": self.eod}


def tokenizer_identity(spec: str) -> dict[str, str]:
    """What makes two tokenizers the same, found without loading them (so without transformers).

    Args:
        spec: "byte" or "hf:PATH".

    Returns:
        {"type": "byte"}, or {"type": "hf", "sha256": digest of the tokenizer files of the folder}.

    Raises:
        DataError: another spec, or a folder that is not there or holds no tokenizer file.
    """
    if spec == "byte":
        return {"type": "byte"}
    kind, _, path = spec.partition(":")
    if kind != "hf" or not path:
        raise DataError(FIELD, "'byte' or 'hf:PATH'", repr(spec), "Use 'byte' if in doubt.")
    folder = Path(path).expanduser()
    files = {file for pattern in _HF_FILES for file in folder.glob(pattern) if file.is_file()}
    if not files:
        raise DataError(
            FIELD,
            "a folder with the files of a Hugging Face tokenizer",
            f"{folder} ({'no such file in it' if folder.is_dir() else 'not a folder'})",
            "Download the tokenizer beforehand and give its folder; names of a hub are not looked up.",
        )
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return {"type": "hf", "sha256": digest.hexdigest()}


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that ``spec`` names: "byte", or "hf:PATH" with PATH a folder.

    Raises:
        DataError: another spec, or what ``HFTokenizer`` raises.
    """
    identity = tokenizer_identity(spec)
    return ByteTokenizer() if identity["type"] == "byte" else HFTokenizer(spec.partition(":")[2])
