"""``megatron-wsd report``: the summary, the picture and the page of a run, also of one that is going on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_wsd.errors import ConfigError


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The run folder.")],
    out: Annotated[
        Path | None, typer.Option(help="An .html page, or a .png; default: RUN/summary.json and run.png.")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="RUN2 ...", help="Other runs for the page, or other islands.")
    ] = None,
) -> None:
    """Print the summary of a run and draw it; with --out report.html, a page that needs no network.

    Example: megatron-wsd report runs/first --compare runs/second runs/third --out report.html
    """
    from megatron_wsd import report as writer

    run_dir, others = run_dirs[0], [*(compare or []), *run_dirs[1:]]
    if len(run_dirs) > 1 and not compare:
        raise ConfigError("RUN", "one run folder", f"{len(run_dirs)}", "Name the others after --compare.")
    suffix = None if out is None else out.suffix.lower()
    if suffix not in (None, ".html", ".png"):
        raise ConfigError("--out", "a name that ends in .html or .png", str(out))
    if others and suffix != ".html":
        raise ConfigError("--compare", "a page to compare in", "none", "Add --out report.html.")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError("--out", "a folder that is there", str(out.parent), "Make it first.")
    for folder in (run_dir, *others):
        if not writer.has_steps(folder):
            which = "RUN" if folder == run_dir else "--compare"
            raise ConfigError(which, "a run folder in which steps are logged", f"{folder}, which has none")
    if out is None:
        writer.write(run_dir)
        return
    if suffix == ".html":
        from megatron_wsd.reporting.page import write_page

        write_page(run_dir, out, others)
    else:
        writer.draw(run_dir, out)
    typer.echo(str(out.absolute()))
