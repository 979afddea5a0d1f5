"""The half of the json that is DeepSpeed's: batch sizes, and what cannot work together with islands."""

from __future__ import annotations

import math
import re
from typing import Any

from megatron_wsd.config.block import BLOCK, IslandJob
from megatron_wsd.config.deepspeed_keys import (
    ADAM,
    DEEPSPEED_OPTIMIZERS,
    TORCH_ADAM,
    TORCH_OPTIMIZERS,
    ZERO_TESTED,
    is_number,
)
from megatron_wsd.config.keys import AUTO, check_table, nearest
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
            got = repr(value) if isinstance(value, str) else value
            raise ConfigError(key, "an integer of at least 1", got, AUTO if value == "auto" else "")
        if value is not None and value >= 2**31:
            raise ConfigError(key, "less than 2^31 sequences", value)
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


def check_optimizer(deepspeed: dict[str, Any], block: IslandJob) -> None:
    """Name and numbers of the inner optimizer, which DeepSpeed and torch would refuse only in the ranks."""
    optimizer = deepspeed.get("optimizer", {})
    kind, params = optimizer.get("type"), optimizer.get("params", {})
    if kind is not None:
        _check_name(kind, tested=not deepspeed.get("zero_allow_untested_optimizer"))
        if kind.lower() in ("adam", "adamw"):
            torchs = params.get("torch_adam") or block.inner == "torch"
            check_table(params, TORCH_ADAM if torchs else ADAM, "optimizer.params.")
    wanted = [(key, params[key], math.inf) for key in ("lr", "eps", "weight_decay") if key in params]
    betas = params.get("betas", [0.0, 0.0])
    if not isinstance(betas, list) or len(betas) != 2:
        raise ConfigError("optimizer.params.betas", "two numbers in [0, 1)", betas)
    wanted += [(f"betas.{i}", beta, 1.0) for i, beta in enumerate(betas)]
    for key, value, high in wanted:
        if not (is_number(value) and 0.0 <= value < high):
            bound = "0 or more" if high == math.inf else f"in [0, {high:g})"
            got = repr(value) if isinstance(value, str) else value
            raise ConfigError(f"optimizer.params.{key}", f"a finite number, {bound}", got)


def _check_name(kind: str, *, tested: bool) -> None:
    # DeepSpeed takes its own in any case, torch's as they are spelt.
    own = next((name for name in DEEPSPEED_OPTIMIZERS if name.lower() == kind.lower()), None)
    if own is None and kind not in TORCH_OPTIMIZERS:
        near = nearest(kind, ZERO_TESTED) or nearest(kind, (*DEEPSPEED_OPTIMIZERS, *TORCH_OPTIMIZERS))
        raise ConfigError(
            "optimizer.type",
            f"{', '.join(ZERO_TESTED)}, or another optimizer of DeepSpeed or torch",
            repr(kind),
            f"Did you mean {near!r}?" if near else 'Take "AdamW", say.',
        )
    if tested and own not in ZERO_TESTED:
        raise ConfigError(
            "optimizer.type",
            f"one of {', '.join(ZERO_TESTED)}, which DeepSpeed has tested with ZeRO",
            kind,
            'For another one add "zero_allow_untested_optimizer": true.',
        )


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
    kind = str(deepspeed.get("optimizer", {}).get("type", ""))
    if kind.lower().replace("_", "") in ("onebitadam", "onebitlamb", "zerooneadam"):
        raise ConfigError(
            "optimizer.type",
            "an optimizer whose state is that of its own shard, such as AdamW",
            kind,
            "1-bit optimizers exchange by themselves and do not run under ZeRO-3.",
        )
    for section in ("fp16", "bfloat16"):
        if deepspeed.get(section, {}).get("enabled"):
            why = "Islands do not agree on loss scales." if section == "fp16" else "Write bf16."
            raise ConfigError(f"{section}.enabled", "bf16 or fp32", f"{section}, switched on", why)
    if deepspeed.get("bf16", {}).get("bf16_master_weights_and_grads"):
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads",
            "false together with islands",
            True,
            "Remove it: the outer loop reads fp32 masters.",
        )
    zero = deepspeed.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage != 3 or isinstance(stage, bool):
        raise ConfigError(
            "zero_optimization.stage", "3, whose shards the outer loop reads", stage, 'Set "stage": 3.'
        )
    refused = {
        "zero_hpz_partition_size": (1, "hpZ keeps a second, differently sharded copy of the weights"),
        "zero_quantized_weights": (False, "the island would not hold what the outer loop wrote"),
        "zero_quantized_nontrainable_weights": (False, "the island would not hold what the outer loop wrote"),
        "zero_quantized_gradients": (False, "quantised gradients change the shards' arithmetic"),
        "compute_grad_norm": (True, "ZeRO-3 clips by that norm, and DeepSpeed insists on it"),
    }
    for key, (off, why) in refused.items():
        if zero.get(key, off) != off:
            raise ConfigError(
                f"zero_optimization.{key}", f"{off!r} together with islands", zero[key], f"Remove it: {why}."
            )
    gone = {
        "mics_shard_size": "Remove it: MiCS replicates shards inside an island.",
        "mics_hierarchical_params_gather": "Remove it: MiCS replicates shards inside an island.",
        "zeropp_loco_param": "Remove it: quantised gradients change the shards' arithmetic.",
        "cpu_offload": 'Write "offload_optimizer": {"device": "cpu"}.',
        "cpu_offload_param": 'Write "offload_param": {"device": "cpu"}.',
        "cpu_offload_use_pin_memory": "Write pin_memory inside offload_optimizer and offload_param.",
    }
    for key, remedy in gone.items():
        # the deprecated ones may be there to say no
        if key in zero and (zero[key] or not key.startswith("cpu_offload")):
            raise ConfigError(f"zero_optimization.{key}", "no such key", "it there", remedy)
    for part in ("offload_param", "offload_optimizer"):
        device = (zero.get(part) or {}).get("device", "none")
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
