"""Names of keys: whose they are, where they belong, and what was meant by one that is unknown."""

from __future__ import annotations

import difflib
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

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


def _model_in(annotation: Any) -> type[BaseModel] | None:
    kinds = get_args(annotation) or (annotation,)
    return next((t for t in kinds if isinstance(t, type) and issubclass(t, BaseModel)), None)


def parts() -> dict[str, type[BaseModel]]:
    """The parts of our block by name."""
    models = {name: _model_in(field.annotation) for name, field in IslandJob.model_fields.items()}
    return {name: model for name, model in models.items() if model is not None}


def _home(key: str) -> str | None:
    """Where a key of that very name belongs, if anywhere."""
    if key in _DEEPSPEED:
        return f"{key} at the top level"
    if key in IslandJob.model_fields:
        return f"{BLOCK}.{key}"
    homes = [f"{BLOCK}.{name}.{key}" for name, part in parts().items() if key in part.model_fields]
    if key in _SCHEDULER:
        homes.append(f"scheduler.params.{key}")
    return " or ".join(homes) or None


def _place(loc: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel]]:
    """The keys that lead to a place in our block, and the model whose keys are there.

    Pydantic puts the kind of value that it tried between them where a key takes several kinds.
    """
    model: type[BaseModel] = IslandJob
    inside: type[BaseModel] | None = IslandJob
    path: list[str] = []
    several = False
    for part in loc:
        model = inside or model
        if several:
            several = False
            continue
        if part in model.model_fields:
            annotation = model.model_fields[str(part)].annotation
            inside = _model_in(annotation)
            kinds = [t for t in get_args(annotation) if t is not type(None)]
            several = get_origin(annotation) in (Union, UnionType) and len(kinds) > 1
        path.append(str(part))
    return path, model


def config_error(e: ValidationError) -> ConfigError:
    """The first thing pydantic found wrong in our block, in the words of this package."""
    errors = e.errors()
    # Where several kinds of value are taken, each has its complaint: that of the one that came furthest.
    same_key = [x for x in errors if x["loc"][:2] == errors[0]["loc"][:2]]
    first = max(same_key, key=lambda x: len(x["loc"]))
    path, model = _place(first["loc"])
    where = ".".join((BLOCK, *path))
    if first["type"] == "extra_forbidden":
        key = path[-1]
        names = list(model.model_fields)
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        remedy = f"Remove it; known here are: {', '.join(names)}."
        if home := _home(key):
            remedy = f"Move it to {home}."
        elif near:
            remedy = f"Did you mean {near[0]!r}?"
        return ConfigError(where, "a known key", f"the unknown key {key!r}", remedy)
    if first["type"] == "missing":
        return ConfigError(where, "a value", "nothing", "Add this key.")
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    value = first["input"]
    remedy = ""
    if first["type"] == "literal_error" and isinstance(value, str):
        words = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        near = difflib.get_close_matches(value, words, n=1, cutoff=0.5)
        remedy = f"Did you mean {near[0]!r}?" if near else ""
    got = repr(value) if isinstance(value, str) else value
    return ConfigError(where, message[0].lower() + message[1:], got, remedy)


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
