"""A DeepSpeed script with a plain torch model, run by the real launcher; see test_equivalence.py.

On one island it trains the same model three times: without islands, with an outer SGD that must change
nothing, and in bf16 with CGAD. On two islands it does the last alone, on the same data. With CGAD the loop
is told the losses, and that the script has come to its end.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

import megatron_wsd
from megatron_wsd.errors import ConfigError
from megatron_wsd.models.cpu import without_shm_comm

STEPS = 9


class Model(nn.Module):
    """Two layers of different sizes, one of them too small for 8 bits, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.block = nn.Sequential(
            nn.Linear(48, 97), nn.SiLU(), nn.LayerNorm(97), nn.Linear(97, 48, bias=False)
        )
        self.head = nn.Linear(48, 64, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.block(self.embed(x))).float(), y)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 64, (16,), generator=g), torch.randint(0, 64, (16,), generator=g)


def stale(engine: Any) -> list[str]:
    """Parameters whose gathered working copy is not the cast of the master."""
    bad = []
    for name, p in engine.module.named_parameters():
        full = safe_get_full_fp32_param(p)
        # What a forward pass would use: a copy that is still gathered is used as it is.
        if p.ds_status.name == "AVAILABLE":
            same = torch.equal(p.data, full.to(p.dtype))
        else:
            with deepspeed.zero.GatheredParameters([p]):
                same = torch.equal(p.data, full.to(p.dtype))
        if not same:
            bad.append(name)
    return bad


def forget(engine: Any, rank: int) -> str:
    """What comes of an update that the loop is not told of, when the next one is to be made."""
    for step in range(2):
        engine.backward(engine(*batch(STEPS + step, rank)))
        try:
            engine.step()
        except ConfigError as e:
            return f"update {step + 1}: {e}"
    return ""


def train(raw: dict[str, Any], changes: dict[str, Any], outer: dict[str, Any] | None) -> dict[str, Any]:
    """Train once; final masters, losses, and what was stale after each round."""
    config = {**raw, **changes}
    if outer is not None:
        config["megatron_wsd"] = {**raw["megatron_wsd"], "outer": outer}
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loop = megatron_wsd.attach(engine) if outer is not None else None
    rank = torch.distributed.get_rank()
    told = outer is not None and outer["optimizer"] == "cgad"
    losses, means, bad, rounds, evals = [], [], [], 0, []
    for step in range(STEPS):
        loss = engine(*batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if loop is None:
            continue
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        means.append(mean.item() / torch.distributed.get_world_size())
        with torch.no_grad():  # leaves parameters gathered that the round must not leave stale
            for k in range(3):
                engine(*batch(100 + k, rank))
        if loop.step(loss=loss if told else None) is not None:
            rounds += 1
            bad += stale(engine)
            with torch.no_grad():
                evals.append(engine(*batch(100, rank)).item())
    result: dict[str, Any] = {
        "losses": losses,
        "means": means,
        "stale": bad,
        "rounds": rounds,
        "evals": evals,
    }
    result["weights"] = {n: safe_get_full_fp32_param(p).tolist() for n, p in engine.module.named_parameters()}
    if loop is not None:
        if told:
            loop.finish()
        result["digest"] = loop.state.digest()  # without counters, which tell the number of islands
        result["refused"] = forget(engine, rank)
        loop.close()
    engine.destroy()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--local_rank", type=int)
    args, _ = parser.parse_known_args()
    without_shm_comm()
    deepspeed.init_distributed()
    raw = json.loads(Path(args.config).read_text())
    kept = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}
    bf16 = {"bf16": {"enabled": True}}
    sgd, cgad = {"optimizer": "sgd", "lr": 1.0}, {"optimizer": "cgad", "lr": 0.01}
    results = {}
    if os.environ["MEGATRON_WSD_ISLANDS"] == "1":
        results["plain"] = train(raw, {}, None)
        results["sgd"] = train(raw, {}, sgd)
    results["cgad"] = train(raw, {**kept, **bf16}, cgad)
    if torch.distributed.get_rank() == 0:
        island = os.environ["MEGATRON_WSD_ISLAND"]
        (args.run_dir / f"results_{island}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
