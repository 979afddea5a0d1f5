"""DeepSpeed's own keys and names and what they take, so that a wrong one is told without importing DeepSpeed.

Its import takes seconds, and what it says of a wrong key comes from every rank, after all of them have begun.
The tables are those of DeepSpeed 0.19.8 and torch 2.13; a test holds them against what is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

OF_DEEPSPEED = (0, 19, 8)


@dataclass(frozen=True)
class Kind:
    """What a key takes: in words, and as a test of a value."""

    words: str
    fits: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """The same, and null."""
        return Kind(f"{self.words}, or null", lambda value: value is None or self.fits(value))


Table = Mapping[str, Union[Kind, "Table"]]
"""Name -> what it takes; a table in turn for an object whose every key is known."""


def is_number(value: object) -> bool:
    """Whether it is a finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)  # isfinite cannot take an int of 400 digits


def _whole(low: int | None) -> Kind:
    def fits(value: Any) -> bool:  # 5e8 is a float in json, and DeepSpeed takes it
        within = is_number(value) and (-(2**63) if low is None else low) <= value < 2**63
        return within and value == int(value)

    return Kind("a whole number" if low is None else f"a whole number of at least {low}", fits)


def _number(low: float, high: float = math.inf) -> Kind:
    words = f"a finite number of at least {low:g}" if high == math.inf else f"a number in [{low:g}, {high:g}]"
    return Kind(words, lambda value: is_number(value) and low <= value <= high)


def _one_of(*words: str) -> Kind:
    return Kind("one of " + ", ".join(f'"{w}"' for w in words), lambda value: value in words)


def _any_case(kind: Kind) -> Kind:
    """DeepSpeed writes some texts in small letters before it looks at them."""
    return Kind(kind.words, lambda value: kind.fits(value.lower() if isinstance(value, str) else value))


BOOL = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("a json object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
ANY = Kind("anything", lambda value: True)
COUNT, SIZE = _whole(0), _whole(1)
_DTYPES = (
    *("fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half"),
    *("torch.float32", "torch.float16", "torch.bfloat16"),
)
_DTYPE = Kind('"fp32", "fp16" or "bf16"', lambda value: value in _DTYPES).or_null()
_WIRE_DTYPE = _one_of("fp32", "fp16", "bf16").or_null()

_OFFLOAD_PARAM: Table = {
    "device": _one_of("none", "cpu", "nvme"),
    "nvme_path": TEXT.or_null(),
    "buffer_count": COUNT,
    "buffer_size": COUNT,
    "max_in_cpu": COUNT,
    "pin_memory": BOOL,
}
_OFFLOAD_OPTIMIZER: Table = {
    "device": _one_of("none", "cpu", "nvme"),
    "nvme_path": TEXT.or_null(),
    "buffer_count": COUNT,
    "pin_memory": BOOL,
    "pipeline_read": BOOL,
    "pipeline_write": BOOL,
    "fast_init": BOOL,
    "ratio": _number(0, 1),
    "super_offload": BOOL,
    "cpuadam_cores_perc": _number(0, 1),
}
# Under these names DeepSpeed takes them as well as with "stage3_" in front.
_STAGE3: Table = {
    "prefetch_bucket_size": COUNT,
    "param_persistence_threshold": COUNT,
    "model_persistence_threshold": COUNT,
    "max_live_parameters": COUNT,
    "max_reuse_distance": COUNT,
    "gather_16bit_weights_on_model_save": BOOL,
    "module_granularity_threshold": _whole(None),
    "use_all_reduce_for_fetch_params": BOOL,
    "allgather_sequential": BOOL,
}
ZERO: Table = {
    "stage": ANY,  # one alone works, which is checked elsewhere
    "contiguous_gradients": BOOL,
    "reduce_scatter": BOOL,
    "reduce_bucket_size": SIZE,
    "use_multi_rank_bucket_allreduce": BOOL,
    "allgather_partitions": BOOL,
    "allgather_bucket_size": COUNT,
    "overlap_comm": BOOL.or_null(),
    "compute_grad_norm": BOOL,
    "load_from_fp32_weights": BOOL,
    "elastic_checkpoint": BOOL,
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": OBJECT.or_null(),
    "sub_group_size": COUNT,
    **{f"stage3_{name}": kind for name, kind in _STAGE3.items()},
    **_STAGE3,
    "stage3_gather_fp16_weights_on_model_save": BOOL,
    "ignore_unused_parameters": BOOL,
    "legacy_stage1": BOOL,
    "round_robin_gradients": BOOL,
    "parameter_alignment": BOOL,
    "zero_hpz_partition_size": COUNT,
    "zero_quantized_weights": BOOL,
    "zero_quantized_nontrainable_weights": BOOL,
    "zero_quantized_gradients": BOOL,
    "memory_efficient_linear": BOOL,
    "pipeline_loading_checkpoint": BOOL,
    "override_module_apply": BOOL,
    "log_trace_cache_warnings": BOOL,
    "enable_sanity_checks": BOOL,
    "save_muon_momentum_buffer_in_memory": BOOL,
    "leaf_module": OBJECT,
    # of older versions; refused by name, whatever is in them
    **dict.fromkeys(("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"), ANY),
    **dict.fromkeys(("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"), ANY),
}
_BF16: Table = {
    "enabled": BOOL,
    "immediate_grad_update": BOOL,
    "check_grad_overflow": BOOL,
    "bf16_master_weights_and_grads": BOOL,
    "bf16_optimizer_states": BOOL,
}
_FILES: Table = {"enabled": BOOL, "output_path": TEXT, "job_name": TEXT}
_COMET_TEXTS = ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode")

TOP: Table = {
    # their arithmetic is checked where it is done
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), ANY
    ),
    "managed_gradient_accumulation": BOOL,
    "gradient_clipping": _number(0),
    "optimizer": {"type": TEXT, "params": OBJECT, "legacy_fusion": BOOL},
    "scheduler": {"type": TEXT, "params": OBJECT},
    "zero_optimization": ZERO,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp16": {
        "enabled": BOOL,
        "auto_cast": BOOL,
        "loss_scale": _number(0),
        "initial_scale_power": COUNT,
        "loss_scale_window": COUNT,
        "hysteresis": COUNT,
        "consecutive_hysteresis": BOOL,
        "min_loss_scale": COUNT,
        "fp16_master_weights_and_grads": BOOL,
    },
    "tensorboard": _FILES,
    "csv_monitor": _FILES,
    "wandb": {"enabled": BOOL, "group": TEXT.or_null(), "team": TEXT.or_null(), "project": TEXT},
    "comet": {
        "enabled": BOOL,
        "samples_log_interval": COUNT,
        "online": BOOL.or_null(),
        **dict.fromkeys(_COMET_TEXTS, TEXT.or_null()),
    },
    "data_types": {
        "grad_accum_dtype": _DTYPE,
        "param_dtype": _DTYPE,
        "buffer_dtype": _DTYPE,
        "keep_in_fp32_modules": Kind(
            '"auto" or a list of names', lambda v: v == "auto" or isinstance(v, list)
        ),
    },
    "activation_checkpointing": OBJECT,
    "aio": OBJECT.or_null(),
    "allgather_size": COUNT,
    "autotuning": OBJECT,
    "checkpoint": OBJECT,
    "comms_logger": OBJECT,
    "communication_data_type": _any_case(_WIRE_DTYPE),
    "compile": OBJECT,
    "data_efficiency": OBJECT,
    "dataloader_drop_last": BOOL,
    "datastates_ckpt": OBJECT,
    "disable_allgather": BOOL,
    "disable_python_gc": BOOL,
    "dump_state": BOOL,
    "flops_profiler": OBJECT,
    "gradient_allreduce_op": _any_case(_one_of("mean")),
    "gradient_predivide_factor": _number(0),
    "hybrid_engine": OBJECT,
    "log_level": TEXT,
    "memory_breakdown": BOOL,
    "prescale_gradients": BOOL,
    "seq_parallel_communication_data_type": _DTYPE,
    "steps_per_print": SIZE.or_null(),
    "timers": OBJECT,
    "torch_autocast": OBJECT,
    "use_data_before_expert_parallelism": BOOL,
    "vocabulary_size": SIZE,
    "wall_clock_breakdown": BOOL,
    "weight_quantization": OBJECT,
    "zero_allow_untested_optimizer": BOOL,
    "zero_force_ds_cpu_optimizer": BOOL,
}

REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)
"""Top-level keys of older versions, which newer ones refuse."""

# DeepSpeed takes its own in any case, torch's as they are spelt.
DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon")
TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
ZERO_TESTED = ("Adam", "AdamW", "Adagrad", "Lion", "Muon")
"""Those that ZeRO takes without ``zero_allow_untested_optimizer``."""

SCHEDULERS = (
    *("WSD", "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR"),
    *("LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR"),
    *("ReduceLROnPlateau", "StepLR"),
)
"""What a scheduler of the json may be: ours, DeepSpeed's, torch's."""

_FLAG = BOOL.or_null()
TORCH_ADAM: Table = {
    **dict.fromkeys(
        ("lr", "betas", "eps", "weight_decay"), ANY
    ),  # their ranges are checked where they matter
    **dict.fromkeys(("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"), _FLAG),
    **dict.fromkeys(("torch_adam", "adam_w_mode"), _FLAG),  # for DeepSpeed, which takes them out
}
ADAM: Table = {
    **TORCH_ADAM,
    **dict.fromkeys(("bias_correction", "adamw_mode", "set_grad_none", "fp32_optimizer_states"), _FLAG),
    "master_weights": _FLAG,
}
"""Params of Adam and AdamW: what torch's takes, and what DeepSpeed's two or apex's do."""
