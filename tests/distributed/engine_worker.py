"""What ranks of `engine_processes.island` do."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RUST_LOG", "warn")

import deepspeed
import torch
import torch.distributed as dist
import torchft  # noqa: F401  # here, so that forked ranks have it
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel  # noqa: F401

from megatron_wsd import inner
from megatron_wsd.config import Config, parse_config
from megatron_wsd.diloco.loop import attach
from megatron_wsd.models import engine as engine_module
from megatron_wsd.models.attention import Spec
from megatron_wsd.models.cpu import prepare_for_cpu, without_shm_comm
from megatron_wsd.models.engine import build_engine
from megatron_wsd.models.gpt import CausalInputs, build_gpt
from megatron_wsd.shards.zero3 import Zero3Shards
from megatron_wsd.train import Trainer

VOCAB = 64


def start(tensor_parallel: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel("ERROR")
    prepare_for_cpu()
    without_shm_comm()
    deepspeed.init_distributed(verbose=False)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def train(engine: Any, config: Config, steps: int, after: Any = lambda: None) -> list[float]:
    """Losses over the samples of the whole island, which are the same for every number of ranks."""
    assert config.model is not None
    inputs = CausalInputs(torch.device("cpu"))
    reader, readers = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    losses = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        batch = torch.randint(0, VOCAB, (config.island_batch, config.model.seq_length + 1), generator=g)
        own = batch.chunk(readers)[reader]
        positions, mask = inputs(own[:, :-1])
        loss = engine(own[:, :-1], positions, mask, labels=own[:, 1:]).float().mean()
        engine.backward(loss)
        engine.step()
        after()
        total = loss.detach().double().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def own_shards(engine: Any) -> dict[str, torch.Tensor]:
    """Masters of this rank by name of the piece."""
    shards = Zero3Shards(engine)
    out = [torch.zeros(s.numel) for s in shards.shards]
    shards.read(out)
    return {s.key_name: t for s, t in zip(shards.shards, out, strict=True)}


def tensor_parallel(runs: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """Train one model after the other, with the outer loop of a lone island."""
    found = []
    start(runs[0][0]["megatron_wsd"]["model"]["tensor_parallel"])
    for raw, steps in runs:
        config = parse_config(raw, islands=1, ranks=dist.get_world_size())
        built = build_engine(config, config.deepspeed, VOCAB)
        loop = attach(built.engine, config)
        losses = train(built.engine, config, steps, lambda loop=loop: loop.step(tokens=1))
        layouts = [s for f in loop.state.fragments for s in f.layout.segments]
        found.append(
            {
                "parameters": built.parameters,
                "losses": losses,
                "norm": float(built.engine.get_global_grad_norm()),
                "rounds": loop.outer_step,
                "shards": own_shards(built.engine),
                "shapes": {s.name: s.shape for s in Zero3Shards(built.engine).shards},
                "eight_bit": sorted({s.name.split("/")[0] for s in layouts if s.quantised}),
                "keys": {s.name: s.key for s in layouts},
                "errors": [f.error.abs().max().item() for f in loop._local.fragments if f.error is not None],
            }
        )
        loop.close()
        built.engine.destroy()
    return found


def trainer(raw: dict[str, Any], run_dir: str, steps: int, resume: bool) -> None:
    """The trainer itself."""
    torch.set_num_threads(1)
    config = parse_config(raw, islands=1, ranks=int(os.environ["WORLD_SIZE"]))
    Trainer(config, Path(run_dir), steps, resume=resume).run()


def parity(raw: dict[str, Any], kinds: list[inner.Kind], steps: int) -> dict[str, Any]:
    """Train the same model with each implementation of the inner optimizer."""
    start(1)
    config = parse_config(raw, islands=1, ranks=dist.get_world_size())
    found = {}
    for kind in kinds:
        chosen = inner.Choice(kind, "a test says so")
        engine_module.choose = lambda *_, chosen=chosen, **__: chosen
        built = build_engine(config, config.deepspeed, VOCAB)
        losses = train(built.engine, config, steps)
        optimizer = built.engine.basic_optimizer
        found[kind] = {
            "losses": losses,
            "shards": own_shards(built.engine),
            "class": type(optimizer).__name__,
            "fused": any(group.get("fused") for group in optimizer.param_groups),
        }
        built.engine.destroy()
    return found


def attention(raw: dict[str, Any], specs: list[Spec]) -> dict[str, Any]:
    """Loss and gradients of one batch for each kind of layers that a CPU can run."""
    start(1)
    config = parse_config(raw, islands=1, ranks=1)
    assert config.model is not None
    tokens = torch.randint(
        0, VOCAB, (2, config.model.seq_length + 1), generator=torch.Generator().manual_seed(5)
    )
    found = {}
    for spec in specs:
        model = build_gpt(config.model, VOCAB, spec)
        positions, mask = CausalInputs(torch.device("cpu"), spec)(tokens[:, :-1])
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found[spec] = {"loss": loss.item(), "masked": mask is not None, "gradients": gradients}
    return found
