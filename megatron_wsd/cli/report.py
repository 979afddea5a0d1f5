"""``megatron-wsd report``: the summary and the picture of a run, also of one that is still going on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_wsd.errors import ConfigError


def report(run_dir: Annotated[Path, typer.Argument(help="The run folder.")]) -> None:
    """Print the summary of a run and write its summary.json and run.png anew."""
    from megatron_wsd import report as writer

    if not writer.has_steps(run_dir):
        raise ConfigError("RUN_DIR", "a run folder in which steps are logged", f"{run_dir}, which has none")
    writer.write(run_dir)
