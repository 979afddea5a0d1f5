"""One one-rank island whose inner step is a sleep: the real outer loop and torchft on plain tensors.

python worker.py JOB    # json, see `main`; writes what it saw into the file that the job names
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_wsd.config import parse_config
from megatron_wsd.diloco.island import IslandAddress
from megatron_wsd.diloco.loop import Decoupled, Lockstep, OuterLoop
from megatron_wsd.shards.zero3 import Shard

LAYERS, WIDTH = 8, 256


class Tensors:
    """A model of eight matrices and a norm, in place of an engine's ZeRO-3 shards.

    Args:
        parameters: about how many; rounded to whole rows of 256.
    """

    def __init__(self, parameters: int) -> None:
        draw = torch.Generator().manual_seed(0)
        rows = max(1, round(parameters / (LAYERS * WIDTH)))
        shapes = {f"layers.{i}.weight": (rows, WIDTH) for i in range(LAYERS)} | {
            "final_norm.weight": (WIDTH,)
        }
        self.values = [torch.randn(torch.Size(s), generator=draw).view(-1) for s in shapes.values()]
        self.shards = [
            Shard(name, shape, 0, v.numel())
            for (name, shape), v in zip(shapes.items(), self.values, strict=True)
        ]

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Copy the parameters of ``members``, by default of all, into ``out``."""
        for i, target in zip(self._chosen(members), out, strict=True):
            target.copy_(self.values[i])

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """The other way."""
        for i, value in zip(self._chosen(members), values, strict=True):
            self.values[i].copy_(value)

    def _chosen(self, members: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.values)) if members is None else members


class SleepingEngine:
    """What the outer loop needs of an engine. A step draws the island to a number of its own, and sleeps."""

    def __init__(self, tensors: Tensors, island: int, step_s: float) -> None:
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._tensors, self._target, self._step_s = tensors, float(island), step_s

    def train_batch_size(self) -> int:
        return 1

    def gradient_accumulation_steps(self) -> int:
        return 1

    def train(self) -> None:
        """One inner step."""
        for value in self._tensors.values:
            value.mul_(0.999).add_(0.001 * self._target)
        time.sleep(self._step_s)
        self.global_steps += 1


def build(job: dict[str, Any], tensors: Tensors, engine: SleepingEngine) -> OuterLoop:
    """The outer loop of this island, as `megatron_wsd.attach` makes it for an engine."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = parse_config(job["config"], islands=job["islands"], ranks=1)
    address = IslandAddress(
        job["island"], job["islands"], job["lighthouse"], ("localhost", store.port), Path(job["run_dir"])
    )
    kind = Lockstep if config.sync.mode == "sync" else Decoupled
    loop = kind(engine, config, address, 0, tensors)
    loop.store = store  # type: ignore[attr-defined]  # must outlive the manager
    return loop


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train for ``seconds`` or ``steps``, then offer what is left; no config, no outer loop."""
    torch.set_num_threads(1)
    tensors = Tensors(job["parameters"])
    engine = SleepingEngine(tensors, job["island"], job["step_s"])
    loop = build(job, tensors, engine) if job["config"] else None
    if loop is not None:
        loop.meet()
    began = time.monotonic()
    times: list[float] = []
    pauses: list[float] = []
    while len(times) < job["steps"] if job["steps"] else time.monotonic() - began < job["seconds"]:
        engine.train()
        trained = time.monotonic()
        if loop is not None:
            loop.step(tokens=job["tokens_per_step"])
        times.append(time.monotonic())
        pauses.append(times[-1] - trained)
    found: dict[str, Any] = {
        "parameters": sum(v.numel() for v in tensors.values),
        "times": [t - began for t in times],
        "pauses": pauses,
        "ended": time.time(),
    }
    if loop is not None:
        loop.finish()
        found |= {"tokens": loop.state.tokens, "outer_step": loop.outer_step, "digest": loop.state.digest()}
        loop.close()
    return found


def main() -> None:
    """Run the job that the command line tells; ends at once, whatever torchft's threads are still doing.

    The job: island, islands, lighthouse, run_dir, config (DeepSpeed's json, or null), parameters, step_s,
    tokens_per_step, seconds, steps (of the two one is null), out.
    """
    job = json.loads(sys.argv[1])
    try:
        found = run(job)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    Path(job["out"]).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
