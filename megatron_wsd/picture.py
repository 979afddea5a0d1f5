"""The picture of a run: loss, learning rate with its phases, and outer rounds, over one step axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wsd.curves import passed
from megatron_wsd.records import Record, anchors, is_void, of_kind, position, read_islands
from megatron_wsd.rundir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ISLAND_COLOURS = ("#1f77b4", "#e8710a", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#e377c2")
_CORPUS_MARKERS = "osD^vP"
_CORPUS_COLOURS = ("#111111", "#a8071a", "#00695c", "#5e35b1", "#6d4c41", "#37474f")
_PHASE_SHADES = {"warmup": "#fff1d6", "stable": "#e4f1e4", "decay": "#e3e8f7", "done": "#f0f0f0"}
_ROUND_STYLES: dict[str, dict[str, Any]] = {
    "committed": {"marker": "|", "markersize": 11, "markeredgewidth": 1.4},
    "committed without a contribution": {"marker": "o", "markersize": 5, "markerfacecolor": "none"},
    "void": {"marker": "x", "markersize": 7, "markeredgewidth": 1.8, "color": "#d62728"},
    "healed": {"marker": "v", "markersize": 5, "color": "#111111"},
}


def draw(run_dir: str | Path, out_png: str | Path) -> None:
    """Draw the run in ``run_dir`` into ``out_png`` (1500 x 1350 pixels)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    islands = read_islands(run_dir)
    figure = Figure(figsize=(10, 9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot no display is looked for and nothing is kept open
    loss, rate, rounds = figure.subplots(3, 1, sharex=True, height_ratios=(3.2, 1.5, 1.5))
    last = max((position(r) for records in islands.values() for r in records if "step" in r), default=1)
    run = RunDir(Path(run_dir))
    spans = passed(run, islands)
    begun = spans[0][1] - 1 if spans else 0  # where a branch left its parent
    loss.set_xlim(begun, max(1, last) + 0.01 * max(1, last - begun))
    figure.suptitle(_title(Path(run_dir), islands), x=0.01, ha="left", fontsize=11, fontweight="bold")
    _draw_loss(loss, islands, run.asynchronous)
    _draw_rate(rate, islands, spans)
    _draw_rounds(rounds, islands)
    rounds.set_xlabel("inner step of the run")
    for axes in (loss, rate, rounds):
        axes.spines[["top", "right"]].set_visible(False)
    temporary = Path(out_png).with_suffix(".tmp.png")
    figure.savefig(temporary)
    temporary.replace(out_png)


def _title(run_dir: Path, islands: dict[int, list[Record]]) -> str:
    sizes = [r["parameters"] for records in islands.values() for r in records if r["kind"] == "start"]
    size = f", {sizes[-1] / 1e6:.2f}M parameters" if sizes else ""
    run = RunDir(run_dir)
    count = max(len(islands), int(run.facts().get("islands", 0)) if run.run_json.is_file() else 0)
    here = f"{len(islands)} of " * (len(islands) < count)  # the others are on other clusters
    return f"{run_dir.absolute().name}: {here}{count} island{'s' * (count != 1)}{size}"


def _colour(island: int) -> str:
    return _ISLAND_COLOURS[island % len(_ISLAND_COLOURS)]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean. At the start it narrows, since losses fall fast there; at the end it is cut."""
    reach = [min(window // 2, i) for i in range(len(values))]
    spans = [(i - r, min(len(values), i + r + 1)) for i, r in enumerate(reach)]
    return [sum(values[low:high]) / (high - low) for low, high in spans]


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def stretches(steps: list[Record], starts: Sequence[float] | None = None) -> list[list[Record]]:
    """The steps cut where the island was away: where a gap is more than three usual ones.

    Args:
        steps: of one island.
        starts: of an asynchronous island, when it was started, in Unix seconds: only there it was away, since
            the position of one that is slow jumps by what the others commit.
    """
    if starts is not None:
        cuts = [
            i
            for i, (a, b) in enumerate(pairwise(steps), 1)
            if any(a["time"] < t <= b["time"] for t in starts)
        ]
        return [steps[a:b] for a, b in pairwise([0, *cuts, len(steps)])]
    gaps = [position(b) - position(a) for a, b in pairwise(steps)]
    usual = sorted(gaps)[len(gaps) // 2] if gaps else 1
    cuts = [i for i, gap in enumerate(gaps, 1) if gap > 3 * usual]
    return [steps[a:b] for a, b in pairwise([0, *cuts, len(steps)])]


def start_times(records: list[Record], asynchronous: bool) -> list[float] | None:
    """What `stretches` wants to know of the starts of an island."""
    return [r["time"] for r in records if r["kind"] == "start"] if asynchronous else None


def _draw_loss(axes: Axes, islands: dict[int, list[Record]], asynchronous: bool) -> None:
    entropy: dict[str, float] = {}
    for island, records in islands.items():
        steps = of_kind(records, "step")
        window = max(3, len(steps) // 20)
        label: str | None = f"island {island}, training"
        for part in stretches(steps, start_times(records, asynchronous)):
            x, y = [position(r) for r in part], [_number(r.get("loss")) for r in part]
            axes.plot(x, y, color=_colour(island), alpha=0.35, linewidth=0.8)
            axes.plot(x, _smooth(y, window), color=_colour(island), linewidth=1.6, label=label)
            label = None
        for record in records:
            if record["kind"] == "start":
                entropy |= record.get("unigram_entropy") or {}
    evals = anchors([r for records in islands.values() for r in records])
    for i, corpus in enumerate(sorted(evals.keys() | entropy.keys())):
        colour, marker = _CORPUS_COLOURS[i % 6], _CORPUS_MARKERS[i % 6]
        points = [(position(r), _number(r["loss"])) for r in evals.get(corpus, [])]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                markersize=4.5,
                linewidth=0.7,
                linestyle=":",
                label=f"anchor, validation on {corpus} (last {points[-1][1]:.3f})",
            )
        if corpus in entropy:
            label = f"unigram entropy of {corpus} ({entropy[corpus]:.3f})"
            axes.axhline(entropy[corpus], color=colour, linestyle="--", linewidth=1.0, label=label)
    _draw_mixes(axes, islands)
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper right", framealpha=0.9)


def _draw_mixes(axes: Axes, islands: dict[int, list[Record]]) -> None:
    """Where the first of the islands went over to another mix: other data have another loss."""
    switched: dict[str, int] = {}
    for records in islands.values():
        for record in of_kind(records, "event"):
            if record.get("event") == "mix":
                told = str(record.get("message", "")).partition(": ")[2] or "another data mix"
                switched[told] = min(position(record), switched.get(told, position(record)))
    for told, step in switched.items():
        axes.axvline(step, color="#666666", linestyle="-.", linewidth=1.0, label=f"{told} (step {step})")


def _draw_rate(axes: Axes, islands: dict[int, list[Record]], spans: list[tuple[str, int, int]]) -> None:
    each = [of_kind(records, "step") for records in islands.values()]
    steps = max(each, key=len, default=[])
    axes.set_ylabel("learning rate")
    if not steps:
        return
    x, y = [position(r) for r in steps], [r["lr"] for r in steps]
    axes.plot(x, y, color="#333333", linewidth=1.6)
    top = max(y) or 1.0
    axes.set_ylim(0, top * 1.3)  # room for the names of the phases
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    begin, end = axes.get_xlim()
    width = end - begin
    for name, first, right in spans:
        left = first - 1
        axes.axvspan(left, right, color=_PHASE_SHADES.get(name, "#f0f0f0"), linewidth=0, zorder=0)
        if right - left > 0.012 * len(name) * width:
            axes.text((left + right) / 2, top * 1.15, name, ha="center", va="center", fontsize=9)
        elif right > left:  # too narrow for its name: upright beside its left edge
            axes.text(left + 0.004 * width, top * 1.26, name, rotation=90, va="top", fontsize=7)


def _draw_rounds(axes: Axes, islands: dict[int, list[Record]]) -> None:
    """A row for each island: where it took part, where the round was void, where it was healed."""
    from matplotlib.lines import Line2D

    per_island = {i: of_kind(records, "round") for i, records in islands.items()}
    rows = {island: row for row, island in enumerate(islands)}
    drawn: dict[str, Any] = {}
    for island, rounds in per_island.items():
        row, colour = rows[island], _colour(island)
        full = [position(r) for r in rounds if r["committed"] and island in r["contributors"]]
        without = [position(r) for r in rounds if r["committed"] and island not in r["contributors"]]
        void = [position(r) for r in rounds if is_void(r)]
        healed = [position(r) for r in islands[island] if r["kind"] == "event" and r["event"] == "heal"]
        for label, at in (
            ("committed", full),
            ("committed without a contribution", without),
            ("void", void),
            ("healed", healed),
        ):
            if at:
                style = _ROUND_STYLES[label]
                y = [row - 0.3 if label == "healed" else row] * len(at)
                axes.plot(at, y, linestyle="none", clip_on=False, **{"color": colour, **style})
                # the legend is about marks, not islands: grey unless the mark has a colour of its own
                drawn[label] = Line2D([], [], linestyle="none", **{"color": "#555555", **style})
    axes.set_yticks(range(len(rows)), [f"island {i}" for i in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6 - 0.3 * len(rows))  # island 0 on top, the legend above it
    if drawn:
        committed = {r["outer_step"] for rounds in per_island.values() for r in rounds if r["committed"]}
        title = f"{len(committed)} outer rounds:"
        blank = Line2D([], [], linestyle="none")
        axes.legend(
            [blank, *drawn.values()],
            [title, *drawn],
            fontsize=8,
            loc="upper left",
            ncols=len(drawn) + 1,
            frameon=False,
            borderaxespad=0.1,
            handletextpad=0.3,
            columnspacing=1.2,
        )
    _draw_bytes(axes.twinx(), per_island)


def _draw_bytes(axes: Axes, per_island: dict[int, list[Record]]) -> None:
    total, x, y = 0.0, [axes.get_xlim()[0]], [0.0]
    for step, count in sorted(
        (position(r), r.get("island_bytes", 0)) for rounds in per_island.values() for r in rounds
    ):
        total += count
        x.append(step)
        y.append(total)
    x.append(axes.get_xlim()[1])  # the bytes of the last round, which may be the end of the run
    y.append(total)
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    scale, unit = next(((size, name) for size, name in units if total >= size), (1.0, "bytes"))
    axes.fill_between(x, [v / scale for v in y], step="post", color="#777777", alpha=0.15, linewidth=0)
    axes.set_ylim(0, max(total / scale, 1e-9) * 1.35)
    axes.set_ylabel(f"exchanged in all, {unit}", color="#666666")
    axes.tick_params(axis="y", colors="#666666")
    axes.spines["top"].set_visible(False)
