"""What the trainer needs of a config, checked before any rank is started. Imports no torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from megatron_wsd.config import BLOCK, Config
from megatron_wsd.data.corpus import is_source
from megatron_wsd.data.epochs import Amount, amount_of
from megatron_wsd.data.indexed import check_pair
from megatron_wsd.data.mix import split_corpus
from megatron_wsd.data.prepare import refuse_tokenizer
from megatron_wsd.data.tokenizer import FIELD as TOKENIZER_FIELD
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


@dataclass
class Files:
    """What a look at the files of a config found.

    Attributes:
        problems: everything that the trainer would refuse.
        amounts: of the corpora that can be used, by name.
    """

    problems: list[DataError] = field(default_factory=list)
    amounts: dict[str, Amount] = field(default_factory=dict)


def look_at_files(config: Config) -> Files:
    """Whether corpora and tokenizer are there, fit together, and have a sample of the model's length.

    Reads sizes and first bytes; text is neither read nor tokenized, so it may still turn out too short.
    """
    found, data = Files(), config.data
    for name, spec in data.corpora.items():
        where = f"{BLOCK}.data.corpora.{name}"
        try:
            amount = _amount(where, spec, data.tokenizer)
            if config.model is not None:
                split_corpus(name, amount.tokens, config.model.seq_length, data.valid_fraction)
            found.amounts[name] = amount
            if not is_source(spec):
                refuse_tokenizer(name, check_pair(spec), data.tokenizer)
        except DataError as e:
            if e.field != TOKENIZER_FIELD:  # which is told once, below
                found.problems.append(e)
    try:
        tokenizer_identity(data.tokenizer)
    except DataError as e:
        found.problems.append(e)
    return found


def _amount(where: str, spec: str, tokenizer: str) -> Amount:
    try:
        return amount_of(spec, tokenizer)
    except DataError as e:
        told = e.got if is_source(spec) else f"{e.field}: {e.got}"
        raise DataError(where, e.expected, told, e.remedy) from None
    except OSError as e:  # no right to look there, a name that is too long
        raise DataError(where, "a path that can be read", f"{spec}: {e.strerror}", "Mend it.") from None


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
