"""Names of keys: whose they are, where they belong, and what was meant by one that is unknown."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_wsd.config.block import BLOCK, IslandJob
from megatron_wsd.errors import ConfigError

# The top-level keys of DeepSpeed that users of this package write. Others pass too.
_DEEPSPEED = (
    "activation_checkpointing",
    "bf16",
    "csv_monitor",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "steps_per_print",
    "tensorboard",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_optimization",
)
_SCHEDULER = (
    "warmup_steps",
    "warmup_init_ratio",
    "decay_start",
    "decay_steps",
    "decay_shape",
    "decay_power",
    "total_steps",
    "min_lr_ratio",
    "min_lr",
    "then",
    "rewarmup_steps",
    "max_lr",
)


def parts() -> dict[str, type[BaseModel]]:
    """The parts of our block by name."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in IslandJob.model_fields.items():
        kinds = getattr(field.annotation, "__args__", (field.annotation,))
        found[name] = next(t for t in kinds if isinstance(t, type) and issubclass(t, BaseModel))
    return found


def _home(key: str) -> str | None:
    """Where a key of that very name belongs, if anywhere."""
    if key in _DEEPSPEED:
        return f"{key} at the top level"
    if key in parts():
        return f"{BLOCK}.{key}"
    homes = [f"{BLOCK}.{name}.{key}" for name, part in parts().items() if key in part.model_fields]
    if key in _SCHEDULER:
        homes.append(f"scheduler.params.{key}")
    return " or ".join(homes) or None


def config_error(e: ValidationError) -> ConfigError:
    """The first thing pydantic found wrong in our block, in the words of this package."""
    first = e.errors()[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join((BLOCK, *path))
    if first["type"] == "extra_forbidden":
        key = path[-1]
        names = list(IslandJob.model_fields if len(path) == 1 else parts()[path[0]].model_fields)
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        remedy = f"Remove it; known here are: {', '.join(names)}."
        if home := _home(key):
            remedy = f"Move it to {home}."
        elif near:
            remedy = f"Did you mean {near[0]!r}?"
        return ConfigError(where, "a known key", f"the unknown key {key!r}", remedy)
    if first["type"] == "missing":
        return ConfigError(where, "a value", "nothing", "Add this key.")
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(where, message[0].lower() + message[1:], first.get("input"))


def refuse_misplaced(deepspeed: dict[str, Any]) -> None:
    """Keys of ours at the top level, and misspelt keys there, would be ignored by DeepSpeed without a word.

    Raises:
        ConfigError: naming the key and where it belongs.
    """
    for key, value in deepspeed.items():
        if key in _DEEPSPEED:
            continue
        if key == "checkpoint":  # DeepSpeed has an object of this name too
            ours = (
                sorted(set(value) & set(parts()["checkpoint"].model_fields))
                if isinstance(value, dict)
                else []
            )
            if ours:
                raise ConfigError(
                    f"checkpoint.{ours[0]}",
                    "a key of DeepSpeed",
                    "one of ours",
                    f"Move it to {BLOCK}.checkpoint.",
                )
            continue
        if home := _home(key):
            raise ConfigError(key, "no such key at the top level", "it there", f"Move it to {home}.")
        near = difflib.get_close_matches(key, [*_DEEPSPEED, BLOCK], n=1, cutoff=0.85)
        if near:
            raise ConfigError(key, "a DeepSpeed key", f"{key!r}", f"Did you mean {near[0]!r}?")
    for key in ("bf16", "fp16", "optimizer", "zero_optimization", "tensorboard", "csv_monitor", "wandb"):
        if not isinstance(deepspeed.get(key, {}), dict):
            raise ConfigError(key, "a json object", deepspeed[key], 'Write it as {"enabled": true}, say.')
