"""The table of DeepSpeed's and torch's names, held against those that are installed."""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS as INSTALLED_OPTIMIZERS
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from pydantic import BaseModel

from megatron_wsd.config import deepspeed_keys as table
from megatron_wsd.config import parse_config
from megatron_wsd.config.deepspeed_keys import OF_DEEPSPEED, TOP, ZERO, Kind
from megatron_wsd.config.keys import _newer_deepspeed, check_deepspeed, check_table
from megatron_wsd.errors import ConfigError

SECTIONS: list[tuple[str, Any, type[BaseModel]]] = [
    ("zero_optimization", ZERO, DeepSpeedZeroConfig),
    ("offload_param", ZERO["offload_param"], DeepSpeedZeroOffloadParamConfig),
    ("offload_optimizer", ZERO["offload_optimizer"], DeepSpeedZeroOffloadOptimizerConfig),
    ("bf16", TOP["bf16"], DeepSpeedBF16Config),
    ("fp16", TOP["fp16"], DeepSpeedFP16Config),
    ("tensorboard", TOP["tensorboard"], TensorBoardConfig),
    ("csv_monitor", TOP["csv_monitor"], CSVConfig),
    ("wandb", TOP["wandb"], WandbConfig),
    ("comet", TOP["comet"], CometConfig),
]
OLD = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
VALUES: list[Any] = [None, True, -1, 0, 1, 3, 1.5, 5e8, "x", "cpu", "auto", [], [1], {}, {"a": 1}]


def names_of(model: type[BaseModel]) -> set[str]:
    fields = model.model_fields
    return set(fields) | {f.alias for f in fields.values() if f.alias is not None}


@pytest.mark.parametrize(("name", "known", "model"), SECTIONS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_keys_are_those_of_the_installed_version(name: str, known: Any, model: type[BaseModel]) -> None:
    assert set(known) - OLD == names_of(model)


@pytest.mark.parametrize(("name", "known", "model"), SECTIONS, ids=lambda v: v if isinstance(v, str) else "")
def test_what_deepspeed_refuses_is_refused(name: str, known: Any, model: type[BaseModel]) -> None:
    for key in names_of(model) & {key for key, kind in known.items() if isinstance(kind, Kind)}:
        for value in VALUES:
            if value == "auto":  # DeepSpeed drops it without a word
                continue
            try:
                model(**{key: value})
            except (ValueError, TypeError, AssertionError):
                elsewhere = known[key] is table.ANY or key == "compute_grad_norm"  # refused by name
                if elsewhere or (known[key].words.startswith(table.OBJECT.words) and isinstance(value, dict)):
                    continue  # objects that nobody writes with islands are not looked into
                with pytest.raises(ConfigError, match=rf"^{name}\.{key}: expected "):
                    check_table({key: value}, known, f"{name}.")


def test_defaults_of_the_installed_version_pass() -> None:
    for _, known, model in SECTIONS:
        for key, field in model.model_fields.items():
            kind = known[field.alias or key]
            default = field.get_default(call_default_factory=True)
            if isinstance(kind, Kind) and not isinstance(default, BaseModel):
                assert kind.fits(default), (key, default)


def test_top_level_keys_that_deepspeed_asks_for_are_known() -> None:
    asked: set[str] = set()

    class Asked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    config = DeepSpeedConfig.__new__(DeepSpeedConfig)
    config._initialize_params(Asked(train_batch_size=4))
    assert len(asked) > 40
    parallel = {"pipeline", "tensor_parallel", "expert_parallel"}  # refused by name
    assert asked - set(TOP) == parallel


def test_optimizers_and_schedulers() -> None:
    assert {name.lower() for name in table.DEEPSPEED_OPTIMIZERS} == set(INSTALLED_OPTIMIZERS)
    classes = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert set(table.TORCH_OPTIMIZERS) == classes - {"Optimizer"}
    # those that take nothing but numbers and texts, as json can write them
    own = {
        name
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
    } - {"LRScheduler", "_LRScheduler", "ChainedScheduler", "SequentialLR"}
    assert set(table.SCHEDULERS) == {"WSD", *lr_schedules.VALID_LR_SCHEDULES, *own}


def test_params_of_adam() -> None:
    def params(kind: Any) -> set[str]:
        return set(inspect.signature(kind.__init__).parameters) - {"self", "params", "model_params"}

    assert set(table.TORCH_ADAM) == params(torch.optim.AdamW) | {"torch_adam", "adam_w_mode"}
    assert params(FusedAdam) | params(DeepSpeedCPUAdam) <= set(table.ADAM)


def test_a_key_that_is_like_no_other_may_be_of_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    strange: dict[str, Any] = {"shiny": 1, "zero_optimization": {"moonbeam": 2}}
    with pytest.raises(ConfigError, match="the unknown key 'shiny'"):
        check_deepspeed(strange)
    monkeypatch.setattr("megatron_wsd.config.keys._newer_deepspeed", lambda: True)
    check_deepspeed(strange)
    with pytest.raises(ConfigError, match="Did you mean 'overlap_comm'"):
        check_deepspeed({"zero_optimization": {"overlap_com": True}})


def test_the_version_of_the_tables_is_the_installed_one() -> None:
    assert tuple(map(int, deepspeed.__version__.split("+")[0].split(".")[:3])) == OF_DEEPSPEED
    assert not _newer_deepspeed()


def test_notes_may_stand_at_the_top_level() -> None:
    raw = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "_note": {"who": "me"}, "__x": 1}
    assert parse_config(raw).deepspeed["_note"] == {"who": "me"}


@pytest.mark.parametrize(
    "more",
    [
        {"zero_optimization": {"stage": 3, "cpu_offload": False}},
        {"communication_data_type": "FP32"},
        {"gradient_allreduce_op": "Mean"},
        {"data_types": {"grad_accum_dtype": "torch.float32"}},
        {"vocabulary_size": 50304},
    ],
    ids=str,
)
def test_what_deepspeed_takes_in_other_words_is_taken(more: dict[str, Any]) -> None:
    raw = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "megatron_wsd": {}}
    parse_config(raw | more, islands=1, ranks=1)
