"""What the trainer needs of a config, checked before any rank is started. Imports no torch."""

from __future__ import annotations

from megatron_wsd.config import BLOCK, Config
from megatron_wsd.data.corpus import is_source, open_source
from megatron_wsd.data.indexed import check_pair
from megatron_wsd.errors import ConfigError


def stop_step(config: Config, steps: int | None) -> int:
    """The inner step at which a run ends: that of the schedule, or ``--steps`` if it comes first.

    Raises:
        ConfigError: no model, no WSD schedule, or neither an end nor ``--steps``.
    """
    if config.model is None:
        raise ConfigError(f"{BLOCK}.model", "the shape of a GPTModel", "nothing", "Add the block.")
    if config.schedule is None:
        got = config.deepspeed.get("scheduler", {}).get("type", "nothing")
        raise ConfigError("scheduler.type", '"WSD"', got, "The trainer follows the WSD schedule.")
    ends = [n for n in (steps, config.schedule.end) if n is not None]
    if not ends:
        raise ConfigError(
            "--steps",
            "a number of inner steps, since the schedule has no end",
            "nothing",
            "Give --steps, or decay_start and decay_steps in scheduler.params.",
        )
    return min(ends)


def check_trainable(config: Config, steps: int | None) -> None:
    """Everything of `stop_step`, and that the corpora can be opened.

    Raises:
        ConfigError: see `stop_step`.
        DataError: a corpus is missing, empty, or an .idx does not match its .bin.
    """
    stop_step(config, steps)
    for spec in config.data.corpora.values():
        if is_source(spec):
            open_source(spec)
        else:
            check_pair(spec)
