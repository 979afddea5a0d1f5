"""The json config, validated once, at the edge.

One file serves DeepSpeed and this package. DeepSpeed's own keys keep their meaning and are left to
DeepSpeed; what is validated here is the block ``"megatron_wsd"``, the ``scheduler`` when it is a WSD,
and the few DeepSpeed keys that cannot work together with islands. Nothing here imports torch: a wrong
config is refused before anything slow begins.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_wsd.errors import ConfigError
from megatron_wsd.schedule import Schedule, schedule_from_params

BLOCK = "megatron_wsd"


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class IslandsConfig(_Block):
    """Who takes part, and how long one waits for another."""

    count: int | None = Field(None, ge=1, description="number of islands; also --islands")
    ranks: int | None = Field(None, ge=1, description="ranks of one island; also --ranks")
    min_islands: int | None = Field(
        None, ge=1, description="fewest live islands that may commit; default 1 for 2, else a majority"
    )
    start_timeout_s: float = Field(300.0, gt=0, description="wait for all islands before the first round")
    heartbeat_timeout_s: float = Field(5.0, gt=0, description="an island silent for longer counts as dead")
    join_timeout_s: float = Field(600.0, gt=0, description="a round waits this long for a live, slow island")


class OuterConfig(_Block):
    """The outer optimizer."""

    optimizer: Literal["cgad", "adam_decay", "adam", "sgd", "nesterov"] = "cgad"
    lr: float = Field(2e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="nesterov only")
    alpha: float = Field(0.2, ge=0, description="decay of the staleness gate a round")
    tau_cut: int = Field(32, ge=1, description="staleness from which a contribution counts nothing")
    state_bits: Literal[8, 32] = 8
    participation: bool = Field(True, description="scale the outer rate by contributors / live islands")


class SyncConfig(_Block):
    """When islands exchange, and how."""

    mode: Literal["sync"] = "sync"
    inner_steps: int = Field(30, ge=1, description="inner steps between two outer rounds (H)")
    wire: Literal["fp32"] = "fp32"
    bucket_bytes: int = Field(64 << 20, ge=1024, description="largest single message")
    timeout_s: float = Field(60.0, gt=0, description="one message of an exchange")
    max_voids: int = Field(20, ge=1, description="void rounds in a row after which the run gives up")


class DataConfig(_Block):
    """Corpora, and the mix of them in each phase of the schedule."""

    corpora: dict[str, str] = Field(
        default_factory=lambda: {"broad": "builtin:stdlib", "high_quality": "builtin:pydoc"},
        description="name -> builtin:stdlib | builtin:pydoc | text:PATH | prefix of a .bin/.idx pair",
    )
    mixes: dict[Literal["stable", "decay"], dict[str, float]] = Field(
        default_factory=lambda: {"stable": {"broad": 1.0}}, description="phase -> {corpus: weight}"
    )
    tokenizer: str = "byte"
    valid_fraction: float = Field(0.02, gt=0, lt=0.5)
    seed: int = Field(1234, ge=0)
    cache_dir: str | None = Field(None, description="where built-in and text corpora are prepared")


class ModelConfig(_Block):
    """megatron-core GPTModel: RMSNorm, SwiGLU, RoPE, grouped-query attention, no biases."""

    num_layers: int = Field(..., ge=1)
    hidden_size: int = Field(..., ge=8)
    ffn_hidden_size: int = Field(..., ge=8)
    num_attention_heads: int = Field(..., ge=1)
    num_query_groups: int = Field(..., ge=1)
    seq_length: int = Field(..., ge=2)
    vocab_size: int | None = Field(None, ge=2, description="default: of the tokenizer, padded to 64")
    rotary_base: int = Field(10000, ge=1)
    init_std: float = Field(0.02, gt=0)
    layernorm_epsilon: float = Field(1e-5, gt=0)
    tie_embeddings: bool = False
    recompute: bool = Field(False, description="recompute activations layer by layer")
    seed: int = Field(1234, ge=0)


class CheckpointConfig(_Block):
    interval_steps: int | None = Field(None, ge=1, description="default: only at the end and when stopped")
    keep: int = Field(3, ge=2, description="complete checkpoints kept in each island")


class LogConfig(_Block):
    interval_steps: int = Field(10, ge=1)
    eval_interval: int = Field(5, ge=0, description="outer rounds between validations; 0: only at the end")
    eval_batches: int = Field(8, ge=1, description="global micro-batches of each validation")


class IslandJob(_Block):
    """The block ``"megatron_wsd"`` of the json."""

    islands: IslandsConfig = IslandsConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class Config:
    """A validated config.

    Attributes:
        block: the validated ``"megatron_wsd"`` block; its parts are also attributes of this object.
        deepspeed: the rest of the json, as DeepSpeed gets it (with the batch sizes filled in).
        schedule: the WSD schedule of the json, None if another scheduler is named.
        path: where the json came from, for messages.
    """

    def __init__(self, block: IslandJob, deepspeed: dict[str, Any], schedule: Schedule | None, path: str):
        self.block = block
        self.deepspeed = deepspeed
        self.schedule = schedule
        self.path = path
        self.islands, self.outer, self.sync = block.islands, block.outer, block.sync
        self.data, self.model = block.data, block.model
        self.checkpoint, self.log = block.checkpoint, block.log

    def resolved(self) -> dict[str, Any]:
        """The complete json: DeepSpeed's keys and every default of ours written out."""
        return {**self.deepspeed, BLOCK: self.block.model_dump(mode="json")}

    def digest(self) -> str:
        """Hex digest of everything that must be equal between islands and over a resume.

        Logging, checkpoint cadence, timeouts, monitors and folders may differ and are left out.
        """
        whole = self.resolved()
        block = whole[BLOCK]
        for part in ("log", "checkpoint"):
            del block[part]
        block["islands"] = {k: v for k, v in block["islands"].items() if not k.endswith("_timeout_s")}
        block["sync"] = {k: v for k, v in block["sync"].items() if k not in ("timeout_s", "max_voids")}
        del block["data"]["cache_dir"]
        ours = ("steps_per_print", "wall_clock_breakdown", "tensorboard", "csv_monitor", "wandb", "comet")
        keep = {k: v for k, v in whole.items() if k not in ours}
        return hashlib.sha256(json.dumps(keep, sort_keys=True).encode()).hexdigest()[:32]

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


def load_config(path: str | Path, *, islands: int | None = None, ranks: int | None = None) -> Config:
    """Read and validate a json config.

    Args:
        path: the json file.
        islands: number of islands from the command line; must not contradict the file.
        ranks: ranks of an island from the command line; must not contradict the file.

    Raises:
        ConfigError: naming the key, what was expected, what came, and the way out.
    """
    file = Path(path)
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            "--config", "a json file", f"{file}, which does not exist", "Check the path."
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError("--config", "a readable json file", f"{file}: {e}") from None
    except json.JSONDecodeError as e:
        where = f"{file}, line {e.lineno}, column {e.colno}"
        raise ConfigError("--config", "valid json", f"{e.msg} at {where}", "Mend the json there.") from None
    return parse_config(raw, str(file), islands=islands, ranks=ranks)


def parse_config(
    raw: Any, path: str = "config", *, islands: int | None = None, ranks: int | None = None
) -> Config:
    """Validate a config that has been read already; see `load_config`."""
    if not isinstance(raw, dict):
        raise ConfigError(path, "a json object", type(raw).__name__)
    deepspeed = {k: v for k, v in raw.items() if k != BLOCK}
    _refuse_misplaced(deepspeed)
    try:
        block = IslandJob.model_validate(raw.get(BLOCK, {}))
    except ValidationError as e:
        raise _config_error(e, raw.get(BLOCK, {})) from None
    block = _resolve_islands(block, islands, ranks)
    _check_outer(block)
    _check_model(block)
    _check_data(block)
    assert block.islands.ranks is not None
    _resolve_batch(deepspeed, block.islands.ranks)
    _refuse_with_islands(deepspeed)
    return Config(block, deepspeed, _schedule(deepspeed), path)


def _config_error(e: ValidationError, raw: Any) -> ConfigError:
    """The first thing pydantic found wrong, in the words of this package."""
    first = e.errors()[0]
    where = ".".join(str(part) for part in (BLOCK, *first["loc"]))
    got = first.get("input")
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        model: type[BaseModel] = IslandJob
        for part in first["loc"][:-1]:
            field = model.model_fields.get(str(part))
            kinds = list(getattr(field.annotation, "__args__", (field.annotation,))) if field else []
            model = next((t for t in kinds if isinstance(t, type) and issubclass(t, BaseModel)), model)
        names = list(model.model_fields)
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        elsewhere = [
            f"{BLOCK}.{name}.{key}"
            for name, f in IslandJob.model_fields.items()
            for t in getattr(f.annotation, "__args__", (f.annotation,))
            if isinstance(t, type) and issubclass(t, BaseModel) and key in t.model_fields
        ]
        remedy = (
            f"Did you mean {elsewhere[0]}?"
            if elsewhere and not (near and near[0] == key)
            else f"Did you mean {near[0]!r}?"
            if near
            else f"Remove it; known here are: {', '.join(names)}."
        )
        return ConfigError(where, "a known key", f"the unknown key {key!r}", remedy)
    if first["type"] == "missing":
        return ConfigError(where, "a value", "nothing", "Add this key.")
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(where, message[0].lower() + message[1:], got)


def _refuse_misplaced(deepspeed: dict[str, Any]) -> None:
    """A key of ours at the top level would be ignored by DeepSpeed without a word."""
    for key in deepspeed:
        if key in IslandJob.model_fields and key != "checkpoint":
            raise ConfigError(key, "no such key at the top level", "it there", f"Move it to {BLOCK}.{key}.")
    known = [
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
        BLOCK,
    ]
    for key in deepspeed:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near and near[0] != key:
            raise ConfigError(key, "a DeepSpeed key", f"{key!r}", f"Did you mean {near[0]!r}?")


def _resolve_islands(block: IslandJob, islands: int | None, ranks: int | None) -> IslandJob:
    given = block.islands
    for name, flag, value in (("count", "--islands", islands), ("ranks", "--ranks", ranks)):
        in_file = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(flag, "at least 1", value)
        if value is not None and in_file is not None and value != in_file:
            raise ConfigError(
                flag,
                f"{in_file}, as {BLOCK}.islands.{name} in the config says",
                value,
                f"Give {flag} {in_file}, or change or remove the key.",
            )
    count = islands or given.count or 1
    lowest = 1 if count <= 2 else count // 2 + 1
    min_islands = given.min_islands if given.min_islands is not None else lowest
    if min_islands > count:
        raise ConfigError(f"{BLOCK}.islands.min_islands", f"at most islands.count = {count}", min_islands)
    if min_islands < lowest:
        raise ConfigError(
            f"{BLOCK}.islands.min_islands",
            f"a majority, at least {lowest} of {count} islands",
            min_islands,
            "Fewer could commit on both sides of a network that split.",
        )
    resolved = given.model_copy(
        update={"count": count, "ranks": ranks or given.ranks or 1, "min_islands": min_islands}
    )
    if not resolved.heartbeat_timeout_s < resolved.join_timeout_s:
        raise ConfigError(
            f"{BLOCK}.islands.join_timeout_s",
            f"more than heartbeat_timeout_s = {resolved.heartbeat_timeout_s:g}",
            resolved.join_timeout_s,
            "A dead island must be noticed before a round stops waiting for it.",
        )
    return block.model_copy(update={"islands": resolved})


def _check_outer(block: IslandJob) -> None:
    for i, beta in enumerate(block.outer.betas):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"{BLOCK}.outer.betas.{i}", "a number in [0, 1)", beta)


def _check_model(block: IslandJob) -> None:
    model = block.model
    if model is None:
        return
    if model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"{BLOCK}.model.num_attention_heads",
            f"a divisor of hidden_size = {model.hidden_size}",
            model.num_attention_heads,
        )
    if (model.hidden_size // model.num_attention_heads) % 2:
        raise ConfigError(
            f"{BLOCK}.model.num_attention_heads",
            "an even size of each head, for rotary embeddings",
            f"hidden_size / num_attention_heads = {model.hidden_size // model.num_attention_heads}",
        )
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"{BLOCK}.model.num_query_groups",
            f"a divisor of num_attention_heads = {model.num_attention_heads}",
            model.num_query_groups,
        )


def _check_data(block: IslandJob) -> None:
    data = block.data
    if "stable" not in data.mixes:
        raise ConfigError(f"{BLOCK}.data.mixes", 'a mix named "stable"', sorted(data.mixes))
    for phase, mix in data.mixes.items():
        for corpus, weight in mix.items():
            where = f"{BLOCK}.data.mixes.{phase}.{corpus}"
            if corpus not in data.corpora:
                near = difflib.get_close_matches(corpus, list(data.corpora), n=1)
                remedy = f"Did you mean {near[0]!r}?" if near else "Add it to data.corpora."
                raise ConfigError(where, f"one of the corpora {sorted(data.corpora)}", corpus, remedy)
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigError(
                    where, "a weight above 0", weight, "Leave the corpus out of the mix instead."
                )
        if not mix:
            raise ConfigError(f"{BLOCK}.data.mixes.{phase}", "at least one corpus", "none")


def _resolve_batch(deepspeed: dict[str, Any], ranks: int) -> None:
    """Fill in what DeepSpeed would derive, and show the arithmetic when it does not come out."""
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
        micro = total // (ranks * (accum or 1))
    if accum is None:
        accum = total // (micro * ranks) if total is not None and micro else 1
    product = micro * accum * ranks
    if (total if total is not None else product) != product or product == 0:
        raise ConfigError(
            "train_batch_size",
            f"train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks = "
            f"{micro} x {accum} x {ranks} = {product}",
            total,
            "The batch is that of one island. Change one of the numbers, or --ranks.",
        )
    deepspeed.update(dict(zip(keys, (product, micro, accum), strict=True)))


def _refuse_with_islands(deepspeed: dict[str, Any]) -> None:
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


def _schedule(deepspeed: dict[str, Any]) -> Schedule | None:
    scheduler = deepspeed.get("scheduler")
    if scheduler is None:
        return None
    if not isinstance(scheduler, dict) or "type" not in scheduler:
        raise ConfigError("scheduler", 'an object with a "type"', scheduler)
    if scheduler["type"] != "WSD":
        return None
    return schedule_from_params(scheduler.get("params", {}))
