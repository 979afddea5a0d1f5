"""A damaged checkpoint is set aside, and the one before it taken. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.errors import CheckpointError, DamagedError
from megatron_wsd.resume import Start


def whole_start(
    store: CheckpointStore,
    choose: Callable[[], Start],
    damage: Callable[[Path], DamagedError | None],
    everyone: Callable[[Any], list[Any]],
    *,
    first: bool,
) -> tuple[Start, list[str]]:
    """Where an island begins, of checkpoints whose files are all what was written; all ranks must call it.

    Nothing is loaded before all ranks have found whole what they are going to load, so that no state has to
    be undone. What is damaged gets another name (`CheckpointStore.set_aside`); the choice is then made anew,
    by the rules that hold without it.

    Args:
        store: of the island.
        choose: asked on the first rank; see `megatron_wsd.resume.starting_point`.
        damage: what this rank finds in a checkpoint; see `RunCheckpoints.damage`.
        everyone: what each rank says, by rank, on all of them.
        first: whether this is the first rank.

    Returns:
        The start, and a sentence for every checkpoint that was set aside.

    Raises:
        DamagedError: the checkpoint of a branch's parent is damaged; it is left as it is.
        CheckpointError: none that is whole is left, or it belongs to something else.
    """
    told = []

    def set_aside(step: int, errors: Sequence[DamagedError]) -> None:
        folder = store.folder(step)
        why = "; ".join(str(e).replace(f"{folder}/", "").rstrip(".") for e in errors)
        aside = store.set_aside(step).name if first else ""
        told.append(f"{folder.name} is damaged ({why}) and is now {aside}")

    if first:
        for step, error in store.torn().items():
            set_aside(step, [error])
    while True:
        start: Start = everyone(choose() if first else None)[0]
        found = [] if start.folder is None else [e for e in everyone(damage(start.folder)) if e is not None]
        if start.folder is None or not found:
            break
        if start.parent is not None:
            raise DamagedError(
                str(start.folder),
                "the parent's checkpoint as it was when it was saved",
                " ".join(map(str, found)),
                "It is left as it is. Bring its files back from a copy, or make the branch anew.",
            )
        set_aside(int(start.folder.name.removeprefix("step_")), found)
    instead = "fresh weights, which the others heal" if start.folder is None else start.folder.name
    return start, [f"{text}; taken instead: {instead}" for text in told]


def refuse_unhealed(root: Path, lost: Sequence[str], outer_step: int) -> None:
    """An island that has lost its checkpoints, and has met the others, must have got their state.

    Each may have counted on another whose checkpoint turned out to be damaged as well.

    Args:
        root: where the checkpoints are of an island that began without one.
        lost: those that it had; see `CheckpointStore.lost`.
        outer_step: committed rounds, after the islands have met.

    Raises:
        CheckpointError: they stand at the beginning as well.
    """
    if lost and outer_step == 0:
        raise CheckpointError(
            str(root),
            "a whole checkpoint, here or of another island of this run",
            f"{', '.join(lost)}, damaged, and no other island that has begun",
            "Restore the files of one of them, or begin anew in another --run-dir.",
        )
