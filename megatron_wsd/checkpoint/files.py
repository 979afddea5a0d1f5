"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
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


def write_json(target: Path, content: Any) -> None:
    """Write json to a temporary name, flush it, rename it."""
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    replace_file(part, target)
