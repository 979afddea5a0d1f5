"""``megatron-wsd schedule``: the learning rate of a config, or of a run and its branches."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_wsd.cli.plan import check_picture
from megatron_wsd.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megatron_wsd.curves import Curve


def schedule(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A json config, or a run folder.")],
    at: Annotated[
        str | None, typer.Option(help="Positions such as 0,10,95: the rate after so many updates.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Rows of step, tokens, phase, lr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Phases, rates and the whole schedule.")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="How far; default: past everything that is planned.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this png.")] = None,
    islands: Annotated[int | None, typer.Option(help="Of a config, as for launch.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Of a config, as for launch.")] = None,
) -> None:
    """Tell the learning rate with its phases: of a config, or of a run as it stands, with its branches."""
    if as_csv and as_json:
        raise ConfigError("--csv", "it or --json", "both")
    if plot is not None:
        check_picture(plot)
    curves, notes = _curves(source, islands, ranks)
    from megatron_wsd.curves import extent

    chosen = None if at is None else positions_of(at)
    until = extent(curves, steps)
    for note in notes:  # beside the tables, where they are read; not among rows or json
        typer.echo(note, err=as_csv or as_json)
    if as_csv:
        _write_csv(curves, chosen, until, source.is_dir())
    elif as_json:
        typer.echo(json.dumps([describe(curve, chosen or []) for curve in curves], indent=1))
    else:
        _print_tables(curves, chosen or [])
    if plot is not None:
        from megatron_wsd.curve_picture import draw

        draw(curves, until, plot)
        typer.echo(f"wrote {plot}", err=True)


def _curves(source: Path, islands: int | None, ranks: int | None) -> tuple[list[Curve], list[str]]:
    from megatron_wsd.config import load_config
    from megatron_wsd.curves import of_config, of_run
    from megatron_wsd.rundir import RunDir

    if not source.is_dir():
        if not source.exists():
            raise ConfigError(
                "CONFIG|RUN",
                "a json config or a run folder",
                f"{source}, which does not exist",
                "Check the path.",
            )
        config = load_config(source, islands=islands, ranks=ranks, named="CONFIG|RUN")
        return [of_config(config, source.name)], [config.assumption] if config.assumption else []
    run = RunDir(source.absolute())
    if not run.run_json.is_file():
        raise ConfigError(
            "CONFIG|RUN",
            "a json config or a run folder",
            f"{source}, a folder without a run",
            "Check the path.",
        )
    for option, value in (("--islands", islands), ("--ranks", ranks)):
        if value is not None:
            raise ConfigError(option, "none with a run, which has its number", value, "Leave it out.")
    return of_run(run)


def positions_of(text: str) -> list[int]:
    """``"0,10,95"`` as numbers.

    Raises:
        ConfigError: not whole numbers of at least 0 with commas between them.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 19 for part in parts):  # which no counter holds
        raise ConfigError("--at", "whole numbers with commas between them", text, "Write 0,10,95.")
    return [int(part) for part in parts]


def describe(curve: Curve, at: Sequence[int]) -> dict[str, Any]:
    """A curve in json: its phases, its rates at some positions, its history and its whole schedule.

    ``first`` and ``last`` of a phase count updates, samples or tokens from 1 on; ``position`` counts those
    that are completed, and ``lr`` there is the rate of the update that follows.
    """
    phases = [
        {
            "phase": name,
            "first": left + 1,
            "last": right,
            "length": None if right is None else right - left,
            "tokens": _tokens_between(curve, left, right),
            "lr_first": curve.rate(left),
            "lr_last": curve.rate(left if right is None else right - 1),
        }
        for name, left, right in curve.spans()
    ]
    return {
        "name": curve.name,
        "unit": curve.schedule.unit,
        "peak": curve.peak,
        "begin": curve.begin,
        "position": curve.position,
        "end": curve.schedule.end,
        "phases": phases,
        "at": [
            {"position": n, "tokens": tokens, "phase": phase, "lr": lr}
            for n, _, tokens, phase, lr in _rows(curve, [n for n in at if n >= curve.begin])
        ],
        "history": curve.schedule.history(),
        "schedule": curve.schedule.state_dict(),
    }


def _tokens_between(curve: Curve, left: int, right: int | None) -> int | None:
    a, b = curve.count(left, "tokens"), None if right is None else curve.count(right, "tokens")
    return None if a is None or b is None else b - a


def _rows(curve: Curve, positions: Sequence[int]) -> Iterator[tuple[int, int | None, int | None, str, float]]:
    """(position, step, tokens, phase, rate) of each position."""
    for n in positions:
        yield n, curve.count(n, "steps"), curve.count(n, "tokens"), curve.schedule.phase(n), curve.rate(n)


def _write_csv(curves: Sequence[Curve], at: Sequence[int] | None, until: int, run: bool) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["step", "tokens", "phase", "lr", *(["run"] if run else [])])
    for curve in curves:
        chosen = curve.points(until) if at is None else [n for n in at if n >= curve.begin]
        for _, step, tokens, phase, lr in _rows(curve, chosen):
            writer.writerow([step, tokens, phase, repr(lr), *([curve.name] if run else [])])


def _print_tables(curves: Sequence[Curve], at: Sequence[int]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for curve in curves:
        _print_phases(console, curve)
    if at:
        _print_rates(console, curves, at)


def _print_phases(console: Console, curve: Curve) -> None:
    unit = curve.schedule.unit
    left_parent = f", leaves its parent at {curve.begin:,}" if curve.begin else ""
    table = _table(f"{curve.name}: peak {curve.peak:g}{left_parent}")
    table.add_column("phase", no_wrap=True)
    headings = [f"first {unit[:-1]}", f"last {unit[:-1]}", unit, *(["tokens"] if unit != "tokens" else [])]
    for heading in (*headings, "first rate", "last rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    for p in describe(curve, [])["phases"]:
        counts = [p["first"], p["last"] or "open", p["length"] or ""]
        counts += [] if unit == "tokens" else ["" if p["tokens"] is None else p["tokens"]]
        words = [c if isinstance(c, str) else f"{c:,}" for c in counts]
        table.add_row(p["phase"], *words, f"{p['lr_first']:.4g}", f"{p['lr_last']:.4g}")
    console.print(table)
    for line in _told(curve):
        console.print(line, soft_wrap=True, markup=False)


def _told(curve: Curve) -> Iterator[str]:
    """What the table of phases leaves open: decisions, where the run stands, how it ends."""
    schedule, unit = curve.schedule, curve.schedule.unit
    for entry in schedule.history():
        if entry["decision"] == "override":
            yield f"changed at {entry['at']:,}: {entry['field']} from {entry['old']} to {entry['new']}"
            continue
        decay = entry["decay"]
        word = "decided" if entry["decision"] == "begin_decay" else "withdrawn"
        what = f"decay of {decay['length']:,} {unit} from {decay['start']:,}, {decay['shape']}"
        yield f"{word} at {entry['at']:,}: {what}"
    if curve.position is not None:
        n, phase = curve.position, schedule.phase(curve.position)
        yield f"stands at {n:,} {unit}: {phase}{f', next rate {curve.rate(n):.4g}' * (phase != 'done')}"
    if schedule.end is None:
        yield "no end: stable until a decay is begun"
        return
    tokens = curve.count(schedule.end, "tokens")
    also = f", {tokens:,} tokens" if tokens is not None and unit != "tokens" else ""
    yield f"ends after {schedule.end:,} {unit}{also}, at {curve.rate(schedule.end):.4g}"


def _print_rates(console: Console, curves: Sequence[Curve], at: Sequence[int]) -> None:
    table = _table("Rate of the next update")
    unit = curves[0].schedule.unit
    in_tokens = [] if unit == "tokens" else ["tokens"]
    names = [curve.name for curve in curves]
    for heading in (f"completed {'updates' if unit == 'steps' else unit}", *in_tokens, *names):
        table.add_column(heading, justify="right", no_wrap=True)
    for n in at:
        tokens = curves[0].count(n, "tokens")
        cells = [
            f"{curve.rate(n):.6g} {curve.schedule.phase(n)}" if n >= curve.begin else "" for curve in curves
        ]
        also = ["" if tokens is None else f"{tokens:,}"] if in_tokens else []
        table.add_row(f"{n:,}", *also, *cells)
    console.print(table)


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # a run of a trillion tokens fits into 80 columns
    look: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 0), "pad_edge": False}
    return Table(title=title, title_justify="left", title_style="bold", **look)
