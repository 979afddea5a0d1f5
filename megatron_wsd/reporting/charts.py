"""The charts of a run's page: matplotlib draws SVG whose colours are the page's own variables."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from megatron_wsd.picture import _number, _smooth
from megatron_wsd.records import Record, begun_at, position
from megatron_wsd.reporting.facts import RunFacts, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP"  # of the corpora
SERIES = 8  # colours for islands and runs; from the ninth on lines are dashed

# Colours that stand for variables of the style sheet: matplotlib knows no variables, and the page is light or
# dark as its reader wants it.
INK, _MUTED, _GRID, _PAPER, _BAD = "#010000", "#020000", "#030000", "#040000", "#050000"
_PHASES = {"warmup": "#060001", "stable": "#060002", "decay": "#060003", "done": "#060004"}
_VARIABLES = {INK: "ink", _MUTED: "muted", _GRID: "grid", _PAPER: "paper", _BAD: "bad"}
_VARIABLES |= {colour: f"phase-{name}" for name, colour in _PHASES.items()}
_VARIABLES |= {f"#07000{i}": f"series-{i}" for i in range(SERIES)}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, selected and searched
    "text.parse_math": False,  # names of runs and corpora are not formulas
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _MUTED),
    "grid.color": _GRID,
}


def series(index: int) -> dict[str, Any]:
    """Colour and line style of an island or a run."""
    return {"color": f"#07000{index % SERIES}", "linestyle": ("-", "--", ":")[index // SERIES % 3]}


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, in the style of the page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)  # without pyplot no display is looked for and nothing is kept open
        yield figure


def as_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as ``<svg>`` for a page: ids of its own, colours by variable, a title to be read aloud."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub("|".join(_VARIABLES), lambda m: f"var(--{_VARIABLES[m[0]]})", text)
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg {namespaces} {box[0]} role="img" aria-labelledby="{name}-title">'
    return f'{opening}<title id="{name}-title">{escape(title)}</title>{rest}'


def tokens_axis(axes: Axes, first: float, most: float) -> None:
    """Tokens in thousands, millions, billions or trillions, with the unit in the label.

    Args:
        axes: whose horizontal axis counts tokens.
        first: where it begins, which in a branch is not 0.
        most: where it ends.
    """
    scale, unit = next(
        (
            (s, u)
            for s, u in ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
            if most >= s
        ),
        (1.0, ""),
    )
    most = max(most, first + 1.0)
    axes.set_xlim(first, most + 0.01 * (most - first))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / scale:g}")
    axes.set_xlabel(f"tokens over all islands{', ' + unit if unit else ''}")


def _byte_scale(most: float) -> tuple[float, str]:
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((size, unit) for size, unit in units if most >= size), (1.0, "bytes"))


def _time_scale(most: float) -> tuple[float, str]:
    units = ((86400.0 * 2, 86400.0, "days"), (7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"))
    return next(((size, unit) for least, size, unit in units if most >= least), (1.0, "seconds"))


def loss_and_rate(run: RunFacts) -> str:
    """Training and anchor loss by tokens, with phases and numbered decisions, over the learning rate."""
    with canvas(9.6, 6.2) as figure:
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1.3))
        for axes in (loss, rate):
            for name, left, right in run.phases:
                axes.axvspan(left, right, color=_PHASES.get(name, _PHASES["done"]), linewidth=0, zorder=0)
        for i, island in enumerate(run.steps):
            _draw_training(loss, run, run.stretches[island], series(i), f"island {island}, training")
        _draw_anchor(loss, run)
        _mark_decisions(loss, run)
        loss.set_title("Loss, nats a token", pad=24 if run.decisions else 8)
        loss.set_ylabel("nats a token")
        longest = max(run.steps.values(), key=len, default=[])
        points = [(run.tokens(position(r)), float(r["lr"])) for r in longest]
        rate.plot(*xy(points), color=INK, linewidth=1.5)
        rate.set_ylim(bottom=0)
        rate.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        rate.set_title("Learning rate of the inner steps; shaded by phase")
        rate.set_ylabel("rate")
        tokens_axis(rate, *run.extent)
        handles, labels = loss.get_legend_handles_labels()
        shades, names = _phase_handles(run)
        figure.legend([*handles, *shades], [*labels, *names], loc="outside lower left", ncols=3)
        return as_svg(figure, "loss", f"Loss and learning rate of {run.name} by tokens")


def _phase_handles(run: RunFacts) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for name, _, _ in run.phases))
    edge: dict[str, Any] = {"edgecolor": _MUTED, "linewidth": 0.4}
    return [Patch(facecolor=_PHASES.get(n, _PHASES["done"]), **edge) for n in names], names


def xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """What `Axes.plot` wants."""
    return [x for x, _ in points], [y for _, y in points]


def _draw_training(
    axes: Axes, run: RunFacts, stretches: list[list[Record]], style: dict[str, Any], name: str
) -> None:
    label: str | None = name
    window = max(3, sum(map(len, stretches)) // 20)
    for part in stretches:
        x, y = [run.tokens(position(r)) for r in part], [_number(r.get("loss")) for r in part]
        raw = thinned(list(zip(x, y, strict=True)))
        smooth = thinned(list(zip(x, _smooth(y, window), strict=True)))
        axes.plot(*xy(raw), **style, alpha=0.3, linewidth=0.8)
        axes.plot(*xy(smooth), **style, linewidth=1.7, label=label)
        label = None


def _draw_anchor(axes: Axes, run: RunFacts) -> None:
    for i, (corpus, validated) in enumerate(run.anchors.items()):
        points = [(tokens, _number(loss)) for tokens, loss in validated]
        look: dict[str, Any] = {
            "color": INK,
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4.5,
            "linewidth": 0.8,
            "linestyle": ":",
        }
        look |= {"markerfacecolor": _PAPER} if i % 2 else {}
        axes.plot(*xy(thinned(points, 200)), **look, label=f"anchor, validation on {corpus}")


def _mark_decisions(axes: Axes, run: RunFacts) -> None:
    """Upright lines with the numbers of the decisions above the axes; close ones share a number's place."""
    first, most = run.extent
    groups: list[tuple[float, list[int]]] = []
    for number, decision in enumerate(run.decisions, 1):
        at = run.tokens(decision.step)
        axes.axvline(at, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        if groups and at - groups[-1][0] < 0.035 * (most - first):
            groups[-1][1].append(number)
        else:
            groups.append((at, [number]))
    for at, numbers in groups:
        text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        box: dict[str, Any] = {
            "boxstyle": "round,pad=0.25",
            "facecolor": _PAPER,
            "edgecolor": INK,
            "linewidth": 0.8,
        }
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(text, (at, 1.0), (0, 9), **place, ha="center", va="center", fontsize=9, bbox=box)


def presence(run: RunFacts) -> str:
    """A row for each island: when it trained, and where it was gone, void, healed or started again."""
    from matplotlib.lines import Line2D

    marks: dict[str, dict[str, Any]] = {
        "round void": {"marker": "x", "color": _BAD, "markersize": 7, "markeredgewidth": 1.8},
        "contribution dropped": {"marker": "D", "color": _BAD, "markersize": 5},
        "started again": {"marker": "^", "color": INK, "markersize": 7},
        "healed": {"marker": "o", "color": INK, "markersize": 6, "markerfacecolor": "none"},
    }
    aside = {"started again": 0.3, "healed": -0.3}  # the two come together
    rows = {island: row for row, island in enumerate(run.islands)}
    with canvas(9.6, 1.5 + 0.5 * len(rows)) as figure:
        axes = figure.subplots()
        for island, row in rows.items():
            for i, part in enumerate(run.stretches[island]):
                first = position(part[0]) if i else begun_at(run.islands[island])  # logged, or not yet
                span = [run.tokens(first), run.tokens(position(part[-1]))]
                style = series(row) | {"linestyle": "-"}
                axes.plot(span, [row, row], **style, linewidth=7, alpha=0.55, solid_capstyle="butt")
        used: dict[str, Any] = {}
        for fault in run.faults:
            if (look := marks.get(fault.what)) is not None and fault.island in rows:
                at = max(run.tokens_at(fault.seconds), run.extent[0])
                y = rows[fault.island] + aside.get(fault.what, 0.0)
                axes.plot([at], [y], linestyle="none", clip_on=False, **look)
                used[fault.what] = Line2D([], [], linestyle="none", **look)
        axes.set_yticks(range(len(rows)), [f"island {i}" for i in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_title("Islands at work, and what befell them, by tokens")
        tokens_axis(axes, *run.extent)
        if used:
            figure.legend(list(used.values()), list(used), loc="outside lower left", ncols=len(used))
        return as_svg(figure, "presence", f"When each island of {run.name} trained, and its faults")


def staleness(run: RunFacts) -> str:
    """How old contributions were, and what the gate made of them, for each island."""
    with canvas(9.6, 3.1) as figure:
        ages, gates = figure.subplots(1, 2)
        oldest = max((max(counts) for counts in run.staleness.values()), default=0)
        width = 0.8 / max(1, len(run.staleness))
        for i, (island, counts) in enumerate(run.staleness.items()):
            at = [age - 0.4 + width * (i + 0.5) for age in range(oldest + 1)]
            style: dict[str, Any] = {"color": series(i)["color"], "label": f"island {island}"}
            ages.bar(at, [counts[age] for age in range(oldest + 1)], width * 0.92, **style)
        ages.set_xlim(-0.7, max(oldest, 4) + 0.7)
        ages.xaxis.get_major_locator().set_params(integer=True)
        ages.yaxis.get_major_locator().set_params(integer=True)
        ages.grid(axis="x", visible=False)
        ages.set_title("Staleness, outer rounds")
        ages.set_xlabel("age of a contribution, outer rounds")
        ages.set_ylabel("contributions")
        for i, (_, points) in enumerate(run.gates.items()):
            thin = thinned([(float(k), gate) for k, gate in points], 300)
            # Equal gates lie on each other: ever smaller marks let all islands be seen.
            look: dict[str, Any] = {"marker": "o", "markersize": max(2.0, 6.5 - 1.5 * i), "linewidth": 0.8}
            gates.plot(*xy(thin), **series(i), **look, alpha=0.9)
        gates.set_ylim(-0.04, 1.08)
        gates.set_title("Staleness gate, 0 to 1")
        gates.set_xlabel("outer round")
        gates.set_ylabel("gate")
        handles, labels = ages.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower left", ncols=6)
        return as_svg(figure, "staleness", f"Staleness and gates of the contributions in {run.name}")


def exchange(run: RunFacts) -> str:
    """Bytes by wall time, and how long each round took."""
    span = max((r["time"] for rounds in run.rounds.values() for r in rounds), default=run.begun) - run.begun
    scale, unit = _time_scale(span)
    with canvas(9.6, 3.1) as figure:
        moved, lasted = figure.subplots(1, 2)
        total = max((i["bytes_exchanged"] for i in run.summary["islands"]), default=0)
        size, name = _byte_scale(total)
        for i, (island, rounds) in enumerate(run.rounds.items()):
            points, sum_ = [(0.0, 0.0)], 0.0
            for record in sorted(rounds, key=lambda r: r["time"]):
                sum_ += record.get("island_bytes") or 0
                points.append(((record["time"] - run.begun) / scale, sum_ / size))
            # Islands that exchange alike lie on each other: the first is the widest.
            look: dict[str, Any] = {"linewidth": max(1.2, 3.6 - 1.2 * i), "drawstyle": "steps-post"}
            moved.plot(*xy(points), **series(i), **look, label=f"island {island}")
            each = [((r["time"] - run.begun) / scale, r["seconds"]) for r in rounds if r.get("seconds")]
            style: dict[str, Any] = {
                "color": series(i)["color"],
                "marker": "o",
                "markersize": max(2.0, 4.5 - i),
            }
            lasted.plot(*xy(each), linestyle="none", **style, alpha=0.8)
        moved.set_ylim(bottom=0)
        moved.set_title(f"Exchanged in all, {name}")
        moved.set_ylabel(f"{name}, sent and received")
        lasted.set_title("Duration of outer rounds, seconds")
        lasted.set_ylabel("seconds")
        if any(line.get_ydata().size for line in lasted.get_lines()):
            lasted.set_yscale("log")
            lasted.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        for axes in (moved, lasted):
            axes.set_xlabel(f"wall time, {unit}")
        handles, labels = moved.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=6)
        return as_svg(figure, "exchange", f"Bytes exchanged and duration of rounds in {run.name}")
