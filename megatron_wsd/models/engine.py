"""The model, its inner optimizer and the DeepSpeed engine around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_wsd.config import Config
from megatron_wsd.inner import Choice, Found, build, choose, find
from megatron_wsd.metrics import say
from megatron_wsd.models.attention import Spec, find_spec
from megatron_wsd.models.gpt import build_gpt
from megatron_wsd.models.parallel import TensorParallelUnit


@dataclass(frozen=True)
class Built:
    """What `build_engine` made.

    Attributes:
        engine: of DeepSpeed.
        spec: the model's layers.
        inner: whose AdamW takes the inner steps.
        parameters: of the whole model.
    """

    engine: Any
    spec: Spec
    inner: Choice
    parameters: int


def build_engine(config: Config, deepspeed_json: dict[str, Any], vocab: int) -> Built:
    """Build the model sharded from the start, and the engine that trains it.

    Must be called by all ranks of the island, after `deepspeed.init_distributed` and
    `megatron.core.parallel_state.initialize_model_parallel`.

    Args:
        config: of the run; with a model.
        deepspeed_json: as DeepSpeed shall see it.
        vocab: rows of the embedding.

    Raises:
        ConfigError: the inner optimizer that was asked for cannot be used.
    """
    import deepspeed
    import torch

    assert config.model is not None
    cuda = torch.cuda.is_available()
    inner = choose(config, _found_by_all(find(config, cuda=cuda)), cuda=cuda)
    if inner.builds and torch.distributed.get_rank() == 0:
        say(f"DeepSpeed compiles its {inner.name} now, which can take minutes; once, for these versions")
    mpu = TensorParallelUnit() if config.tensor_parallel > 1 else None
    group = None if mpu is None else mpu.get_data_parallel_group()
    spec = find_spec()
    # `mpu` counts batches there, and only the group says over which ranks to shard.
    with deepspeed.zero.Init(config_dict_or_path=deepspeed_json, mpu=mpu, data_parallel_group=group):
        model = build_gpt(config.model, vocab, spec)
    groups = _decay_groups(model)
    optimizer, changes = build(inner, groups, config)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups,
        config={**deepspeed_json, **changes},
        mpu=mpu,
    )
    return Built(engine, spec, inner, _parameters(model, config.tensor_parallel))


def _found_by_all(own: Found) -> Found:
    import torch

    each: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(each, own)
    return Found.together(each)


def _decay_groups(model: Any) -> list[dict[str, Any]]:
    """Two param groups: matrices with the json's weight decay, vectors (norms) without."""
    matrices = [p for p in model.parameters() if len(p.ds_shape) > 1]
    vectors = [p for p in model.parameters() if len(p.ds_shape) <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def _parameters(model: Any, pieces: int) -> int:
    cut = [pieces if getattr(p, "tensor_model_parallel", False) else 1 for p in model.parameters()]
    return sum(int(p.ds_numel) * n for p, n in zip(model.parameters(), cut, strict=True))
