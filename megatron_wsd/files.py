"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def fsync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_file(path: Path) -> None:
    """Have the content of a file on disk."""
    with open(path, "rb+") as f:
        os.fsync(f.fileno())


def replace_file(part: Path, target: Path) -> None:
    """Flush ``part`` to disk and give it the name ``target``."""
    flush_file(part)
    os.replace(part, target)
    fsync_folder(target.parent)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name.

    Raises:
        FileExistsError: the name is taken.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: for an instant another could be first as well
        if target.exists():
            raise FileExistsError(target) from None
        source.replace(target)


def write_json_atomic(path: Path, value: Any, *, first: bool = False) -> bool:
    """Write ``value`` as json so that a reader, another writer or a crash never sees half of it.

    Args:
        path: of the file.
        value: what json can hold.
        first: only if there is no such file yet; of several writers at once, one is the first.

    Returns:
        Whether it was written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("w") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if first:
            _link(temporary, path)
        else:
            temporary.replace(path)
        fsync_folder(path.parent)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True
