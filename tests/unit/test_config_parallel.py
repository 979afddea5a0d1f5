"""Tensor parallelism inside an island in the config, and every other model parallelism refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_wsd.config import Config, parse_config
from megatron_wsd.errors import ConfigError

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "seq_length": 16,
}


def parsed(ranks: int, top: dict[str, Any] | None = None, **model: Any) -> Config:
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 3},
        **(top or {}),
        "megatron_wsd": {"model": {**MODEL, **model}},
    }
    return parse_config(raw, ranks=ranks)


def test_a_group_counts_as_one_reader() -> None:
    assert (parsed(8).tensor_parallel, parsed(8).island_batch) == (1, 2 * 3 * 8)
    config = parsed(8, tensor_parallel=4)
    assert (config.tensor_parallel, config.island_batch) == (4, 2 * 3 * 2)
    assert config.digest() != parsed(8, tensor_parallel=2).digest()
    with pytest.raises(ConfigError, match=r"\(ranks / tensor_parallel = 8 / 4\) = 2 x 3 x 2 = 12"):
        parsed(8, {"train_batch_size": 48}, tensor_parallel=4)


@pytest.mark.parametrize(
    ("ranks", "changes", "what"),
    [
        (6, {"tensor_parallel": 4}, "the ranks of an island, 6"),
        (8, {"tensor_parallel": 8}, "num_query_groups, 4"),
        (4, {"tensor_parallel": 4, "ffn_hidden_size": 90}, "ffn_hidden_size, 90"),
        (4, {"tensor_parallel": 4, "vocab_size": 258}, "vocab_size, 258"),
    ],
)
def test_what_cannot_be_cut_evenly(ranks: int, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"a divisor of {what}"):
        parsed(ranks, **changes)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("pipeline_parallel", "pipeline"),
        ("pipeline_model_parallel_size", "pipeline"),
        ("virtual_pipeline_model_parallel_size", "virtual pipeline"),
        ("context_parallel_size", "context"),
        ("expert_model_parallel_size", "expert"),
        ("expert_tensor_parallel_size", "expert tensor"),
    ],
)
def test_other_parallelism_of_megatron_is_refused_by_name(key: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"model.{key}: expected no {kind} parallelism, got 2"):
        parsed(2, **{key: 2})


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("pipeline", {"stages": 2}, "pipeline"),
        ("sequence_parallel_size", 2, "sequence"),
        ("expert_parallel", {"enabled": True}, "expert"),
    ],
)
def test_and_deepspeeds(key: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: expected no {kind} parallelism"):
        parsed(2, {key: value})


def test_switches_that_are_off_or_misplaced() -> None:
    assert parsed(2, {"sequence_parallel_size": 1}).tensor_parallel == 1
    with pytest.raises(ConfigError, match="no sequence parallelism, got True"):
        parsed(2, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"Write megatron_wsd\.model\.tensor_parallel"):
        parsed(2, tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"Move it to megatron_wsd\.model\.tensor_parallel"):
        parsed(2, {"tensor_parallel": {"autotp_size": 2}})


def test_where_the_outer_half_computes_is_no_part_of_the_run() -> None:
    raw: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    on_gpu = parse_config({**raw, "megatron_wsd": {"outer": {"device": "cuda"}}})
    assert on_gpu.outer.device == "cuda" and on_gpu.digest() == parse_config(raw).digest()
