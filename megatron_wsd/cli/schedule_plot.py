"""``megatron-wsd schedule-plot``: the learning rate that a config asks for, with its phases."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_wsd.errors import ConfigError

if TYPE_CHECKING:
    from megatron_wsd.config import Config
    from megatron_wsd.schedule import Batch, Schedule

_SHADES = {"warmup": "#fff1d6", "stable": "#e4f1e4", "decay": "#e3e8f7", "done": "#f0f0f0"}
_POINTS = 1000  # of the curve: more than the picture has pixels for


def schedule_plot(
    config: Annotated[Path, typer.Argument(help="The json config.")],
    out: Annotated[Path, typer.Option("--out", help="The picture, a png.")] = Path("schedule.png"),
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="How far; default: a little past the last decay.")
    ] = None,
    islands: Annotated[int | None, typer.Option("--islands", help="As for launch.")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="As for launch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers instead of drawing.")] = False,
    at: Annotated[
        str | None, typer.Option("--at", help="Positions such as 0,10,95: print their rates only.")
    ] = None,
) -> None:
    """Draw the learning rate of a config with its phases."""
    from megatron_wsd.config import load_config
    from megatron_wsd.schedule import Batch

    job = load_config(config, islands=islands, ranks=ranks)
    if job.schedule is None:
        raise ConfigError(
            "scheduler.type", '"WSD"', job.deepspeed.get("scheduler"), "Only a WSD schedule can be drawn."
        )
    seq_length = job.model.seq_length if job.model is not None else None
    count = job.islands.count or 1
    batch = Batch(job.island_batch * count, seq_length)
    until = horizon(job.schedule, steps, batch)
    peak = peak_rate(job)
    if at is not None:
        for n in positions_of(at):
            typer.echo(f"{n} {job.schedule.phase(n)} {job.schedule.rate(n, peak)!r}")
        return
    if as_json:
        typer.echo(json.dumps(describe(job.schedule, peak, until), indent=1))
        return
    title = f"{config.name}: learning rate, {count} island{'s' * (count != 1)}"
    draw(job.schedule, peak, until, batch, title, out)
    typer.echo(f"wrote {out}")


def positions_of(text: str) -> list[int]:
    """``"0,10,95"`` as numbers.

    Raises:
        ConfigError: not whole numbers of at least 0 with commas between them.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError("--at", "whole numbers with commas between them", text, "Write 0,10,95.")
    return [int(part) for part in parts]


def peak_rate(job: Config) -> float:
    """Peak of the first param group: scheduler.params.max_lr, else the optimizer's lr.

    Raises:
        ConfigError: the config says neither.
    """
    max_lr: Any = job.deepspeed["scheduler"]["params"].get("max_lr")
    if isinstance(max_lr, list):
        max_lr = max_lr[0]
    if max_lr is None:
        max_lr = job.deepspeed.get("optimizer", {}).get("params", {}).get("lr")
    if isinstance(max_lr, bool) or not isinstance(max_lr, (int, float)):
        raise ConfigError("scheduler.params.max_lr", "a rate there or in optimizer.params.lr", max_lr)
    return float(max_lr)


def horizon(schedule: Schedule, steps: int | None, batch: Batch) -> int:
    """How far to look, in the schedule's unit: ``steps`` updates, or past everything that is planned."""
    from megatron_wsd.schedule import Length

    if steps is not None:
        return max(1, batch.convert("--steps", Length(steps, "steps"), schedule.unit))
    last = max([schedule.warmup_steps, *(decay.settled for decay in schedule.decays)])
    if schedule.end is not None:
        return last + max(1, last // 20)
    return 2 * last if last else 1000 * (batch.per_step(schedule.unit) or 1)


def spans(schedule: Schedule, until: int) -> list[tuple[str, int, int]]:
    """The phases up to ``until`` as (name, first position, position after the last)."""
    edges = {0, until, schedule.warmup_steps}
    for decay in schedule.decays:
        edges |= {decay.start, decay.end, decay.settled}
    inside = sorted(edge for edge in edges if edge <= until)
    return [(schedule.phase(left), left, right) for left, right in pairwise(inside)]


def describe(schedule: Schedule, peak: float, until: int) -> dict[str, Any]:
    """Phases, and the rate at the beginning, middle and last position of each."""
    phases = []
    for name, left, right in spans(schedule, until):
        rates = {n: schedule.rate(n, peak) for n in (left, (left + right) // 2, right - 1)}
        phases.append({"phase": name, "from": left, "to": right, "rates": rates})
    return {"unit": schedule.unit, "peak": peak, "phases": phases, "schedule": schedule.state_dict()}


def draw(schedule: Schedule, peak: float, until: int, batch: Batch, title: str, out: Path) -> None:
    """Draw the rate up to ``until`` into ``out`` (1350 x 600 pixels), tokens on a second axis if known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot no display is looked for and nothing is kept open
    axes = figure.subplots()
    found = spans(schedule, until)
    positions = {round(until * k / _POINTS) for k in range(_POINTS + 1)}
    for _, left, right in found:  # both sides of every edge, so that a jump back to the peak is upright
        positions |= {left, max(left, right - 1), right}
    x = sorted(positions)
    axes.plot(x, [schedule.rate(n, peak) for n in x], color="#333333", linewidth=1.6)
    for name, left, right in found:
        axes.axvspan(left, right, color=_SHADES[name], linewidth=0, zorder=0)
        wide = right - left > 0.012 * len(name) * until
        axes.text(
            (left + right) / 2, peak * 1.12, name, ha="center", va="center", fontsize=8,
            rotation=0 if wide else 90,
        )  # fmt: skip
    axes.set_xlim(0, until)
    axes.set_ylim(0, peak * 1.25)
    axes.set_xlabel(f"completed {'updates' if schedule.unit == 'steps' else schedule.unit}")
    axes.set_ylabel("learning rate")
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    tokens = _tokens(schedule, batch)
    if tokens is not None:
        scale: Any = (lambda n: n * tokens, lambda count: count / tokens)
        top = axes.secondary_xaxis("top", functions=scale)
        top.set_xlabel("tokens, over all islands", fontsize=8)
        top.xaxis.set_major_formatter(lambda count, _: _short(count))
        top.tick_params(labelsize=8)
    temporary = out.with_suffix(".tmp.png")
    figure.savefig(temporary)
    temporary.replace(out)


def _tokens(schedule: Schedule, batch: Batch) -> int | None:
    """Tokens of one unit of the schedule; None if they are on the first axis or not known."""
    if schedule.unit == "samples":
        return batch.tokens_per_sample
    return batch.per_step("tokens") if schedule.unit == "steps" else None


def _short(count: float) -> str:
    size, letter = next(((s, c) for s, c in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= s), (1.0, ""))
    return f"{count / size:g}{letter}"
