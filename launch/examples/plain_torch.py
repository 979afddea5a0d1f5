#!/usr/bin/env python3
"""An ordinary DeepSpeed script with a plain torch model, and the three lines that put it on islands.

megatron-wsd launch --islands 2 --ranks 2 --config launch/examples/plain_torch.json \
    --run-dir runs/plain --script launch/examples/plain_torch.py
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import deepspeed
import torch
from torch import nn

import megatron_wsd
from megatron_wsd.models.cpu import without_shm_comm

CONTEXT = 16  # bytes that the model sees


class NextByte(nn.Module):
    """Predicts a byte from the CONTEXT bytes before it; returns the mean loss in nats."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mix = nn.Sequential(
            nn.Linear(CONTEXT * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width), nn.SiLU()
        )
        self.head = nn.Linear(width, 256)

    def forward(self, context: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.embed(context).flatten(1))
        return nn.functional.cross_entropy(self.head(hidden).float(), target)


def main() -> None:
    """Train until the schedule ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()

    without_shm_comm()
    deepspeed.init_distributed()
    torch.manual_seed(0)  # every island starts from the same weights
    model = NextByte()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    outer = megatron_wsd.attach(engine)  # 1: beside the engine

    folder = args.run_dir / f"island_{outer.island}" / "example"
    if args.resume and (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
        outer.load(folder / "outer")  # 2: beside the engine's checkpoint

    text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.int64)
    rank = torch.distributed.get_rank()
    while outer.inner_step < args.steps:
        seed = 1_000_000 * outer.island + 1000 * outer.inner_step + rank
        random = torch.Generator().manual_seed(seed)  # islands and ranks read different bytes
        at = torch.randint(
            0, len(text) - CONTEXT - 1, (engine.train_micro_batch_size_per_gpu(), 1), generator=random
        )
        window = text[at + torch.arange(CONTEXT + 1)]
        loss = engine(window[:, :-1], window[:, -1])
        engine.backward(loss)
        engine.step()
        outer.step(loss=loss)  # 3: after engine.step()

    outer.finish()
    engine.save_checkpoint(str(folder))
    outer.save(folder / "outer")
    outer.close()
    print(f"megatron-wsd: rank {rank} is done", flush=True)
    os._exit(0)  # torchft's native threads do not end by themselves


if __name__ == "__main__":
    main()
