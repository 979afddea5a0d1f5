"""The checkpoints of one island: named by step, written aside, renamed when complete."""

from __future__ import annotations

import functools
import logging
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.whole import check_crc, open_sealed, sealed
from megatron_wsd.errors import CheckpointError, DamagedError
from megatron_wsd.files import flush_file, fsync_folder, write_json_atomic

log = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
OUTER_MANIFEST = "outer/manifest.json"
_NAME = re.compile(r"step_(\d{8})")


class CheckpointStore:
    """Folders ``step_00000100`` under ``root``; those with a manifest that fits are complete.

    Not collective: one rank of an island does the naming and renaming.

    Args:
        root: ``RUN/island_<i>/checkpoints``.
        keep: complete checkpoints to keep.
        pinned: steps that are kept besides, since branches need them; asked when old ones are removed.
    """

    def __init__(self, root: Path, keep: int, pinned: Callable[[], Collection[int]] = tuple) -> None:
        self.root, self._keep, self._pinned = root, keep, pinned

    def folder(self, step: int) -> Path:
        """Where the complete checkpoint of a step is."""
        return self.root / f"step_{step:08d}"

    def staging(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it is complete."""
        return self.root / f"step_{step:08d}.part"

    def begin(self, step: int, expected_bytes: int) -> None:
        """Make an empty staging folder.

        Raises:
            CheckpointError: the file system cannot take ``expected_bytes``.
        """
        staging = self.staging(step)
        for left in (*self.root.glob("step_*.part"), *self.root.glob("step_*.old")):
            shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
        staging.mkdir(parents=True)
        free = shutil.disk_usage(staging).free
        if free < expected_bytes:
            shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(
                str(self.root),
                f"{expected_bytes / 1e9:.2f} GB free for a checkpoint",
                f"{free / 1e9:.2f} GB",
                "Free space, then resume from the newest complete checkpoint with --resume.",
            )

    def discard(self, step: int) -> None:
        """Remove what was staged."""
        shutil.rmtree(self.staging(step), ignore_errors=True)

    def complete(self, step: int, content: dict[str, Any]) -> Path:
        """List the staged files in a manifest and give the folder its name; then prune old ones.

        Args:
            step: of the staged checkpoint.
            content: what else the manifest shall say; json-able.
        """
        staging, final = self.staging(step), self.folder(step)
        files = {}
        for path in sorted(p for p in staging.rglob("*") if p.is_file()):
            flush_file(path)
            files[str(path.relative_to(staging))] = path.stat().st_size
        # A run that went back to an older one may write a lower step later: what is newest, numbers say.
        serial = 1 + max((self._serial(s) for s in self.steps()), default=0)
        manifest = {**content, "step": step, "serial": serial, "files": files}
        write_json_atomic(staging / MANIFEST, sealed(manifest))
        old = self._retire(step)
        staging.rename(final)
        fsync_folder(self.root)
        shutil.rmtree(old, ignore_errors=True)
        pinned = self._pinned()
        for stale in [s for s in self.steps()[: -self._keep] if s not in pinned]:
            shutil.rmtree(self._retire(stale), ignore_errors=True)
        return final

    def _retire(self, step: int) -> Path:
        """Take the name of a checkpoint away before it is removed: a removal that is killed damages none."""
        old = self.root / f"step_{step:08d}.old"
        shutil.rmtree(old, ignore_errors=True)
        if self.folder(step).exists():
            self.folder(step).rename(old)
        return old

    def set_aside(self, step: int) -> Path:
        """Give a damaged checkpoint a name under which nobody takes it for one, or removes it."""
        name = f"damaged_{self.folder(step).name}"
        earlier = len(list(self.root.glob(f"{name}*")))  # the run came by this step more than once
        aside = self.root / (f"{name}.{earlier + 1}" if earlier else name)
        self.folder(step).rename(aside)
        fsync_folder(self.root)
        return aside

    def lost(self) -> list[str]:
        """Names of the checkpoints that were complete once and are not, be they set aside or not."""
        torn = [self.folder(n).name for n in self._named() if self.manifest(n) is None]
        return torn + sorted(aside.name for aside in self.root.glob("damaged_step_*"))

    def torn(self) -> dict[int, DamagedError]:
        """By step, what is wrong with the checkpoints that `manifest` takes for none."""
        found = {}
        for step in self._named():
            try:
                self.read(step)
            except DamagedError as e:
                found[step] = e
            except OSError as e:
                log.warning("cannot read %s: %s", self.folder(step), e)
        return found

    def _named(self) -> list[int]:
        """Steps by the names of the folders, complete or not."""
        if not self.root.is_dir():
            return []
        return sorted(int(m[1]) for entry in self.root.iterdir() if (m := _NAME.fullmatch(entry.name)))

    def manifest(self, step: int, *, told: bool = False) -> dict[str, Any] | None:
        """The manifest of a step; None if the checkpoint is torn: no manifest, a file missing or short.

        Args:
            step: of the checkpoint.
            told: take also one of which all json files were copied here, and nothing else.
        """
        try:
            return self.read(step, told=told)
        except (OSError, DamagedError):
            return None

    def read(self, step: int, *, told: bool = False) -> dict[str, Any]:
        """The manifest of a step; ``told`` is that of `manifest`.

        Raises:
            DamagedError: there is none, it is another one, a file is missing or of another size, or the
                manifest of the outer state is another one.
            OSError: it cannot be read for another reason.
        """
        folder = self.folder(step)
        where = folder / MANIFEST
        try:
            content = open_sealed(where)
            files = dict(content["files"])
            if told and not any((folder / name).exists() for name in files if not name.endswith(".json")):
                files = {name: size for name, size in files.items() if name.endswith(".json")}
            for name, size in files.items():
                where = folder / name
                if (found := where.stat().st_size) != size:
                    raise DamagedError(str(where), f"{size} bytes", found)
            where = folder / OUTER_MANIFEST
            if (crc := content.get("crc32", {}).get(OUTER_MANIFEST)) is not None:
                check_crc(where, crc)
        except FileNotFoundError:
            raise DamagedError(str(where), "this file", "none") from None
        except (KeyError, TypeError, AttributeError) as e:
            raise DamagedError(str(where), "a manifest", repr(e)) from None
        return content

    def _serial(self, step: int) -> int:
        manifest = self.manifest(step)
        return 0 if manifest is None else int(manifest.get("serial", 0))

    def steps(self, era: int | None = None, *, told: bool = False) -> list[int]:
        """Steps of the complete checkpoints as they were written; with ``era`` those of it.

        ``told`` is that of `manifest`.
        """
        found = []
        for step in self._named():
            manifest = self.manifest(step, told=told)
            if manifest is None:
                _tell_torn(self.folder(step))
            elif era is None or manifest.get("era", 0) == era:
                found.append((int(manifest.get("serial", 0)), step))
        return [step for _, step in sorted(found)]


@functools.cache
def _tell_torn(folder: Path) -> None:
    """Once a process: islands look at each other's checkpoints, and more than once."""
    log.warning("ignoring %s: it is torn", folder)


def resume_step(
    run_dir: Path, island: int, islands: int, era: int = 0, *, keep: int = 3, lockstep: bool = True
) -> int | None:
    """The step that an island resumes from; None if it has no complete checkpoint of this era.

    Its own newest, if the newest of all islands come after the same round: islands that were stopped
    between two rounds may be some steps apart, and each goes on where it stood. Else the newest step that
    all islands have among their newest ``keep``; else its own newest, and whoever is behind is healed: one
    that is there for a branch alone, or since a decay began, may lie thousands of steps back. Folders of
    other islands that are not on this file system do not count. An era ends when the number of islands
    changes.

    Not ``lockstep``, in asynchronous mode: its own newest; whoever has fewer rounds is healed by the others.
    """
    own = CheckpointStore(run_dir / f"island_{island}" / "checkpoints", 2)
    steps = own.steps(era)
    if not steps:
        return None
    if not lockstep:
        return steps[-1]
    common, rounds = set(steps[-keep:]), {_round_of(own, steps[-1])}
    for other in range(islands):
        root = run_dir / f"island_{other}" / "checkpoints"
        if other != island and root.is_dir():
            store = CheckpointStore(root, 2)
            theirs = store.steps(era)
            common &= set(theirs[-keep:])
            rounds.add(_round_of(store, theirs[-1]) if theirs else None)
    if len(rounds) == 1 or not common:
        return steps[-1]
    return next(step for step in reversed(steps) if step in common)


def _round_of(store: CheckpointStore, step: int) -> int | None:
    """The outer step of a complete checkpoint; None if it vanished meanwhile."""
    manifest = store.manifest(step)
    return None if manifest is None else manifest.get("outer_step")
