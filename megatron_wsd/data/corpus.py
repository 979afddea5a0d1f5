"""Where documents come from: this interpreter's own library, its help topics, or text on disk.

A source is a function that yields its documents in the same order every time; a document is a name and its
bytes. Empty documents are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_wsd.errors import DataError

# The corpora that need no download, under the names that the configs use.
BUILTIN_CORPORA = {"broad": "builtin:stdlib", "high_quality": "builtin:pydoc"}

_PLAIN = {".txt", ".py", ".md"}
TEXT_SUFFIXES = tuple(sorted(_PLAIN | {".jsonl"}))
"""What ``text:FOLDER`` reads; every other file in it is skipped."""
# pydoc_data is the other builtin corpus; tests are repetitive; the rest is not the standard library.
_STDLIB_SKIP = {"site-packages", "dist-packages", "pydoc_data", "test", "tests", "idle_test", "__pycache__"}
# A larger file is cut into several documents, so that memory holds one piece at a time.
_PIECE_BYTES = 16 * 2**20
_KINDS_SHOWN = 5

Documents = Iterator[tuple[str, bytes]]


@dataclass(frozen=True)
class Source:
    """A source of documents.

    Attributes:
        spec: "builtin:stdlib", "builtin:pydoc" or "text:PATH", as it was given.
        read: yields (name, bytes) in a fixed order, anew at every call.
        num_bytes: of its text, and in .jsonl of what stands around it: no less than there is.
        most_documents: no less than there are, those in .jsonl aside.
        plain: there is no .jsonl, so ``num_bytes`` is what there is.
        files: how many are read; 0 for help topics.
        skipped: how many files of a folder are not read, by suffix: of another kind, or empty.
    """

    spec: str
    read: Callable[[], Documents]
    num_bytes: int = 0
    most_documents: int = 0
    plain: bool = True
    files: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)

    def told_skipped(self) -> str:
        """What of a folder is not read, and which suffixes are, in a line for people; empty if all is."""
        if not self.skipped:
            return ""
        kinds = sorted(self.skipped.items(), key=lambda kind: (-kind[1], kind[0]))
        shown = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:_KINDS_SHOWN])
        more = f", {len(kinds) - _KINDS_SHOWN} more kinds" if len(kinds) > _KINDS_SHOWN else ""
        return (
            f"{self.files:,} of {self.files + sum(self.skipped.values()):,} files are read "
            f"(*{', *'.join(TEXT_SUFFIXES)}); skipped: {shown}{more}"
        )


@dataclass(frozen=True)
class SourceDigest:
    """What one pass over a source found: sha256 over all names and contents, and how much there is."""

    sha256: str
    documents: int
    num_bytes: int


def is_source(spec: str) -> bool:
    """True if ``spec`` names text still to be prepared, False if it is the prefix of a .bin and .idx."""
    return spec.startswith(("builtin:", "text:"))


def open_source(spec: str) -> Source:
    """The source that ``spec`` names.

    Args:
        spec: "builtin:stdlib", the .py files of the running interpreter's standard library, sorted by path,
            without site-packages, tests and pydoc_data; "builtin:pydoc", the topics of ``help()``, sorted by
            name; "text:PATH", a file, or a folder searched for \\*.txt, \\*.py, \\*.md (a document each) and
            \\*.jsonl (a document a line, its field "text"), sorted by path.

    Raises:
        DataError: an unknown spec, or nothing to read there.
    """
    if spec == "builtin:stdlib":
        return _files_source(spec, _stdlib_files())
    if spec == "builtin:pydoc":
        sizes = [len(data) for _, data in _pydoc_topics()]
        return Source(spec, _pydoc_topics, sum(sizes), len(sizes))
    kind, _, path = spec.partition(":")
    if kind != "text" or not path:
        raise DataError(
            "megatron_wsd.data.corpora",
            "'builtin:stdlib', 'builtin:pydoc', 'text:PATH' or the prefix of a .bin and .idx",
            spec,
            "Use one of these.",
        )
    return _files_source(spec, *_text_files(Path(path).expanduser()))


def digest_source(documents: Documents) -> SourceDigest:
    """One pass over ``documents``; see ``SourceDigest``."""
    hasher = SourceHasher()
    for name, data in documents:
        hasher.add(name, data)
    return hasher.result()


class SourceHasher:
    """The running form of ``digest_source``. Lengths are hashed too: moving a cut changes the digest."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._documents = 0
        self._bytes = 0

    def add(self, name: str, data: bytes) -> None:
        """Takes in the next document."""
        encoded = name.encode("utf-8", errors="surrogateescape")
        self._sha.update(f"{len(encoded)} {len(data)} ".encode() + encoded)
        self._sha.update(data)
        self._documents += 1
        self._bytes += len(data)

    def result(self) -> SourceDigest:
        """The digest of all documents so far."""
        return SourceDigest(self._sha.hexdigest(), self._documents, self._bytes)


def _files_source(
    spec: str, files: list[tuple[str, Path]], skipped: Mapping[str, int] | None = None
) -> Source:
    def read() -> Documents:
        for name, path in files:
            try:
                yield from _jsonl(name, path) if path.suffix == ".jsonl" else _plain(name, path)
            except OSError as error:
                raise DataError(spec, "a file that can be read", f"{path}: {error.strerror}") from error

    lines = [path.suffix == ".jsonl" for _, path in files]
    sizes = [path.stat().st_size for _, path in files]
    # a json line is longer than its text and the end of a document together
    pieces = sum(1 + size // _PIECE_BYTES for size, jsonl in zip(sizes, lines, strict=True) if not jsonl)
    return Source(spec, read, sum(sizes), pieces, not any(lines), len(files), skipped or {})


def _plain(name: str, path: Path) -> Documents:
    with path.open("rb") as file:
        pieces = iter(lambda: b"".join(file.readlines(_PIECE_BYTES)), b"")
        for index, piece in enumerate(pieces):
            yield (f"{name}#{index}" if index else name), piece


def _jsonl(name: str, path: Path) -> Documents:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}", "a json object", _where(error), "Repair or delete this line."
                ) from error
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                got = type(record).__name__
                if isinstance(record, dict):
                    there = "text" in record
                    got = f'"text": {json.dumps(text)[:40]}' if there else f"the keys {sorted(record)}"
                raise DataError(
                    f"{path}:{number}", 'an object with a string "text"', got, 'Put the text under "text".'
                )
            if text:
                # json can spell lone surrogates, which have no UTF-8 form.
                yield f"{name}:{number}", text.encode("utf-8", errors="replace")


def _where(error: ValueError) -> str:
    """What is wrong with a line of json, without the number of a line, which is that of the file."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _walk(
    folder: Path, suffixes: Iterable[str], skip: set[str]
) -> tuple[list[tuple[str, Path]], Counter[str]]:
    """The files with text, by name, and how many others there are, by suffix."""

    def unreadable(error: OSError) -> None:
        # os.walk passes over what it may not list: part of the corpus would be missing without a word.
        raise DataError(str(folder), "folders that can be listed", f"{error.filename}: {error.strerror}")

    found, others = [], Counter[str]()
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if name not in skip]  # not even entered
        for path in (Path(parent, name) for name in names):
            if path.suffix not in suffixes:
                others[path.suffix or "without a suffix"] += 1
            elif path.is_file() and path.stat().st_size > 0:
                found.append((path.relative_to(folder).as_posix(), path))
            else:
                others[f"{path.suffix} (empty)"] += 1
    return sorted(found), others


def _stdlib_files() -> list[tuple[str, Path]]:
    folder = Path(sysconfig.get_path("stdlib"))
    files, _ = _walk(folder, {".py"}, _STDLIB_SKIP)
    if not files:
        raise DataError(
            "builtin:stdlib",
            "the sources of the standard library",
            f"no .py file in {folder}",
            "This interpreter ships without sources: use text:PATH, or another interpreter.",
        )
    return files


def _pydoc_topics() -> Documents:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "builtin:pydoc",
            "the module pydoc_data of the standard library",
            str(error),
            "Install the full standard library (Debian: libpython3-stdlib), or use text:PATH.",
        ) from error
    for name in sorted(topics):
        if topics[name]:
            yield name, topics[name].encode()


def _text_files(path: Path) -> tuple[list[tuple[str, Path]], Mapping[str, int]]:
    kinds = f"*{', *'.join(TEXT_SUFFIXES)}"
    skipped: Mapping[str, int] = {}
    if path.is_file():
        files = [(path.name, path)] if path.stat().st_size > 0 else []
        expected = "a file with text in it"
    elif path.is_dir():
        files, skipped = _walk(path, TEXT_SUFFIXES, {"__pycache__"})
        expected = f"a folder with {kinds} that are not empty"
    else:
        files, expected = [], f"a file, or a folder with {kinds}"
    if not files:
        why = "does not exist"
        if path.exists():
            others = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(skipped.items()))
            why = f"nothing of the kind{f', but {others}' if others else ''}"
        raise DataError(f"text:{path}", expected, f"{path} ({why})", "Give the path of your text.")
    return files, skipped
