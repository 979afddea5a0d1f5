"""The schedule as a torch ``LRScheduler``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import naming
from megatron_wsd.schedule.front import Front
from megatron_wsd.schedule.lengths import Batch
from megatron_wsd.schedule.plan import Plan
from megatron_wsd.schedule.wsd import Decay, Schedule


class WarmupStableDecayLR(Front, LRScheduler):
    """Warm-up from 0, constant rate, decay to ``min_lr_ratio`` times the peak of each param group.

    Call ``step()`` once after every ``optimizer.step()``. Update n (from 0) runs at
    ``initial_lr * schedule.factor(n)``. It counts updates; for samples and tokens there is
    ``megatron_wsd.schedule.WSD``, which takes any torch optimizer as well.

    Args:
        optimizer: its groups' lr are the peaks (``initial_lr``, where a group already carries one).
        warmup_steps: updates of linear warm-up; 0 for none.
        decay_start_step: completed updates at which the decay begins; None (with ``total_steps`` None) for a
            stable phase without end.
        total_steps: completed updates at which the minimum is reached.
        min_lr_ratio: minimum / peak.
        decay_type: any shape of ``megatron_wsd.schedule.SHAPES`` or an alias of one.
        last_epoch: -1 for a fresh schedule; n - 1 to go on after n completed updates, for which every group
            must carry ``initial_lr`` (a loaded optimizer state has it).

    Raises:
        ScheduleError: the lengths are impossible or the shape is unknown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        decay_start_step: int | None,
        total_steps: int | None,
        min_lr_ratio: float = 0.0,
        decay_type: str = "cosine",
        last_epoch: int = -1,
    ) -> None:
        with naming({"decay_start": "decay_start_step", "decay_shape": "decay_type"}):
            if (decay_start_step is None) != (total_steps is None):
                raise ScheduleError(
                    "total_steps",
                    "a number beside decay_start, or None for both",
                    f"decay_start = {decay_start_step}, total_steps = {total_steps}",
                )
            decays: tuple[Decay, ...] = ()
            if decay_start_step is not None and total_steps is not None:
                decays = (Decay.until(decay_start_step, total_steps, decay_type, min_lr_ratio),)
            schedule = Schedule(warmup_steps, decays)
        self._attach(optimizer, schedule, last_epoch)

    @classmethod
    def from_schedule(
        cls, optimizer: Optimizer, schedule: Schedule, last_epoch: int = -1
    ) -> WarmupStableDecayLR:
        """The front of any schedule in steps, such as one with cycles.

        Raises:
            ScheduleError: it counts samples or tokens, or has a minimum that is no ratio.
        """
        if schedule.unit != "steps" or any(decay.min_lr is not None for decay in schedule.decays):
            raise ScheduleError(
                "schedule", "one in steps, with minimums as ratios", f"one in {schedule.unit}", "Use WSD."
            )
        front = cls.__new__(cls)
        front._attach(optimizer, schedule, last_epoch)
        return front

    def _attach(self, optimizer: Optimizer, schedule: Schedule, last_epoch: int) -> None:
        self._batch = Batch()
        # torch's constructor reads the peaks from the groups, and takes the first step
        self._plan = Plan((schedule,) * len(optimizer.param_groups), ())
        LRScheduler.__init__(self, optimizer, last_epoch)

    @property
    def position(self) -> int:
        """Completed updates."""
        return self.last_epoch

    @property
    def num_updates(self) -> int:
        """Completed updates."""
        return self.last_epoch

    def get_lr(self) -> list[float | Tensor]:
        """Rate of the next update, one for each param group."""
        if not self._plan.peaks:
            self._plan = replace(self._plan, peaks=tuple(float(peak) for peak in self.base_lrs))
        return [*self._plan.rates(self.last_epoch)]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Take over position and decisions and set the rates for it; loading twice changes nothing.

        Args:
            state_dict: of this front or the DeepSpeed one, in steps.
            overrides: fields of the schedule that are to differ from the saved ones; recorded in
                ``schedule.changes``. Everything else is as saved.

        Raises:
            ScheduleError: the state belongs to another schedule or other peaks; nothing is changed.
        """
        self.last_epoch = self._load(state_dict, overrides)
        self.base_lrs = [*self._plan.peaks]
        self._step_count = self.last_epoch + 1
        self._set_rates()
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
