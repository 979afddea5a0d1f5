"""The outer state on disk: one safetensors file a rank, and a json manifest written last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wsd import __version__
from megatron_wsd.config import Config
from megatron_wsd.diloco.agree import to_int64
from megatron_wsd.errors import CheckpointError, DamagedError
from megatron_wsd.files import replace_file, write_json_atomic

if TYPE_CHECKING:
    import torch

    from megatron_wsd.diloco.island import IslandGroup
    from megatron_wsd.diloco.state import OuterState

FORMAT = 2
_DAMAGED = (
    "The file is damaged. Move its step_... folder out of checkpoints, and resume: the one before is taken."
)
MANIFEST = "manifest.json"


def rank_file(rank: int) -> str:
    """Name of the file with the tensors of a rank."""
    return f"outer_rank{rank:05d}.safetensors"


def _segments(state: OuterState) -> list[list[Any]]:
    return [
        [i, s.name, s.numel, s.element0, s.quantised]
        for i, f in enumerate(state.fragments)
        for s in f.layout.segments
    ]


def _kind(config: Config) -> dict[str, Any]:
    outer = config.outer
    return {
        "outer.optimizer": outer.optimizer,
        "outer.state_bits": outer.state_bits,
        "outer.anchor_dtype": outer.anchor_dtype,
        "sync.wire": config.sync.wire,
    }


def agreed(group: IslandGroup, what: Path, action: Callable[[], object]) -> None:
    """Run ``action`` on every rank; if it fails on one, raise on all.

    Raises:
        DamagedError: on every rank, if that is all that was found on any.
        CheckpointError: on every rank; with the cause on the rank that failed.
    """
    from safetensors import SafetensorError

    cause: Exception | None = None
    try:
        action()
    except (OSError, CheckpointError, SafetensorError) as e:
        cause = e
    own = 0 if cause is None else 1 if isinstance(cause, DamagedError) else 2
    worst = max(row[0] for row in group.gather([own]))
    if worst == 0:
        return
    kind = DamagedError if worst == 1 else CheckpointError
    if own != worst:
        raise kind(str(what), "success on every rank", "a failure on another rank", "See its message.")
    if isinstance(cause, CheckpointError):
        raise cause
    if cause is not None:
        raise CheckpointError(
            str(what),
            "to read or write it",
            f"{type(cause).__name__}: {cause}",
            "Free space or mend the file system; complete checkpoints are untouched.",
        ) from cause


def save_outer(
    folder: Path,
    state: OuterState,
    config: Config,
    group: IslandGroup,
    extra: dict[str, Any],
    own: dict[str, torch.Tensor],
) -> None:
    """Write it; all ranks of the island must call it. The manifest makes it complete.

    Args:
        folder: made if it is not there.
        state: what to write.
        config: named in the manifest.
        group: the ranks of this island.
        extra: further json-able facts, equal on all ranks.
        own: tensors of this island alone: what encoded contributions have left out.

    Raises:
        CheckpointError: a file cannot be written; on all ranks.
    """
    from safetensors.torch import save_file

    digests = [row[0] for row in group.gather([to_int64(state.digest())])]
    target, manifest = folder / rank_file(group.rank), folder / MANIFEST
    part = target.with_suffix(".part")

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({**state.tensors(), **own}, str(part), metadata={"segments": json.dumps(_segments(state))})

    def clear() -> None:  # from here on what was there before is gone
        if group.rank == 0:
            manifest.unlink(missing_ok=True)

    def finish() -> None:
        if group.rank == 0:
            content = {
                "format": FORMAT,
                "version": __version__,
                "ranks": group.size,
                "outer": _kind(config),
                "counters": state.counters(),
                "extra": extra,
                "digests": [f"{d & ((1 << 64) - 1):016x}" for d in digests],
            }
            write_json_atomic(manifest, content)

    for action in (write, clear, lambda: replace_file(part, target), finish):
        agreed(group, folder, action)


def load_outer(
    folder: Path, state: OuterState, config: Config, group: IslandGroup, own: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Read what `save_outer` wrote into ``state`` and ``own``; all ranks of the island must call it.

    Returns:
        The extra facts given to `save_outer`.

    Raises:
        DamagedError: torn or damaged; ``state`` and ``own`` are to be thrown away.
        CheckpointError: of another model, outer optimizer or number of ranks.
    """
    from safetensors import SafetensorError, safe_open

    manifest: dict[str, Any] = {}

    def read() -> None:
        manifest.update(_read_manifest(folder))
        _same(
            folder, "ranks", manifest["ranks"], group.size, "Resume with as many ranks as it was saved with."
        )
        for key, value in _kind(config).items():
            _same(folder, key, manifest["outer"][key], value, "Resume with the config of the run.")
        path = folder / rank_file(group.rank)
        if not path.exists():
            raise DamagedError(str(path), "this rank's part of the outer state", "no such file")
        with safe_open(str(path), framework="pt", device="cpu") as file:
            saved = json.loads(file.metadata()["segments"])
            for theirs, mine in zip(saved, _segments(state), strict=False):
                _same(folder, "parameter", theirs, mine, "The checkpoint is of another model.")
            _same(
                folder, "number of parameters", len(saved), len(_segments(state)), "It is of another model."
            )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        targets = {**state.tensors(), **own}
        if set(tensors) != set(targets):
            raise CheckpointError(
                str(path), f"tensors {sorted(targets)}", sorted(tensors), "It is of another run."
            )
        for name, target in targets.items():
            _same(path, name, _kind_of(tensors[name]), _kind_of(target), "It is of another config.")
        for name, target in targets.items():
            target.copy_(tensors[name])
        state.forget_digest()
        state.take_counters(manifest["counters"])
        digest = f"{state.digest() & ((1 << 64) - 1):016x}"
        if digest != (wrote := manifest["digests"][group.rank]):
            raise DamagedError(f"{path}: digest", f"{wrote}, with which it was saved", digest, _DAMAGED)

    def read_whole() -> None:
        try:
            read()
        except SafetensorError as e:
            path = folder / rank_file(group.rank)
            raise DamagedError(str(path), "a whole safetensors file", str(e), _DAMAGED) from None

    agreed(group, folder, read_whole)
    return dict(manifest["extra"])


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise DamagedError(str(folder), f"a {MANIFEST}", "none: it was not written to its end") from None
    except ValueError as e:
        raise DamagedError(str(folder / MANIFEST), "valid json", str(e), _DAMAGED) from None
    _same(folder, "format", manifest.get("format"), FORMAT, "Use the version that wrote it.")
    return dict(manifest)


def _same(where: Path, what: str, saved: object, now: object, remedy: str) -> None:
    if saved != now:
        raise CheckpointError(
            f"{where}: {what}", f"{now}, as this run has", f"{saved} in the checkpoint", remedy
        )
