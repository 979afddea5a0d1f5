"""The half of the json that is DeepSpeed's: batch sizes, and what cannot work together with islands."""

from __future__ import annotations

import math
import re
from typing import Any

from megatron_wsd.config.block import BLOCK, IslandJob
from megatron_wsd.errors import ConfigError


def resolve_batch(deepspeed: dict[str, Any], ranks: int, tensor_parallel: int = 1) -> None:
    """Fill in what DeepSpeed would derive, and show the arithmetic when it does not come out.

    The ranks of one tensor parallel group read the same samples, so that they count as one.
    """
    each = "ranks" if tensor_parallel == 1 else f"(ranks / tensor_parallel = {ranks} / {tensor_parallel})"
    ranks //= tensor_parallel
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key in keys:
        value = deepspeed.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(key, "an integer of at least 1", value)
    total, micro, accum = (deepspeed.get(key) for key in keys)
    if micro is None and total is None:
        raise ConfigError(
            keys[1], "a number of sequences", "neither it nor train_batch_size", "Add one of them."
        )
    if micro is None:
        assert total is not None
        micro = total // (ranks * (accum or 1))
    if accum is None:
        accum = total // (micro * ranks) if total is not None and micro else 1
    product = micro * accum * ranks
    if (total if total is not None else product) != product or product == 0:
        raise ConfigError(
            "train_batch_size",
            f"train_micro_batch_size_per_gpu x gradient_accumulation_steps x {each} = "
            f"{micro} x {accum} x {ranks} = {product}",
            total,
            "The batch is that of one island. Change one of the numbers, or --ranks.",
        )
    deepspeed.update(dict(zip(keys, (product, micro, accum), strict=True)))


def check_numbers(deepspeed: dict[str, Any]) -> None:
    """The numbers of the inner optimizer that DeepSpeed and torch would take or refuse only in the ranks."""
    params = deepspeed.get("optimizer", {}).get("params", {})
    if not isinstance(params, dict):
        raise ConfigError("optimizer.params", "a json object", params)
    bounds = {"lr": (0.0, math.inf), "eps": (0.0, math.inf), "weight_decay": (0.0, math.inf)}
    wanted = [
        (f"optimizer.params.{k}", params[k], low, high) for k, (low, high) in bounds.items() if k in params
    ]
    betas = params.get("betas", [])
    if not isinstance(betas, list):
        raise ConfigError("optimizer.params.betas", "two numbers in [0, 1)", betas)
    wanted += [(f"optimizer.params.betas.{i}", b, 0.0, 1.0) for i, b in enumerate(betas)]
    if "gradient_clipping" in deepspeed:
        wanted.append(("gradient_clipping", deepspeed["gradient_clipping"], 0.0, math.inf))
    for name, value, low, high in wanted:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and low <= value < high):
            bound = "0 or more" if high == math.inf else f"in [{low:g}, {high:g})"
            raise ConfigError(name, f"a finite number, {bound}", value)


def check_inner(deepspeed: dict[str, Any], block: IslandJob) -> None:
    """That ``inner`` and the json's optimizer block do not name two implementations."""
    if block.inner == "auto":
        return
    optimizer = deepspeed.get("optimizer", {})
    kind, params = optimizer.get("type"), optimizer.get("params", {})
    if str(kind).lower() not in ("adam", "adamw"):
        raise ConfigError(
            f"{BLOCK}.inner",
            '"auto" for an optimizer that is no Adam',
            f"{block.inner!r} for {kind or 'none'}",
            "DeepSpeed builds the others as its optimizer block says.",
        )
    if "torch_adam" in params:
        raise ConfigError(
            f"{BLOCK}.inner",
            '"auto" beside optimizer.params.torch_adam',
            repr(block.inner),
            "Both say whose Adam it is; remove one of them.",
        )
    offload = deepspeed.get("zero_optimization", {}).get("offload_optimizer") or {}
    if block.inner == "apex" and offload.get("device", "none") != "none":
        raise ConfigError(
            f"{BLOCK}.inner",
            '"deepspeed" or "torch" with offload_optimizer',
            '"apex"',
            "Apex steps on the GPU alone.",
        )


def refuse_with_islands(deepspeed: dict[str, Any]) -> None:
    """DeepSpeed features that compress or re-shard what an island must hold exactly."""
    optimizer = deepspeed.get("optimizer", {})
    kind = str(optimizer.get("type", "")) if isinstance(optimizer, dict) else ""
    if kind.lower().replace("_", "") in ("onebitadam", "onebitlamb", "zerooneadam"):
        raise ConfigError(
            "optimizer.type",
            "an optimizer whose state is that of its own shard, such as AdamW",
            kind,
            "1-bit optimizers exchange by themselves and do not run under ZeRO-3.",
        )
    zero = deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError("zero_optimization", "a json object", type(zero).__name__)
    stage = zero.get("stage", 0)
    if stage != 3:
        raise ConfigError(
            "zero_optimization.stage", "3, whose shards the outer loop reads", stage, 'Set "stage": 3.'
        )
    refused = {
        "zero_hpz_partition_size": (1, "hpZ keeps a second, differently sharded copy of the weights"),
        "zero_quantized_weights": (False, "the island would not hold what the outer loop wrote"),
        "zero_quantized_nontrainable_weights": (False, "the island would not hold what the outer loop wrote"),
        "zero_quantized_gradients": (False, "quantised gradients change the shards' arithmetic"),
        "mics_shard_size": (-1, "MiCS replicates shards inside an island"),
        "mics_hierarchical_params_gather": (False, "MiCS replicates shards inside an island"),
    }
    for key, (off, why) in refused.items():
        if zero.get(key, off) != off:
            raise ConfigError(
                f"zero_optimization.{key}", f"{off!r} together with islands", zero[key], f"Remove it: {why}."
            )
    for part in ("offload_param", "offload_optimizer"):
        device = zero.get(part, {}).get("device", "none") if isinstance(zero.get(part, {}), dict) else "none"
        if device == "nvme":
            raise ConfigError(f"zero_optimization.{part}.device", '"cpu" or "none"', device, "Use cpu.")


# As users of Megatron-LM or DeepSpeed would write it, and why it is not to be had.
_NO_PARALLELISM = {
    "pipeline": "the model is built whole on every rank, and ZeRO-3 shards it",
    "virtual_pipeline": "the model is built whole on every rank, and ZeRO-3 shards it",
    "context": "a sequence is on one rank, or on those of one tensor_parallel group",
    "sequence": "a sequence is on one rank, or on those of one tensor_parallel group",
    "expert": "the model is dense",
    "expert_tensor": "the model is dense",
}


def refuse_parallelism(raw: dict[str, Any]) -> None:
    """Every form of model parallelism but tensor parallelism inside an island, by its name.

    Takes the whole json, unvalidated: these are no keys of ours, and would be misread as spelling mistakes.

    Raises:
        ConfigError: naming the key.
    """
    block = raw.get(BLOCK)
    model = block.get("model") if isinstance(block, dict) else None
    places = [("", raw), (f"{BLOCK}.", block), (f"{BLOCK}.model.", model)]
    for prefix, place in places:
        for key, value in place.items() if isinstance(place, dict) else ():
            kind = re.sub(r"(_model)?_parallel(_size)?$|_size$", "", key)
            if kind == "tensor" and key != "tensor_parallel":
                raise ConfigError(prefix + key, "its name here", key, f"Write {BLOCK}.model.tensor_parallel.")
            off = value is None or value is False or (value == 1 and value is not True)
            if kind not in _NO_PARALLELISM or off or (kind == key and kind != "pipeline"):
                continue
            raise ConfigError(
                prefix + key,
                f"no {kind.replace('_', ' ')} parallelism",
                value,
                f"Remove it: {_NO_PARALLELISM[kind]}.",
            )
