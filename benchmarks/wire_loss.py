#!/usr/bin/env python3
"""Does the format of the exchange cost loss? Paired runs of the simulator, beside a format that must fail.

    .venv/bin/python benchmarks/wire_loss.py

Two islands train a byte model for the same tokens from the same seed, with fp32, int8 and int4 on the wire.
The mean over the seeds must lie within 0.5% of fp32. A rounding toward zero, as coarse as int4 and without
error feedback, goes through the same check and must not pass it with SGD as outer optimizer, which takes
contributions as they are. docs/simulator.md keeps the last figures.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import torch
from byte_model import Island, Text, config_of, parser_of, versions

from megatron_wsd.shards.zero3 import Shards
from megatron_wsd.simulator import simulate

LIMIT = 0.5  # percent
OUTER = {
    "sgd": {"optimizer": "sgd", "lr": 0.7},
    "nesterov": {"optimizer": "nesterov", "lr": 0.4, "momentum": 0.9},
    "cgad": {"optimizer": "cgad", "lr": 3e-3},
}
TRUNCATED = "truncated"
# Adam undoes what shortens its gradient, and momentum has some to spare: only here can the bias be seen.
TELLS = "sgd"
FORMATS = ("fp32", "int8", "int4", TRUNCATED)


class Truncated:
    """Shards that let out no progress finer than int4 has it, rounded toward zero.

    The progress since the last write is cut, in blocks of 64, to 0, 1, ..., 7 sevenths of the largest there.
    The island itself keeps its own values; what was cut off is never told.
    """

    def __init__(self, inner: Shards) -> None:
        self._inner, self.shards = inner, inner.shards
        self._written = [torch.zeros(s.numel) for s in inner.shards]
        inner.read(self._written)

    def _which(self, members: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.shards)) if members is None else members

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """The last written values, less the truncated progress since then."""
        self._inner.read(out, members)
        for i, target in zip(self._which(members), out, strict=True):
            target.copy_(self._written[i] - truncate(self._written[i] - target))

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Passed on."""
        self._inner.write(values, members)
        for i, value in zip(self._which(members), values, strict=True):
            self._written[i].copy_(value)


def truncate(x: torch.Tensor) -> torch.Tensor:
    """Toward zero to sevenths of the largest magnitude in each block of 64; fp32 [n]."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % 64)).view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / 7
    return (torch.trunc(blocks / scale) * scale).view(-1)[: x.numel()]


def loss(text: Text, outer: str, wire: str, seed: int, rounds: int, inner_steps: int, islands: int) -> float:
    """Validation loss of the anchor at the end."""
    trained = [Island(text, seed, number) for number in range(islands)]
    if wire == TRUNCATED:
        for island in trained:
            island.shards = Truncated(island.shards)
    sync = {"inner_steps": inner_steps, "wire": "fp32" if wire == TRUNCATED else wire}
    simulate(config_of(islands, OUTER[outer], sync), trained, rounds * inner_steps)
    return trained[0].valid_loss(text)


def main() -> int:
    """The table; 1 if a verdict is not as it must be."""
    given = parser_of(__doc__, seeds=3, rounds=80, inner_steps=8, islands=2).parse_args()
    torch.set_num_threads(given.threads)
    text, began, wrong = Text(), time.process_time(), 0
    shape = (given.rounds, given.inner_steps, given.islands)
    print(f"seeds 0 to {given.seeds - 1}, rounds {shape[0]}, inner steps {shape[1]}, islands {shape[2]}")
    print("\n| outer optimizer | wire | loss | against fp32, % | standard error | within 0.5% |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for outer in OUTER:
        base: list[float] = []
        for wire in FORMATS:
            found = [loss(text, outer, wire, seed, *shape) for seed in range(given.seeds)]
            base = base or found
            more = [100 * (a / b - 1) for a, b in zip(found, base, strict=True)]
            spread = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
            within = abs(statistics.mean(more)) <= LIMIT
            wrong += within == (wire == TRUNCATED) and (wire != TRUNCATED or outer == TELLS)
            row = f"{statistics.mean(found):.4f} | {statistics.mean(more):+.2f} | {spread:.2f}"
            print(f"| {outer} | {wire} | {row} | {'yes' if within else 'no'} |", flush=True)
    print(f"\n{time.process_time() - began:.0f} processor seconds; {versions()}")
    print("as it must be" if not wrong else f"{wrong} verdicts are NOT as they must be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
