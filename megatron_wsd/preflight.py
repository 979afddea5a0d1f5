"""What the trainer needs of a config, checked before any rank is started. Imports no torch."""

from __future__ import annotations

import importlib.util

from megatron_wsd.config import BLOCK, Config
from megatron_wsd.data.corpus import is_source, open_source
from megatron_wsd.data.indexed import check_pair
from megatron_wsd.data.tokenizer import ByteTokenizer, tokenizer_identity
from megatron_wsd.errors import ConfigError, DataError


def check_trainer(config: Config) -> None:
    """That the config says what to train, and on which schedule.

    Raises:
        ConfigError: no model, no WSD schedule, no inner optimizer, or no peak of its rate.
    """
    model = config.model
    if model is None:
        raise ConfigError(f"{BLOCK}.model", "the shape of a GPTModel", "nothing", "Add the block.")
    scheduler, optimizer = config.deepspeed.get("scheduler", {}), config.deepspeed.get("optimizer", {})
    if config.schedule is None:
        got = scheduler.get("type", "nothing")
        raise ConfigError("scheduler.type", '"WSD"', got, "The trainer follows the WSD schedule.")
    if "type" not in optimizer:
        raise ConfigError("optimizer.type", '"AdamW", say', "nothing", "Name the inner optimizer.")
    max_lr, lr = scheduler["params"].get("max_lr"), optimizer.get("params", {}).get("lr")
    peak = lr if max_lr is None else max_lr
    if not any(peak if isinstance(peak, list) else [peak]):
        field = "optimizer.params.lr" if max_lr is None else "scheduler.params.max_lr"
        got = "nothing" if peak is None else peak
        raise ConfigError(field, "the peak of the schedule, above 0", got, "Name the rate.")
    bytes_need = ByteTokenizer.vocab_size
    if config.data.tokenizer == "byte" and (model.vocab_size or bytes_need) < bytes_need:
        raise ConfigError(
            f"{BLOCK}.model.vocab_size",
            f"at least {bytes_need}, the ids of the tokenizer byte",
            model.vocab_size,
            "Raise it, or remove the key.",
        )


def check_files(config: Config) -> None:
    """That the corpora can be opened, and the tokenizer is there.

    Raises:
        DataError: a corpus is missing, empty, or an .idx does not match its .bin; no tokenizer.
    """
    for name, spec in config.data.corpora.items():
        where = f"{BLOCK}.data.corpora.{name}"
        try:
            if is_source(spec):
                open_source(spec)
            else:
                check_pair(spec)
        except DataError as e:
            told = e.got if is_source(spec) else f"{e.field}: {e.got}"
            raise DataError(where, e.expected, told, e.remedy) from None
        except OSError as e:  # no right to look there, a name that is too long
            raise DataError(where, "a path that can be read", f"{spec}: {e.strerror}", "Mend it.") from None
    tokenizer_identity(config.data.tokenizer)


def check_packages(config: Config) -> None:
    """That this machine can load the tokenizer.

    Raises:
        DataError: transformers is missing.
    """
    if config.data.tokenizer != "byte" and importlib.util.find_spec("transformers") is None:
        raise DataError(
            f"{BLOCK}.data.tokenizer",
            "the package transformers for a tokenizer hf:PATH",
            "none",
            'Install it (pip install transformers), or use the tokenizer "byte".',
        )
