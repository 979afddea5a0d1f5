"""The picture of a plan: utilisation over bandwidth, and the inner steps that a target takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wsd.planner.advice import FEWEST, TRIED
from megatron_wsd.planner.exchange import WIRE_BYTES
from megatron_wsd.planner.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODES = (
    ("asynchronous", "asynchronous: training never waits", "#2ca02c"),
    ("streaming", "streaming: a round hides behind a few steps", "#1f77b4"),
    ("sync", "synchronous: training waits for each round", "#e8710a"),
    ("data_parallel", "data parallel: gradients every step", "#8c8c8c"),
)
_WIRES = {"fp32": "#d62728", "bf16": "#e8710a", "int8": "#1f77b4", "int4": "#2ca02c"}


def draw(plan: Plan, marked: tuple[float, ...], title: str, out: Path) -> None:
    """Draw ``plan``, whose links are the points of the curves, into ``out`` (1800 x 930 pixels).

    All words are beside and below the panels: wherever the curves run, they hide none and none hides them.

    Args:
        plan: with many links, ascending in bandwidth.
        marked: bandwidths that were asked about, in bits a second.
        title: of the picture.
        out: a png.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot no display is looked for and nothing is kept open
    share, steps = figure.subplots(1, 2)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    _draw_share(share, plan)
    _draw_steps(steps, plan)
    for axes in (share, steps):
        axes.set_xscale("log")
        axes.set_xlim(plan.links[0].bits_per_s / 1e9, plan.links[-1].bits_per_s / 1e9)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel("bandwidth of an island's link, Gbit/s")
        for bits in marked:
            axes.axvline(bits / 1e9, color="#bbbbbb", linewidth=1.0, zorder=1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    temporary = out.with_suffix(".tmp.png")
    figure.savefig(temporary)
    temporary.replace(out)


_BELOW: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (0, -0.13),
    "fontsize": 8.5,
    "frameon": False,
    "columnspacing": 1.2,
    "handlelength": 1.6,
    "borderpad": 0,
}


def _draw_share(axes: Axes, plan: Plan) -> None:
    x = [link.bits_per_s / 1e9 for link in plan.links]
    # those that may lie on one line are drawn over each other, the wider below
    for width, (name, label, colour) in zip((6.0, 3.6, 2.0, 2.0), _MODES, strict=True):
        y = [100 * getattr(link, name) for link in plan.links]
        axes.plot(x, y, color=colour, linewidth=width, label=label, zorder=3)
    axes.axhline(
        100 * plan.target, color="#333333", linewidth=1.0, linestyle="--", label=f"target {plan.target:.0%}"
    )
    axes.set_ylim(0, 103)
    axes.set_ylabel("share of the time that trains, %")
    cut = f", {plan.fragments} fragments" if plan.fragments > 1 else ""
    axes.set_title(
        f"As configured: {plan.wire}, {plan.inner_steps} inner steps{cut}", fontsize=10, loc="left"
    )
    axes.legend(ncol=2, **_BELOW)


def _draw_steps(axes: Axes, plan: Plan) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    x = [link.bits_per_s / 1e9 for link in plan.links]
    factor = plan.target / (1 - plan.target) / plan.step_s
    for wire in WIRE_BYTES:
        seconds = [link.sync_s[wire] for link in plan.links]
        axes.plot(x, [max(1.0, s * factor) for s in seconds], color=_WIRES[wire], linewidth=2.2)
        axes.plot(
            x, [max(1.0, s / plan.step_s) for s in seconds], color=_WIRES[wire], linewidth=1.5, linestyle=":"
        )
    axes.axhspan(FEWEST, TRIED, color="#eaf3ea", linewidth=0, zorder=0)
    configured = axes.axhline(plan.inner_steps, color="#333333", linewidth=1.0, linestyle="--")
    configured.set_label(f"configured: {plan.inner_steps}")
    axes.set_yscale("log")
    axes.set_ylim(0.8, None)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_ylabel("inner steps between two syncs")
    axes.set_title(
        f"Least inner steps, for {plan.target:.0%} or for the link to keep up", fontsize=10, loc="left"
    )
    grey: dict[str, Any] = {"color": "#555555"}
    lines: list[Any] = [Line2D([], [], color=_WIRES[w], linewidth=2.2, label=w) for w in WIRE_BYTES]
    lines.append(Line2D([], [], linewidth=2.2, label=f"{plan.target:.0%}, waiting for rounds", **grey))
    lines.append(Line2D([], [], linewidth=1.5, linestyle=":", label="asynchronous, keeping up", **grey))
    lines += [configured, Patch(color="#dcebdc", label=f"usual: {FEWEST} to {TRIED}")]
    axes.legend(handles=lines, ncol=3, **_BELOW)


def bandwidths(marked: tuple[float, ...], points: int = 121) -> tuple[float, ...]:
    """Bandwidths for the curves: even on a log axis, a decade past what was asked on either side."""
    low, high = min(marked) / 10, max(marked) * 10
    return tuple(low * (high / low) ** (i / (points - 1)) for i in range(points))
