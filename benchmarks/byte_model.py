"""A small byte model on the built-in corpora, as an island of the simulator; for the benchmarks beside it."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn

from megatron_wsd.config import Config, parse_config
from megatron_wsd.data.corpus import BUILTIN_CORPORA, open_source
from megatron_wsd.simulator import ModuleIsland

CONTEXT, BATCH, INNER_LR = 8, 64, 2e-3


class Layer(nn.Module):
    """x + linear(gelu(linear(norm(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width] -> [batch, width]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ByteModel(nn.Module):
    """Predicts a byte from the 8 before it; 79,000 parameters, two layers."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.inputs = nn.Linear(16 * CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """int64 [batch, CONTEXT] -> [batch, 256]."""
        hidden = self.inputs(self.embedding(x).flatten(1))
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.as_tensor(self.output(self.norm(hidden)))


class Text:
    """The first 2 MB of each built-in corpus; every tenth document is kept for validation."""

    def __init__(self, limit: int = 2 << 20) -> None:
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for spec in BUILTIN_CORPORA.values():
            size = 0
            for i, (_, document) in enumerate(open_source(spec).read()):
                parts[i % 10 == 9].append(document)
                size += len(document)
                if size > limit:
                    break
        joined = (bytearray(b"\0".join(p)) for p in parts)
        self.train, self.valid = (torch.frombuffer(j, dtype=torch.uint8) for j in joined)

    def batch(self, corpus: torch.Tensor, size: int, draw: torch.Generator) -> torch.Tensor:
        """int64 [size, CONTEXT + 1]."""
        starts = torch.randint(len(corpus) - CONTEXT, (size, 1), generator=draw)
        return corpus[starts + torch.arange(CONTEXT + 1)].long()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the last byte, in nats."""
    return nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])


class Island(ModuleIsland):
    """A byte model under AdamW; its data are a function of seed, island and inner step alone.

    Args:
        text: to be read.
        seed: of the weights and the data.
        number: of the island.
    """

    def __init__(self, text: Text, seed: int, number: int) -> None:
        torch.manual_seed(seed)
        model = ByteModel()

        def loss(n: int) -> tuple[torch.Tensor, int]:
            draw = torch.Generator().manual_seed(seed * 1_000_000_007 + number * 1_000_003 + n)
            return loss_of(model, text.batch(text.train, BATCH, draw)), BATCH

        optimizer = torch.optim.AdamW(model.parameters(), INNER_LR, betas=(0.9, 0.95), weight_decay=0.0)
        super().__init__(model, optimizer, loss)

    def valid_loss(self, text: Text) -> float:
        """On 16,384 places of the validation documents, the same for all."""
        batch = text.batch(text.valid, 16384, torch.Generator().manual_seed(0))
        with torch.no_grad():
            return float(loss_of(self.module, batch))


def config_of(islands: int, outer: dict[str, Any], sync: dict[str, Any]) -> Config:
    """A config of the simulator."""
    block = {"outer": outer, "sync": sync}
    raw = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3},
        "megatron_wsd": block,
    }
    return parse_config(raw, islands=islands, ranks=1)


def parser_of(doc: str, **defaults: int) -> argparse.ArgumentParser:
    """Flags for whole numbers, and one for the threads."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, value in {**defaults, "threads": 1}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    return parser


def versions() -> str:
    """Hardware and versions, in a line."""
    return f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
