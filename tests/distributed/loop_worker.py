"""One one-rank island without DeepSpeed: the whole outer loop and real torchft on plain tensors.

The model is a handful of tensors that are drawn to a target of each island's own, so that islands disagree and
everything is a pure function of (island, inner step): nothing here learns, and every number can be checked.
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
from megatron_wsd.errors import MegatronWSDError
from megatron_wsd.shards.zero3 import Shard

SHAPES = {
    "embedding.weight": (40, 8),
    "layers.0.weight": (70, 64),
    "layers.0.bias": (7,),
    "layers.1.weight": (64, 65),
    "layers.2.weight": (257,),
    "final.weight": (1,),
}


class PlainShards:
    """Tensors in the place of an engine's shards."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.values = [torch.randn(torch.Size(shape), generator=g).view(-1) for shape in SHAPES.values()]
        self.shards = [Shard(name, shape, 0, v.numel()) for (name, shape), v in zip(SHAPES.items(), self.values)]

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        for i, target in zip(range(len(self.values)) if members is None else members, out, strict=True):
            target.copy_(self.values[i])

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        for i, value in zip(range(len(self.values)) if members is None else members, values, strict=True):
            self.values[i].copy_(value)


class PlainEngine:
    """What the outer loop needs of an engine."""

    def __init__(self, shards: PlainShards, island: int) -> None:
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._shards, self._island = shards, island

    def train_batch_size(self) -> int:
        return 4

    def gradient_accumulation_steps(self) -> int:
        return 1

    def train(self) -> None:
        """One inner step: a pull towards this island's target, and noise of this step."""
        g = torch.Generator().manual_seed(1_000_003 * self._island + self.global_steps)
        for i, value in enumerate(self._shards.values):
            target = float(self._island) - 1.0
            value.add_(0.02 * (target - value) + 0.01 * torch.randn(value.shape, generator=g)).add_(i * 0.0)
        self.global_steps += 1


def build(job: dict[str, Any]) -> tuple[OuterLoop, PlainEngine, PlainShards]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = parse_config(job["config"], islands=job["islands"], ranks=1)
    address = IslandAddress(
        job["island"], job["islands"], job["lighthouse"], ("localhost", store.port), Path(job["run_dir"])
    )
    shards = PlainShards(job.get("weight_seed", 0))
    engine = PlainEngine(shards, job["island"])
    kind = Lockstep if config.sync.mode == "sync" else Decoupled
    loop = kind(engine, config, address, 0, shards)
    loop.store = store  # type: ignore[attr-defined]  # must outlive the manager
    return loop, engine, shards


def checkpoint(loop: OuterLoop, folder: Path) -> None:
    loop.save(folder)


def resume(loop: OuterLoop, engine: PlainEngine, shards: PlainShards, folder: Path) -> bool:
    """The outer state alone: what was local is given up, as for an island whose engine is lost."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return False
    engine.global_steps = json.loads(manifest.read_text())["extra"]["inner_step"]
    loop.load(folder)
    return True


def run(job: dict[str, Any]) -> dict[str, Any]:
    loop, engine, shards = build(job)
    folder = Path(job["run_dir"]) / f"island_{job['island']}" / "checkpoint"
    resumed = bool(job.get("resume")) and resume(loop, engine, shards, folder)
    loop.meet()
    began, trained, longest = time.monotonic(), 0, 0.0
    while loop.position < job["until"] and not Path(job["run_dir"], "stop").exists():
        engine.train()
        time.sleep(job.get("step_s", 0.02))
        before = time.monotonic()
        loop.step(tokens=100)
        longest = max(longest, time.monotonic() - before)
        trained += 1
        if job.get("save_every") and trained % job["save_every"] == 0:
            checkpoint(loop, folder)
    seconds = time.monotonic() - began
    loop.finish()
    result = {
        "resumed": resumed,
        "outer_step": loop.outer_step,
        "versions": [f.version for f in loop.state.fragments],
        "taken": [f.taken for f in loop.state.fragments],
        "inner_step": loop.inner_step,
        "position": loop.position,
        "tokens": loop.tokens,
        "digest": loop.state.digest(),
        "holds_anchor": all(
            torch.equal(v, shards.values[i])
            for f, own in zip(loop.state.fragments, loop._local.fragments, strict=True)
            for v, i in zip(f.layout.views(f.anchor.float()), own.members, strict=True)
        ),
        "trained": trained,
        "seconds": seconds,
        "longest_pause_s": longest,
    }
    loop.close()
    return result


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    try:
        result = run(job)
    except MegatronWSDError as e:
        result = {"error": type(e).__name__, "text": str(e)}
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    Path(job["out"]).write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
