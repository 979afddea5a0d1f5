"""What the trainer needs of a config, checked before any rank is started. Imports no torch."""

from __future__ import annotations

from megatron_wsd.config import BLOCK, Config
from megatron_wsd.data.corpus import is_source, open_source
from megatron_wsd.data.indexed import check_pair
from megatron_wsd.errors import ConfigError


def check_trainer(config: Config) -> None:
    """That the config says what to train, and on which schedule.

    Raises:
        ConfigError: no model, or no WSD schedule.
    """
    if config.model is None:
        raise ConfigError(f"{BLOCK}.model", "the shape of a GPTModel", "nothing", "Add the block.")
    if config.schedule is None:
        got = config.deepspeed.get("scheduler", {}).get("type", "nothing")
        raise ConfigError("scheduler.type", '"WSD"', got, "The trainer follows the WSD schedule.")
    if "type" not in config.deepspeed.get("optimizer", {}):
        raise ConfigError("optimizer.type", '"AdamW", say', "nothing", "Name the inner optimizer.")
    if config.deepspeed.get("fp16", {}).get("enabled"):
        raise ConfigError("fp16.enabled", "bf16 or fp32", True, "Islands do not agree on loss scales.")


def check_trainable(config: Config) -> None:
    """Everything of `check_trainer`, and that the corpora can be opened.

    Raises:
        ConfigError: see `check_trainer`.
        DataError: a corpus is missing, empty, or an .idx does not match its .bin.
    """
    check_trainer(config)
    for spec in config.data.corpora.values():
        if is_source(spec):
            open_source(spec)
        else:
            check_pair(spec)
