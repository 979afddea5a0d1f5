"""What a wrong config gets: one error that names key, expectation, what came and the way out."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from megatron_wsd.config import IslandJob, load_config, parse_config
from megatron_wsd.errors import ConfigError, MegatronWSDError

CONFIGS = Path(__file__).parents[2] / "launch" / "configs"
TINY = CONFIGS / "tiny_cpu.json"


def tiny() -> dict[str, Any]:
    return dict(json.loads(TINY.read_text()))


def changed(path: str, value: Any) -> dict[str, Any]:
    raw = tiny()
    node = raw
    *parents, last = path.split("/")
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return raw


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = load_config(path)
    assert config.model is not None and config.schedule is not None
    assert parse_config(config.resolved()).digest() == config.digest()


def test_7b_arithmetic_is_what_its_page_says() -> None:
    config = load_config(CONFIGS / "7b_2x8_100gbps.json")
    assert config.model is not None
    m = config.model
    head = m.hidden_size // m.num_attention_heads
    qkv = m.hidden_size * (m.hidden_size + 2 * m.num_query_groups * head)
    layer = qkv + m.hidden_size**2 + 3 * m.hidden_size * m.ffn_hidden_size + 2 * m.hidden_size
    assert m.vocab_size is not None
    parameters = m.num_layers * layer + 2 * m.vocab_size * m.hidden_size + m.hidden_size
    page = (CONFIGS / "README.md").read_text()
    assert f"{parameters:,}" in page
    assert f"{config.island_batch * m.seq_length * 2:,}" in page  # tokens a step, both islands
    assert f"{parameters * 4 // 8:,}" in page  # bytes a rank and round in fp32


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("megatron_wsd/sync/inner_step", 5, ["megatron_wsd.sync.inner_step", "'inner_steps'"]),
        ("megatron_wsd/inner_steps", 5, ["megatron_wsd.inner_steps", "megatron_wsd.sync.inner_steps"]),
        ("megatron_wsd/outr", {}, ["megatron_wsd.outr", "'outer'"]),
        ("sync", {"inner_steps": 3}, ["sync", "megatron_wsd.sync"]),
        ("inner_steps", 3, ["inner_steps", "megatron_wsd.sync.inner_steps"]),
        ("warmup_steps", 3, ["warmup_steps", "scheduler.params.warmup_steps"]),
        ("checkpoint", {"interval_steps": 3}, ["checkpoint.interval_steps", "megatron_wsd.checkpoint"]),
        ("megatron_wsd/train_batch_size", 8, ["train_batch_size", "top level"]),
        ("bf16", True, ["bf16", "json object"]),
        ("megatron_wsd/outer/eps", 1e-30, ["outer.eps"]),
        ("megatron_wsd/outer/lr_schedule", "follow", ["outer.lr_schedule"]),
        ("megatron_wsd/outer/lr_schedule", {"warmup": 3}, ["outer.lr_schedule", "warmup_steps"]),
        ("megatron_wsd/sync/inner_steps", True, ["sync.inner_steps"]),
        ("megatron_wsd/sync/inner_steps", "10", ["sync.inner_steps"]),
        ("optimizer/params", {"lr": float("nan")}, ["optimizer.params.lr", "nan"]),
        ("optimizer/params", {"lr": 1e-3, "betas": [0.9, 1.5]}, ["optimizer.params.betas.1"]),
        ("gradient_clipping", -1, ["gradient_clipping"]),
        ("megatron_wsd/outer", {"optimizer": "nesterov", "momentum": 0.0}, ["outer.momentum"]),
        ("megatron_wsd/data/seed", 2**64, ["data.seed"]),
        ("gradient_cliping", 1.0, ["gradient_cliping", "'gradient_clipping'"]),
        (
            "megatron_wsd/sync/inner_steps",
            0,
            ["megatron_wsd.sync.inner_steps", "at least 1", "0"],
        ),
        ("megatron_wsd/outer/lr", -1.0, ["megatron_wsd.outer.lr", "-1.0"]),
        ("megatron_wsd/outer/lr", float("nan"), ["megatron_wsd.outer.lr", "nan"]),
        ("megatron_wsd/outer/betas", [0.9, 1.0], ["megatron_wsd.outer.betas.1", "[0, 1)"]),
        ("megatron_wsd/outer/optimizer", "lion", ["megatron_wsd.outer.optimizer", "'cgad'", "lion"]),
        ("megatron_wsd/outer/state_bits", 4, ["megatron_wsd.outer.state_bits", "8 or 32"]),
        ("megatron_wsd/sync/wire", "int3", ["megatron_wsd.sync.wire", "'fp32'"]),
        ("megatron_wsd/model/num_query_groups", 3, ["num_query_groups", "divisor", "4"]),
        ("megatron_wsd/model/num_attention_heads", 5, ["num_attention_heads", "divisor", "128"]),
        ("megatron_wsd/data/mixes/decay", {"hihg_quality": 1.0}, ["hihg_quality", "'high_quality'"]),
        ("megatron_wsd/data/mixes/decay", {"broad": 0.0}, ["decay.broad", "above 0"]),
        ("megatron_wsd/data/mixes", {"decay": {"broad": 1.0}}, ["mixes", '"stable"']),
        ("megatron_wsd/data/mixes/code", {}, ["mixes.code", "at least one"]),
        ("megatron_wsd/islands", {"min_islands": 3}, ["min_islands", "islands.count = 2"]),
        ("megatron_wsd/islands", {"join_timeout_s": 1.0}, ["join_timeout_s", "heartbeat_timeout_s = 5"]),
        ("megatron_wsd/islands", {"hang_timeout_s": 605.0}, ["hang_timeout_s", "more than", "= 605"]),
        ("megatron_wsd/sync/timeout_s", 600.0, ["sync.timeout_s", "less than islands.join_timeout_s = 600"]),
        ("megatron_wsd/sync/wire", "int3", ["sync.wire", "'int4'", "Did you mean 'int8'?"]),
        ("megatron_wsd/sync/mode", "asynch", ["sync.mode", "Did you mean 'async'?"]),
        ("megatron_wsd/outer/optimizer", "nestorov", ["Did you mean 'nesterov'?"]),
        ("megatron_wsd/sync", {"mode": "async", "quorum": 3}, ["sync.quorum", "islands.count = 2", "3"]),
        ("megatron_wsd/sync", {"quorum": 2}, ["sync.quorum", '"async"', "islands.min_islands"]),
        (
            "megatron_wsd/sync",
            {"mode": "async", "inner_steps": 9, "overlap_steps": 9},
            ["sync.overlap_steps", "less than inner_steps = 9"],
        ),
        ("megatron_wsd/sync", {"overlap_steps": 2}, ["sync.overlap_steps", '"async"', "training waits"]),
        ("megatron_wsd/sync/fragments", 5, ["sync.fragments", "at most model.num_layers = 4", "got 5"]),
        (
            "megatron_wsd/sync",
            {"mode": "async", "controlled_delay": 2},
            ["sync.controlled_delay", "measured, not made"],
        ),
        ("megatron_wsd/sync/controlled_delay", [1, 2, 3], ["sync.controlled_delay", "each of 2 islands"]),
        ("megatron_wsd/sync/controlled_delay", [1, -2], ["sync.controlled_delay", "at least 0"]),
        ("megatron_wsd/sync/controlled_delay", -1, ["sync.controlled_delay", "at least 0", "-1"]),
        (
            "megatron_wsd/sync/controlled_delay",
            "3",
            ["controlled_delay: expected a whole number", "'3'"],
        ),
        ("megatron_wsd/sync/controlled_delay", [1, "a"], ["sync.controlled_delay.1: ", "'a'"]),
        (
            "megatron_wsd/sync/controlled_delay",
            {"kind": "uniform", "low": 3, "high": 2},
            ["sync.controlled_delay.high", "at least low = 3"],
        ),
        (
            "megatron_wsd/sync/controlled_delay",
            {"kind": "geometric", "mean": 2.0, "high": 2},
            ["sync.controlled_delay", "mean alone"],
        ),
        ("megatron_wsd/sync/controlled_delay", {"kind": "unifrm"}, ["delay.kind: ", "'uniform'?"]),
        ("megatron_wsd/sync/controlled_delay", {"kind": "uniform", "hihg": 3}, ["delay.hihg: ", "'high'"]),
        ("megatron_wsd/outer", {"optimizer": "delayed_nesterov", "momentum": 0.0}, ["outer.momentum"]),
        ("optimizer/type", "OneBitAdam", ["optimizer.type", "OneBitAdam"]),
        ("zero_optimization/stage", 2, ["zero_optimization.stage", "3", "2"]),
        ("zero_optimization/zero_hpz_partition_size", 8, ["zero_hpz_partition_size", "8", "hpZ"]),
        ("zero_optimization/zero_quantized_gradients", True, ["zero_quantized_gradients"]),
        ("zero_optimization/mics_shard_size", 4, ["mics_shard_size", "MiCS"]),
        ("train_batch_size", 12, ["train_batch_size", "4 x 1 x 2 = 8", "12"]),
        ("train_micro_batch_size_per_gpu", 0, ["train_micro_batch_size_per_gpu", "0"]),
        ("scheduler/params/decay_steps", -1, ["scheduler.params.decay_steps", "-1"]),
        ("scheduler/params/decay_start", 10, ["decay_start", "10"]),
        ("scheduler/params/warmup_step", 10, ["warmup_step", "warmup_steps"]),
        ("scheduler", {"type": "WSD"}, ["scheduler.params"]),
    ],
)
def test_wrong_key_is_named(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(MegatronWSDError) as caught:
        parse_config(changed(path, value), islands=2, ranks=2)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_flags_must_not_contradict_the_file() -> None:
    raw = changed("megatron_wsd/islands", {"count": 2, "ranks": 2})
    assert parse_config(raw, islands=2, ranks=2).islands.count == 2
    with pytest.raises(ConfigError, match="--islands"):
        parse_config(raw, islands=3, ranks=2)


def test_min_islands_defaults_to_a_majority_from_three_on() -> None:
    got = {n: parse_config(tiny(), islands=n, ranks=2).islands.min_islands for n in (1, 2, 3, 4, 5)}
    assert got == {1: 1, 2: 1, 3: 2, 4: 3, 5: 3}
    with pytest.raises(ConfigError, match="majority"):
        parse_config(changed("megatron_wsd/islands", {"min_islands": 2}), islands=4, ranks=2)


def test_a_hang_is_longer_than_any_wait_by_default() -> None:
    raw = changed("megatron_wsd/islands", {"join_timeout_s": 70.0, "heartbeat_timeout_s": 5.0})
    config = parse_config(raw, islands=2, ranks=2)
    assert config.islands.hang_timeout_s == 150.0
    assert parse_config(config.resolved()).islands.hang_timeout_s == 150.0


@pytest.mark.parametrize(
    ("delay", "optimizer", "warned"),
    [
        (31, "cgad", False),
        (32, "cgad", True),
        (40, "adam_decay", False),
        ([0, 50], "cgad", False),
        ([40, 50], "cgad", True),
        ({"kind": "uniform", "low": 33, "high": 40}, "cgad", True),
        ({"kind": "uniform", "low": 3, "high": 40}, "cgad", False),
        ({"kind": "geometric", "mean": 90.0}, "cgad", False),
    ],
)
def test_a_delay_that_gates_everything_to_nothing_is_told(
    delay: Any, optimizer: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    raw = changed("megatron_wsd/sync/controlled_delay", delay)
    raw["megatron_wsd"].setdefault("outer", {})["optimizer"] = optimizer
    parse_config(raw, islands=2, ranks=2)
    told = [r for r in caplog.records if "the gate is 0" in r.getMessage()]
    assert len(told) == warned


def test_digest_sees_what_changes_the_numbers_and_nothing_else() -> None:
    whole = parse_config(tiny(), islands=2, ranks=2).digest()
    for path, value in (
        ("megatron_wsd/outer/lr", 1e-4),
        ("megatron_wsd/sync/inner_steps", 7),
        ("megatron_wsd/sync/mode", "async"),
        ("megatron_wsd/sync/fragments", 2),
        ("megatron_wsd/sync/controlled_delay", 1),
        ("megatron_wsd/outer/all_gated", "skip"),
        ("optimizer/params", {"lr": 1e-3}),
        ("megatron_wsd/model/num_layers", 3),
    ):
        assert parse_config(changed(path, value), islands=2, ranks=2).digest() != whole, path
    for path, value in (
        ("megatron_wsd/log/interval_steps", 1),
        ("megatron_wsd/checkpoint/keep", 9),
        ("megatron_wsd/islands", {"join_timeout_s": 77.0, "hang_timeout_s": 99.0}),
        ("megatron_wsd/sync/timeout_s", 7.0),
        ("megatron_wsd/sync/grace_s", 7.0),
        ("megatron_wsd/sync/poll_s", 7.0),
        ("megatron_wsd/data/cache_dir", "elsewhere"),
        ("megatron_wsd/data/corpora", {"broad": "/mnt/broad", "high_quality": "/mnt/high"}),
        ("tensorboard/enabled", False),
    ):
        assert parse_config(changed(path, value), islands=2, ranks=2).digest() == whole, path


def test_validation_does_not_change_what_it_was_given() -> None:
    raw = tiny()
    before = copy.deepcopy(raw)
    parse_config(raw, islands=2, ranks=2)
    assert raw == before


@pytest.mark.parametrize(
    ("content", "word"), [("{", "line 1"), ("[]", "json object"), ("", "an empty file"), ("\xff", "json")]
)
def test_unreadable_files(tmp_path: Path, content: str, word: str) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert word in str(caught.value)
    with pytest.raises(ConfigError, match="got nothing there"):
        load_config(tmp_path / "none.json")


def test_reading_a_config_imports_no_framework() -> None:
    code = (
        "import sys; from megatron_wsd.config import load_config; load_config(sys.argv[1]);"
        "bad = {'torch', 'deepspeed', 'megatron', 'torchft'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, str(TINY)], check=True, timeout=60)


def test_every_key_is_documented() -> None:
    page = (CONFIGS.parents[1] / "docs" / "configuration.md").read_text()
    for name, field in IslandJob.model_fields.items():
        kinds = getattr(field.annotation, "__args__", (field.annotation,))
        block = next((t for t in kinds if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if block is None:
            assert f"`{name}`" in page, name
            continue
        for key in block.model_fields:
            assert f"`{key}`" in page or f"`{name}.{key}`" in page, f"{name}.{key}"


def test_lengths_in_tokens_become_steps_of_all_islands() -> None:
    raw = changed(
        "scheduler/params", {"warmup_steps": "1000 samples", "decay_start": 99, "decay_steps": "20480 tokens"}
    )
    config = parse_config(raw, islands=2, ranks=2)  # a step is 16 sequences of 128 tokens
    assert config.schedule is not None
    assert (config.schedule.warmup_steps, config.schedule.decays[0].length) == (63, 10)
    assert config.resolved()["scheduler"]["params"]["decay_steps"] == 10
