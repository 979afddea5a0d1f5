"""``megatron-wsd status``: how a run stands, from the files in its folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_wsd.cli.logs import excerpt
from megatron_wsd.control import told
from megatron_wsd.errors import ConfigError
from megatron_wsd.reporting.waiting import duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from megatron_wsd.reporting.status import RunStatus

_COLOURS = {
    **dict.fromkeys(("running", "finished"), "green"),
    **dict.fromkeys(("silent", "starting"), "yellow"),
    **dict.fromkeys(("lost", "failed"), "red"),
}
_WHY_LINES = 3  # of the log of an island that failed
_UNWRAPPED = 10_000  # columns: more than any line has


def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Look again until the run is over.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print json, one line a look.")] = False,
    prometheus: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve /metrics there instead of printing.")
    ] = None,
) -> None:
    """Print how a run stands: islands, rounds, loss, rate, speed, bytes, and what it is waiting for.

    Only files of the run folder are read, so it works over a shared disk, and on a run that is dead.

    Example: megatron-wsd status runs/first --watch
    """
    from megatron_wsd.reporting.status import RunStatus

    run = RunStatus(run_dir)
    if prometheus is not None:
        _serve(run, prometheus)
    elif as_json:
        _repeat(run, interval, watch, lambda found: typer.echo(json.dumps(found)))
    elif watch and sys.stdout.isatty():
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            _repeat(run, interval, watch, lambda found: live.update(render(found), refresh=True))
    else:
        from rich.console import Console

        # what a program reads has its whole lines, however narrow a terminal is taken to be
        console = Console() if sys.stdout.isatty() else Console(width=_UNWRAPPED)
        _repeat(run, interval, watch, lambda found: console.print(render(found)))


def _repeat(run: RunStatus, interval: float, watch: bool, show: Any) -> None:
    while True:
        found = run.look()
        show(found)
        if not watch or found["state"] in ("finished", "stopped"):
            return
        time.sleep(interval)


def _serve(run: RunStatus, address: str) -> None:
    from megatron_wsd.reporting.prometheus import make_server

    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError("--prometheus", "a port, or HOST:PORT", address, "Give 9400, or 0.0.0.0:9400.")
    with make_server(run, host or "127.0.0.1", int(port)) as server:
        typer.echo(f"http://{server.server_address[0]!s}:{server.server_address[1]}/metrics")
        server.serve_forever()


def render(found: dict[str, Any]) -> RenderableType:
    """What `RunStatus.look` returned, for a terminal."""
    from rich.console import Group
    from rich.text import Text

    lines = [_headline(found), _islands(found)]
    if len(found["fragments"]) > 1:
        each = ", ".join(f"{f['fragment']}: v{f['version']}" for f in found["fragments"])
        lines.append(Text(f"fragments  {each}"))
    if found["anchor"]:
        each = ", ".join(
            f"{c} {_or(a['loss'], '.3f')} at step {a['step']}" for c, a in found["anchor"].items()
        )
        lines.append(Text(f"anchor     {each}"))
    checkpoints = [i["checkpoint"] for i in found["islands"] if i["checkpoint"]]
    if checkpoints:
        newest = max(checkpoints, key=lambda c: c["position"])
        age = duration(found["time"] - newest["time"])
        own = f" (own step {newest['step']})" if found["mode"] == "async" else ""
        where = f"step {newest['position']}{own}, round {newest['outer_step']}"
        lines.append(Text(f"checkpoint {where}, {age} ago"))
    for order in found["orders"]["accepted"]:
        agreed = "" if "refused" in order else "agreed "
        lines.append(Text(f"order      {told(order)}; {agreed}at step {order['step']}"))
    if found["orders"]["pending"] is not None:
        lines.append(Text(f"order      {_pending(found)}"))
    for name, told_here in (("waits for", found["waiting_for"]), ("note", found["notes"])):
        for number, sentence in enumerate(told_here):
            lines.append(Text(f"{'' if number else name:<11}{sentence}"))
    for island in found["islands"]:
        if island["state"] == "failed":
            why = excerpt(Path(island["log"]), _WHY_LINES)
            lines += [Text(f"island {island['island']:<4}| {line}") for line in why]
    return Group(*lines)


def _pending(found: dict[str, Any]) -> str:
    order = found["orders"]["pending"]
    if order["kind"] == "unreadable":
        return f"cannot be read: {order['message']}"
    going = any(i["state"] in ("running", "silent", "starting", "elsewhere") for i in found["islands"])
    return f"{told(order)}; pending, {'for the next round' if going else 'until the run goes on'}"


def _headline(found: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    from megatron_wsd.report import human_bytes

    text = Text(f"{found['run']}: ", style="bold")
    text.append(found["state"], style=_COLOURS.get(found["state"], ""))
    text.append(f" ({found['path']})\n", style="not bold")
    void = max((i["rounds_void"] for i in found["islands"]), default=0)
    age = found["last_commit_age_s"]
    committed = "" if age is None else f" ({duration(age)} ago)"
    passed = "" if found["end"] in (None, found["position"]) else f" (the schedule ended at {found['end']})"
    parts = [f"step {found['position']}{passed}", f"round {found['outer_step']}{committed}"]
    parts += [f"{void} void"] * (void > 0)
    parts += [found["mode"]] + ([found["phase"]] if found["phase"] else [])
    parts += [f"lr {found['lr']:.2e}"] if found["lr"] is not None else []
    parts += [f"{found['tokens']:,} tokens trained"] if found["tokens"] is not None else []
    parts += [f"{found['tokens_per_s']:,.0f} tok/s"] if found["tokens_per_s"] else []
    parts.append(f"{human_bytes(found['bytes'])} exchanged")
    return text.append(", ".join(parts) + "\n", style="not bold")


def _islands(found: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from megatron_wsd.report import human_bytes

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("island", no_wrap=True)
    table.add_column("state", no_wrap=True)
    own = ["own"] if found["mode"] == "async" else []  # steps of its own
    for name in ("seen", "step", *own, "round", "stale", "gate", "loss", "tok/s", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)  # fits 80 columns; --json has the rest
    for i in found["islands"]:
        table.add_row(
            str(i["island"]),
            Text(i["state"], style=_COLOURS.get(i["state"], "")),
            "-" if i["age_s"] is None else duration(i["age_s"]),
            _or(i["position"], "d"),
            *[_or(i["step"], "d") for _ in own],
            _or(i["outer_step"], "d"),
            _or(i["staleness"], "d"),
            _or(i["gate"], ".2f"),
            _or(i["loss"], ".3f"),
            _or(i["tokens_per_s"], ",.0f"),
            human_bytes(i["bytes"]),
        )
    return table


def _or(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
