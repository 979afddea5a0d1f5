#!/usr/bin/env python3
"""What stale pseudo-gradients do to each outer optimizer: controlled delay, in the simulator.

    .venv/bin/python benchmarks/delay_sweep.py --out docs/delay_sweep.png

Two islands train a byte model in lockstep; every contribution is held back for a number of rounds, constant
or drawn anew each time, uniform from 0 to twice the mean. Runs of one seed see the same data.
docs/simulator.md keeps the last figures, and says how to read them.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from byte_model import Island, Text, config_of, parser_of, versions

from megatron_wsd.errors import ExchangeError
from megatron_wsd.records import of_kind
from megatron_wsd.simulator import simulate

DELAYS = (0, 2, 4, 8, 16)
KINDS = ("constant", "random")
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95]}
OUTER: dict[str, dict[str, Any]] = {
    "cgad": ADAM,
    "adam_decay": ADAM,
    "adam": ADAM,
    "nesterov": {"lr": 0.4, "momentum": 0.9},
    "delayed_nesterov": {"lr": 0.4, "momentum": 0.9, "momentum_period": 4},
    "sgd": {"lr": 1.0},
}
CHANCE = math.log(256)  # nats a byte, of a model that has learnt nothing

Cell = tuple[float, float]  # validation loss, mean staleness of what was used in the second half


def run(text: Text, name: str, kind: str, mean: int, seed: int, rounds: int, inner_steps: int) -> Cell:
    """One run of two islands."""
    delay: Any = mean if kind == "constant" else {"kind": "uniform", "high": 2 * mean, "seed": seed}
    sync = {"inner_steps": inner_steps, "controlled_delay": delay}
    config = config_of(2, {"optimizer": name, **OUTER[name]}, sync)
    islands = [Island(text, seed, number) for number in range(2)]
    try:
        records = simulate(config, islands, rounds * inner_steps)
    except ExchangeError:
        return math.inf, math.nan
    made = of_kind(records, "round")
    ages = [tau for r in made[len(made) // 2 :] for tau in r["staleness"].values()]
    loss = islands[0].valid_loss(text)
    return (loss if math.isfinite(loss) else math.inf), statistics.fmean(ages)


def shown(cells: list[Cell]) -> str:
    """Mean loss and, in brackets, half the distance between the seeds' extremes."""
    losses = [loss for loss, _ in cells]
    if max(losses) > CHANCE:
        worst = f"{max(losses):.0f}" if max(losses) < 1e4 else "1e4 or more"
        return f"diverged ({worst})"
    return f"{statistics.fmean(losses):.3f} ({(max(losses) - min(losses)) / 2:.3f})"


def draw(found: dict[str, dict[str, dict[int, list[Cell]]]], path: Path, title: str) -> None:
    """Loss over delay, a panel for constant and one for random delays."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    markers = dict(zip(OUTER, "osxDv^", strict=True))
    for axis, kind in zip(axes, KINDS, strict=True):
        for name, rows in found.items():
            losses = [statistics.fmean(min(loss, 99.0) for loss, _ in rows[kind][d]) for d in DELAYS]
            low = [min(min(loss, 99.0) for loss, _ in rows[kind][d]) for d in DELAYS]
            high = [max(min(loss, 99.0) for loss, _ in rows[kind][d]) for d in DELAYS]
            places = range(len(DELAYS))
            (line,) = axis.plot(places, losses, marker=markers[name], label=name, fillstyle="none")
            axis.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.axhline(CHANCE, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xticks(range(len(DELAYS)), [str(d) for d in DELAYS])
        axis.set_xlabel("delay, outer rounds" if kind == "constant" else "mean delay, outer rounds")
        axis.set_title(f"{kind} delay", fontsize=10)
        axis.set_ylim(1.8, 6.2)
        axis.grid(alpha=0.3)
    axes[0].text(0, CHANCE + 0.05, "chance", fontsize=8, color="grey")
    axes[0].set_ylabel("validation loss, nats a byte")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, loc="lower center", ncol=len(OUTER))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    """The table and the picture."""
    parser = parser_of(__doc__, seeds=2, rounds=160, inner_steps=4)
    where = Path("runs/delay_sweep.png")
    parser.add_argument("--out", type=Path, default=where, help="picture; a json goes beside it")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    text, began = Text(), time.process_time()
    found: dict[str, dict[str, dict[int, list[Cell]]]] = {}
    print("| outer optimizer | delay |", *(f"{d} |" for d in DELAYS))
    print("| --- | --- |", *("---: |" for _ in DELAYS), flush=True)
    for name in OUTER:
        found[name] = {}
        for kind in KINDS:
            row = found[name][kind] = {}
            for mean in DELAYS:
                if kind == "random" and mean == 0:
                    row[0] = found[name]["constant"][0]
                    continue
                row[mean] = [
                    run(text, name, kind, mean, seed, given.rounds, given.inner_steps)
                    for seed in range(given.seeds)
                ]
            print(f"| {name} | {kind} |", *(f"{shown(row[d])} |" for d in DELAYS), flush=True)
    ages = {d: statistics.fmean(age for _, age in found["adam"]["random"][d]) for d in DELAYS}
    print("\nmean staleness of random delays:", *(f"{d}: {age:.1f};" for d, age in ages.items()))
    shape = f"{given.seeds} seeds, {given.rounds} rounds of {given.inner_steps} steps"
    size = f"{shape}, 2 islands, 78,880 parameters"
    print(f"{size}; {time.process_time() - began:.0f} processor seconds; {versions()}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(found, given.out, size)
    given.out.with_suffix(".json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
