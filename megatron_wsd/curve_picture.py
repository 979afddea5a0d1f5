"""The picture of learning rates in advance: phases, branches, tokens on a second axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wsd.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = {"warmup": "#fff1d6", "stable": "#e4f1e4", "decay": "#e3e8f7", "done": "#f0f0f0"}
_OWN_COLOUR = "#333333"
_BRANCH_COLOURS = ("#e8710a", "#1f77b4", "#9467bd", "#2ca02c", "#8c564b", "#17becf", "#e377c2")
_OPEN_SHARE = 0.12  # of the picture, for the dashes of a horizon that is open though nothing runs yet
_UPRIGHT_SHARE = 0.018  # of the picture that a name takes which stands upright


def draw(curves: Sequence[Curve], until: int, out: Path) -> None:
    """Draw the curves up to ``until`` into ``out`` (1350 x 630 pixels); the phases are those of the first.

    Args:
        curves: that of a config or a run, then its branches.
        until: last position shown, in what the first schedule counts.
        out: a png.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot no display is looked for and nothing is kept open
    axes, own = figure.subplots(), curves[0]
    axes.set_xlim(0, until)
    top = max(curve.peak for curve in curves) or 1.0
    axes.set_ylim(0, top * 1.25)
    _shade(axes, own, until, top)
    for index, curve in enumerate(curves):
        colour = _BRANCH_COLOURS[(index - 1) % len(_BRANCH_COLOURS)] if index else _OWN_COLOUR
        _draw_curve(axes, curve, until, colour)
    axes.set_xlabel(f"completed {'updates' if own.schedule.unit == 'steps' else own.schedule.unit}")
    axes.set_ylabel("learning rate")
    axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    axes.set_yticks([rate for rate in axes.get_yticks() if rate <= top * 1.001])
    power = math.floor(math.log10(top))
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate / 10.0**power:g}e{power}" if rate else "0")
    axes.spines[["top", "right"]].set_visible(False)
    _add_tokens(axes, own)
    figure.suptitle(_title(own), x=0.01, ha="left", fontsize=10, fontweight="bold")
    if len(curves) > 1 or own.position is not None:
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    temporary = out.with_suffix(".tmp.png")
    figure.savefig(temporary)
    temporary.replace(out)


def _title(own: Curve) -> str:
    decays = own.schedule.decays
    shapes = ", ".join(dict.fromkeys(decay.shape for decay in decays))
    return f"{own.name}: learning rate, {f'decay {shapes}' if decays else 'no decay planned'}"


def _shade(axes: Axes, own: Curve, until: int, top: float) -> None:
    """Shade and name the phases; a narrow one is named upright, from its left edge on."""
    free = 0.0
    for name, left, right in own.spans(until):
        assert right is not None  # spans up to a position all end
        axes.axvspan(left, right, color=_SHADES[name], linewidth=0, zorder=0)
        flat = 0.012 * len(name) * until
        if right - left > flat:
            middle = max((left + right) / 2, free + flat / 2)
            axes.text(middle, top * 1.17, name, ha="center", va="center", fontsize=9)
            free = middle + flat / 2
        elif left >= free - 0.004 * until:  # of phases that are narrower than their names some go unnamed
            axes.text(left + 0.003 * until, top * 1.23, name, rotation=90, va="top", fontsize=7.5)
            free = left + _UPRIGHT_SHARE * until


def _draw_curve(axes: Axes, curve: Curve, until: int, colour: str) -> None:
    x = curve.points(until)
    if not x:
        return
    y = [curve.rate(n) for n in x]
    end = until
    if curve.schedule.end is None:
        # what follows is stable until somebody decides otherwise
        settled = max([curve.schedule.warmup_steps, *(decay.settled for decay in curve.schedule.decays)])
        known = curve.position if curve.position is not None else round(until * (1 - _OPEN_SHARE))
        end = min(max(known, settled, curve.begin), until)
    wide = 1.8 if curve.begin == 0 else 1.5
    solid = [(n, rate) for n, rate in zip(x, y, strict=True) if n <= end] or [(x[0], y[0])]
    style: dict[str, Any] = {"color": colour, "linewidth": wide, "zorder": 3 if curve.begin else 2}
    stands = "" if curve.position is None else f", stands at {curve.position:,}"
    label = f"{curve.name}{f', from {curve.begin:,}' if curve.begin else ''}{stands}"
    axes.plot(*zip(*solid, strict=True), label=label, **style)
    if end < until:
        level = curve.rate(until)
        axes.plot([solid[-1][0], until], [level, level], linestyle=(0, (4, 3)), **style)
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 0, "mutation_scale": 18, "shrinkB": 0}
        axes.annotate("", (until, level), (until * 0.985, level), arrowprops=arrow, annotation_clip=False)
        axes.text(until * 0.985, level * 1.03, "no end", ha="right", va="bottom", fontsize=8, color=colour)
    if curve.begin:
        axes.plot([curve.begin], [curve.rate(curve.begin)], "o", color=colour, markersize=4, zorder=4)
    if curve.position is not None and curve.begin <= curve.position <= until:
        point: dict[str, Any] = {
            "marker": "D",
            "markersize": 6,
            "markerfacecolor": "white",
            "markeredgewidth": 1.4,
        }
        axes.plot(
            [curve.position], [curve.rate(curve.position)], color=colour, linestyle="none", zorder=5,
            clip_on=False, **point,
        )  # fmt: skip


def _add_tokens(axes: Axes, own: Curve) -> None:
    """A second axis on top, unless the first counts tokens or nobody knows how many a step takes."""
    each = own.batch.per_step("tokens") if own.schedule.unit == "steps" else None
    if own.schedule.unit == "samples":
        each = own.batch.tokens_per_sample
    if each is None:
        return
    known: int = each
    scale: Any = (lambda n: n * known, lambda count: count / known)
    top = axes.secondary_xaxis("top", functions=scale)
    top.set_xlabel("tokens, over all islands", fontsize=8)
    top.xaxis.set_major_formatter(lambda count, _: _short(count))
    top.tick_params(labelsize=8)


def _short(count: float) -> str:
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    size, letter = next(((s, c) for s, c in sizes if count >= s), (1.0, ""))
    return f"{count / size:g}{letter}"
