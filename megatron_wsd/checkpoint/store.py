"""The checkpoints of one island: named by step, written aside, renamed when complete."""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron_wsd.errors import CheckpointError
from megatron_wsd.files import flush_file, fsync_folder, write_json_atomic

log = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
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
        write_json_atomic(staging / MANIFEST, {**content, "step": step, "serial": serial, "files": files})
        old = self.root / f"step_{step:08d}.old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        staging.rename(final)
        fsync_folder(self.root)
        shutil.rmtree(old, ignore_errors=True)
        pinned = self._pinned()
        for stale in [s for s in self.steps()[: -self._keep] if s not in pinned]:
            shutil.rmtree(self.folder(stale), ignore_errors=True)
        return final

    def manifest(self, step: int, *, told: bool = False) -> dict[str, Any] | None:
        """The manifest of a step; None if the checkpoint is torn: no manifest, a file missing or short.

        Args:
            step: of the checkpoint.
            told: take also one of which all json files were copied here, and nothing else.
        """
        folder = self.folder(step)
        try:
            content = json.loads((folder / MANIFEST).read_text())
            files = dict(content["files"])
            if told and not any((folder / name).exists() for name in files if not name.endswith(".json")):
                files = {name: size for name, size in files.items() if name.endswith(".json")}
            whole = all((folder / name).stat().st_size == size for name, size in files.items())
        except (OSError, ValueError, KeyError):
            return None
        return dict(content) if whole else None

    def _serial(self, step: int) -> int:
        manifest = self.manifest(step)
        return 0 if manifest is None else int(manifest.get("serial", 0))

    def steps(self, era: int | None = None, *, told: bool = False) -> list[int]:
        """Steps of the complete checkpoints as they were written; with ``era`` those of it.

        ``told`` is that of `manifest`.
        """
        if not self.root.is_dir():
            return []
        found = []
        for entry in self.root.iterdir():
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            manifest = self.manifest(int(match[1]), told=told)
            if manifest is None:
                _tell_torn(entry)
            elif era is None or manifest.get("era", 0) == era:
                found.append((int(manifest.get("serial", 0)), int(match[1])))
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
