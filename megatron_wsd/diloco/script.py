"""What our trainer does beside training, for a script of a user's own: its records, and no step uncounted."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from megatron_wsd.diloco.round import RoundResult
from megatron_wsd.errors import ConfigError
from megatron_wsd.models.utilisation import was_clipped

if TYPE_CHECKING:
    from megatron_wsd.diloco.outer_loop import OuterLoop


class Script:
    """Watches the engine of a script, and writes the records by which `status` and `report` know a run.

    While the loop is open, ``engine.step`` first looks whether the update before has been counted.

    Args:
        engine: DeepSpeed's.
        loop: that stands beside it.
    """

    def __init__(self, engine: Any, loop: OuterLoop) -> None:
        self._engine, self._loop = engine, loop
        self._losses: list[float | torch.Tensor] = []
        self._step = self._recorded = 0
        self._tokens = 0  # since then, for the speed
        self._since: float | None = None
        self._lr: float | None = None  # of the update that comes next
        self._phase: str | None = None
        self._begun = self._finished = False
        self._plain = getattr(engine, "step", None)
        self._replaced = vars(engine).get("step")
        if self._plain is not None:
            engine.step = self._watched_step

    def _watched_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._plain is not None
        self.check()
        scheduler = getattr(self._engine, "lr_scheduler", None)
        phase = getattr(scheduler, "phase", None)
        self._lr, self._phase = float(self._engine.get_lr()[0]), None if phase is None else str(phase)
        return self._plain(*args, **kwargs)

    def check(self) -> None:
        """Refuse updates of the engine that the loop does not know of.

        Raises:
            ConfigError: there are some.
        """
        if missed := self._loop.uncounted:
            raise ConfigError(
                "outer.step()",
                "a call after every engine.step()",
                f"{missed} update{'s' * (missed != 1)} of the engine without one",
                "Call it in the same loop. After engine.load_checkpoint() call outer.load(), or attach only "
                "then.",
            )

    def begin(self) -> None:
        """The island is about to meet the others."""
        self._begun = True
        loop = self._loop
        loop.metrics.write(
            "start",
            island=loop.island,
            step=loop.inner_step,
            outer_step=loop.outer_step,
            parameters=loop.parameters,
            resumed=loop.inner_step > 0,
        )
        self._step = self._recorded = loop.inner_step

    def add(self, loss: float | torch.Tensor) -> None:
        """Take in the loss of one batch of this rank.

        Raises:
            ConfigError: it is not one number.
        """
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ConfigError("loss", "one number, the mean of the batch", f"shape {tuple(loss.shape)}")
            loss = loss.detach()  # read when it is logged: training does not wait for the device here
        self._losses.append(loss)

    def stepped(self, step: int, tokens: int) -> None:
        """Inner step ``step`` is done; record it if it is its turn. All ranks must call it."""
        self._step = step
        if self._since is None:  # the first one has waited for the others
            self._since = time.perf_counter()
        else:
            self._tokens += tokens
        scheduler: Any = getattr(self._engine, "lr_scheduler", None)
        ends_a_phase = self._phase is not None and str(scheduler.phase) != self._phase
        if step % self._loop.config.log.interval_steps == 0 or ends_a_phase:
            self.record()

    def record(self) -> None:
        """Record what was trained since the last time, if that is something; all ranks must call it."""
        if self._step == self._recorded or self._since is None or self._lr is None:
            return
        loop, engine = self._loop, self._engine
        # Also of ranks that have none: a script that tells the loss of rank 0 alone must not hang.
        total = loop.group.mean(float(sum(map(float, self._losses))))
        count = loop.group.mean(float(len(self._losses)))
        loss = total / count if count else None
        fields: dict[str, Any] = {"lr": self._lr} if loss is None else {"loss": loss, "lr": self._lr}
        if self._phase is not None:
            fields["phase"] = self._phase
        fields["tokens"] = loop.tokens
        now = time.perf_counter()
        if self._tokens:
            fields["tokens_per_s"] = self._tokens / max(now - self._since, 1e-9)
        norm = engine.get_global_grad_norm()
        if norm is not None:
            fields["grad_norm"] = float(norm)
            fields["clipped"] = was_clipped(float(norm), float(engine.gradient_clipping()))
        loop.metrics.write("step", step=self._step, **fields)
        what = f"step {loop.position}" + (f" {self._phase:<6}" if self._phase is not None else "")
        what += "" if loss is None else f" loss {loss:.4f}"
        loop.metrics.tell(f"{what} lr {self._lr:.3e} round {loop.outer_step}")
        self._losses, self._tokens, self._since, self._recorded = [], 0, now, self._step

    def finished(self, result: RoundResult | None) -> None:
        """The last round is over, unless it was given up."""
        self._finished = (result is None or not result.void) and not self._loop.stop_requested()

    def close(self) -> None:
        """Record how the island ended, and leave the engine as it was.

        A script that ends by an exception leaves no record of an end, wherever it closes the loop.
        """
        if self._plain is not None:
            if self._replaced is None:
                del self._engine.step
            else:
                self._engine.step = self._replaced
            self._plain = None
        raised = sys.exc_info()[0] is not None
        if not self._begun or (raised and not self._finished):
            return
        self._begun = False
        loop = self._loop
        event, told = "finish", f"finished at step {loop.position}"
        if not self._finished:
            event, told = "stop", f"stopped at step {loop.position}, without a last round"
        loop.metrics.event(event, loop.inner_step, told, tokens=loop.tokens)
