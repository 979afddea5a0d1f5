"""The outer loop beside a DeepSpeed engine: what is common to its synchronous and its asynchronous form."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_wsd.checkpoint.outer import load_outer, save_outer
from megatron_wsd.config import Config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.diloco.agree import MAX_FRAGMENTS
from megatron_wsd.diloco.faults import Faults
from megatron_wsd.diloco.fragments import SyncPoints, plan_digest, plan_fragments
from megatron_wsd.diloco.inner_rate import InnerRate
from megatron_wsd.diloco.island import IslandAddress, IslandGroup
from megatron_wsd.diloco.journal import Journal
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.meeting import Meeting
from megatron_wsd.diloco.membership import Membership
from megatron_wsd.diloco.orders import Orders
from megatron_wsd.diloco.residence import residence_of
from megatron_wsd.diloco.round import OuterHalf, RoundResult
from megatron_wsd.diloco.script import Script
from megatron_wsd.diloco.state import OuterState, make_state
from megatron_wsd.errors import CheckpointError, ConfigError, MegatronWSDError
from megatron_wsd.metrics import Metrics, say
from megatron_wsd.monitors import Monitors
from megatron_wsd.schedule.deepspeed import WSD
from megatron_wsd.shards.zero3 import Shards, Zero3Shards

log = logging.getLogger(__name__)


def make_group(config: Config, islands: int, numel: int) -> IslandGroup:
    """A group over the ranks of this island that waits long enough for one of them in an exchange."""
    messages = islands * -(-4 * numel // config.sync.bucket_bytes) + 4
    patience = config.islands.join_timeout_s + config.islands.heartbeat_timeout_s
    return IslandGroup(patience + messages * config.sync.timeout_s + 60)


class OuterLoop(ABC):
    """The outer loop of one rank; see `attach`.

    Attributes:
        inner_step: inner steps that this island has trained, which is how far its data have come. In
            synchronous mode those of the run: it moves ahead at once when the island was left behind.
        last_round: the newest `RoundResult`; None before the first.
        stop_requested: asked while the loop waits for other islands; once it says True on one rank, the
            loop stops waiting. Set it to let a signal end the run.
        at_start: asked, in asynchronous mode, when the islands have met, for the orders with which a branch
            begins at the position that they have then; the same on all. Those that are known are left out.
        metrics: ``metrics.jsonl`` of this island in the run folder; silent on all ranks but the first.
        script: writes the records of a script of a user's own; None where our trainer does.
    """

    def __init__(
        self,
        engine: Any,
        config: Config,
        address: IslandAddress,
        data_digest: int = 0,
        shards: Shards | None = None,
    ) -> None:
        self._data_digest = data_digest
        self._engine, self._config, self._address = engine, config, address
        self._shards = shards or Zero3Shards(engine)
        parts = self._shards.shards
        plan = plan_fragments(parts, config.sync.fragments, config.sync.fragment_order)
        if len(plan) > MAX_FRAGMENTS:
            raise ConfigError("megatron_wsd.sync.fragments", f"at most {MAX_FRAGMENTS - 1}", len(plan) - 1)
        self._plan_digest = plan_digest(plan, parts)
        self.sync_points = SyncPoints(config.sync.inner_steps, len(plan))
        self._group = make_group(config, address.islands, sum(s.numel for s in parts))
        self._faults = Faults.from_environ(address.island, self._group.rank)
        self._state = make_state(config, self._shards, plan, residence_of(config))
        self._check_healing()
        self._local = Local(self._shards, plan, self._state, config, self._faults)
        if config.outer.anchor_dtype == "bf16" and int(engine.global_steps) == 0:
            # Such an anchor is not quite what the model was initialised to; training begins from the anchor.
            for i in range(len(plan)):
                self._local.adopt(i)
        where = address.run_dir if self._group.rank == 0 else None
        self.metrics = Metrics(
            where and where / f"island_{address.island}" / "metrics.jsonl",
            Monitors(getattr(engine, "monitor", None), config.island_batch),
        )
        self.metrics.position = lambda: self.position
        self._journal = Journal(self.metrics, address.islands, self._state)
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
        self._engine_step = int(engine.global_steps)
        self.inner_step = int(engine.global_steps)
        self._fresh = self.inner_step == 0
        self._resumed_with: tuple[int, ...] = ()
        self._rate = InnerRate(engine)
        self.last_round: RoundResult | None = None
        self.stop_requested: Callable[[], bool] = lambda: False
        self.at_start: Callable[[int], Sequence[Order]] = lambda position: ()
        self.script: Script | None = None

    def _check_healing(self) -> None:
        """The others wait for an island that is being healed, and go on without it if that takes too long."""
        islands = self._config.islands
        size = sum(t.numel() * t.element_size() for t in self._state.tensors().values())
        needs_s = 8e-6 * size / islands.heal_mbit_per_s
        if needs_s >= islands.join_timeout_s:
            raise ConfigError(
                "megatron_wsd.islands.join_timeout_s",
                f"more than {needs_s:.0f} s, in which a rank's {size / 1e9:.2f} GB of outer state come at "
                f"heal_mbit_per_s = {islands.heal_mbit_per_s:g}",
                islands.join_timeout_s,
                "Raise it, or heal_mbit_per_s to what the link gives each rank.",
            )

    # ---- what a script may ask ----

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
        """The ranks of this island, for the thread that trains."""
        return self._group

    @property
    def faults(self) -> Faults:
        """Those that are to be injected; mostly none."""
        return self._faults

    @property
    def outer_step(self) -> int:
        """Committed outer rounds."""
        return self._state.outer_step

    @property
    @abstractmethod
    def position(self) -> int:
        """Position of the schedule, in inner steps of the run; equal on all ranks of the island.

        In synchronous mode `inner_step`; else what all islands have committed plus what this one has trained
        since, times the live islands, over the number of islands; it never runs backwards.
        """

    @property
    def tokens(self) -> int:
        """Tokens over all islands: those committed, and this island's since then times the live islands."""
        live = self.last_round.decision if self.last_round else None
        own = self._local.uncommitted(self.island)[1] // len(self._state.fragments)
        return self._state.tokens + own * (len(live.reports) if live else 1)

    @property
    def parameters(self) -> int:
        """Elements of the whole model that are trained."""
        return sum(shard.global_numel for shard in self._shards.shards)

    @property
    def uncounted(self) -> int:
        """Updates of the engine that `step` has not counted yet."""
        return int(self._engine.global_steps) - self._engine_step

    @property
    def orders(self) -> list[dict[str, Any]]:
        """Orders of the operator that all islands have committed, oldest first; see `control.Order`."""
        return self._state.orders

    @property
    def state(self) -> OuterState:
        """Anchors and outer optimizers of this rank's shard."""
        return self._state

    # ---- meeting ----

    def _joined(self) -> OuterHalf:
        if self._half is None:
            group = self._round_group()
            self._seat = Membership(self._address, group, self._config)
            self._seat.stopping = lambda: self.stop_requested()
            if self._address.run_dir is not None:
                self._seat.roll.consent = self._address.run_dir / "control" / "go-on"
            if self._resumed_with:
                self._seat.roll.resume(self._resumed_with)
            if self._group.rank == 0:
                self._seat.lighthouse.start(self._note_lighthouse)
            self._half = OuterHalf(
                self._config,
                self._address.island,
                group,
                self._seat,
                self._state,
                self._data_digest,
                self._plan_digest,
                self._faults,
            )
            self._half.on_commit = self._local.committed
            self._obey()
        return self._half

    def _note_lighthouse(self, answers: bool, told: str) -> None:
        self.metrics.event("lighthouse", self.inner_step, told, answers=answers)

    def _round_group(self) -> IslandGroup:
        """The ranks of this island, for whoever runs rounds."""
        return self._group

    def meet(self) -> RoundResult:
        """Wait for the other islands, compare configs and weights, take over their state if behind.

        Called once after a start; `step` does it if the caller did not. A fresh run waits for all
        islands; a resumed one goes on without the missing after ``start_timeout_s`` if enough are there and
        those who are not cannot have gone on without it, see `RollCall`.

        Raises:
            IslandError: islands are missing, or differ in config, corpora, fragments or initial weights.
            StopRequested: `stop_requested` said so.
        """
        half = self._joined()
        if self.script is not None:
            self.script.begin()
        taken = [f.taken.get(self.island) for f in self._state.fragments]
        meeting = Meeting(half, self._config, self._address, self._group, lambda: self.stop_requested())
        result = meeting.hold(lambda: self.position, self._met)
        half.settled = True
        self.last_round = result
        for f, state, before in zip(self._local.fragments, self._state.fragments, taken, strict=True):
            if f.error is not None and state.taken.get(self.island) != before:
                f.error.zero_()  # a contribution after that of the checkpoint has told it already
        self._started()
        if self._fresh and self.outer_step > 0:
            steps = self._rate.begin_rewarm()
            if steps and self._group.rank == 0:
                say(f"no inner moments: the rate rises over {steps} steps on this island")
        return result

    @abstractmethod
    def _met(self, result: RoundResult) -> None:
        """One round of the meeting is over: take over what it brought."""

    @abstractmethod
    def _started(self) -> None:
        """The meeting is over."""

    # ---- training ----

    def step(
        self, tokens: int | None = None, *, loss: float | torch.Tensor | None = None
    ) -> RoundResult | None:
        """To be called after every `engine.step()`, by all ranks of the island.

        Counts the inner step if the engine has just applied one. Synchronous: at a sync point it runs a
        round, and on return the island holds the new anchor. Asynchronous: it takes what is to be sent, and
        adopts what has come meanwhile.

        Args:
            tokens: of the island's inner step; by default its samples are counted.
            loss: of this rank's batch, one number (nats a token), for `status` and `report`: every
                ``log.interval_steps`` the mean over batches and ranks is recorded. Of a tensor the value is
                read only then.

        Returns:
            The newest round that the island has adopted something of just now, or None.

        Raises:
            IslandError: too many void rounds in a row, or islands that cannot work together.
            ConfigError: ``tokens`` is no whole number from 1 on, or ``loss`` not one number.
        """
        if tokens is not None and (isinstance(tokens, bool) or int(tokens) != tokens or tokens < 1):
            raise ConfigError("tokens", "a whole number from 1 on, of the island's inner step", tokens)
        if self._half is None or not self._half.settled:
            self.meet()
        if self.script is not None and loss is not None:
            self.script.add(loss)
        if self.uncounted == 0:
            return None
        self._rate.follow_skipped_update(self.position)
        self._engine_step = int(self._engine.global_steps)
        self.inner_step += 1
        step, counted = self.inner_step, int(self._engine.train_batch_size()) if tokens is None else tokens
        self._local.count(counted)
        result = self._advance()
        self._rate.rewarm()
        if self.script is not None:
            self.script.stepped(step, counted)
        return result

    @abstractmethod
    def _advance(self) -> RoundResult | None:
        """One more inner step has been counted."""

    def finish(self) -> RoundResult | None:
        """A last round for what was trained since the newest one; None if that is nothing.

        All ranks of the island must call it. After it `close` records that the run has finished.

        Raises:
            ConfigError: the engine has made updates that `step` was not called after.
        """
        if self.script is not None:
            self.script.check()
            self.script.record()
        result = self._finish()
        if self.script is not None:
            self.script.finished(result)
        return result

    @abstractmethod
    def _finish(self) -> RoundResult | None:
        """The last round, or rounds."""

    @abstractmethod
    def round_due(self) -> bool:
        """Whether the next `step` after one more inner step would run a round; False in asynchronous mode."""

    def committed(self) -> dict[str, int]:
        """``outer_step``, ``position`` and ``tokens`` of what rounds have committed, which is the anchor."""
        return {"outer_step": self.outer_step, "position": self.position, "tokens": self._state.tokens}

    @contextmanager
    def anchor_weights(self) -> Iterator[dict[str, int]]:
        """While it is open the island holds the anchor, for a validation; all ranks must use it.

        Gives what `committed` said when the anchor was taken: rounds may go on meanwhile.
        """
        anchors, committed = self._anchors()
        held = self._local.hold()
        self._local.restore(anchors)
        try:
            yield committed
        finally:
            self._local.restore(held)

    @abstractmethod
    def alive(self, more_s: float = 0.0) -> None:
        """Tell the watch over hangs that this rank is well; to be called in what is long between two `step`.

        Args:
            more_s: seconds that the next thing may take beyond ``islands.hang_timeout_s``, as a checkpoint.
        """

    def ready(self) -> bool:
        """Whether the outer state is whole, so that a checkpoint or a validation need not wait.

        False while this island is being healed, in asynchronous mode; all ranks must call it.
        """
        return self._group.all_agree(self._state.outer_step >= 0)

    @abstractmethod
    def _anchors(self) -> tuple[list[torch.Tensor], dict[str, int]]:
        """All anchors at one moment, equal in version on all ranks of the island; and `committed` then."""

    # ---- orders ----

    def carry_out(self, order: Order) -> None:
        """Carry out an order that all islands know already, as that of a branch at its beginning.

        Raises:
            MegatronWSDError: the schedule refuses it.
        """
        entry = {**order.model_dump(mode="json"), "number": order.number, "step": self.position}
        self._state.orders.append(entry)
        self._obey()
        if "refused" in entry:
            raise MegatronWSDError(f"the decay of this branch is refused: {entry['refused']}")

    def _obey(self) -> None:
        """Carry out new orders, and let the outer rate follow the schedule that results."""
        schedule = self._orders.carry_out(self.position, inner_step=self.inner_step)
        if schedule is not None and self._half is not None:
            self._half.schedule = schedule

    # ---- moving, saving, leaving ----

    def _move_to(self, inner_step: int, position: int) -> None:
        """Stand where the outer state stands: step counters of the engine, schedule, data."""
        self.inner_step = self._engine_step = inner_step
        self._engine.global_steps = inner_step
        self._engine.global_samples = inner_step * self._engine.train_batch_size()
        self._engine.micro_steps = inner_step * self._engine.gradient_accumulation_steps()
        self._rate.place(position, self._engine_step)

    def digest(self) -> int:
        """Of the outer state over all ranks of the island; all ranks must call it."""
        return self._joined().refresh_digest()

    def save(self, folder: str | Path) -> None:
        """Write the outer state beside the engine's checkpoint; all ranks of the island must call it.

        One safetensors file a rank and a json manifest, complete or not there at all.
        """
        self._faults.here("checkpoint", self._state.outer_step)
        self._write(Path(folder))

    def _write(self, folder: Path) -> None:
        if self._state.outer_step < 0:
            raise CheckpointError(
                str(folder),
                "a whole outer state to write",
                "one that a failed step or healing has torn",
                "Go on from an older checkpoint, or from another island's.",
            )
        extra = {
            "inner_step": self.inner_step,
            "position": self.position,
            "tokens": self.tokens,
            "orders": self._orders.done,
            "met": list(self._resumed_with if self._seat is None else self._seat.roll.met),
            "since": [[f.version, f.steps, f.tokens] for f in self._local.fragments],
            **self._own_facts(),
        }
        errors = {f"{i}.error": f.error for i, f in enumerate(self._local.fragments) if f.error is not None}
        save_outer(folder, self._state, self._config, self._group, extra, errors)

    def _own_facts(self) -> dict[str, Any]:
        """What else `_loaded` needs."""
        return {}

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote; to be called after the engine's checkpoint was loaded, before `meet`.

        Raises:
            CheckpointError: it is torn, or belongs to another model, config or number of ranks.
        """
        errors = {f"{i}.error": f.error for i, f in enumerate(self._local.fragments) if f.error is not None}
        extra = load_outer(Path(folder), self._state, self._config, self._group, errors)
        self.inner_step = extra["inner_step"]
        self._engine_step = int(self._engine.global_steps)
        if self._engine_step != self.inner_step:
            raise CheckpointError(
                str(folder),
                f"the outer state of step {self._engine_step}, to which the engine was loaded",
                f"that of step {self.inner_step}",
                "Load both from the same checkpoint, the engine's first.",
            )
        self._loaded(extra)
        self._orders.loaded(extra["orders"])
        self._resumed_with = tuple(i for i in extra.get("met", ()) if i < self._address.islands)
        if self._half is not None:
            self._half.refresh_digest()

    @abstractmethod
    def _loaded(self, extra: dict[str, Any]) -> None:
        """Go on from what `_write` has written beside the outer state."""

    def close(self) -> None:
        """Leave the other islands, and close the metrics.

        The run has finished if `finish` was called before, else it was stopped.
        """
        if self.script is not None:
            self.script.close()
        self.metrics.close()
        if self._half is not None:
            self._half.close()
        if self._seat is not None:
            self._seat.shutdown()
            self._seat = None
