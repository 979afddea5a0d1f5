"""Memory of one rank, part by part: what DeepSpeed ZeRO-3 holds, and the outer half beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_wsd.config import Config
from megatron_wsd.diloco.fragments import plan_fragments
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key, wants_8bit
from megatron_wsd.planner.activations import activations
from megatron_wsd.planner.exchange import WIRE_BYTES
from megatron_wsd.planner.model import Parameter

Where = Literal["device", "host"]
Moment = Literal["always", "backward", "step", "round"]

_BLOCK = 256  # elements that share a scale of the 8-bit moments
# Bytes an element of what optimizers keep beside the fp32 master; unknown ones are taken for Adam.
_INNER_STATE = {"lion": 4, "adagrad": 4, "sgd": 0}


@dataclass(frozen=True)
class Part:
    """One line of the table.

    Attributes:
        name: what it is.
        where: memory of the device, or of its host.
        moment: when it is there; parts of different moments but ``always`` do not add up.
        nbytes: of one rank.
        how: where the number comes from.
    """

    name: str
    where: Where
    moment: Moment
    nbytes: int
    how: str


def peak(parts: Sequence[Part], where: Where) -> int:
    """The most that a rank needs at any one moment, in bytes."""
    sums: dict[str, int] = {}
    for part in parts:
        if part.where == where:
            sums[part.moment] = sums.get(part.moment, 0) + part.nbytes
    always = sums.pop("always", 0)
    # The outer half works beside training, so a round is added to whatever training does.
    round_ = sums.pop("round", 0)
    return always + round_ + max(sums.values(), default=0)


def memory_parts(config: Config, parameters: Sequence[Parameter], vocab: int, *, flash: bool) -> list[Part]:
    """All parts of the memory of rank 0, whose shards are the largest.

    Args:
        config: of the run.
        parameters: of the model.
        vocab: rows of the embedding.
        flash: attention that never writes its scores to memory.

    Raises:
        ConfigError: more fragments than layers.
    """
    return [
        *_inner(config, parameters),
        *_activations(config, vocab, flash),
        *_outer(config, parameters),
    ]


def element_bytes(config: Config) -> int:
    """Bytes of an element of the working weights: 2 with bf16 (or fp16), else 4."""
    return 2 if any(config.deepspeed.get(kind, {}).get("enabled") for kind in ("bf16", "fp16")) else 4


def _inner(config: Config, parameters: Sequence[Parameter]) -> list[Part]:
    ds, ranks = config.deepspeed, config.islands.ranks or 1
    zero: dict[str, Any] = ds["zero_optimization"]
    e = element_bytes(config)
    shard = sum(p.shard(ranks) for p in parameters)
    whole = sum(p.piece_numel for p in parameters)
    weights_at = _offloaded(zero, "offload_param")
    state_at = _offloaded(zero, "offload_optimizer")
    accumulated = ds.get("data_types", {}).get("grad_accum_dtype")
    g = {"fp32": 4, "fp16": 2, "bf16": 2}.get(str(accumulated), e)
    optimizer = str(ds.get("optimizer", {}).get("type", "AdamW")).lower()
    moments = _INNER_STATE.get(optimizer, 8)
    threshold = int(zero.get("stage3_param_persistence_threshold", 100_000))
    small = sum(p.piece_numel for p in parameters if p.piece_numel <= threshold)
    live = min(whole, int(zero.get("stage3_max_live_parameters", 1_000_000_000)))
    bucket = int(zero.get("reduce_bucket_size", 500_000_000))
    group = min(shard, int(zero.get("sub_group_size", 1_000_000_000)))
    largest = max(p.piece_numel for p in parameters)
    parts = [
        Part("weights", weights_at, "always", e * shard, f"{e} B a parameter of the shard"),
        Part("gradients", state_at, "always", g * shard, f"{g} B a parameter of the shard"),
        Part("fp32 masters", state_at, "always", 4 * shard, "4 B a parameter of the shard"),
        Part("inner moments", state_at, "always", moments * shard, f"{moments} B a parameter of the shard"),
        Part(
            "small parameters, kept gathered", "device", "always", e * small,
            f"{e} B x {small:,}; stage3_param_persistence_threshold",
        ),
        Part(
            "gathered parameters", "device", "backward", e * (live - min(live, small)),
            f"at most {e} B x {live:,}; stage3_max_live_parameters",
        ),
        Part(
            "gradient of one parameter", "device", "backward", e * largest,
            f"{e} B x {largest:,}, before it is reduced",
        ),
        Part(
            "fp32 gradients of a sub-group", state_at, "step", 4 * group,
            f"4 B x {group:,}; sub_group_size",
        ),
    ]  # fmt: skip
    if ds.get("optimizer", {}).get("params", {}).get("torch_adam"):
        # the root of v and its quotient; DeepSpeed's own Adams have none
        parts.append(Part("temporaries of torch's Adam", state_at, "step", 8 * group, f"8 B x {group:,}"))
    if zero.get("contiguous_gradients", True):
        text = f"{e} B x {bucket:,}; reduce_bucket_size"
        parts.insert(2, Part("bucket of gradients", "device", "always", e * bucket, text))
    return [part for part in parts if part.nbytes]


def _offloaded(zero: dict[str, Any], key: str) -> Where:
    part = zero.get(key)
    return "host" if isinstance(part, dict) and part.get("device", "none") == "cpu" else "device"


def _activations(config: Config, vocab: int, flash: bool) -> list[Part]:
    model = config.model
    assert model is not None
    found = activations(model, vocab, config.micro_batch, element_bytes(config), flash=flash)
    how = "layer inputs alone are kept" if model.recompute else "every layer's are kept"
    return [
        Part("activations, saved", "device", "backward", found.saved, how),
        Part("activations, working set", "device", "backward", found.working, "in a layer, and the logits"),
    ]  # fmt: skip


def outer_layouts(config: Config, parameters: Sequence[Parameter]) -> list[FlatLayout]:
    """The flat buffers of rank 0, one for each fragment."""
    ranks, eight = config.islands.ranks or 1, config.outer.state_bits == 8
    segments = [
        Segment(
            name=p.name,
            key=parameter_key(p.name),
            numel=p.shard(ranks),
            element0=0,
            quantised=eight and wants_8bit(p.name, p.global_numel, p.shape),
        )
        for p in parameters
    ]
    plan = plan_fragments(parameters, config.sync.fragments, config.sync.fragment_order)
    return [FlatLayout([segments[i] for i in fragment.members], _BLOCK) for fragment in plan]


def outer_state_bytes(config: Config, layout: FlatLayout) -> int:
    """What the outer optimizer keeps for one fragment beside the anchor.

    One or two vectors: 1 B an element and 4 B a block where they are coded, 4 B an element in the rest.
    """
    kind, period = config.outer.optimizer, config.outer.momentum_period
    vectors = {"sgd": 0, "nesterov": 1, "delayed_nesterov": 2 if period > 1 else 1}.get(kind, 2)
    coded = layout.quantised_total
    return vectors * (coded + 4 * (coded // layout.block_size) + 4 * (layout.total - coded))


def pinned_rounding(config: Config, parameters: Sequence[Parameter]) -> int:
    """Bytes that torch adds to the pinned buffers of a rank beside a GPU: each becomes a power of two."""
    if config.outer.device != "cpu":
        return 0
    totals = [la.total for la in outer_layouts(config, parameters)]
    anchor = 2 if config.outer.anchor_dtype == "bf16" else 4
    sizes = [anchor * total for total in totals] + [4 * max(totals)]  # anchors and scratch
    if config.sync.mode == "async":
        sizes += [anchor * total for total in totals] + [4 * total for total in totals]  # bases and captures
    else:
        sizes.append(4 * max(totals))  # one capture at a time
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if size)


def _outer(config: Config, parameters: Sequence[Parameter]) -> list[Part]:
    sync, outer = config.sync, config.outer
    layouts = outer_layouts(config, parameters)
    total, largest = sum(la.total for la in layouts), max(la.total for la in layouts)
    anchor = 2 if outer.anchor_dtype == "bf16" else 4
    state = sum(outer_state_bytes(config, la) for la in layouts)
    wire = WIRE_BYTES[sync.wire]
    lossy, free = sync.wire != "fp32", sync.mode == "async"
    bucket = min(sync.bucket_bytes, round(wire * largest))
    in_flight = total if free else largest
    there: Where = "device" if outer.device == "cuda" else "host"
    which = "each fragment may have one in flight" if free else "the largest fragment"
    parts = [
        Part("anchor", there, "always", anchor * total, f"{anchor} B a parameter of the shard"),
        Part("outer moments", there, "always", state, f"{state / total:.2f} B, {outer.optimizer}"),
        Part("base", there, "always", anchor * total if free else 0, f"{anchor} B, last adopted"),
        Part("captured pseudo-gradient", there, "always", 4 * in_flight, f"4 B, {which}"),
        Part("error feedback", there, "always", 4 * total if lossy else 0, f"4 B, since {sync.wire} rounds"),
        Part("scratch", there, "always", 4 * largest, "4 B, the largest fragment"),
        Part("merged pseudo-gradient", there, "always", 4 * largest, "4 B, the largest fragment"),
        Part("incoming bucket", there, "always", bucket, "the smaller of bucket_bytes and a fragment"),
        Part("bucket of the network", "host", "always", bucket if there == "device" else 0, "pinned"),
        Part(
            "encoded contribution", there, "round", round(wire * in_flight) if lossy else 0,
            f"{wire:.4g} B, {which}",
        ),
        Part(
            "decoded contribution", there, "round", 4 * largest if sync.merge == "radial" else 0,
            "4 B, the largest fragment, for its norms",
        ),
    ]  # fmt: skip
    return [part for part in parts if part.nbytes]
