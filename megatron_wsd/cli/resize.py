"""``megatron-wsd resize``: another number of islands for a run whose islands are started one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def resize(
    run_dir: Annotated[Path, typer.Argument(help="The run folder; all islands must have stopped.")],
    islands: Annotated[int, typer.Option(help="How many islands go on.")],
) -> None:
    """Let a stopped run go on with another number of islands, without repeating or losing a sample."""
    from megatron_wsd.config import load_config
    from megatron_wsd.errors import IslandError
    from megatron_wsd.resume import plan_change
    from megatron_wsd.rundir import RunDir, is_held, open_run

    run = RunDir(run_dir.absolute())
    for lock in sorted(run.path.glob("island_*/lock")):
        if is_held(lock):
            raise IslandError(lock.parent.name, "a stopped island", f"one that is running at {run.path}")
    config = load_config(run.config_json, islands=islands, resize=True)
    change = plan_change(run.path, config)
    open_run(run.path, config, resume=True, eras=None if change is None else change.eras)
    if change is None:
        typer.echo(f"{run.path} has {islands} islands already.")
        return
    typer.echo(f"{change.told(config)}.\nStart all {islands} with --resume --islands {islands}.")
