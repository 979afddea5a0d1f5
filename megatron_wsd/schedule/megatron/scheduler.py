"""Megatron-core's ``OptimizerParamScheduler`` with its WSD repaired."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import optimizer_param_scheduler as upstream
from megatron.core.utils import log_single_rank

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.decay import Decay, Then
from megatron_wsd.schedule.fields import naming, whole
from megatron_wsd.schedule.front import to_unit
from megatron_wsd.schedule.lengths import Batch
from megatron_wsd.schedule.megatron.control import ControlDir
from megatron_wsd.schedule.megatron.timeline import (
    WORDS,
    Decisions,
    Planned,
    read_decisions,
    schedule_of,
    shape_name,
)
from megatron_wsd.schedule.wsd import Phase, Schedule

logger = logging.getLogger(__name__)

# what upstream's state leaves out, and the values of which nothing need be said when a state lacks them
_OWN_FIELDS = {
    "init_lr": ...,
    "wsd_decay_steps": ...,
    "lr_wsd_decay_style": ...,
    "wsd_decay_start": None,
    "wsd_open_horizon": False,
    "wsd_decay_power": None,
}
_RANGE = ("max_lr", "min_lr")


class OptimizerParamScheduler(upstream.OptimizerParamScheduler):
    """Drop-in for ``megatron.core.optimizer_param_scheduler.OptimizerParamScheduler``: same constructor.

    Every upstream rate is unchanged to the last bit: all decay styles, and under WSD the shapes linear,
    cosine, minus_sqrt and exponential (which here keeps upstream's 2 * 0.5^x - 1; the true exponential is
    "geometric"). The other names of ``megatron_wsd.schedule.SHAPES`` work as ``lr_wsd_decay_style`` too.

    What differs:
        - the style and the WSD decay are checked when the scheduler is built and when a state is loaded,
          instead of failing, or jumping out of the warm-up, in the middle of a run;
        - ``state_dict`` also carries what upstream leaves out, which ``load_state_dict`` treats like the
          other fields (override, use_checkpoint, or must be equal), and the decisions made while running,
          which are always those of the checkpoint;
        - loading sets ``num_steps`` instead of adding to it, and a load that fails changes nothing;
        - the max_lr and min_lr of each param group follow the same rule. Upstream lets those that the
          optimizer's checkpoint brought win over ``override_opt_param_scheduler``.
    States pass both ways between this class and upstream's.

    All positions and lengths are in units of ``num_steps``, which are samples in Megatron's training.

    Args:
        wsd_decay_start: where the decay begins, instead of at lr_decay_steps - wsd_decay_steps.
        wsd_open_horizon: no decay until one is begun on command; lr_decay_steps ends nothing.
            wsd_decay_steps, if given, is then the length of a decay that is begun without one.
        wsd_decay_power: of the style "polynomial".
        wsd_control_dir: folder in which a file ``decay_now.json`` begins or cancels a decay (``ControlDir``).
        wsd_batch: what one update and one sample hold, for lengths such as "20e9 tokens".

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
        *,
        wsd_decay_start: int | None = None,
        wsd_open_horizon: bool = False,
        wsd_decay_power: float | None = None,
        wsd_control_dir: str | Path | None = None,
        wsd_batch: Batch | None = None,
    ) -> None:
        self.wsd_decay_start = wsd_decay_start
        self.wsd_open_horizon = wsd_open_horizon
        self.wsd_decay_power = wsd_decay_power
        self._batch = wsd_batch or Batch()
        self._decisions: Decisions = ((), ())
        self._loading = False
        self._control = None if wsd_control_dir is None else ControlDir(wsd_control_dir)
        self._ranges = [{key: group.get(key) for key in _RANGE} for group in optimizer.param_groups]
        self.lr_decay_steps, self.wsd_decay_steps = lr_decay_steps, wsd_decay_steps
        self.lr_decay_style, self.lr_wsd_decay_style = lr_decay_style, lr_wsd_decay_style
        self._check_flags()
        if lr_decay_style == "WSD":
            # before upstream's constructor, whose bare asserts would answer first
            schedule_of(lr_warmup_steps, self._planned(()), (), max_lr, min_lr)
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
            # upstream wants a number here under WSD; with an open horizon none is used
            0 if wsd_open_horizon and wsd_decay_steps is None else wsd_decay_steps,
            lr_wsd_decay_style,
        )
        self.wsd_decay_steps = wsd_decay_steps
        self._check_style()

    def _check_flags(self) -> None:
        if self.lr_decay_style != "WSD" and (
            self.wsd_open_horizon or self.wsd_decay_start is not None or self._control is not None
        ):
            raise ScheduleError(
                "lr_decay_style", "WSD beside the wsd_ settings", self.lr_decay_style, "Set it to WSD."
            )
        if self.wsd_decay_start is None:
            return
        if self.wsd_open_horizon:
            raise ScheduleError("wsd_decay_start", "none with an open horizon", self.wsd_decay_start)
        end = whole("wsd_decay_start", self.wsd_decay_start)
        end += whole("wsd_decay_steps", self.wsd_decay_steps, minimum=1)
        if end > self.lr_decay_steps:
            raise ScheduleError(
                "wsd_decay_start",
                f"a decay that is over at lr_decay_steps = {self.lr_decay_steps}",
                f"{self.wsd_decay_start} + wsd_decay_steps = {end}",
                "Begin earlier, decay for a shorter time, or let the run be longer.",
            )

    @property
    def schedule(self) -> Schedule:
        """The pure schedule in units of ``num_steps``, for the scheduler's own max_lr and min_lr.

        Its ``rate(n, max_lr)`` is the rate to rounding; warm-up starts at init_lr / max_lr.

        Raises:
            ScheduleError: ``lr_decay_style`` is not WSD.
        """
        if self.lr_decay_style != "WSD":
            raise ScheduleError("lr_decay_style", "WSD, the only style with a schedule", self.lr_decay_style)
        init_ratio = self.init_lr / self.max_lr if self.max_lr else 0.0
        return replace(self._schedule_of({}), warmup_init_ratio=init_ratio, cancelled=self._decisions[1])

    @property
    def phase(self) -> Phase:
        """Phase of the next update."""
        return self.schedule.phase(self.num_steps)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Rate of ``param_group`` at ``num_steps``; its own max_lr and min_lr go before the scheduler's."""
        in_warmup = 0 < self.lr_warmup_steps >= self.num_steps
        if self.lr_decay_style != "WSD" or in_warmup:
            return super().get_lr(param_group)
        max_lr, min_lr = self._range_of(param_group)
        schedule = self._schedule_of(param_group)
        if not schedule.decays or self.num_steps <= schedule.decays[0].start:
            return min_lr + (max_lr - min_lr)  # upstream's expression, for the sake of its last bit
        return schedule.rate(self.num_steps, max_lr)

    def step(self, increment: int) -> None:
        """Count ``increment`` more, set the rates, and look for a command now and then.

        With a control folder every rank must call it alike, as Megatron's training does.
        """
        super().step(increment)
        if increment > 0 and not self._loading:
            self._updated()

    def _updated(self) -> None:
        """Called after every update that is counted, but not where a loaded state sets the position."""
        if self._control is not None:
            self._control.poll(self)

    # ---- decided while running ----

    def begin_decay(
        self,
        length: int | str | None = None,
        *,
        start: int | str | None = None,
        shape: str | None = None,
        min_lr_ratio: float | None = None,
        power: float | None = None,
        then: Then = "stop",
        rewarmup: int | str = 0,
    ) -> Schedule:
        """Decide, while running, that a decay begins. Every rank must call it alike, at the same position.

        Args:
            length: of the decay, in units of ``num_steps`` or a string such as "20e9 tokens"; None for
                wsd_decay_steps.
            start: position at which it begins; None for the next update.
            shape: default lr_wsd_decay_style, and one_minus_sqrt if there is none.
            min_lr_ratio: minimum / max_lr; None for min_lr, each param group's own where it has one.
            power, then, rewarmup: see ``megatron_wsd.schedule.Decay``.

        Returns:
            The schedule from now on.

        Raises:
            ScheduleError: a decay is running or planned, or this one is impossible; nothing is changed.
        """
        request = {"length": length, "start": start, "shape": shape, "min_lr_ratio": min_lr_ratio}
        request |= {"power": power, "then": then, "rewarmup": rewarmup}
        self.commit(self.decided(request))
        return self.schedule

    def cancel_decay(self) -> Schedule:
        """Withdraw every decay that has not begun, configured or decided. Every rank must call it alike.

        Raises:
            ScheduleError: there is none; nothing is changed.
        """
        self.commit(self.decided({"cancel": True}))
        return self.schedule

    def decided(self, request: Mapping[str, Any]) -> Decisions:
        """What ``request`` would make of the decisions.

        Args:
            request: the arguments of ``begin_decay``, or ``{"cancel": True}``.

        Raises:
            ScheduleError: it cannot be done. Nothing is changed in any case.
        """
        schedule = self.schedule
        if request.get("cancel"):
            after = schedule.cancel_decay(self.num_steps)
        else:
            after = schedule.begin_decay(self.num_steps, **self._arguments(request))
        decisions = tuple(d for d in after.decays if d.decided_at is not None), after.cancelled
        for param_group in self.optimizer.param_groups:
            self._schedule_of(param_group, decisions)
        return decisions

    def commit(self, decisions: Decisions) -> None:
        """Go on with ``decisions``, which ``decided`` returned."""
        self._decisions = decisions
        super().step(0)

    def _arguments(self, request: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in request.items() if value is not None}
        own = {"length": self.wsd_decay_steps, "shape": self.lr_wsd_decay_style or "one_minus_sqrt"}
        given = own | given
        given["shape"] = shape_name(given["shape"])
        if given["shape"] == shape_name(self.lr_wsd_decay_style) and self.wsd_decay_power is not None:
            given.setdefault("power", self.wsd_decay_power)
        for key, field in (
            ("length", "decay_steps"),
            ("start", "decay_start"),
            ("rewarmup", "rewarmup_steps"),
        ):
            if key in given:
                given[key] = to_unit(field, given[key], self._batch, "samples")
        if "min_lr_ratio" not in given:  # then each group's own minimum, see schedule_of
            ratio = self.min_lr / self.max_lr if self.max_lr else 1.0
            given |= {"min_lr": self.min_lr, "min_lr_ratio": ratio}
        return given

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Upstream's state and the fields it leaves out."""
        decided, cancelled = self._decisions
        own = {name: getattr(self, name) for name in _OWN_FIELDS}
        own["wsd_decisions"] = {
            "decided": [decay.state_dict() for decay in decided],
            "cancelled": [decay.state_dict() for decay in cancelled],
        }
        return super().state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of upstream's, old key names included.

        Fields follow ``use_checkpoint_opt_param_scheduler`` and ``override_opt_param_scheduler`` as upstream
        has it; those that an upstream state lacks keep their value, with a warning. Call it after the
        optimizer has loaded its state, as Megatron does: then the rates of each param group follow, too.
        After an error the scheduler is as it was.

        Raises:
            AssertionError: a field differs and neither flag says which value counts (upstream's check).
            ScheduleError: the resulting decay is impossible, or the max_lr or min_lr of a param group differs
                and neither flag says which counts.
        """
        before = self.__dict__.copy()
        groups = self.optimizer.param_groups
        ranges = [{key: group[key] for key in _RANGE if key in group} for group in groups]
        try:
            for name, silent in _OWN_FIELDS.items():
                own = getattr(self, name)
                if name in state_dict:
                    setattr(self, name, self._check_and_set(own, state_dict[name], name))
                elif own != silent:
                    log_single_rank(
                        logger, logging.WARNING, f" > the checkpoint does not say {name}, keeping {own}"
                    )
            self._decisions = read_decisions(state_dict.get("wsd_decisions"))
            self.num_steps = 0  # upstream adds the saved position to this one, by step()
            self._loading = True
            self._settle_ranges(groups)
            super().load_state_dict(state_dict)
            self._check_flags()
            self._check_style()
        except BaseException:
            self.__dict__.update(before)
            for group, own_range in zip(groups, ranges, strict=True):
                group.update(own_range)
            self.step(0)
            raise
        self._loading = False
        self.step(0)  # upstream reads the weight decay after it has set the groups

    def _settle_ranges(self, groups: list[dict[str, Any]]) -> None:
        """Which max_lr and min_lr of each param group count, if the optimizer's checkpoint brought others."""
        if self.use_checkpoint_opt_param_scheduler:
            return
        if len(groups) != len(self._ranges):
            raise ScheduleError("param groups", f"{len(self._ranges)}, as when it was built", len(groups))
        for index, (group, given) in enumerate(zip(groups, self._ranges, strict=True)):
            for key, value in given.items():
                if value is None or group.get(key) == value:
                    continue
                if not self.override_opt_param_scheduler:
                    raise ScheduleError(
                        f"{key} of param group {index}",
                        f"{value}, as configured",
                        f"{group.get(key)} in the checkpoint",
                        "Set use_checkpoint_opt_param_scheduler or override_opt_param_scheduler.",
                    )
                group[key] = value

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

    def _planned(self, cancelled: tuple[Decay, ...]) -> Planned | None:
        """The decay that the configuration plans, unless it is among those cancelled."""
        if self.wsd_open_horizon:
            return None
        start: Any = self.wsd_decay_start
        if start is None:
            with naming(WORDS):
                length = whole("decay_steps", self.wsd_decay_steps, minimum=1)
                start = whole("lr_decay_steps", self.lr_decay_steps, minimum=1) - length
        gone = {(d.start, d.length) for d in cancelled if d.decided_at is None}
        if (start, self.wsd_decay_steps) in gone:
            return None
        return start, self.wsd_decay_steps, self.lr_wsd_decay_style, self.wsd_decay_power

    def _schedule_of(self, param_group: dict[str, Any], decisions: Decisions | None = None) -> Schedule:
        decided, cancelled = decisions or self._decisions
        return schedule_of(
            self.lr_warmup_steps, self._planned(cancelled), decided, *self._range_of(param_group)
        )
