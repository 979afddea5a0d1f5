"""The json config, validated once, at the edge.

One file serves DeepSpeed and this package. DeepSpeed's own keys keep their meaning and are left to
DeepSpeed; what is validated here is the block ``"megatron_wsd"``, the ``scheduler`` when it is a WSD,
and the few DeepSpeed keys that cannot work together with islands. Nothing here imports torch: a wrong
config is refused before anything slow begins.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_wsd.config import checks, engine, keys
from megatron_wsd.config.block import (
    BLOCK,
    CheckpointConfig,
    DataConfig,
    DelayConfig,
    IslandJob,
    IslandsConfig,
    LogConfig,
    ModelConfig,
    OuterConfig,
    SyncConfig,
)
from megatron_wsd.config.read import read_json
from megatron_wsd.errors import ConfigError
from megatron_wsd.schedule import Schedule, schedule_from_params

__all__ = [
    "BLOCK",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DelayConfig",
    "IslandJob",
    "IslandsConfig",
    "LogConfig",
    "ModelConfig",
    "OuterConfig",
    "SyncConfig",
    "load_config",
    "parse_config",
    "read_json",
]


_LARGEST = 2**63 - 1  # what every counter and tensor that it may come to can hold


class Config:
    """A validated config.

    Attributes:
        block: the validated ``"megatron_wsd"`` block; its parts are also attributes of this object.
        deepspeed: the rest of the json, as DeepSpeed gets it (with the batch sizes filled in).
        schedule: the WSD schedule of the json, None if another scheduler is named.
        outer_schedule: that of the outer rate, in inner steps, if it has one of its own.
        assumed: "islands", "ranks" or both: nobody said how many, the batch follows from it, and 1 is taken.
    """

    def __init__(
        self,
        block: IslandJob,
        deepspeed: dict[str, Any],
        schedule: Schedule | None,
        assumed: tuple[str, ...] = (),
    ) -> None:
        self.block = block
        self.deepspeed = deepspeed
        self.schedule = schedule
        self.assumed = assumed
        own = block.outer.lr_schedule
        self.outer_schedule = schedule_from_params(own) if isinstance(own, dict) else None
        self.islands, self.outer, self.sync = block.islands, block.outer, block.sync
        self.data, self.model, self.inner = block.data, block.model, block.inner
        self.checkpoint, self.log = block.checkpoint, block.log

    @property
    def assumption(self) -> str:
        """What the batch takes for granted since nobody said it, in a line for people; mostly empty."""
        words = {"islands": "1 island", "ranks": "1 rank an island"}
        if not self.assumed or (
            self.model is None and (self.schedule is None or self.schedule.unit == "steps")
        ):
            return ""
        batch = self.island_batch * (self.islands.count or 1)
        what = " and ".join(words[name] for name in self.assumed)
        flags = ", ".join(f"--{name}" for name in self.assumed)
        return f"assumed: {what}, so {batch:,} samples a step; to say otherwise: {flags}"

    def resolved(self) -> dict[str, Any]:
        """The complete json: DeepSpeed's keys and every default of ours written out."""
        return {**self.deepspeed, BLOCK: self.block.model_dump(mode="json")}

    def with_absolute_paths(self) -> Config:
        """The same with relative paths of corpora and tokenizer taken from the current folder."""

        def absolute(spec: str) -> str:
            kind, colon, path = spec.partition(":")
            if kind not in ("text", "hf"):
                kind, colon, path = "", "", spec
            return kind + colon + os.path.abspath(os.path.expanduser(path))

        data = self.data
        corpora = {k: v if v.startswith("builtin:") else absolute(v) for k, v in data.corpora.items()}
        tokenizer = absolute(data.tokenizer) if data.tokenizer.startswith("hf:") else data.tokenizer
        cache = data.cache_dir and absolute(data.cache_dir)
        changed = data.model_copy(update={"corpora": corpora, "tokenizer": tokenizer, "cache_dir": cache})
        block = self.block.model_copy(update={"data": changed})
        return Config(block, self.deepspeed, self.schedule, self.assumed)

    def identity(self) -> dict[str, Any]:
        """Everything that must be equal between islands and over a resume.

        Logging, checkpoint cadence, timeouts and pauses, monitors and folders may differ and are left out.
        """
        whole = self.resolved()
        block = whole[BLOCK]
        for part in ("log", "checkpoint"):
            del block[part]
        ends = ("_timeout_s", "_per_s")
        block["islands"] = {k: v for k, v in block["islands"].items() if not k.endswith(ends)}
        own = ("timeout_s", "grace_s", "poll_s", "max_voids")
        block["sync"] = {k: v for k, v in block["sync"].items() if k not in own}
        # So may the hardware, and with it whose AdamW is there; a checkpoint says which one wrote it.
        del block["inner"], block["outer"]["device"]
        # Where files lie may differ between clusters; what is in them is compared by the islands.
        del block["data"]["cache_dir"]
        block["data"]["corpora"] = sorted(block["data"]["corpora"])
        block["data"]["tokenizer"] = block["data"]["tokenizer"].split(":")[0]
        ours = ("steps_per_print", "wall_clock_breakdown", "tensorboard", "csv_monitor", "wandb", "comet")
        return {k: v for k, v in whole.items() if k not in ours}

    def digest(self) -> str:
        """Hex digest of `identity`."""
        keep = self.identity()
        return hashlib.sha256(json.dumps(keep, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def tensor_parallel(self) -> int:
        """Ranks over which each matrix of the model is cut; 1 for a model that is not ours."""
        return self.model.tensor_parallel if self.model is not None else 1

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward pass of one rank."""
        return int(self.deepspeed["train_micro_batch_size_per_gpu"])

    @property
    def grad_accum(self) -> int:
        """Micro-batches of one inner step of one rank."""
        return int(self.deepspeed["gradient_accumulation_steps"])

    @property
    def island_batch(self) -> int:
        """Sequences of one inner step of one island."""
        return int(self.deepspeed["train_batch_size"])


def load_config(
    path: str | Path,
    *,
    islands: int | None = None,
    ranks: int | None = None,
    resize: bool = False,
    named: str | None = None,
) -> Config:
    """Read and validate a json config.

    Args:
        path: the json file.
        islands: number of islands from the command line; must not contradict the file.
        ranks: ranks of an island from the command line; must not contradict the file.
        resize: ``islands`` may contradict the file, and then replaces its count and what follows from it.
        named: the option or argument that named the file; None if it was none.

    Raises:
        ConfigError: naming the key, what was expected, what came, and the way out.
    """
    raw = read_json(path, named)
    return parse_config(raw, str(path), islands=islands, ranks=ranks, resize=resize).with_absolute_paths()


def parse_config(
    raw: Any,
    path: str = "config",
    *,
    islands: int | None = None,
    ranks: int | None = None,
    resize: bool = False,
) -> Config:
    """Validate a config that has been read already; see `load_config`."""
    if not isinstance(raw, dict):
        kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
        raise ConfigError(path, "a json object", kinds.get(type(raw), "a number"), "Write {...} around it.")
    for field, leaf in _leaves(raw):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            raise ConfigError(field, "a finite number", leaf)
        if isinstance(leaf, int) and abs(leaf) > _LARGEST:
            raise ConfigError(field, "a number of less than 2^63", leaf)
        if isinstance(leaf, str) and ("\0" in leaf or not _encodes(leaf)):
            raise ConfigError(field, "a text that UTF-8 can hold, without null bytes", ascii(leaf))
    deepspeed = {k: v for k, v in raw.items() if k != BLOCK}
    keys.refuse_misplaced(deepspeed)
    engine.refuse_parallelism(raw)
    keys.check_deepspeed(deepspeed)
    try:
        block = IslandJob.model_validate(raw.get(BLOCK, {}))
    except ValidationError as e:
        raise keys.config_error(e) from None
    assumed = tuple(
        name
        for name, known in (
            ("islands", islands or block.islands.count),
            ("ranks", ranks or block.islands.ranks or deepspeed.get("train_batch_size")),
        )
        if not known
    )
    if resize and islands is not None and block.islands.count not in (None, islands):
        # What min_islands a written config holds is mostly the default for the old count.
        fresh = block.islands.model_copy(update={"count": None, "min_islands": None})
        block = block.model_copy(update={"islands": fresh})
    block = checks.resolve_islands(block, islands, ranks)
    checks.check_outer(block)
    checks.check_sync(block)
    checks.check_model(block)
    checks.check_data(block)
    assert block.islands.ranks is not None
    tensor_parallel = block.model.tensor_parallel if block.model is not None else 1
    engine.resolve_batch(deepspeed, block.islands.ranks, tensor_parallel)
    engine.check_optimizer(deepspeed, block)
    engine.refuse_with_islands(deepspeed)
    engine.check_inner(deepspeed, block)
    return Config(block, deepspeed, checks.build_schedule(deepspeed, block), assumed)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # json can spell half a surrogate pair
        return False
    return True


def _leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a json with its dotted name."""
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if inside is None:
        yield field, value
        return
    for key, item in inside:
        yield from _leaves(item, f"{field}.{key}" if field else str(key))
