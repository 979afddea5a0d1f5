"""The trainer: one rank of one island, from the json to the last checkpoint.

Started by the real `deepspeed` launcher through ``launch/train.py``.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_wsd.config import Config, load_config
from megatron_wsd.control import Order
from megatron_wsd.diloco.watch import LossWatch
from megatron_wsd.errors import GaveUp, MegatronWSDError, NotFiniteError, StopRequested
from megatron_wsd.fallback import refuse_unhealed, whole_start
from megatron_wsd.lineage import Parent
from megatron_wsd.metrics import say, say_at_once, set_up_logging
from megatron_wsd.models.utilisation import Window, peak_tflops, utilisation, was_clipped
from megatron_wsd.monitors import finish_monitors, monitors_of
from megatron_wsd.preflight import check_trainer
from megatron_wsd.resume import Start, starting_point
from megatron_wsd.rundir import STOP

# What `islands.hang_timeout_s` does not count: writing a checkpoint, and compiling in the first step.
_LONGEST_SAVE_S = _LONGEST_START_S = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit status for the launcher: 0 well, 2 an error the user can mend, 1 anything else."""
    parser = argparse.ArgumentParser(description="Train one rank of one island.")
    parser.add_argument("--config", required=True, help="the json config")
    parser.add_argument("--run-dir", required=True, type=Path, help="the run folder")
    parser.add_argument("--steps", type=int, help="stop after this many inner steps in all")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    args = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    island = os.environ.get("MEGATRON_WSD_ISLAND", "0")
    set_up_logging(island, rank)
    trainer: Trainer | None = None
    try:
        config = load_config(
            args.config,
            islands=int(os.environ["MEGATRON_WSD_ISLANDS"]) if "MEGATRON_WSD_ISLANDS" in os.environ else None,
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
        )
        trainer = Trainer(config, args.run_dir, args.steps, resume=args.resume)
        trainer.run()
        status = 0
    except StopRequested as e:
        say(f"{e}; nothing to save")
        status = 128 + signal.SIGTERM
    except MegatronWSDError as e:
        say(f"error: island {island} rank {rank}: {e}")
        if os.environ.get("MEGATRON_WSD_DEBUG"):
            traceback.print_exc()
        status = 2
    except OSError as e:
        say(f"error: island {island} rank {rank}: {e.filename or 'system'}: {e.strerror or e}")
        traceback.print_exc()
        status = 2
    except Exception:
        traceback.print_exc()
        status = 1
    finish_monitors(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Native threads of torchft and gloo outlive a normal exit, and a rank that failed must not sit in a
    # collective at exit while its siblings wait.
    os._exit(status)


class Trainer:
    """Everything one rank holds while it trains.

    Args:
        config: the validated config.
        run_dir: the run folder.
        steps: stop after this many inner steps in all; None: at the end of the schedule.
        resume: go on from the newest complete checkpoint.

    Raises:
        MegatronWSDError: of the kind that fits, before anything slow where that is possible.
    """

    def __init__(self, config: Config, run_dir: Path, steps: int | None, *, resume: bool) -> None:
        self.config, self.run_dir = config, run_dir
        self._stop_requested = False
        self._validated = ("", -1)
        self._validations = 0
        self._steps = steps
        check_trainer(config)
        self._setup(resume)

    @property
    def stop_at(self) -> int | None:
        """The step of the run at which it ends as things stand; None while there is no end."""
        ends = [n for n in (self._steps, self.engine.lr_scheduler.schedule.end) if n is not None]
        return min(ends, default=None)

    def _there(self) -> bool:
        stop_at = self.stop_at
        return stop_at is not None and self.outer.position >= stop_at

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._stop_requested and self.rank == 0:
            say_at_once(f"{signal.Signals(number).name}: stops after this step, or round, and saves")
        self._stop_requested = True

    def _asked_to_stop(self) -> bool:
        """By a signal, or by the file with which an island's launcher reaches the ranks of other machines.

        A shared disk that is away for a moment says that there is none (`Path.exists` would raise).
        """
        return self._stop_requested or os.path.exists(self.folder / STOP)

    # ---- set-up, in the order in which things can be wrong ----

    def _setup(self, resume: bool) -> None:
        import torch

        from megatron_wsd.data.feed import Feed
        from megatron_wsd.diloco.island import IslandAddress
        from megatron_wsd.diloco.residence import check_residence
        from megatron_wsd.models.cpu import prepare_for_cpu, without_shm_comm

        if not torch.cuda.is_available():
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.address = IslandAddress.from_environ()
        self.folder = self.run_dir / f"island_{self.address.island}"
        check_residence(self.config)
        prepare_for_cpu()
        without_shm_comm()
        import deepspeed
        from megatron.core import parallel_state

        logging.getLogger("DeepSpeed").setLevel(os.environ.get("DS_LOG_LEVEL", "WARNING").upper())
        deepspeed.init_distributed()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=self.config.tensor_parallel)
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # The ranks of one tensor parallel group read the same samples.
        self.readers = parallel_state.get_data_parallel_world_size()
        self.reader = parallel_state.get_data_parallel_rank()
        self.device = torch.device(deepspeed.get_accelerator().current_device_name())
        self.feed = Feed(self.config, self.run_dir, self.address, self.reader, self.readers)
        self._build_engine()
        self._attach(resume)

    def _build_engine(self) -> None:
        import torch

        from megatron_wsd.data.tokenizer import load_tokenizer
        from megatron_wsd.models.engine import build_engine
        from megatron_wsd.models.gpt import CausalInputs, resolve_vocab
        from megatron_wsd.planner.model import flops_per_token

        model = self.config.model
        assert model is not None
        vocab = resolve_vocab(model, load_tokenizer(self.config.data.tokenizer).vocab_size)
        self.feed.corpora.check_vocab(vocab)
        ds = dict(self.config.deepspeed)
        ds.setdefault("steps_per_print", 10**9)
        ds = monitors_of(ds, self.run_dir, self.address.island)
        self.built = build_engine(self.config, ds, vocab)
        self.engine = self.built.engine
        self.inputs = CausalInputs(self.device, self.built.spec)
        self._flops_per_token = flops_per_token(model, vocab)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        known = peak_tflops(name, bf16=self._precision() == "bf16")
        self._peak_tflops = self.config.log.peak_tflops or known

    def _attach(self, resume: bool) -> None:
        from megatron_wsd.checkpoint.run import RunCheckpoints
        from megatron_wsd.diloco.loop import make_loop

        self.checkpoints = RunCheckpoints(self.folder / "checkpoints", self.config, self.built.inner.family)
        start, damaged = self._choose_start() if resume else (Start(), [])
        folder, begins, store = start.folder, None, self.checkpoints.store
        self._must_be_healed = resume and folder is None
        own = store.steps()[-1:]
        if self.rank == 0 and folder is not None and own and folder != store.folder(own[0]):
            say(f"goes back from its step {own[0]} to {folder.name}, the newest that all islands have")
        if start.sampler is not None:
            self.feed.sampler.load_state_dict(start.sampler)
        if folder is not None:
            self.checkpoints.load_engine(self.engine, folder)
        self.outer = make_loop(self.engine, self.config, data_digest=self.feed.digest)
        self.outer.stop_requested = self._asked_to_stop
        if folder is not None:
            self.checkpoints.load_rest(self.outer, folder)
            if start.parent is not None:
                begins = self._begin_branch(start.parent)
            elif (consumed := self.checkpoints.consumed(folder)) is not None:
                self.feed.ledger.load_state_dict(consumed)
        self.metrics = self.outer.metrics
        self.metrics.write(
            "start",
            island=self.address.island,
            step=self.outer.inner_step if begins is None else begins,
            outer_step=self.outer.outer_step,
            parameters=self.built.parameters,
            inner=str(self.built.inner),
            layers=self.built.spec,
            resumed=folder is not None,
            **self.feed.facts(),
        )
        for text in damaged:  # told at once
            self.metrics.write("event", event="damaged", step=self.outer.inner_step, message=text)
        self._losses = LossWatch(self.config, self.address.island, self.outer.group)
        if self.rank == 0:
            how = f"resumed at {self._where()}" if folder else "fresh"
            if resume and folder is None:
                how = f"begins anew, no checkpoint yet in {self.checkpoints.store.root}"
            end = "no end" if self.stop_at is None else f"step {self.stop_at}"
            sync = self.config.sync
            say(
                f"{how}: {self.built.parameters:,} parameters, {self.address.islands} islands of "
                f"{self.ranks} ranks{self._grid()}, {self._precision()}, to {end}, "
                f"{sync.mode}: {self.outer.sync_points.describe()}, wire {sync.wire}, "
                f"outer {self.config.outer.optimizer} at {self.config.outer.lr:g}"
            )
            say(f"inner optimizer: {self.built.inner}; layers: {self.built.spec}")

    def _choose_start(self) -> tuple[Start, list[str]]:
        """Where to begin, of what is whole; and what is damaged, which is said on the console."""
        import torch
        from megatron.core import parallel_state

        def everyone(own: Any) -> list[Any]:
            each: list[Any] = [None] * self.ranks
            torch.distributed.all_gather_object(each, own)
            return each

        store, piece = self.checkpoints.store, parallel_state.get_tensor_model_parallel_rank()
        start, damaged = whole_start(
            store,
            lambda: starting_point(self.run_dir, self.address.island, self.config),
            lambda folder: self.checkpoints.damage(folder, self.rank, self.reader, piece),
            everyone,
            first=self.rank == 0,
        )
        for text in damaged if self.rank == 0 else ():
            say(text)
        return start, damaged

    def _begin_branch(self, parent: Parent) -> int:
        """What a branch does once, when it begins from its parent's checkpoint: its own decay.

        Returns:
            The inner step of this island at which it begins.
        """

        def orders(position: int) -> list[Order]:
            planned = self.engine.lr_scheduler.schedule.decays
            withdraw = any(decay.start >= position for decay in planned)
            cancel = Order(kind="cancel", nonce=parent.order.nonce)
            return [cancel, parent.order] if withdraw else [parent.order]

        # In the newest outer state, which may be another island's and know of more than this one's.
        cursor = parent.cursors[str(self.address.island)]
        self.feed.inherited(cursor)
        if self.config.sync.mode == "sync":
            for order in orders(self.outer.position):
                self.outer.carry_out(order)
            return self.outer.inner_step
        self.outer.at_start = orders  # each checkpoint comes after a round of its own: first one state
        return cursor

    def _grid(self) -> str:
        tp = self.config.tensor_parallel
        return f" ({tp} tensor x {self.readers} data parallel)" if tp > 1 else ""

    def _precision(self) -> str:
        for name in ("bf16", "fp16"):
            if self.config.deepspeed.get(name, {}).get("enabled"):
                return name
        return "fp32"

    # ---- the loop ----

    def run(self) -> None:
        """Train to the end, or until asked to stop; leaves a complete checkpoint behind."""
        # Only from here on is there anything to save: before, a signal ends the rank at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.outer.meet()
        if self._must_be_healed:
            store = self.checkpoints.store
            refuse_unhealed(store.root, self.outer.group.share(store.lost()), self.outer.outer_step)
        self.feed.note(self.outer, self.outer.last_round)  # a round that it was stopped before
        self.feed.note_earlier(self.outer)
        self.outer.alive(_LONGEST_START_S)
        self._window = Window()
        stopped = False
        try:
            stopped = self._train()
        except GaveUp:
            self._save()
            raise
        self._end(stopped)
        self.outer.close()

    def _train(self) -> bool:
        """Inner steps and rounds until the end or a request to stop; whether it was the latter."""
        stopped = due = False
        while not self._there() and not stopped:
            self._inner_step()
            interval = self.config.checkpoint.interval_steps
            due = due or bool(interval and self.outer.inner_step % interval == 0)
            if due and not self._there() and self.outer.ready():
                self._save()
                due = False
            stopped = not self.outer.group.all_agree(not self._asked_to_stop())
        return stopped

    def _inner_step(self) -> None:
        import torch

        engine, step = self.engine, self.outer.inner_step
        scheduler = engine.lr_scheduler
        self.feed.switch_mix(scheduler.schedule, self.outer)
        lr, phase = scheduler.get_last_lr()[0], str(scheduler.phase)
        losses = []
        for micro in range(self.config.grad_accum):
            tokens, labels = self.feed.batch(step, micro)
            loss = self._loss(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        assert self.config.model is not None
        tokens_of_step = self.config.island_batch * self.config.model.seq_length
        mean = torch.stack(losses).mean()
        self._window.add(mean, tokens_of_step)
        self._losses.add(mean)
        self._step_outer(tokens_of_step)
        self._log_step(step + 1, lr, phase)

    def _loss(self, tokens: Any, labels: Any) -> Any:
        """Mean loss of a batch, in nats a token."""
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        positions, mask = self.inputs(tokens)
        return self.engine(tokens, positions, mask, labels=labels).float().mean()

    def _step_outer(self, tokens: int) -> None:
        """Count the step; around a round that is due, validate local weights and anchor."""
        every = self.config.log.eval_interval
        due = every > 0 and self.outer.round_due() and (self.outer.outer_step + 1) % every == 0
        if due:
            self._evaluate("local")
        result = self.outer.step(tokens=tokens)
        self.feed.note(self.outer, result)
        if result is not None:
            self._losses.check()
        if result is not None and every > 0 and self.config.sync.mode == "async":
            # Rank 0 says which round it is: others may have seen a newer one already.
            (now,) = self.outer.group.broadcast([self.outer.outer_step // every])
            due, self._validations = now > self._validations, now
            if due:
                self._evaluate("local")
        if due and result is not None and self.outer.ready():
            with self.outer.anchor_weights() as committed:
                self._evaluate("anchor", committed)

    def _end(self, stopped: bool) -> None:
        """A run that is over ends on an anchor; one that is only stopped keeps its local progress."""
        end = self.engine.lr_scheduler.schedule.end
        over = end is not None and self.outer.position >= end and not stopped
        if over:
            self.feed.note(self.outer, self.outer.finish())
            if self._validated != ("anchor", self.outer.outer_step):
                self._evaluate("anchor", self.outer.committed())
        saved = self._save()
        self._losses.check(ended=True)
        if not saved:
            raise NotFiniteError(
                f"island {self.address.island}",
                "finite weights and moments at its end",
                "NaN or Inf, which are not saved",
                "Go on with --resume: its newest checkpoint is finite.",
            )
        step = self.outer.inner_step
        if over:
            # Where an asynchronous island stands is an estimate, until all have committed what they trained.
            told = f"finished at {self._where(end)}, the end of the schedule"
            committed = self.outer.committed()["position"]
            told += "" if committed == end else f"; {committed} steps of the run are committed"
            self.metrics.event("finish", step, told, tokens=self.outer.tokens, end=end)
        else:
            told = f"stopped at {self._where()}; go on with --resume"
            self.metrics.event("stop", step, told, tokens=self.outer.tokens)

    # ---- what is told ----

    def _where(self, position: int | None = None) -> str:
        """The step of the run, by default that of now, and that of this island where it counts its own."""
        own = "" if self.config.sync.mode == "sync" else f" (own step {self.outer.inner_step})"
        return f"step {self.outer.position if position is None else position}{own}"

    def _log_step(self, step: int, lr: float, phase: str) -> None:
        position = self.outer.position
        ends_a_phase = self.engine.lr_scheduler.schedule.phase(position) != phase
        if step % self.config.log.interval_steps and not ends_a_phase and not self._there():
            return
        loss, tokens_per_s = self._window.close()
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        mfu = utilisation(tokens_per_s, self._flops_per_token, self.ranks, self._peak_tflops)
        self.metrics.write(
            "step",
            step=step,
            loss=loss,
            lr=lr,
            phase=phase,
            tokens=self.outer.tokens,
            tokens_per_s=tokens_per_s,
            grad_norm=norm,
            clipped=was_clipped(norm, float(self.engine.gradient_clipping())),
            **({} if mfu is None else {"mfu": mfu}),
        )
        if self.rank == 0:
            used = "" if mfu is None else f" mfu {mfu:.1%}"
            own = "" if self.config.sync.mode == "sync" else f" (own step {step})"
            say(
                f"step {position}/{self.stop_at or 'open'}{own} {phase:<6} loss {loss:.4f} lr {lr:.3e} "
                f"{tokens_per_s:,.0f} tok/s{used} round {self.outer.outer_step}"
            )

    def _evaluate(self, target: str, anchor: Mapping[str, int] | None = None) -> None:
        """Loss on the held-out part of every corpus, in nats a token; all ranks must call it.

        Args:
            target: ``local`` or ``anchor``.
            anchor: which one it is, see `OuterLoop.committed`; islands that validate the same say the same.
        """
        import torch

        self.engine.eval()
        which = anchor or {"outer_step": self.outer.outer_step}
        self._validated = (target, which["outer_step"])
        for corpus in sorted(self.feed.corpora.files):
            losses = []
            with torch.no_grad():
                for tokens, labels in self.feed.held_out(corpus):
                    losses.append(float(self._loss(tokens, labels)))
                    self.outer.alive()
            # Every rank has equally many batches; NaN and Inf go through as they are.
            loss = self.outer.group.mean(sum(losses) / len(losses))
            self.metrics.write(
                "eval",
                step=self.outer.inner_step,
                target=target,
                corpus=corpus,
                loss=loss,
                **which,
            )
            if self.rank == 0:
                say(f"validation of the {target} on {corpus}: {loss:.4f} nats/token")
        self.engine.train()

    def _save(self) -> bool:
        """Write a checkpoint; False if weights or inner moments are not finite, and none is written."""
        from megatron_wsd.shards.zero3 import is_finite

        step = self.outer.inner_step
        if not self.outer.group.all_agree(is_finite(self.engine)):
            told = "no checkpoint: weights or moments of the inner optimizer hold NaN or Inf"
            self.metrics.event("unsaved", step, f"step {self.metrics.at(step)}: {told}")
            return False
        self.outer.alive(_LONGEST_SAVE_S)
        self.checkpoints.save(self.engine, self.outer, self.feed.sampler, self.feed.ledger, step)
        self.outer.alive()
        own = "" if self.config.sync.mode == "sync" else "own "
        self.metrics.event("checkpoint", step, f"checkpoint of {own}step {step} complete")
        return True
