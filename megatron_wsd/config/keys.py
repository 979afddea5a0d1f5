"""Names of keys: whose they are, where they belong, and what was meant by one that is unknown."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from megatron_wsd.config.block import BLOCK, IslandJob
from megatron_wsd.config.deepspeed_keys import ANY, OF_DEEPSPEED, REMOVED, TOP, Kind, Table
from megatron_wsd.errors import ConfigError

AUTO = (
    '"auto" is filled in by Hugging Face\'s trainer before DeepSpeed sees it; write the value, or remove it.'
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
    if key in TOP:
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
        error = unknown_key(where, key, names, cutoff=0.5)
        home = _home(key)
        return ConfigError(where, error.expected, error.got, f"Move it to {home}.") if home else error
    if first["type"] == "missing":
        return ConfigError(where, "a value", "nothing", "Add it.")
    value = first["input"]
    expected = words_of(first)
    if first["type"] == "literal_error" and isinstance(value, str):
        words = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        near = nearest(value, words, cutoff=0.5)
        return ConfigError(where, expected, repr(value), f"Did you mean {near!r}?" if near else "")
    return ConfigError(where, expected, _quoted(value))


_WORDS = {
    "model_type": "a json object",
    "dict_type": "a json object",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
}


def words_of(error: Any) -> str:
    """What pydantic expected, in the words that all messages here use."""
    if error["type"] in _WORDS:
        return _WORDS[error["type"]].format(**error.get("ctx", {}))
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return message[0].lower() + message[1:]


def refuse_misplaced(deepspeed: dict[str, Any]) -> None:
    """Keys of ours at the top level, which DeepSpeed would ignore without a word.

    Raises:
        ConfigError: naming the key and where it belongs.
    """
    for key, value in deepspeed.items():
        if key == "checkpoint" and isinstance(value, dict):  # DeepSpeed has an object of this name too
            ours = sorted(set(value) & set(parts()["checkpoint"].model_fields))
            if ours:
                remedy = f"Move it to {BLOCK}.checkpoint."
                raise ConfigError(f"checkpoint.{ours[0]}", "a key of DeepSpeed", "one of ours", remedy)
        elif key not in TOP and (home := _home(key)):
            raise ConfigError(key, "no such key at the top level", "it there", f"Move it to {home}.")


# ---- DeepSpeed's ----


def check_deepspeed(deepspeed: dict[str, Any]) -> None:
    """The names and values of DeepSpeed's keys.

    At the top level DeepSpeed ignores what it does not know; a key that begins with an underscore may be
    there, for notes and for scripts of the user's own.

    Raises:
        ConfigError: an unknown key with the nearest right one, or a value that the key does not take.
    """
    for key in deepspeed:
        if key in REMOVED:
            raise ConfigError(
                key, "no such key", "it there", "Remove it: DeepSpeed has this feature no more."
            )
    # forms of parallelism are refused elsewhere, and may be there switched off
    rest = {k: v for k, v in deepspeed.items() if not re.match(r"_|pipeline$|\w+_parallel(_size)?$", k)}
    check_table(rest, {**TOP, BLOCK: ANY})


def check_table(values: Mapping[str, Any], table: Table, prefix: str = "") -> None:
    """Every key of an object, and of those in it, against a table.

    Args:
        values: the object.
        table: what its keys take.
        prefix: of their full names, such as ``"optimizer.params."``.

    Raises:
        ConfigError: an unknown key with the nearest right one, or a value that the key does not take.
    """
    for key, value in values.items():
        kind = table.get(key)
        if kind is None:
            if nearest(key, table) or not _newer_deepspeed():
                other = "" if prefix else ", or begin its name with _ if it is a note"
                raise unknown_key(prefix + key, key, table, remedy=f"Remove it{other}.")
        elif isinstance(kind, Kind):
            if not kind.fits(value):
                raise ConfigError(prefix + key, kind.words, _quoted(value), AUTO if value == "auto" else "")
        elif isinstance(value, dict):
            check_table(value, kind, f"{prefix}{key}.")
        elif value is not None or not prefix:  # what is off may be null inside a section
            raise ConfigError(prefix + key, "a json object", _quoted(value), _example(kind))


def _example(table: Table) -> str:
    return 'Write it as {"enabled": true}, say.' if "enabled" in table else ""


def _quoted(value: object) -> object:
    return repr(value) if isinstance(value, str) else value


def nearest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that was probably meant, whatever its case."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word).lower(), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else None


def unknown_key(
    field: str, key: str, known: Iterable[str], *, cutoff: float = 0.6, remedy: str = ""
) -> ConfigError:
    """The error about a key that nobody reads.

    Args:
        field: its full name.
        key: its last part.
        known: those that are read there.
        cutoff: how alike the nearest one must be to be suggested.
        remedy: where none is near; by default the known ones are listed.
    """
    names = list(known)
    near = nearest(key, names, cutoff)
    remedy = f"Did you mean {near!r}?" if near else remedy or f"Remove it; known are: {', '.join(names)}."
    return ConfigError(field, "a known key", f"the unknown key {key!r}", remedy)


@functools.cache
def _newer_deepspeed() -> bool:
    """Whether the DeepSpeed that is installed may have keys that the tables here do not."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", found)[:3])) > OF_DEEPSPEED
