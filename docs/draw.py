"""Draws the pictures of docs/concepts.md, the gate by the package's own: python docs/draw.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from megatron_wsd.optim import staleness_gate

# text stays text, and the same picture has the same bytes
plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "megatron_wsd", "font.size": 10}
TRAIN, OUTER, WIRE, INK = "#cfe3f7", "#fbe3c0", "#d9efd3", "#333333"


def box(ax: Axes, x: float, y: float, width: float, text: str, color: str, height: float = 0.9) -> None:
    """A rounded box whose left edge is at x and whose middle is at y."""
    style = {"boxstyle": "round,pad=0.04", "facecolor": color, "edgecolor": INK, "linewidth": 0.8}
    shape = FancyBboxPatch((x, y - height / 2), width, height, **style)
    ax.add_patch(shape)
    ax.text(x + width / 2, y, text, ha="center", va="center", color=INK, fontsize=8.5)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], both: bool = False) -> None:
    """An arrow between two points."""
    style = "<|-|>" if both else "-|>"
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=10, color=INK, linewidth=0.9))


def one_round(file: Path) -> None:
    """Two islands from one version of the anchor to the next, in time from left to right."""
    figure, ax = plt.subplots(figsize=(11.5, 3.7))
    stages = (
        (1.75, 2.0, "inner steps\nAdamW, WSD rate", TRAIN),
        (4.2, 1.55, "capture\nanchor - local", OUTER),
        (6.2, 1.55, "exchange\nequal ranks", WIRE),
        (8.2, 1.55, "gate, merge\nthen all vote", WIRE),
        (10.2, 1.55, "outer step\nCGAD, shards", OUTER),
    )
    for island, y in ((0, 2.6), (1, 0.6)):
        ax.text(-0.05, y, f"island {island}", ha="right", va="center", color=INK, weight="bold")
        box(ax, 0.2, y, 1.1, "anchor\nversion 7", OUTER)
        right = 1.3
        for x, width, text, color in stages:
            arrow(ax, (right + 0.05, y), (x - 0.05, y))
            box(ax, x, y, width, text, color)
            right = x + width
        arrow(ax, (right + 0.05, y), (12.15, y))
        box(ax, 12.2, y, 1.1, "anchor\nversion 8", OUTER)
    for x, text in ((6.975, "thin link"), (8.975, "same digest?")):
        arrow(ax, (x, 2.1), (x, 1.1), both=True)
        ax.text(x + 0.12, 1.6, text, va="center", color=INK, fontsize=8.5)
    ax.text(2.75, 3.3, "islands do not talk", ha="center", color=INK, fontsize=8.5, style="italic")
    ax.text(7.975, 3.3, "once every H inner steps", ha="center", color=INK, fontsize=8.5, style="italic")
    ax.text(12.75, 3.3, "equal bits", ha="center", color=INK, fontsize=8.5, style="italic")
    ax.set(xlim=(-1.1, 13.5), ylim=(-0.1, 3.6))
    ax.axis("off")
    save(figure, file)


def gate(file: Path) -> None:
    """The staleness gate over the age, for the paper's two alphas."""
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    ages = range(41)
    for alpha, color, mark in ((0.2, "#1f6fb4", "o"), (0.4, "#c8641b", "s")):
        gates = [staleness_gate(age, alpha, 32) for age in ages]
        ax.plot(ages, gates, color=color, marker=mark, markersize=3, linewidth=1, label=f"alpha {alpha}")
    cosine = [staleness_gate(age, 0.0, 32) for age in ages]
    ax.plot(ages, cosine, color="#888888", linewidth=1, linestyle="--", label="alpha 0: the cosine alone")
    ax.axvline(32, color=INK, linewidth=0.7, linestyle=":")
    ax.text(32.4, 0.93, "tau_cut", color=INK, fontsize=8.5)
    ax.set(xlabel="age of a contribution, in outer rounds (tau)", ylabel="gate")
    ax.set(xlim=(-0.5, 40.5), ylim=(-0.02, 1.04))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, loc="upper center")
    save(figure, file)


def save(figure: plt.Figure, file: Path) -> None:
    """Write an svg without the date of its making."""
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    print(f"wrote {file}")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    one_round(folder / "one_round.svg")
    gate(folder / "gate.svg")
