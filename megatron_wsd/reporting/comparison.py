"""The charts that hold runs against each other: all of their losses, and those since they parted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wsd.picture import _number, _smooth
from megatron_wsd.records import position
from megatron_wsd.reporting.charts import INK, MARKERS, as_svg, canvas, series, tokens_axis, xy
from megatron_wsd.reporting.facts import RunFacts, thinned
from megatron_wsd.reporting.several import shared_until

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Validated = Mapping[str, list[tuple[float, float | None]]]
"""By corpus, where the anchor was validated, and its loss there."""


def whole(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    """Training loss, mean over islands, and the anchor's by corpus, by tokens, a colour a run."""
    first, most = min(run.extent[0] for run in runs), max(run.extent[1] for run in runs)
    with canvas(9.6, 4.6) as figure:
        axes = figure.subplots()
        for i, run in enumerate(runs):
            points = [(run.tokens(int(step)), loss) for step, loss in _training(run)]
            _draw_smooth(axes, points, i)
            _draw_anchors(axes, run.anchors, _corpora(runs), i)
        axes.set_title("Loss of the runs, nats a token")
        axes.set_ylabel("nats a token")
        tokens_axis(axes, first, most)
        _legend(figure, names, _corpora(runs), _corpora(runs))
        return as_svg(figure, "comparison", "Loss of the compared runs by tokens")


def since(runs: Sequence[RunFacts], names: Sequence[str], step: int, until: int, place: int) -> str:
    """Training loss and the anchor's beside it, by steps of the run, from where the runs part.

    Args:
        runs: that are one up to ``step``.
        names: of them.
        step: of the run, at which they part.
        until: last step shown; a parent may have gone on for long.
        place: number of the chart on its page.
    """
    each = [_validated_since(run, runs, step, until) for run in runs]
    # One that a single run has would only stretch the axis.
    corpora = _corpora(runs)
    shown = [c for c in corpora if sum(c in found for found in each) > 1] or corpora
    with canvas(9.6, 3.9) as figure:
        training, validated = figure.subplots(1, 2)
        for i, run in enumerate(runs):
            inside = [(n, loss) for n, loss in _training(run) if step <= n <= until]
            training.plot(*xy(thinned(inside)), **series(i), alpha=0.3, linewidth=0.8)
            _draw_smooth(training, inside, i)
            _draw_anchors(validated, {c: p for c, p in each[i].items() if c in shown}, corpora, i)
        for axes, what in ((training, "Training"), (validated, "Anchor")):
            axes.set_title(f"{what} from step {step:,} on")
            axes.set_ylabel("nats a token")
            axes.set_xlabel("step of the run")
            margin = 0.03 * max(1, until - step)
            axes.set_xlim(step - margin, until + margin)
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=7)
        _legend(figure, names, corpora, shown)
        return as_svg(figure, f"since-{place}", f"Loss of {' and '.join(names)} from step {step} on")


def _validated_since(run: RunFacts, runs: Sequence[RunFacts], step: int, until: int) -> Validated:
    """The validations of a run after a step, and before them the newest one that it shares with another.

    That one may lie to the left of the chart.
    """
    found: dict[str, list[tuple[float, float | None]]] = {}
    for corpus, own in run.validations.items():
        shared: dict[int, float | None] = {}
        for other in runs:
            upto = step if (least := shared_until(run, other)) is None else least
            shared |= {n: loss for n, loss in other.validations.get(corpus, {}).items() if n <= upto}
        begin = [(float(n), shared[n]) for n in sorted(shared)[-1:]]
        found[corpus] = begin + [(float(n), loss) for n, loss in sorted(own.items()) if step < n <= until]
    return found


def _corpora(runs: Sequence[RunFacts]) -> list[str]:
    return sorted({corpus for run in runs for corpus in run.anchors})


def _training(run: RunFacts) -> list[tuple[float, float]]:
    """(step of the run, mean over islands of the training loss)."""
    by_step: dict[int, list[float]] = {}
    for steps in run.steps.values():
        for record in steps:
            by_step.setdefault(position(record), []).append(_number(record.get("loss")))
    known = [(float(step), sum(v) / len(v)) for step, v in sorted(by_step.items())]
    return [(step, loss) for step, loss in known if not math.isnan(loss)]


def _draw_smooth(axes: Axes, points: Sequence[tuple[float, float]], i: int) -> None:
    x, y = xy(points)
    smooth = thinned(list(zip(x, _smooth(y, max(3, len(y) // 20)), strict=True)))
    axes.plot(*xy(smooth), **series(i), linewidth=1.7)


def _draw_anchors(axes: Axes, each: Validated, corpora: list[str], i: int) -> None:
    for corpus, validated in each.items():
        points = thinned([(x, _number(loss)) for x, loss in validated], 200)
        look: dict[str, Any] = {"marker": _marker(corpora, corpus), "markersize": 4.5}
        axes.plot(*xy(points), **look, color=series(i)["color"], linestyle=":", linewidth=0.8)


def _marker(corpora: list[str], corpus: str) -> str:
    return MARKERS[corpora.index(corpus) % len(MARKERS)]


def _legend(figure: Figure, names: Sequence[str], corpora: list[str], shown: list[str]) -> None:
    """A line a run, then a mark for each corpus that is shown; a corpus has one mark on the whole page."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **series(i), linewidth=1.7) for i in range(len(names))]
    look: dict[str, Any] = {"color": INK, "linestyle": ":", "linewidth": 0.8, "markersize": 4.5}
    handles += [Line2D([], [], marker=_marker(corpora, corpus), **look) for corpus in shown]
    labels = [*names, *(f"anchor, validation on {corpus}" for corpus in shown)]
    figure.legend(handles, labels, loc="outside lower left", ncols=3)
