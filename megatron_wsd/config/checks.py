"""What pydantic cannot see: keys of our block that contradict each other."""

from __future__ import annotations

import difflib
import logging
from typing import Any

from megatron_wsd.config.block import BLOCK, MOST_ISLANDS, MOST_RANKS, DelayConfig, IslandJob, ModelConfig
from megatron_wsd.config.deepspeed_keys import SCHEDULERS
from megatron_wsd.config.keys import nearest
from megatron_wsd.errors import ConfigError, ScheduleError
from megatron_wsd.optim.gate import staleness_gate
from megatron_wsd.schedule import Batch, Schedule, parse_length, schedule_from_params

log = logging.getLogger(__name__)


def resolve_islands(block: IslandJob, islands: int | None, ranks: int | None) -> IslandJob:
    given = block.islands
    for name, flag, value, most in (
        ("count", "--islands", islands, MOST_ISLANDS),
        ("ranks", "--ranks", ranks, MOST_RANKS),
    ):
        in_file = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(flag, "at least 1", value)
        if value is not None and value > most:
            raise ConfigError(flag, f"at most {most:,}", value)
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
    hang = given.hang_timeout_s or 2 * (given.join_timeout_s + given.heartbeat_timeout_s)
    resolved = given.model_copy(
        update={
            "count": count,
            "ranks": ranks or given.ranks or 1,
            "min_islands": min_islands,
            "hang_timeout_s": hang,
        }
    )
    block = block.model_copy(update={"islands": resolved})
    _check_timeouts(block, hang)
    return block


def _check_timeouts(block: IslandJob, hang: float) -> None:
    """heartbeat < join, message < join, join + heartbeat < hang: a longer wait must see a shorter one end."""
    islands, message = block.islands, block.sync.timeout_s
    heartbeat, join = islands.heartbeat_timeout_s, islands.join_timeout_s
    if not heartbeat < join:
        raise ConfigError(
            f"{BLOCK}.islands.join_timeout_s",
            f"more than heartbeat_timeout_s = {heartbeat:g}",
            join,
            "A dead island must be noticed before a round stops waiting for it.",
        )
    if not message < join:
        raise ConfigError(
            f"{BLOCK}.sync.timeout_s",
            f"less than islands.join_timeout_s = {join:g}",
            message,
            "An island that waits for a message of a dead one must be back before the next round begins.",
        )
    if not join + heartbeat < hang:
        raise ConfigError(
            f"{BLOCK}.islands.hang_timeout_s",
            f"more than join_timeout_s + heartbeat_timeout_s = {join + heartbeat:g}",
            hang,
            "A round may wait that long for others; that is no hang.",
        )


def check_sync(block: IslandJob) -> None:
    """Keys of ``sync`` that contradict each other, the islands or the model."""
    sync, count = block.sync, block.islands.count
    assert count is not None  # `resolve_islands` has filled it in
    if sync.quorum > count:
        raise ConfigError(f"{BLOCK}.sync.quorum", f"at most islands.count = {count}", sync.quorum)
    if sync.overlap_steps >= sync.inner_steps:
        raise ConfigError(
            f"{BLOCK}.sync.overlap_steps",
            f"less than inner_steps = {sync.inner_steps}",
            sync.overlap_steps,
            "A fragment's contribution must be merged before the next one is due.",
        )
    if sync.mode == "sync":
        _refuse_async_keys(block)
    layers = block.model.num_layers if block.model is not None else None
    if layers is not None and sync.fragments > 1 and sync.fragments > layers:
        raise ConfigError(
            f"{BLOCK}.sync.fragments",
            f"at most model.num_layers = {layers}",
            sync.fragments,
            "Fragments are cut by layers; embeddings, output layer and final norm are one more.",
        )
    _check_delay(block, count)


def _refuse_async_keys(block: IslandJob) -> None:
    """What would do nothing without a word, where the run would be another than was meant."""
    sync = block.sync
    if sync.overlap_steps > 0:
        raise ConfigError(
            f"{BLOCK}.sync.overlap_steps",
            'mode "async" with it',
            sync.overlap_steps,
            "In sync mode training waits for each round and overlaps with none.",
        )
    if sync.quorum > 1:
        raise ConfigError(
            f"{BLOCK}.sync.quorum",
            'mode "async" with it',
            sync.quorum,
            "In sync mode every live island contributes; islands.min_islands says how many there must be.",
        )


def _check_delay(block: IslandJob, count: int) -> None:
    where, delay = f"{BLOCK}.sync.controlled_delay", block.sync.controlled_delay
    values = [delay] if isinstance(delay, int) else delay if isinstance(delay, list) else [delay.low]
    if isinstance(delay, list) and len(delay) != count:
        raise ConfigError(where, f"one number for each of {count} islands", delay)
    if any(value < 0 for value in values):
        raise ConfigError(where, "rounds, at least 0", delay)
    if isinstance(delay, DelayConfig) and delay.kind == "uniform" and delay.high < delay.low:
        raise ConfigError(f"{where}.high", f"at least low = {delay.low}", delay.high)
    if isinstance(delay, DelayConfig) and delay.kind == "geometric" and (delay.low or delay.high):
        raise ConfigError(where, "mean alone for a geometric delay", "low or high beside it", "Remove them.")
    if block.sync.mode == "async" and delay != 0:
        raise ConfigError(
            where, 'mode "sync" with it', delay, "In async mode staleness is measured, not made; remove it."
        )
    least = 0 if isinstance(delay, DelayConfig) and delay.kind == "geometric" else min(values)
    outer = block.outer
    if outer.optimizer == "cgad" and staleness_gate(least, outer.alpha, outer.tau_cut) == 0.0:
        log.warning(
            "%s: every contribution is %d rounds old or older, and from outer.tau_cut = %d on the gate is 0: "
            "nothing that the islands learn will be used",
            where,
            least,
            outer.tau_cut,
        )


def check_outer(block: IslandJob) -> None:
    own = block.outer.lr_schedule
    if isinstance(own, dict):
        try:
            schedule_from_params(own)
        except ScheduleError as e:
            field = e.field.replace("scheduler.params", f"{BLOCK}.outer.lr_schedule")
            raise ConfigError(field, e.expected, e.got, e.remedy) from None
        if "max_lr" in own or "min_lr" in own:
            raise ConfigError(f"{BLOCK}.outer.lr_schedule", "ratios alone; the peak is outer.lr", sorted(own))
    kind = block.outer.optimizer
    if kind in ("nesterov", "delayed_nesterov") and not block.outer.momentum:
        raise ConfigError(f"{BLOCK}.outer.momentum", f"more than 0 for {kind}", 0.0, 'Or use "sgd".')
    for i, beta in enumerate(block.outer.betas):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"{BLOCK}.outer.betas.{i}", "a number in [0, 1)", beta)


def check_model(block: IslandJob) -> None:
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
    if model.tensor_parallel > 1:
        _check_tensor_parallel(model, block.islands.ranks or 1)


def _check_tensor_parallel(model: ModelConfig, ranks: int) -> None:
    """That every matrix can be cut into equal pieces, and the ranks of an island into groups of as many."""
    tp = model.tensor_parallel
    cut = {
        "the ranks of an island": ranks,
        "num_query_groups": model.num_query_groups,  # and so num_attention_heads, which they divide
        "ffn_hidden_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size or 64,  # by default a multiple of 64
    }
    for name, size in cut.items():
        if size % tp:
            raise ConfigError(f"{BLOCK}.model.tensor_parallel", f"a divisor of {name}, {size}", tp)


_SOURCES = ("builtin:stdlib", "builtin:pydoc")


def _check_corpus(name: str, spec: str) -> None:
    """That it says where a corpus is; whether one is there is looked up when a run is started."""
    kind, colon, path = spec.partition(":")
    if spec in _SOURCES or (kind == "text" and path):
        return
    known = kind in ("builtin", "text") or path.startswith("//")
    near = nearest(spec, _SOURCES) if kind == "builtin" else nearest(kind, ("builtin", "text"), 0.7)
    if not spec.strip() or "\0" in spec or known or (colon and near is not None):
        remedy = f"Did you mean {near if kind == 'builtin' else f'{near}:{path}'!r}?" if near and path else ""
        raise ConfigError(
            f"{BLOCK}.data.corpora.{name}",
            "builtin:stdlib, builtin:pydoc, text:PATH, or the prefix of a .bin and .idx on this disk",
            repr(spec),
            remedy,
        )


def _check_tokenizer(spec: str) -> None:
    kind, _, path = spec.partition(":")
    if spec == "byte" or (kind == "hf" and path.strip() and "\0" not in path):
        return
    near = nearest(kind, ("byte", "hf"))
    remedy = f"Did you mean {near if near == 'byte' else f'hf:{path or spec}'!r}?" if near else ""
    raise ConfigError(
        f"{BLOCK}.data.tokenizer", "byte, or hf:PATH with PATH a folder on this disk", repr(spec), remedy
    )


def check_data(block: IslandJob) -> None:
    data = block.data
    if not data.corpora:
        raise ConfigError(f"{BLOCK}.data.corpora", "at least one corpus", "none", "Take builtin:stdlib, say.")
    for name, spec in data.corpora.items():
        _check_corpus(name, spec)
    _check_tokenizer(data.tokenizer)
    if "stable" not in data.mixes:
        raise ConfigError(f"{BLOCK}.data.mixes", 'a mix named "stable"', sorted(data.mixes))
    for phase, mix in data.mixes.items():
        for corpus, weight in mix.items():
            where = f"{BLOCK}.data.mixes.{phase}.{corpus}"
            if corpus not in data.corpora:
                near = difflib.get_close_matches(corpus, list(data.corpora), n=1)
                remedy = f"Did you mean {near[0]!r}?" if near else "Add it to data.corpora."
                raise ConfigError(where, f"one of the corpora {sorted(data.corpora)}", corpus, remedy)
            if not weight > 0:
                raise ConfigError(
                    where, "a weight above 0", weight, "Leave the corpus out of the mix instead."
                )
            if not 1e-9 <= weight <= 1e9:
                raise ConfigError(where, "a weight from 1e-9 to 1e9", weight, "Only their ratio counts.")
        if not mix:
            raise ConfigError(f"{BLOCK}.data.mixes.{phase}", "at least one corpus", "none")


def build_schedule(deepspeed: dict[str, Any], block: IslandJob) -> Schedule | None:
    """The WSD schedule of the json, in steps; None if another scheduler is named.

    Lengths given in samples or tokens are written into the json in steps: over islands and ranks a batch is
    constant, and rounds, orders and data mixes count steps.
    """
    scheduler = deepspeed.get("scheduler")
    if scheduler is None:
        return None
    if "type" not in scheduler:
        raise ConfigError("scheduler.type", '"WSD", say', "nothing", "Name the scheduler.")
    if scheduler["type"] not in SCHEDULERS:
        near = nearest(scheduler["type"], SCHEDULERS)
        raise ConfigError(
            "scheduler.type",
            '"WSD", or another scheduler of DeepSpeed or torch',
            repr(scheduler["type"]),
            f"Did you mean {near!r}?" if near else "",
        )
    if scheduler["type"] != "WSD":
        return None
    params = scheduler.get("params")
    if not isinstance(params, dict):
        raise ConfigError("scheduler.params", "an object, {} for a constant rate", params or "nothing")
    if block.model is not None:  # a script of the user's own knows its sequence length; we do not
        assert block.islands.count is not None
        batch = Batch(deepspeed["train_batch_size"] * block.islands.count, block.model.seq_length)
        params = {key: _in_steps(key, value, batch) for key, value in params.items()}
        deepspeed["scheduler"] = {**scheduler, "params": params}
    return schedule_from_params(params, peak=deepspeed.get("optimizer", {}).get("params", {}).get("lr"))


def _in_steps(key: str, value: Any, batch: Batch) -> Any:
    if isinstance(value, list):
        return [_in_steps(key, item, batch) for item in value]
    if not isinstance(value, str) or key not in _LENGTHS:
        return value
    field = f"scheduler.params.{key}"
    return batch.convert(field, parse_length(value, field), "steps")


_LENGTHS = ("warmup_steps", "decay_start", "decay_steps", "total_steps", "rewarmup_steps")
