"""Megatron-core's ``OptimizerParamScheduler`` with its WSD repaired; importing it imports megatron-core."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import Any

from megatron.core import optimizer_param_scheduler as upstream
from megatron.core.utils import log_single_rank

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import naming, real, whole
from megatron_wsd.schedule.wsd import Decay, Schedule

logger = logging.getLogger(__name__)

_WORDS = {
    "warmup_steps": "lr_warmup_steps",
    "decay_start": "lr_decay_steps - wsd_decay_steps",
    "decay_steps": "wsd_decay_steps",
    "decay_shape": "lr_wsd_decay_style",
    "min_lr_ratio": "min_lr / max_lr",
}


class OptimizerParamScheduler(upstream.OptimizerParamScheduler):
    """Drop-in for ``megatron.core.optimizer_param_scheduler.OptimizerParamScheduler``: same constructor.

    Every upstream rate is unchanged to the last bit: all decay styles, and under WSD the shapes linear,
    cosine, minus_sqrt and exponential (which here keeps upstream's 2 * 0.5^x - 1; the true exponential is
    "geometric"). The other names of ``megatron_wsd.schedule.SHAPES`` work as ``lr_wsd_decay_style`` too.

    What differs:
        - the style and the WSD decay are checked when the scheduler is built and when a state is loaded,
          instead of failing, or jumping out of the warm-up, in the middle of a run;
        - ``state_dict`` also carries wsd_decay_steps, lr_wsd_decay_style and init_lr, which
          ``load_state_dict`` treats like the other fields (override, use_checkpoint, or must be equal);
        - loading sets ``num_steps`` instead of adding to it, and a load that fails changes nothing.
    States pass both ways between this class and upstream's.

    Raises:
        ScheduleError: the WSD decay overlaps the warm-up or has no length, its style is missing or unknown,
            or does not fit the minimum and maximum rate of some param group.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        if lr_decay_style == "WSD":
            # before upstream's constructor, whose bare asserts would answer first
            _schedule(lr_warmup_steps, lr_decay_steps, wsd_decay_steps, lr_wsd_decay_style, max_lr, min_lr)
        super().__init__(
            optimizer,
            init_lr,
            max_lr,
            min_lr,
            lr_warmup_steps,
            lr_decay_steps,
            lr_decay_style,
            start_wd,
            end_wd,
            wd_incr_steps,
            wd_incr_style,
            use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler,
            wsd_decay_steps,
            lr_wsd_decay_style,
        )
        self._check_style()

    @property
    def schedule(self) -> Schedule:
        """The pure schedule in units of ``num_steps``, for the scheduler's own max_lr and min_lr.

        Its ``factor`` is lr / max_lr to rounding; warm-up starts at init_lr / max_lr.

        Raises:
            ScheduleError: ``lr_decay_style`` is not WSD.
        """
        if self.lr_decay_style != "WSD":
            raise ScheduleError("lr_decay_style", "WSD, the only style with a schedule", self.lr_decay_style)
        decays = self._schedule_of({}).decays
        init_ratio = self.init_lr / self.max_lr if self.max_lr else 0.0
        return Schedule(math.ceil(self.lr_warmup_steps), decays, init_ratio)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Rate of ``param_group`` at ``num_steps``; its own max_lr and min_lr go before the scheduler's."""
        in_warmup = 0 < self.lr_warmup_steps >= self.num_steps
        if self.lr_decay_style != "WSD" or in_warmup:
            return super().get_lr(param_group)
        max_lr, min_lr = self._range_of(param_group)
        (decay,) = self._schedule_of(param_group).decays
        # upstream's expression and order, for the sake of its last bit
        return min_lr + decay.weight(self.num_steps) * (max_lr - min_lr)

    def state_dict(self) -> dict[str, Any]:
        """Upstream's state and the fields it leaves out."""
        return super().state_dict() | {
            "init_lr": self.init_lr,
            "wsd_decay_steps": self.wsd_decay_steps,
            "lr_wsd_decay_style": self.lr_wsd_decay_style,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of upstream's, old key names included.

        Fields follow ``use_checkpoint_opt_param_scheduler`` and ``override_opt_param_scheduler`` as upstream
        has it; those that an upstream state lacks keep their value, with a warning.

        Raises:
            AssertionError: a field differs and neither flag says which value counts (upstream's check).
            ScheduleError: the resulting decay is impossible.
            In both cases the scheduler is as it was.
        """
        before = self.__dict__.copy()
        try:
            for name in ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style"):
                own = getattr(self, name)
                if name in state_dict:
                    setattr(self, name, self._check_and_set(own, state_dict[name], name))
                else:
                    log_single_rank(
                        logger, logging.WARNING, f" > the checkpoint does not say {name}, keeping {own}"
                    )
            self.num_steps = 0  # upstream adds the saved position to this one
            super().load_state_dict(state_dict)
            self._check_style()
        except BaseException:
            self.__dict__.update(before)
            self.step(0)
            raise
        self.step(0)  # upstream reads the weight decay after it has set the groups

    def _check_style(self) -> None:
        if self.lr_decay_style == "WSD":
            for param_group in ({}, *self.optimizer.param_groups):
                self._schedule_of(param_group)
            return
        # upstream refuses an unknown style when it first needs it, after the warm-up: let it need it now
        position, self.num_steps = self.num_steps, self.lr_decay_steps
        try:
            super().get_lr({})
        finally:
            self.num_steps = position

    def _range_of(self, param_group: dict[str, Any]) -> tuple[float, float]:
        own = {"max_lr": self.max_lr, "min_lr": self.min_lr} | param_group
        return own["max_lr"], own["min_lr"]

    def _schedule_of(self, param_group: dict[str, Any]) -> Schedule:
        return _schedule(
            self.lr_warmup_steps,
            self.lr_decay_steps,
            self.wsd_decay_steps,
            self.lr_wsd_decay_style,
            *self._range_of(param_group),
        )


@lru_cache(maxsize=256, typed=True)
def _schedule(
    lr_warmup_steps: float,
    lr_decay_steps: int,
    wsd_decay_steps: int | None,
    lr_wsd_decay_style: str | None,
    max_lr: float,
    min_lr: float,
) -> Schedule:
    """The pure schedule behind one param group; cached, since it is asked for in every step.

    Warm-up may be fractional, since Megatron computes it as lr_warmup_fraction * lr_decay_steps; its rates
    are upstream's, and here only its end matters.
    """
    shape = "megatron_exponential" if lr_wsd_decay_style == "exponential" else lr_wsd_decay_style
    with naming(_WORDS):
        warmup = math.ceil(real("warmup_steps", lr_warmup_steps))
        length = whole("decay_steps", wsd_decay_steps, minimum=1)
        start = whole("lr_decay_steps", lr_decay_steps, minimum=1) - length
        peak, low = real("max_lr", max_lr), real("min_lr", min_lr)
        if low > peak:
            raise ScheduleError("min_lr", f"at most max_lr = {peak:g}", low)
        ratio = low / peak if peak else 1.0  # a peak of 0 never moves, so any ratio will do
        return Schedule(warmup, (Decay(start, length, shape, ratio),))  # type: ignore[arg-type]
