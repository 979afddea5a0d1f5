"""The schedule as a torch ``LRScheduler``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import naming
from megatron_wsd.schedule.state import load_position, save_position, set_rate
from megatron_wsd.schedule.wsd import Decay, Phase, Schedule


class WarmupStableDecayLR(LRScheduler):
    """Warm-up from 0, constant rate, decay to ``min_lr_ratio`` times the peak of each param group.

    Call ``step()`` once after every ``optimizer.step()``. Update n (from 0) runs at
    ``initial_lr * schedule.factor(n)``.

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
            self.schedule = Schedule(warmup_steps, decays)
        super().__init__(optimizer, last_epoch)

    @property
    def num_updates(self) -> int:
        """Completed updates."""
        return self.last_epoch

    @property
    def phase(self) -> Phase:
        """Phase of the next update."""
        return self.schedule.phase(self.last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Rate of the next update, one for each param group."""
        factor = self.schedule.factor(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Schedule, peaks and position, json-able."""
        return save_position(self.schedule, [float(peak) for peak in self.base_lrs], self.last_epoch)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the position and set the rates for it; loading twice changes nothing.

        Raises:
            ScheduleError: the state belongs to another schedule or other peaks; nothing is changed.
        """
        self.last_epoch = load_position(state_dict, self.schedule, [float(peak) for peak in self.base_lrs])
        self._step_count = self.last_epoch + 1
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            set_rate(group, float(rate))
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
