"""The block ``"megatron_wsd"`` of the json: every key, its meaning, its default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BLOCK = "megatron_wsd"
# More is a slip of the keyboard, and would fill the memory.
MOST_ISLANDS, MOST_RANKS = 4096, 2**20
# torchft counts milliseconds, and Python's clocks end somewhere.
Seconds = Annotated[float, Field(ge=1e-3, le=1e8)]


class _Block(BaseModel):
    # Strict: true is no number, and "10" is none either.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class IslandsConfig(_Block):
    """Who takes part, and how long one waits for another."""

    count: int | None = Field(None, ge=1, le=MOST_ISLANDS, description="number of islands; also --islands")
    ranks: int | None = Field(None, ge=1, le=MOST_RANKS, description="ranks of one island; also --ranks")
    min_islands: int | None = Field(
        None, ge=1, description="fewest live islands that may commit; default 1 for 2, else a majority"
    )
    start_timeout_s: Seconds = Field(300.0, description="wait for all islands before the first round")
    heartbeat_timeout_s: Seconds = Field(5.0, description="an island silent for longer counts as dead")
    join_timeout_s: Seconds = Field(600.0, description="a round waits this long for a live, slow island")
    heal_mbit_per_s: float = Field(50.0, ge=1e-3, le=1e9, description="slowest link that a healing waits for")
    hang_timeout_s: float | None = Field(
        None,
        ge=1e-3,
        le=1e9,
        description="a rank whose outer half stands still for longer ends itself; default: 2 joins",
    )


class OuterConfig(_Block):
    """The outer optimizer."""

    optimizer: Literal["cgad", "adam_decay", "adam", "sgd", "nesterov", "delayed_nesterov"] = "cgad"
    lr: float = Field(2e-3, gt=0)
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    eps: float = Field(1e-8, ge=1e-20)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="nesterov and delayed_nesterov only")
    momentum_period: int = Field(4, ge=1, description="delayed_nesterov: steps between two of its momentum")
    alpha: float = Field(0.2, ge=0, description="decay of the staleness gate a round")
    tau_cut: int = Field(32, ge=1, description="staleness from which a contribution counts nothing")
    state_bits: Literal[8, 32] = 8
    anchor_dtype: Literal["fp32", "bf16"] = Field("fp32", description="bf16 is rounded stochastically")
    lr_schedule: Literal["constant", "follow_inner"] | dict[str, Any] = Field(
        "follow_inner", description="of the outer rate: a word, or the params of a WSD of its own"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the outer half computes")
    participation: bool = Field(True, description="scale the outer rate by contributors / live islands")
    all_gated: Literal["coast", "skip"] = Field(
        "coast", description="every gate is 0: a step with a zero gradient, or none"
    )


class DelayConfig(_Block):
    """A random controlled delay, drawn for every contribution from (seed, island, its number)."""

    kind: Literal["uniform", "geometric"]
    low: int = Field(0, ge=0, description="uniform: least delay, in outer rounds")
    high: int = Field(0, ge=0, description="uniform: largest delay, in outer rounds")
    mean: float = Field(1.0, gt=0, description="geometric: mean delay, in outer rounds")
    seed: int = Field(0, ge=0, lt=2**63)


class SyncConfig(_Block):
    """When islands exchange, and how."""

    mode: Literal["sync", "async"] = Field(
        "sync", description="async: an island trains on while its contributions travel"
    )
    inner_steps: int = Field(30, ge=1, description="inner steps between two syncs of a fragment (H)")
    fragments: int = Field(1, ge=1, description="parts of the model that are synced in turn (P)")
    fragment_order: Literal["strided", "sequential"] = Field(
        "strided", description="which layers form a fragment: every P-th, or neighbours"
    )
    overlap_steps: int = Field(0, ge=0, description="async: least inner steps between capture and adoption")
    adopt: Literal["mix", "rebase"] = Field(
        "rebase", description="async: rebase keeps what was trained since the capture, mix blends it"
    )
    merge_alpha: float = Field(0.5, ge=0, le=1, description="adopt mix: share of the local value that stays")
    merge: Literal["mean", "tokens", "radial"] = Field(
        "mean", description="weights of contributions: equal, by tokens, or radial-directional averaging"
    )
    quorum: int = Field(1, ge=1, description="async: contributions that make a round")
    grace_s: float = Field(
        2.0, ge=0, le=1e9, description="async: a round then waits this long for more of them"
    )
    poll_s: Seconds = Field(0.2, description="async: pause between two polls with nothing to do")
    controlled_delay: int | list[int] | DelayConfig = Field(
        0, description="sync: hold contributions back for so many rounds, an experiment; a list: per island"
    )
    wire: Literal["fp32", "bf16", "int8", "int4"] = Field(
        "fp32", description="encoding of contributions on the network; errors are fed back by the sender"
    )
    bucket_bytes: int = Field(64 << 20, ge=1024, description="largest single message")
    timeout_s: Seconds = Field(60.0, description="one message of an exchange")
    max_voids: int = Field(20, ge=1, description="void rounds in a row after which the run gives up")


class DataConfig(_Block):
    """Corpora, and the mix of them in each phase of the schedule."""

    corpora: dict[str, str] = Field(
        default_factory=lambda: {"broad": "builtin:stdlib", "high_quality": "builtin:pydoc"},
        description="name -> builtin:stdlib | builtin:pydoc | text:PATH | prefix of a .bin/.idx pair",
    )
    mixes: dict[str, dict[str, float]] = Field(
        default_factory=lambda: {"stable": {"broad": 1.0}},
        description="name -> {corpus: weight}: stable, decay, and those that orders name",
    )
    tokenizer: str = "byte"
    valid_fraction: float = Field(0.02, gt=0, lt=0.5)
    seed: int = Field(1234, ge=0, lt=2**63)
    cache_dir: str | None = Field(None, description="where built-in and text corpora are prepared")


class ModelConfig(_Block):
    """megatron-core GPTModel: RMSNorm, SwiGLU, RoPE, grouped-query attention, no biases."""

    num_layers: int = Field(..., ge=1, le=10_000)
    hidden_size: int = Field(..., ge=8, le=2**24)
    ffn_hidden_size: int = Field(..., ge=8, le=2**24)
    num_attention_heads: int = Field(..., ge=1)
    num_query_groups: int = Field(..., ge=1)
    seq_length: int = Field(..., ge=2, lt=2**31)
    vocab_size: int | None = Field(None, ge=2, lt=2**31, description="default: tokenizer's, padded to 64")
    rotary_base: int = Field(10000, ge=1)
    init_std: float = Field(0.02, gt=0)
    layernorm_epsilon: float = Field(1e-5, gt=0)
    tie_embeddings: bool = False
    tensor_parallel: int = Field(
        1, ge=1, description="ranks over which each matrix is cut, within an island; ZeRO-3 shards the pieces"
    )
    recompute: bool = Field(False, description="recompute activations layer by layer")
    seed: int = Field(1234, ge=0, lt=2**63)


class CheckpointConfig(_Block):
    interval_steps: int | None = Field(None, ge=1, description="default: only at the end and when stopped")
    keep: int = Field(3, ge=2, description="complete checkpoints kept in each island")


class LogConfig(_Block):
    interval_steps: int = Field(10, ge=1)
    eval_interval: int = Field(5, ge=0, description="outer rounds between validations; 0: only at the end")
    eval_batches: int = Field(8, ge=1, description="micro-batches of each rank and validation")
    peak_tflops: float | None = Field(
        None, gt=0, description="of one device, for the MFU; default: by its name, for bf16 on a known GPU"
    )


class IslandJob(_Block):
    """The block ``"megatron_wsd"`` of the json."""

    islands: IslandsConfig = IslandsConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig | None = None
    inner: Literal["auto", "apex", "deepspeed", "torch"] = Field(
        "auto", description="whose AdamW takes the inner steps; which AdamW is the json's optimizer block"
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
