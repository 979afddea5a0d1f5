"""The outer loop beside a DeepSpeed engine: `attach`, then `step` after every `engine.step()`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_wsd.checkpoint.outer import load_outer, save_outer
from megatron_wsd.config import BLOCK, Config, parse_config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.capture import Contribution, capture
from megatron_wsd.diloco.island import IslandAddress, IslandGroup
from megatron_wsd.diloco.journal import Journal
from megatron_wsd.diloco.membership import Membership
from megatron_wsd.diloco.orders import Orders
from megatron_wsd.diloco.round import OuterHalf, OuterState, RoundResult
from megatron_wsd.errors import (
    CheckpointError,
    ConfigError,
    GaveUp,
    IslandError,
    ScheduleError,
    StopRequested,
)
from megatron_wsd.metrics import Metrics, say
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key, wants_8bit
from megatron_wsd.optim.outer import OuterHyper, make_outer
from megatron_wsd.schedule.deepspeed import WSD
from megatron_wsd.shards.zero3 import Zero3Shards

log = logging.getLogger(__name__)


def attach(engine: Any, config: Config | None = None, *, data_digest: int = 0) -> OuterLoop:
    """Put the outer loop beside a DeepSpeed engine.

    Must be called by all ranks of the island, after `deepspeed.initialize`, on the main thread. Waits for
    the other islands at the first `OuterLoop.step`, or when `OuterLoop.meet` is called.

    Args:
        engine: what `deepspeed.initialize` returned, ZeRO stage 3.
        config: a validated config; by default read from the block ``"megatron_wsd"`` of the engine's json.
        data_digest: non-negative int63 of the corpora; islands with different ones are refused.

    Raises:
        ConfigError: the config is wrong.
        IslandError: not started by the launcher, or no lighthouse answers.
    """
    address = IslandAddress.from_environ()
    if config is None:
        raw = engine._config._param_dict
        if not isinstance(raw, dict) or BLOCK not in raw:
            raise ConfigError(
                BLOCK, "this block in the DeepSpeed json", "none", "Add it; {} takes the defaults."
            )
        ranks = torch.distributed.get_world_size()
        config = parse_config(dict(raw), "the DeepSpeed json", islands=address.islands, ranks=ranks)
    return OuterLoop(engine, config, address, data_digest)


class OuterLoop:
    """The synchronous outer loop of one rank.

    Attributes:
        inner_step: inner steps of the run; moves ahead at once when this island was left behind.
        last_round: the newest `RoundResult`; None before the first.
        stop_requested: asked while the loop waits for other islands; once it says True on one rank, the
            loop stops waiting. Set it to let a signal end the run.
        metrics: ``metrics.jsonl`` of this island in the run folder; silent on all ranks but the first.
    """

    def __init__(self, engine: Any, config: Config, address: IslandAddress, data_digest: int = 0) -> None:
        self._data_digest = data_digest
        self._engine, self._config, self._address = engine, config, address
        self._shards = Zero3Shards(engine)
        layout = FlatLayout(
            [
                Segment(
                    name=s.name,
                    key=parameter_key(s.name),
                    numel=s.numel,
                    element0=s.start,
                    quantised=config.outer.state_bits == 8 and wants_8bit(s.name, s.global_numel, s.shape),
                )
                for s in self._shards.shards
            ]
        )
        # One agreement may have to wait while another rank sits out a quorum and a whole exchange.
        messages = address.islands * -(-4 * layout.total // config.sync.bucket_bytes) + 4
        patience = config.islands.join_timeout_s + config.islands.heartbeat_timeout_s
        self._group = IslandGroup(patience + messages * config.sync.timeout_s + 60)
        dtype = torch.bfloat16 if config.outer.anchor_dtype == "bf16" else torch.float32
        anchor = torch.zeros(layout.total, dtype=dtype)
        self._shards.read(layout.views(anchor))
        if dtype is torch.bfloat16 and int(engine.global_steps) == 0:
            # Such an anchor is not quite what the model was initialised to; training begins from the anchor.
            self._shards.write(layout.views(anchor))
        outer = config.outer
        hyper = OuterHyper(
            lr=outer.lr,
            betas=outer.betas,
            eps=outer.eps,
            weight_decay=outer.weight_decay,
            momentum=outer.momentum if outer.optimizer == "nesterov" else 0.0,
            nesterov=outer.optimizer == "nesterov",
            seed=config.data.seed,
        )
        self._state = OuterState(layout, anchor, make_outer(outer.optimizer, layout, hyper, dtype))
        self._scratch = torch.zeros(layout.total, dtype=torch.float32)
        where = address.run_dir if self._group.rank == 0 else None
        self.metrics = Metrics(
            where and where / f"island_{address.island}" / "metrics.jsonl", getattr(engine, "monitor", None)
        )
        self._journal = Journal(self.metrics, self._group, address.islands)
        scheduler: Any = getattr(engine, "lr_scheduler", None)
        if isinstance(scheduler, WSD) and scheduler.schedule.unit != "steps":
            raise ConfigError(
                "scheduler.params",
                "lengths in steps, which rounds count in",
                f"a schedule in {scheduler.schedule.unit}",
                "Divide by the batch of all islands.",
            )
        control = None if address.run_dir is None else ControlFolder(address.run_dir)
        self._orders = Orders(control, self._group, self._state, self._journal, scheduler)
        self._half: OuterHalf | None = None
        self._seat: Membership | None = None
        self._steps_since_base = 0
        self._tokens_since_base = 0
        self._engine_step = int(engine.global_steps)
        self.inner_step = int(engine.global_steps)
        self.last_round: RoundResult | None = None
        self.stop_requested: Callable[[], bool] = lambda: False

    @property
    def config(self) -> Config:
        """The validated config."""
        return self._config

    @property
    def island(self) -> int:
        """Number of this island."""
        return self._address.island

    @property
    def group(self) -> IslandGroup:
        """The ranks of this island."""
        return self._group

    @property
    def outer_step(self) -> int:
        """Committed outer rounds."""
        return self._state.outer_step

    @property
    def tokens(self) -> int:
        """Tokens over all islands: those committed, and this island's since then times the live islands."""
        live = self.last_round.decision if self.last_round else None
        return self._state.tokens + self._tokens_since_base * (len(live.reports) if live else 1)

    @property
    def orders(self) -> list[dict[str, Any]]:
        """Orders of the operator that all islands have committed, oldest first; see `control.Order`."""
        return self._state.orders

    @property
    def state(self) -> OuterState:
        """Anchor and outer optimizer of this rank's shard."""
        return self._state

    def _joined(self) -> OuterHalf:
        if self._half is None:
            self._seat = Membership(self._address, self._group, self._config)
            self._half = OuterHalf(
                self._config, self._address.island, self._group, self._seat, self._state, self._data_digest
            )
            self._obey()
        return self._half

    def meet(self) -> RoundResult:
        """Wait for the other islands, compare configs and weights, take over their state if behind.

        Called once after a start; `step` does it if the caller did not. A fresh run waits for all
        islands; a resumed one goes on without the missing after ``start_timeout_s`` if enough are there.

        Raises:
            IslandError: islands are missing, or differ in config, corpora or initial weights.
            StopRequested: `stop_requested` said so.
        """
        half = self._joined()
        count, islands = self._address.islands, self._config.islands
        started, told = time.monotonic(), 0.0
        while True:
            result = half.run_round(None, self.inner_step)
            if result.committed or result.healed:
                self._adopt(result)
                self._journal.note(result, self.inner_step)
            here = result.decision.islands if result.decision else (self._address.island,)
            under_way = result.decision is not None and any(r.settled for r in result.decision.reports)
            if not result.void and (len(here) == count or result.committed or under_way):
                break
            if not self._group.all_agree(not self.stop_requested()):
                raise StopRequested("stopped while waiting for the other islands")
            if result.void and result.seconds > islands.join_timeout_s:
                started = time.monotonic()  # others are alive and have not come to their round yet
            waited = time.monotonic() - started
            late = self._group.broadcast([int(waited > islands.start_timeout_s)])[0]
            missing = sorted(set(range(count)) - set(here))
            if late and not result.void and self.outer_step > 0 and len(here) >= (islands.min_islands or 1):
                log.warning("going on with islands %s of %d", list(here), count)
                break
            if late:
                raise IslandError(
                    "megatron_wsd.islands.start_timeout_s",
                    f"all {count} islands within {islands.start_timeout_s:g} s",
                    f"none of islands {missing}" + (f" ({result.reason})" if result.void else ""),
                    "Look at their logs, start them, or raise the timeout.",
                )
            if waited - told > 10 and self._group.rank == 0:
                told = waited
                say(f"waiting for islands {missing}")
            time.sleep(0.5)
        half.settled = True
        self.last_round = result
        if self._steps_since_base >= self._config.sync.inner_steps:
            self._round()  # it was stopped while it waited for this one
        return result

    def round_due(self) -> bool:
        """Whether the next `step` after one more inner step would run a round."""
        return self._steps_since_base + 1 >= self._config.sync.inner_steps

    def step(self, tokens: int | None = None) -> RoundResult | None:
        """To be called after every `engine.step()`, by all ranks of the island.

        Counts the inner step if the engine has just applied one, and after ``inner_steps`` of them runs a
        synchronous round: on return the island holds the new anchor.

        Args:
            tokens: of the island's inner step; by default its samples are counted.

        Returns:
            The round, or None if none was due.

        Raises:
            IslandError: too many void rounds in a row, or islands that cannot work together.
        """
        if self._half is None or not self._half.settled:
            self.meet()
        if int(self._engine.global_steps) == self._engine_step:
            return None
        self._follow_skipped_update()
        self._engine_step = int(self._engine.global_steps)
        self.inner_step += 1
        self._steps_since_base += 1
        self._tokens_since_base += int(self._engine.train_batch_size()) if tokens is None else tokens
        if self._steps_since_base < self._config.sync.inner_steps:
            return None
        return self._round()

    def _follow_skipped_update(self) -> None:
        """DeepSpeed does not step the scheduler with an update that it skips for a gradient of NaN or Inf.

        Islands count steps, not updates: else one of them would run at another rate for good.
        """
        scheduler: Any = getattr(self._engine, "lr_scheduler", None)
        position = getattr(scheduler, "num_updates", None)
        if position is not None and position < self.inner_step + 1 and hasattr(scheduler, "set_position"):
            scheduler.set_position(self.inner_step + 1)

    def finish(self) -> RoundResult | None:
        """A last round for what was trained since the newest one; None if that is nothing."""
        return self._round() if self._steps_since_base else None

    def _round(self) -> RoundResult:
        half = self._joined()
        contribution: Contribution | None = capture(
            self._shards,
            self._state.layout,
            self._state.anchor,
            self._scratch,
            version=self._state.outer_step,
            steps=self._steps_since_base,
            tokens=self._tokens_since_base,
        )
        voids = 0
        while True:
            result = half.run_round(contribution, self.inner_step, self._withdraw, self._orders.proposed())
            self.last_round = result
            if not result.void:
                break
            voids += 1
            self._journal.note_void(result, self.inner_step, self.outer_step)
            if result.healed:
                contribution = None  # it was trained from a version that this island no longer holds
            if not self._group.all_agree(not self.stop_requested()):
                return result  # the progress stays local, and is offered after a resume
            log.warning("round void (%d in a row): %s", voids, result.reason)
            if voids >= self._config.sync.max_voids:
                raise GaveUp(
                    "megatron_wsd.sync.max_voids",
                    f"a round that commits within {self._config.sync.max_voids} attempts",
                    result.reason,
                    "Look at the network between the islands; go on with --resume.",
                )
            time.sleep(min(0.1 * 2**voids, 5.0))
        self._adopt(result)
        self._journal.note(result, self.inner_step)
        return result

    def carry_out(self, order: Order) -> None:
        """Carry out an order that all islands know already, as that of a branch at its beginning.

        Raises:
            ScheduleError: the schedule refuses it.
        """
        entry = {**order.model_dump(mode="json"), "number": order.number, "step": self.inner_step}
        self._state.orders.append(entry)
        self._obey()
        if "refused" in entry:
            raise ScheduleError("branch", "a decay that fits the schedule", str(entry["refused"]))

    def _obey(self) -> None:
        """Carry out new orders, and let the outer rate follow the schedule that results."""
        schedule = self._orders.carry_out(self.inner_step)
        if schedule is not None and self._half is not None:
            self._half.schedule = schedule

    def _withdraw(self, decision: Decision) -> bool:
        """Whether to leave a round because the run is being stopped and the others have left already.

        To commit it alone would set this island apart from what all would have done together.
        """
        before = self.last_round.decision if self.last_round else None
        fewer = before is not None and len(decision.reports) < len(before.reports)
        return fewer and not self._group.all_agree(not self.stop_requested())

    def _adopt(self, result: RoundResult) -> None:
        """Make the island hold the anchor, and stand where the others stand."""
        self._shards.write(self._state.layout.views(self._state.anchor))
        self._steps_since_base = self._tokens_since_base = 0
        self._obey()
        ahead = result.decision.inner_step if result.decision else self.inner_step
        if ahead != self.inner_step:
            self.inner_step = ahead
            self._engine.global_steps = ahead
            self._engine.global_samples = ahead * self._engine.train_batch_size()
            self._engine.micro_steps = ahead * self._engine.gradient_accumulation_steps()
            self._engine_step = ahead
            scheduler: Any = getattr(self._engine, "lr_scheduler", None)
            if hasattr(scheduler, "set_position"):
                scheduler.set_position(ahead)
            elif scheduler is not None:
                log.warning("%s cannot be moved to step %d: its rate is behind", type(scheduler), ahead)

    def digest(self) -> int:
        """Of the outer state over all ranks of the island; all ranks must call it."""
        return self._joined().refresh_digest()

    def save(self, folder: str | Path) -> None:
        """Write the outer state beside the engine's checkpoint; all ranks of the island must call it.

        One safetensors file a rank and a json manifest, complete or not there at all.
        """
        extra = {
            "steps_since_base": self._steps_since_base,
            "tokens_since_base": self._tokens_since_base,
            "inner_step": self.inner_step,
        }
        save_outer(Path(folder), self._state, self._config, self._group, extra)

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote; to be called after the engine's checkpoint was loaded, before `meet`.

        Raises:
            CheckpointError: it is torn, or belongs to another model, config or number of ranks.
        """
        extra = load_outer(Path(folder), self._state, self._config, self._group)
        self._steps_since_base = extra["steps_since_base"]
        self._tokens_since_base = extra["tokens_since_base"]
        self.inner_step = extra["inner_step"]
        self._engine_step = int(self._engine.global_steps)
        if self._engine_step != self.inner_step:
            raise CheckpointError(
                str(folder),
                f"the outer state of step {self._engine_step}, to which the engine was loaded",
                f"that of step {self.inner_step}",
                "Load both from the same checkpoint, the engine's first.",
            )
        self._orders.loaded()
        if self._half is not None:
            self._half.refresh_digest()

    def close(self) -> None:
        """Leave the other islands, and close the metrics."""
        self.metrics.close()
        if self._seat is not None:
            self._seat.shutdown()
            self._seat = None
