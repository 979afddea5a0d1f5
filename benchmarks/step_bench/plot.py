"""The roofline with everyone on it, and time against size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from step_bench.report import size_name

COLOURS = {
    "ours8": "#c1121f",
    "ours8_alone": "#e56b6f",
    "ours8_dynamic": "#b56576",
    "ours32": "#f4845f",
    "torch_fused": "#1d4e89",
    "torch_foreach": "#5fa8d3",
    "deepspeed": "#2a9d8f",
    "torch_plain8": "#8d99ae",
    "bitsandbytes8": "#7b2cbf",
    "torchao8": "#b5838d",
}
GREY = "#6c757d"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a run as png.

    Args:
        document: as written to json; with at least one result.
        path: of the png.
    """
    rows, floors = document["results"], document["floors"]
    most = max(row["threads"] for row in rows)
    largest = max(row["n"] for row in rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 7), width_ratios=(1.0, 1.15))
    _roofline(left, rows, floors, largest, most)
    _sizes(right, [r for r in rows if r["threads"] == most], [f for f in floors if f["threads"] == most])
    machine = document["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}"
    noise = "" if document["quiet"] else " - NOT A QUIET MACHINE"
    torch_version, day = document["versions"]["torch"], document["date"][:10]
    figure.suptitle(f"One AdamW step: {where}; torch {torch_version}; {day}{noise}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _roofline(axes: Axes, rows: Sequence[Any], floors: Sequence[Any], n: int, most: int) -> None:
    """ns a parameter over bytes a parameter; below the line memory itself is the limit."""
    rows = [r for r in rows if r["n"] == n]
    single = [r for r in rows if r["threads"] == 1 != most]
    rows = [r for r in rows if r["threads"] == most]
    floors = [f for f in floors if f["n"] == n and f["traffic"] != "copy"]
    bottom = min(f["ns"] for f in floors) * 0.4
    top = max(r["ns"] for r in rows + single) * 1.7
    axes.set_yscale("log")
    axes.set_xlim(12, 38)
    axes.set_ylim(bottom, top)

    x, y = _roof(floors, most)
    axes.plot(x, y, color=GREY, lw=1.5, zorder=1)
    axes.fill_between(x, y, bottom, color=GREY, alpha=0.15, lw=0, zorder=0)
    note = "faster than memory:\nbelow the floor measured in this run"
    axes.text(25, bottom * 1.1, note, color=GREY, ha="center", va="bottom")
    if single:
        axes.plot(*_roof(floors, 1), color=GREY, lw=1, ls="--", zorder=1)

    for traffic in {r["traffic"] for r in rows}:
        group = sorted((r for r in rows if r["traffic"] == traffic), key=lambda r: r["ns"])
        heights = _apart([r["ns"] for r in group], (top / bottom) ** 0.058)
        for r, height in zip(group, heights, strict=True):
            colour, b = COLOURS.get(r["contender"], GREY), r["bytes_per_parameter"]
            marker, size = ("*", 170) if r["ours"] else ("o", 60)
            axes.scatter(b, r["ns"], s=size, color=colour, zorder=3, marker=marker)
            axes.annotate(
                f"{r['label']}\n{r['ns']:.2f} ns, {r['gb_per_s']:.1f} GB/s, {r['fraction_of_floor']:.0%}",
                (b, r["ns"]),
                xytext=(b + 1.2, height),
                fontsize=8,
                va="center",
                color=colour,
                weight="bold" if r["ours"] else "normal",
                bbox={"facecolor": "white", "alpha": 0.92, "pad": 1, "lw": 0},
                arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkB": 4},
            )
    for r in single:
        colour, b = COLOURS.get(r["contender"], GREY), r["bytes_per_parameter"]
        axes.scatter(b - 0.7, r["ns"], s=36, facecolors="none", edgecolors=colour, zorder=3)
    axes.set_xlabel("bytes a parameter that the step must move")
    axes.set_ylabel("ns a parameter")
    hollow = "; hollow and dashed: 1 thread" if single else ""
    axes.set_title(f"N = {size_name(n)}, {most} thread{'s' * (most > 1)}{hollow}", fontsize=11)
    _plain_numbers(axes)


def _roof(floors: Sequence[Any], threads: int) -> tuple[list[float], list[float]]:
    """The floor's line: through each measured mix, and beyond the outer ones at their bandwidth."""
    points = sorted((f["bytes_per_parameter"], f["ns"]) for f in floors if f["threads"] == threads)
    (first, first_ns), (last, last_ns) = points[0], points[-1]
    points = [(1.0, first_ns / first), *points, (64.0, 64.0 * last_ns / last)]
    return [b for b, _ in points], [ns for _, ns in points]


def _sizes(axes: Axes, rows: Sequence[Any], floors: Sequence[Any]) -> None:
    """ns a parameter over size; labels stand at the end of the lines."""
    ends = []
    for key in dict.fromkeys(r["contender"] for r in rows):
        line = sorted((r for r in rows if r["contender"] == key), key=lambda r: r["n"])
        colour, ours = COLOURS.get(key, GREY), line[0]["ours"]
        axes.plot(
            [r["n"] for r in line],
            [r["ns"] for r in line],
            color=colour,
            lw=2.6 if ours else 1.4,
            marker="o",
            ms=4,
            zorder=3 if ours else 2,
        )
        ends.append((line[-1]["ns"], line[-1]["label"], colour, "bold" if ours else "normal"))
    for mix, style in (("adam8", "--"), ("adam32", ":")):
        line = sorted((f for f in floors if f["traffic"] == mix), key=lambda f: f["n"])
        if line:
            axes.plot([f["n"] for f in line], [f["ns"] for f in line], color=GREY, ls=style, lw=1.5)
            ends.append(
                (line[-1]["ns"], f"floor, {line[-1]['bytes_per_parameter']:.2f} bytes", GREY, "normal")
            )
    ends.sort()
    last = max(r["n"] for r in rows)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    step = (high / low) ** 0.036
    for (ns, label, colour, weight), height in zip(ends, _apart([e[0] for e in ends], step), strict=True):
        axes.annotate(
            label,
            (last, ns),
            xytext=(last * 1.5, height),
            fontsize=8.5,
            va="center",
            color=colour,
            weight=weight,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
    smallest = min(r["n"] for r in rows)
    axes.set_xlim(smallest / 1.5, last * 2 ** (0.42 * (last.bit_length() - smallest.bit_length() + 2)))
    axes.set_xticks(sorted({r["n"] for r in rows}))
    axes.set_xlabel("parameters")
    axes.set_ylabel("ns a parameter")
    axes.set_title("Time against size, all threads", fontsize=11)
    _plain_numbers(axes)


def _apart(values: Sequence[float], factor: float) -> list[float]:
    """Ascending positive values, moved so that each is at least `factor` times the one before.

    The whole is then shifted back, so that labels spread to both sides of their points.
    """
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] * factor) if placed else value)
    pushed = [p / v for p, v in zip(placed, values, strict=True)]
    back = max(pushed, default=1.0) ** 0.5
    shifted = [max(p / back, 0.0) if q > 1.0 else p for p, q in zip(placed, pushed, strict=True)]
    for i in range(len(shifted) - 2, -1, -1):
        shifted[i] = min(shifted[i], shifted[i + 1] / factor)
    return shifted


def _plain_numbers(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
