#!/usr/bin/env python3
"""What a wire format costs in accuracy: the error of a payload, and the loss of a small DiLoCo run.

    .venv/bin/python benchmarks/wire_error.py --out runs/wire_error.json

Islands train a byte model on Python's own sources; each contribution goes through the codec that the real
loop uses, with error feedback and without. Runs of one seed see the same batches, so their losses can be
compared one by one. docs/wire.md keeps the last figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from megatron_wsd.optim import wire
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.wire import WireFormat

FORMATS = ("bf16", "int8", "int4_linear", "int4_e3m0")
CONTEXT, BATCH = 12, 32


class ByteModel(nn.Sequential):
    """Predicts a byte from the 12 before it; 181,120 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(256, 32),
            nn.Flatten(),
            nn.Linear(32 * CONTEXT, 256),
            nn.GELU(),
            nn.LayerNorm(256),
            nn.Linear(256, 256, bias=False),
        )


class Text:
    """Batches of Python's standard library; the last tenth is for validation."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
        self.bytes = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.split = int(0.9 * len(self.bytes))

    def batch(self, low: int, high: int, size: int, generator: torch.Generator) -> torch.Tensor:
        """int64 [size, CONTEXT + 1]."""
        starts = torch.randint(low, high - CONTEXT, (size, 1), generator=generator)
        return self.bytes[starts + torch.arange(CONTEXT + 1)].long()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the last byte."""
    return nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])


class Outer:
    """The anchor and what steps it: SGD with Nesterov momentum (0.4, 0.9), or Adam (3e-3, 0.9, 0.95)."""

    def __init__(self, kind: str, anchor: torch.Tensor) -> None:
        self.anchor = nn.Parameter(anchor)
        if kind == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD([self.anchor], 0.4, 0.9, nesterov=True)
        else:
            self.optimizer = torch.optim.Adam([self.anchor], 3e-3, betas=(0.9, 0.95))

    def step(self, merged: torch.Tensor) -> None:
        """Take the merged pseudo-gradient as gradient."""
        self.anchor.grad = merged
        self.optimizer.step()


def layout_of(model: nn.Module) -> FlatLayout:
    """Every parameter whole, each from a block boundary, as the loop lays them."""
    return FlatLayout([Segment(k, parameter_key(k), p.numel(), 0, True) for k, p in model.named_parameters()])


def flat_of(layout: FlatLayout, model: nn.Module) -> torch.Tensor:
    """A copy of the parameters in the flat buffer."""
    flat = torch.zeros(layout.total)
    for view, p in zip(layout.views(flat), model.parameters(), strict=True):
        view.copy_(p.detach().flatten())
    return flat


def load(layout: FlatLayout, model: nn.Module, flat: torch.Tensor) -> None:
    """The other way."""
    for view, p in zip(layout.views(flat), model.parameters(), strict=True):
        p.data.copy_(view.view_as(p))


def train(
    text: Text,
    kind: str,
    name: str,
    feedback: bool,
    seed: int,
    rounds: int,
    inner_steps: int,
    islands: int,
    keep: Callable[[int, torch.Tensor], None] = lambda round_, g: None,
) -> float:
    """Validation loss of the anchor after `rounds` rounds; `keep` sees every contribution before encoding."""
    torch.manual_seed(seed)
    fmt, model = WireFormat.of(name), ByteModel()
    layout = layout_of(model)
    outer = Outer(kind, flat_of(layout, model))
    n = layout.total
    locals_ = [ByteModel() for _ in range(islands)]
    inner = [torch.optim.AdamW(m.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.0) for m in locals_]
    draws = [torch.Generator().manual_seed(1000 * seed + i) for i in range(islands)]
    errors = [torch.zeros(n) for _ in range(islands)]
    payload = torch.zeros(fmt.encoded_bytes(n), dtype=torch.uint8)
    for round_ in range(rounds):
        merged = torch.zeros(n)
        for model_i, optimizer, draw, error in zip(locals_, inner, draws, errors, strict=True):
            load(layout, model_i, outer.anchor.detach())
            for _ in range(inner_steps):
                optimizer.zero_grad()
                loss_of(model_i, text.batch(0, text.split, BATCH, draw)).backward()
                optimizer.step()
            sent = outer.anchor.detach() - flat_of(layout, model_i)
            keep(round_, sent)
            sent += error
            wire.encode(fmt, sent, payload)
            if feedback:
                wire.residual(fmt, sent, payload, error)
            assert wire.accumulate(fmt, payload, merged, 1 / islands)
        outer.step(merged)
    load(layout, model, outer.anchor.detach())
    with torch.no_grad():
        check = text.batch(text.split, len(text.bytes), 16384, torch.Generator().manual_seed(0))
        return float(loss_of(model, check))


def relative_error(name: str, x: torch.Tensor) -> float:
    """|x - decode(encode(x))| / |x|."""
    fmt = WireFormat.of(name)
    payload = torch.zeros(fmt.encoded_bytes(x.numel()), dtype=torch.uint8)
    left = wire.residual(fmt, x, wire.encode(fmt, x, payload), torch.zeros_like(x))
    return float(left.double().norm() / x.double().norm())


def samples(text: Text, rounds: int) -> dict[str, torch.Tensor]:
    """Numbers to encode, by what they are."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(5, 1 << 20, generator=draw)
    kept: dict[str, torch.Tensor] = {}

    def keep(round_: int, g: torch.Tensor) -> None:
        if round_ in (0, rounds // 2, rounds - 1):
            kept[f"pseudo-gradient, round {round_ + 1}"] = g.clone()

    train(text, "sgd", "fp32", False, 0, rounds, 8, 1, keep)
    return {
        "Gauss": normal[0],
        "Student t, 3 degrees": normal[0] / normal[1:4].square().mean(0).sqrt(),
        "Student t, 1 degree": normal[0] / normal[4].abs(),
        **kept,
    }


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--inner-steps", type=int, default=8)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--optimizers", default="sgd,adam", help="of sgd,adam")
    parser.add_argument("--out", type=Path, help="json with every number")
    given = parser.parse_args()
    text = Text()
    errors = {
        what: {name: relative_error(name, x) for name in FORMATS}
        for what, x in samples(text, given.rounds).items()
    }
    print("| relative error |", *(f"{name} |" for name in FORMATS))
    for what, row in errors.items():
        print(f"| {what} |", *(f"{e:.4f} |" for e in row.values()))
    print("\n| outer optimizer | format | feedback | loss | against fp32, % | standard error |", flush=True)
    losses: dict[str, list[float]] = {}
    for kind in given.optimizers.split(","):
        for name, feedback in [("fp32", False), *((n, f) for n in FORMATS for f in (True, False))]:
            found = [
                train(text, kind, name, feedback, seed, given.rounds, given.inner_steps, given.islands)
                for seed in range(given.seeds)
            ]
            losses[f"{kind} {name} {feedback}"] = found
            base = losses[f"{kind} fp32 False"]
            more = [100 * (a / b - 1) for a, b in zip(found, base, strict=True)]
            spread = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
            row = f"{statistics.mean(found):.4f} | {statistics.mean(more):+.2f} | {spread:.2f}"
            print(f"| {kind} | {name} | {'yes' if feedback else 'no'} | {row} |", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"errors": errors, "losses": losses}, indent=1))


if __name__ == "__main__":
    main()
