"""The inner learning rate of an island that is moved, has skipped an update, or has lost its moments."""

from __future__ import annotations

import logging
from typing import Any

from megatron_wsd.schedule.deepspeed import WSD

log = logging.getLogger(__name__)


class InnerRate:
    """Keeps the engine's scheduler where the island stands.

    Args:
        engine: whose ``lr_scheduler`` and ``optimizer`` it is; without a scheduler every call does nothing.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._steps = self._left = 0

    @property
    def _scheduler(self) -> Any:
        return getattr(self._engine, "lr_scheduler", None)

    def place(self, position: int, steps: int) -> None:
        """Stand at ``position``, in inner steps of the run; the island has made ``steps`` of its own."""
        scheduler = self._scheduler
        if hasattr(scheduler, "set_position"):
            scheduler.set_position(position)
        elif scheduler is not None and position != steps:
            log.warning("%s cannot be moved to step %d: its rate is behind", type(scheduler), position)

    def follow_skipped_update(self, position: int) -> None:
        """DeepSpeed does not step the scheduler with an update that it skips for a gradient of NaN or Inf.

        Islands count steps, not updates: else one of them would run at another rate for good.

        Args:
            position: before the step that is being counted.
        """
        scheduler = self._scheduler
        at = getattr(scheduler, "num_updates", None)
        if at is not None and at < position + 1 and hasattr(scheduler, "set_position"):
            scheduler.set_position(position + 1)

    def begin_rewarm(self) -> int:
        """An island that begins without a checkpoint amid a run has no inner moments: it warms up briefly.

        Returns:
            Steps over which the rate rises linearly: 2 / (1 - beta2), about what it takes to fill the second
            moment; 0 if the optimizer has none.
        """
        groups = getattr(getattr(self._engine, "optimizer", None), "param_groups", [])
        betas = groups[0].get("betas") if groups else None
        if not betas:
            return 0
        self._steps = self._left = round(2 / (1 - float(betas[1])))
        self.rewarm()
        return self._steps

    def rewarm(self) -> None:
        """Lower the rates that the scheduler has just set, while the warm-up lasts."""
        if self._left == 0:
            return
        factor = (self._steps - self._left + 1) / (self._steps + 1)
        self._left -= 1
        scheduler = self._scheduler
        if not isinstance(scheduler, WSD):
            return
        for group in scheduler.optimizer.param_groups:
            group["lr"] *= factor
