"""The whole plan of a run, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_wsd.config import BLOCK, Config
from megatron_wsd.errors import ConfigError
from megatron_wsd.planner.advice import Advice, advise, usual_fragments
from megatron_wsd.planner.exchange import (
    WIRE_BYTES,
    Fleet,
    Link,
    asynchronous,
    period_steps,
    streaming,
    synchronous,
)
from megatron_wsd.planner.memory import Part, element_bytes, memory_parts, peak, pinned_rounding
from megatron_wsd.planner.model import Parameter, flops_per_token, parameters_of, vocabulary
from megatron_wsd.planner.speed import Speed, speed_of

if TYPE_CHECKING:
    from megatron_wsd.data.epochs import Passage

_STREAMING_OVERLAP = 5  # Streaming DiLoCo's, where the config says none
_SHORT_STEP_S = 0.05


@dataclass(frozen=True)
class WireBytes:
    """Bytes of one sync of the whole model in one format; a sync point of fragment f moves its share."""

    wire: str
    rank_sent: int
    rank_received: int
    island_sent: int
    island_received: int
    largest_fragment_sent: int


@dataclass(frozen=True)
class LinkPlan:
    """One bandwidth.

    Attributes:
        bits_per_s: of the link of one island.
        sync_s: seconds of one sync of the whole model, for each format.
        data_parallel: utilisation of plain data parallelism over that link, bf16 gradients every step.
        sync: of synchronous rounds with the config's wire, fragments and inner_steps.
        streaming: of rounds that hide behind a few steps.
        asynchronous: of rounds that training never waits for.
        configured: that of the config's own mode.
        period_steps: inner steps between two syncs of a fragment that the config really gets.
        wall_s: of the whole run with the config; None without an end.
        advice: what would meet the target.
    """

    bits_per_s: float
    sync_s: dict[str, float]
    data_parallel: float
    sync: float
    streaming: float
    asynchronous: float
    configured: float
    period_steps: float
    wall_s: float | None
    advice: Advice


@dataclass(frozen=True)
class PhasePlan:
    """One phase of the schedule, in completed steps and in tokens over all islands; None where it is open."""

    name: str
    first: int
    last: int | None
    tokens: int | None
    rate_first: float
    rate_last: float


@dataclass(frozen=True)
class Plan:
    """Everything that ``megatron-wsd plan`` tells. Bytes and seconds are those of one rank or one island.

    ``data`` is for whoever has the corpora at hand: `make_plan` looks at no file, and leaves it empty.
    """

    islands: int
    ranks: int
    parameters: int
    tokens_per_step: int
    step_s: float
    mode: str
    inner_steps: int
    fragments: int
    wire: str
    target: float
    rtt_s: float
    memory: list[Part]
    device_bytes: int
    host_bytes: int
    exchange: list[WireBytes]
    links: list[LinkPlan]
    phases: list[PhasePlan]
    end_step: int | None
    tokens: int | None
    warnings: list[str]
    assumed: list[str]
    data: list[Passage] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The same as json-able data."""
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """What is asked of the planner beside the config; see the flags of ``megatron-wsd plan``."""

    bandwidths: tuple[float, ...] = (1e9, 10e9, 100e9)
    rtt_s: float = 0.03
    target: float = 0.95
    step_s: float | None = None
    gpu: str | None = None
    tflops: float | None = None
    mfu: float = 0.4
    flash: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError("--target-utilisation", "a share between 0 and 1", self.target, "Give 0.95.")
        if not 0 <= self.rtt_s < math.inf:
            raise ConfigError("--rtt-ms", "0 or more", self.rtt_s * 1e3)


def make_plan(config: Config, question: Question) -> Plan:
    """Plan a run.

    Args:
        config: of the run, with a model.
        question: the rest.

    Raises:
        ConfigError: no model in the config, no vocabulary, or a wrong flag.
    """
    model = config.model
    if model is None:
        raise ConfigError(
            f"{BLOCK}.model", "the shape of a model", "nothing", "Add the block, or give --model 7b."
        )
    vocab = vocabulary(config)
    parameters = parameters_of(model, vocab)
    islands, ranks, sync = config.islands.count or 1, config.islands.ranks or 1, config.sync
    island_tokens = config.island_batch * model.seq_length
    speed = speed_of(
        flops_per_token(model, vocab) * island_tokens,
        ranks,
        step_s=question.step_s,
        gpu=question.gpu,
        tflops=question.tflops,
        mfu=question.mfu,
    )
    memory = memory_parts(config, parameters, vocab, flash=question.flash)
    fleet = Fleet(parameters, islands, ranks, sync.bucket_bytes, sync.fragment_order)
    end = config.schedule.end if config.schedule is not None else None
    links = [
        _link(config, fleet, question.target, speed.step_s, Link(bits, question.rtt_s))
        for bits in question.bandwidths
    ]
    device = peak(memory, "device")
    exchange = []
    for wire in WIRE_BYTES:
        traffic = fleet.traffic(wire, sync.fragments)
        sent, received = traffic.sent(), traffic.received()
        largest = replace(traffic, fragments=(max(traffic.fragments),)).sent()
        exchange.append(WireBytes(wire, sent, received, sent * ranks, received * ranks, largest))
    per_step = island_tokens * islands
    return Plan(
        islands=islands,
        ranks=ranks,
        parameters=sum(p.global_numel for p in parameters),
        tokens_per_step=per_step,
        step_s=speed.step_s,
        mode=sync.mode,
        inner_steps=sync.inner_steps,
        fragments=sync.fragments,
        wire=sync.wire,
        target=question.target,
        rtt_s=question.rtt_s,
        memory=memory,
        device_bytes=device,
        host_bytes=peak(memory, "host"),
        exchange=exchange,
        links=links,
        phases=_phases(config, per_step),
        end_step=end,
        tokens=None if end is None else end * per_step,
        warnings=_warnings(config, speed, device, links),
        assumed=_assumed(config, question, speed, parameters),
    )


def _link(config: Config, fleet: Fleet, target: float, step_s: float, link: Link) -> LinkPlan:
    assert config.model is not None
    sync, layers, islands = config.sync, config.model.num_layers, fleet.islands
    own = fleet.traffic(sync.wire, sync.fragments)
    cut = fleet.traffic(sync.wire, sync.fragments if sync.fragments > 1 else usual_fragments(layers))
    waiting = synchronous(own, link, sync.inner_steps, step_s)
    free = asynchronous(own, sync.inner_steps, step_s)
    hidden = sync.overlap_steps or _STREAMING_OVERLAP
    runs_free = sync.mode == "async"
    configured = free if runs_free else waiting
    end = config.schedule.end if config.schedule is not None else None
    ring_s = 0.0
    if islands > 1:
        gradients = 2 * sum(p.global_numel for p in fleet.parameters)
        ring_s = 2 * (islands - 1) * (gradients / islands * 8 / link.bits_per_s + link.rtt_s / 2)
    return LinkPlan(
        bits_per_s=link.bits_per_s,
        sync_s={wire: fleet.traffic(wire, sync.fragments).sync_seconds(link) for wire in WIRE_BYTES},
        data_parallel=step_s / (step_s + ring_s),
        sync=waiting,
        streaming=streaming(cut, link, sync.inner_steps, step_s, hidden),
        asynchronous=free,
        configured=configured,
        period_steps=period_steps(own, link, sync.inner_steps, step_s) if runs_free else sync.inner_steps,
        wall_s=None if end is None else end * step_s / configured,
        advice=advise(fleet, layers, link, step_s, target),
    )


def _phases(config: Config, tokens_per_step: int) -> list[PhasePlan]:
    """The phases to the end; of a schedule without one, the last is open."""
    schedule, scheduler = config.schedule, config.deepspeed.get("scheduler", {})
    if schedule is None:
        return []
    peak_rate = scheduler["params"].get("max_lr")
    if peak_rate is None:
        peak_rate = config.deepspeed.get("optimizer", {}).get("params", {}).get("lr", 1.0)
    if isinstance(peak_rate, list):
        peak_rate = peak_rate[0]
    edges = {0, schedule.warmup_steps}
    for decay in schedule.decays:
        edges |= {decay.start, decay.end, decay.settled}
    starts = sorted(edges)
    ends: list[int | None] = [*starts[1:], None]
    found = []
    for first, last in zip(starts, ends, strict=True):
        if last is None and schedule.end is not None:
            break  # it is over
        rates = (schedule.rate(n, peak_rate) for n in (first, first if last is None else last - 1))
        tokens = None if last is None else (last - first) * tokens_per_step
        found.append(PhasePlan(schedule.phase(first), first, last, tokens, *rates))
    return found


def _warnings(config: Config, speed: Speed, device: int, links: Sequence[LinkPlan]) -> list[str]:
    found = []
    if speed.memory_bytes is not None and device > speed.memory_bytes:
        found.append(
            f"a rank needs about {device / 1e9:.0f} GB of the device's {speed.memory_bytes / 1e9:.0f} GB: "
            "more ranks, a smaller micro-batch, recompute, or offload_optimizer"
        )
    if speed.guessed and speed.step_s < _SHORT_STEP_S:
        found.append(
            f"a step of {speed.step_s * 1e3:.2g} ms is bound by launches and latency, not by FLOP/s: "
            "measure one, and give --step-time-s"
        )
    for link in links:
        if link.period_steps > config.sync.inner_steps:
            found.append(
                f"at {gbit(link.bits_per_s)} the rounds of one period take {link.period_steps:.0f} steps, "
                f"longer than inner_steps = {config.sync.inner_steps}: sync points will pass unused"
            )
    return found


def _assumed(config: Config, question: Question, speed: Speed, parameters: Sequence[Parameter]) -> list[str]:
    layers = config.model.num_layers if config.model else 1
    found = [
        *([config.assumption.removeprefix("assumed: ")] if config.assumption else []),
        *speed.assumed,
        f"{question.rtt_s * 1e3:g} ms between islands; a link's bandwidth is that of one island in each "
        "direction, shared by its ranks and by nothing else",
        "all islands are alive, equally fast, and contribute to every round",
        "one broadcast a contributor and bucket, in turn; its source sends ceil(log2 islands) copies",
        "the outer half on one core a rank: 2.5 ns a parameter of the shard and 1 ns for each contribution; "
        "training pauses 2 ns a parameter for capture and adoption",
        "exchanges take nothing from the speed of training",
        "attention keeps no scores in memory"
        if question.flash
        else "attention writes its scores to memory, as megatron-core's local layers do (else: --flash)",
        "the allocator's fragmentation, CUDA context and NCCL buffers are not counted: add 2 to 5 GB",
    ]
    if rounding := pinned_rounding(config, parameters):
        found.append(
            "pinned buffers of the host have the size that they need; beside a GPU torch rounds them up by "
            f"{rounding / 1e9:.2f} GB in all, by nothing with "
            "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64 (torch 2.13)"
        )
    if config.schedule is not None and config.schedule.end is None:
        found.append(
            "nothing of the length of the run, which has no end: so there are no tokens in all and no wall "
            "time; for them, give scheduler.params a decay_start and decay_steps, say in a copy of the config"
        )
    if element_bytes(config) == 4 and question.step_s is None:
        found.append("the config trains in fp32, slower than the bf16 rate that is assumed")
    if config.sync.fragments == 1:
        found.append(f"the streaming column cuts the layers into {usual_fragments(layers)} fragments")
    if not config.sync.overlap_steps:
        found.append(f"the streaming column hides a round behind {_STREAMING_OVERLAP} steps")
    return found


def gbit(bits_per_s: float) -> str:
    """A bandwidth for people: ``10 Gbit/s``."""
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:g} Gbit/s"
    return f"{bits_per_s / 1e6:g} Mbit/s"
