"""`attach`: the outer loop beside a DeepSpeed engine; then `step` after every `engine.step()`."""

from __future__ import annotations

from typing import Any

import torch

from megatron_wsd.config import BLOCK, Config, parse_config
from megatron_wsd.diloco.decoupled import Decoupled
from megatron_wsd.diloco.island import IslandAddress
from megatron_wsd.diloco.lockstep import Lockstep
from megatron_wsd.diloco.outer_loop import OuterLoop
from megatron_wsd.diloco.script import Script
from megatron_wsd.errors import ConfigError
from megatron_wsd.shards.zero3 import Shards

__all__ = ["OuterLoop", "attach", "make_loop"]


def attach(
    engine: Any, config: Config | None = None, *, data_digest: int = 0, shards: Shards | None = None
) -> OuterLoop:
    """Put the outer loop beside a DeepSpeed engine, in a script of your own.

    From then on an ``engine.step()`` after which `OuterLoop.step` is not called is refused at the next one,
    and the loop writes the records by which `status` and `report` know the run.

    Must be called by all ranks of the island, after `deepspeed.initialize`, on the main thread. Waits for
    the other islands at the first `OuterLoop.step`, or when `OuterLoop.meet` is called.

    Args:
        engine: what `deepspeed.initialize` returned, ZeRO stage 3.
        config: a validated config; by default read from the block ``"megatron_wsd"`` of the engine's json.
        data_digest: non-negative int63 of the corpora; islands with different ones are refused.
        shards: where the parameters are, if not in DeepSpeed's ZeRO-3; then ``engine`` needs no more than
            ``global_steps``, ``train_batch_size()`` and ``gradient_accumulation_steps()``.

    Returns:
        The synchronous or the asynchronous form, as ``sync.mode`` says.

    Raises:
        ConfigError: the config is wrong, or its fragments do not fit the model.
        IslandError: not started by the launcher, or no lighthouse answers.
    """
    loop = make_loop(engine, config, data_digest=data_digest, shards=shards)
    loop.script = Script(engine, loop)
    return loop


def make_loop(
    engine: Any, config: Config | None = None, *, data_digest: int = 0, shards: Shards | None = None
) -> OuterLoop:
    """What `attach` does, for a trainer that writes the records of a run itself."""
    address = IslandAddress.from_environ()
    if config is None:
        raw = engine._config._param_dict
        if not isinstance(raw, dict) or BLOCK not in raw:
            raise ConfigError(
                BLOCK, "this block in the DeepSpeed json", "none", "Add it; {} takes the defaults."
            )
        ranks = torch.distributed.get_world_size()
        config = parse_config(dict(raw), "the DeepSpeed json", islands=address.islands, ranks=ranks)
    kind = Lockstep if config.sync.mode == "sync" else Decoupled
    return kind(engine, config, address, data_digest, shards)
