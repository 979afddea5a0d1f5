"""Documents into Megatron's .bin/.idx, once: complete or not at all, whoever else is trying."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wsd.data.corpus import (
    BUILTIN_CORPORA,
    Documents,
    Source,
    SourceDigest,
    SourceHasher,
    digest_source,
    open_source,
)
from megatron_wsd.data.indexed import bin_path, idx_path, megatron_indexed_dataset
from megatron_wsd.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_identity
from megatron_wsd.errors import DataError

FORMAT = 1  # goes up when the same documents would give other tokens
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_QUIET_S = 2.0  # a bar only for what takes longer


@dataclass(frozen=True)
class Plan:
    """A corpus to be written: ``prepare`` is ``plan_corpus`` followed by ``write_corpus``."""

    prefix: Path
    source: Source
    digest: SourceDigest
    tokenizer: Tokenizer
    force: bool

    @property
    def inputs(self) -> dict[str, Any]:
        """What decides every token of the result, as the manifest keeps it."""
        return {
            "format": FORMAT,
            "source_sha256": self.digest.sha256,
            "tokenizer": self.tokenizer.describe(),
        }


def manifest_path(prefix: str | Path) -> Path:
    """The json beside PREFIX.bin and PREFIX.idx that says what they were made from."""
    return Path(f"{prefix}.json")


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest of ``prefix``; None where there is none of ours, or where its files were left torn."""
    try:
        manifest = json.loads(manifest_path(prefix).read_text(encoding="utf-8"))
        sizes = {"bin_bytes": bin_path(prefix).stat().st_size, "idx_bytes": idx_path(prefix).stat().st_size}
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("state") != "complete":
        return None
    return manifest if all(manifest.get(key) == size for key, size in sizes.items()) else None


def refuse_tokenizer(name: str, prefix: str | Path, tokenizer: str) -> None:
    """Refuse a pair of files that was prepared, by us, with another tokenizer than the run names.

    Args:
        name: of the corpus.
        prefix: of its files.
        tokenizer: as in data.tokenizer; it is not loaded.

    Raises:
        DataError: it was; or there are no files of the tokenizer.
    """
    manifest = read_manifest(prefix)
    if manifest and not tokenizer_identity(tokenizer).items() <= manifest["tokenizer"].items():
        raise DataError(
            f"megatron_wsd.data.corpora.{name}",
            f"tokens of data.tokenizer, {tokenizer!r}",
            f"{prefix} of {manifest['tokenizer']}",
            "Name the tokenizer it was prepared with, or prepare it again.",
        )


def plan_corpus(spec: str, tokenizer: Tokenizer, prefix: str | Path, force: bool = False) -> Plan:
    """Reads the source once and finds out whether ``write_corpus`` may write. Writes nothing.

    Files of ``prefix`` made from other inputs are never replaced unless ``force``: a run that is resumed
    on other tokens would silently see samples twice. Files that a crash left half written are replaced.

    Raises:
        DataError: an unusable source, or files at ``prefix`` that are made from something else.
    """
    plan = Plan(Path(prefix).expanduser(), *_read_source(spec), tokenizer, force)
    _refuse_conflict(plan)
    return plan


def write_corpus(plan: Plan) -> tuple[dict[str, Any], bool]:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.json, unless they are there from the same inputs.

    Every document is one sequence that ends with the tokenizer's ``eod``. Files get their names only when
    complete and on the disk. Any number of processes may call this at once: one writes, the others wait
    on PREFIX.lock and find the result.

    Returns:
        the manifest, and whether anything was written.

    Raises:
        DataError: the folder cannot be written, the disk is full, or the source changed meanwhile.
    """
    if not plan.force and (manifest := _up_to_date(plan)):
        return manifest, False
    megatron_indexed_dataset()  # its import takes seconds: not while others wait for the lock
    try:
        plan.prefix.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{plan.prefix}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not plan.force and (manifest := _up_to_date(plan)):
                return manifest, False
            _refuse_conflict(plan)  # once more: someone else may have written while we waited
            return _write_locked(plan), True
    except OSError as error:
        raise DataError(
            str(plan.prefix),
            "a folder that takes the tokens",
            f"{error.strerror or error} ({error.filename or plan.prefix.parent})",
            ("Free some space or give" if error.errno in _NO_ROOM else "Give")
            + " another folder; files that were there before are as they were.",
        ) from error


def prepare(
    spec: str, tokenizer: Tokenizer, prefix: str | Path, force: bool = False
) -> tuple[dict[str, Any], bool]:
    """``plan_corpus`` and ``write_corpus`` in one."""
    return write_corpus(plan_corpus(spec, tokenizer, prefix, force))


def prepare_in_cache(spec: str, tokenizer: Tokenizer, cache_dir: str | Path, name: str) -> Path:
    """The prefix, in ``cache_dir``, of the corpus that ``spec`` and ``tokenizer`` give; written if missing.

    The prefix carries a digest of its inputs, so a text that changes gets files of its own and a run that
    uses the earlier ones keeps them.

    Raises:
        DataError: see ``plan_corpus`` and ``write_corpus``.
    """
    source, digest = _read_source(spec)
    key = hashlib.sha256(f"{FORMAT} {digest.sha256} {tokenizer.describe()}".encode()).hexdigest()[:12]
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    prefix = Path(cache_dir).expanduser() / f"{stem}-{key}"
    write_corpus(Plan(prefix, source, digest, tokenizer, force=False))
    return prefix


def ensure_builtin_corpora(folder: str | Path) -> dict[str, Path]:
    """The two corpora that need no download, as bytes, made in ``folder`` if they are not there.

    Safe to call from any number of processes at once.

    Returns:
        prefixes of "broad" (the standard library's sources) and "high_quality" (the topics of ``help()``).
    """
    tokenizer = load_tokenizer("byte")
    return {name: prepare_in_cache(spec, tokenizer, folder, name) for name, spec in BUILTIN_CORPORA.items()}


def _read_source(spec: str) -> tuple[Source, SourceDigest]:
    source = open_source(spec)
    digest = digest_source(_with_bar(source.read(), f"reading {spec}", None))
    if digest.documents == 0:
        raise DataError(spec, "text", "no text in any of its files", "Give the path of your text.")
    return source, digest


def _up_to_date(plan: Plan) -> dict[str, Any] | None:
    manifest = read_manifest(plan.prefix)
    return manifest if manifest and not _differences(manifest, plan) else None


def _differences(manifest: Mapping[str, Any], plan: Plan) -> list[str]:
    return [key for key, value in plan.inputs.items() if manifest.get(key) != value]


def _refuse_conflict(plan: Plan) -> None:
    files = (bin_path(plan.prefix), idx_path(plan.prefix), manifest_path(plan.prefix))
    there = [path for path in files if path.exists()]
    if plan.force or not there:
        return
    try:
        manifest = json.loads(manifest_path(plan.prefix).read_text(encoding="utf-8"))
        # Left by a crash of ours in the middle of the renames: nothing whole is lost by starting over.
        if manifest["state"] == "writing":
            return
        differing = _differences(manifest, plan)
        got = f"the same files made with another {', another '.join(differing)}"
    except (OSError, ValueError, KeyError, TypeError):
        differing, got = ["all"], f"{' and '.join(path.name for path in there)} that were not made here"
    if differing:
        raise DataError(
            str(plan.prefix),
            f"no files, or those of {plan.source.spec} as it is now",
            got,
            "Give another folder, or --force to replace them (runs that use them must then start over).",
        )


class Foreign:
    """Documents that are no UTF-8 text, or hold zero bytes, as UTF-16 does: hardly what is meant.

    Attributes:
        documents: how many.
        first: name of the first.
    """

    def __init__(self) -> None:
        self.documents, self.first = 0, ""

    def add(self, name: str, data: bytes) -> None:
        """Look at one."""
        try:
            data.decode("utf-8")
            fine = b"\0" not in data
        except UnicodeDecodeError:
            fine = False
        if not fine:
            self.documents, self.first = self.documents + 1, self.first or name


def told_foreign(manifest: Mapping[str, Any]) -> str:
    """What to say of documents of a corpus that are no UTF-8 text; nothing without any."""
    count, first = manifest.get("not_utf8", (0, ""))
    if not count:
        return ""
    share = f"{count:,} of {manifest['documents']:,} documents"
    return f"{share} are no UTF-8 text, the first {first}: their bytes are taken as they are"


def _write_locked(plan: Plan) -> dict[str, Any]:
    indexed = megatron_indexed_dataset()
    tokenizer, hasher = plan.tokenizer, SourceHasher()
    dtype = indexed.DType.optimal_dtype(tokenizer.vocab_size)
    partial = Path(f"{plan.prefix}.partial")  # the lock makes one name enough; leftovers are overwritten
    tokens, max_id, foreign = 0, 0, Foreign()
    try:
        builder = indexed.IndexedDatasetBuilder(str(bin_path(partial)), dtype=dtype)
        with contextlib.ExitStack() as stack:
            stack.callback(_close_quietly, builder.data_file)
            documents = plan.source.read()
            for name, data in _with_bar(documents, f"writing {plan.prefix.name}", plan.digest.num_bytes):
                hasher.add(name, data)
                foreign.add(name, data)
                ids = np.append(tokenizer.encode(data).astype(dtype), dtype(tokenizer.eod))
                builder.add_document(ids, [ids.size])
                tokens += ids.size
                max_id = max(max_id, int(ids.max()))
            builder.finalize(str(idx_path(partial)))
        if hasher.result() != plan.digest:
            raise DataError(
                plan.source.spec,
                "text that stays as it is while it is read",
                "a change between two readings",
                "Run again when nothing writes to it.",
            )
        manifest = {
            "state": "complete",
            "source": plan.source.spec,
            **plan.inputs,
            "documents": plan.digest.documents,
            "source_bytes": plan.digest.num_bytes,
            "tokens": tokens,
            "max_token_id": max_id,
            "not_utf8": [foreign.documents, foreign.first],
            "bin_bytes": bin_path(partial).stat().st_size,
            "idx_bytes": idx_path(partial).stat().st_size,
        }
        for path in (bin_path(partial), idx_path(partial)):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        # Three renames are not atomic together: until the last, the manifest says so.
        _write_json(manifest_path(plan.prefix), {"state": "writing"})
        bin_path(partial).replace(bin_path(plan.prefix))
        idx_path(partial).replace(idx_path(plan.prefix))
        _write_json(manifest_path(plan.prefix), manifest)
    finally:
        for path in (bin_path(partial), idx_path(partial)):
            path.unlink(missing_ok=True)
    return manifest


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = Path(f"{path}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _close_quietly(file: Any) -> None:
    # On a full disk close() fails as the write did; the first error is the one to report.
    with contextlib.suppress(OSError):
        file.close()


def _with_bar(documents: Documents, title: str, total: int | None) -> Iterator[tuple[str, bytes]]:
    """``documents``, with a bar on stderr if that is a terminal and it takes long."""
    if not sys.stderr.isatty():
        yield from documents
        return
    from rich.console import Console
    from rich.progress import Progress

    started, done = time.monotonic(), 0
    progress = Progress(console=Console(stderr=True), transient=True)
    task = progress.add_task(title, total=total)
    try:
        for name, data in documents:
            yield name, data
            done += len(data)
            progress.update(task, completed=done)
            if time.monotonic() - started > _QUIET_S:
                progress.start()  # does nothing when it runs already
    finally:
        progress.stop()
