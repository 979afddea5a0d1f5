"""Whether the files of a checkpoint are what was written. Imports torch only for files of its format.

What vouches for what:

- DeepSpeed's ``*.pt``: `torch.save` writes zip archives whose every record, the pickle too, has a CRC32,
  which `torch.load` does not look at. Padding and dates of records have none, and do no harm.
- outer state and random states of each rank: a CRC32 in ``checkpoint.json``.
- ``outer/manifest.json``: likewise. It is checked whenever the checkpoint is looked at, since its numbers say
  where a run stands.
- ``checkpoint.json``: a CRC32 of the rest of it.

Checking takes 0.3 s a GB on one core, from the page cache (Python 3.11, zlib 1.2.13); `torch.load` takes
twice that.
"""

from __future__ import annotations

import errno
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_wsd.errors import DamagedError

SEAL = "seal"
_CHUNK = 1 << 24
_IS_FOLDER = 0x10  # of MS-DOS; torch gives such a record no bytes


def crc_of(path: Path) -> int:
    """CRC32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` and its CRC32; as json gives it back, with text for keys."""
    plain = json.loads(json.dumps(content))
    return {**plain, SEAL: _crc_of_json(plain)}


def open_sealed(path: Path) -> dict[str, Any]:
    """Read what was written `sealed`, or before there were seals.

    Raises:
        DamagedError: it is no json object, or another one.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as e:
        raise DamagedError(str(path), "valid json", str(e)) from None
    if not isinstance(content, dict):
        raise DamagedError(str(path), "a json object", content)
    seal = content.pop(SEAL, None)
    if seal is not None and seal != _crc_of_json(content):
        raise DamagedError(str(path), f"content with the CRC32 {seal}", _crc_of_json(content))
    return content


def _crc_of_json(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def check_crc(path: Path, crc: str) -> None:
    """Read a file and compare.

    Raises:
        DamagedError: it is another one.
        OSError: it cannot be read.
    """
    found = f"{crc_of(path):08x}"
    if found != crc:
        raise DamagedError(str(path), f"a file with the CRC32 {crc}", found)


def check_zip(path: Path) -> None:
    """Read every record of a file of `torch.save` and compare its checksum.

    A file in torch's old format, which ``"checkpoint_serialization": false`` makes DeepSpeed write, is a bare
    pickle without checksums: nothing is known of it.

    Raises:
        DamagedError: it is no zip archive that torch could open, or one with a record that is not what was
            written.
        OSError: it cannot be read.
    """
    import torch

    with path.open("rb") as file:
        if file.read(1) == b"\x80":
            return
    try:
        torch._C.PyTorchFileReader(str(path))  # it is stricter with the directory of the archive
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip() or _misread(archive)
    except Exception as e:  # of many kinds: what is damaged may be an offset, a method, a flag, a name
        if isinstance(e, OSError) and e.errno != errno.EINVAL:  # that is how a wrong offset shows
            raise
        raise DamagedError(str(path), "a whole zip archive", f"{type(e).__name__}: {e}") from None
    if bad is not None:
        raise DamagedError(str(path), "records with the checksums they were written with", f"another {bad}")


def _misread(archive: zipfile.ZipFile) -> str | None:
    """A record that torch reads as another one, or leaves unread, though all checksums hold."""
    seen: set[str] = set()
    for record in archive.infolist():
        if record.filename in seen or record.external_attr & _IS_FOLDER:
            return record.filename
        seen.add(record.filename)
    return None


def first_damage(folder: Path, names: Iterable[str], crcs: Mapping[str, str]) -> DamagedError | None:
    """The first of these files that is not what was written.

    Args:
        folder: of the checkpoint.
        names: relative to it. Of those that are neither ``*.pt`` nor have a checksum nothing is known.
        crcs: by name, in hex.

    Raises:
        OSError: one cannot be read, or is not there: whoever saw it listed saw another disk.
    """
    try:
        for name in names:
            if name in crcs:
                check_crc(folder / name, crcs[name])
            elif name.endswith(".pt"):
                check_zip(folder / name)
    except DamagedError as e:
        return e
    return None
