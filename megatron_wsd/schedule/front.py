"""What the torch and DeepSpeed fronts have in common: decisions while running, state, rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wsd.schedule.lengths import Batch, Unit, parse_length
from megatron_wsd.schedule.plan import Plan
from megatron_wsd.schedule.wsd import Phase, Schedule, Then

_OVERRIDDEN_LENGTHS = ("warmup_steps", "decay_start", "decay_steps", "total_steps", "rewarmup_steps")


class Front:
    """Base of the fronts: a plan, a position in it, and the optimizer whose rates it sets."""

    optimizer: Any
    _plan: Plan
    _batch: Batch

    @property
    def schedule(self) -> Schedule:
        """The pure schedule of the first param group, with what was decided so far."""
        return self._plan.schedule

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """That of each param group; they differ in their minimum at most."""
        return self._plan.schedules

    @property
    def peaks(self) -> list[float]:
        """Peak rate of each param group."""
        return list(self._plan.peaks)

    @property
    def position(self) -> int:
        """Completed updates, samples or tokens: whatever the schedule counts."""
        raise NotImplementedError

    @property
    def phase(self) -> Phase:
        """Phase of the next update."""
        return self._plan.phase(self.position)

    def _set_rates(self) -> None:
        rates = self._plan.rates(self.position)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            set_rate(group, rate)

    def begin_decay(
        self,
        length: int | str,
        *,
        start: int | str | None = None,
        shape: str = "one_minus_sqrt",
        min_lr_ratio: float | list[float] | None = None,
        min_lr: float | list[float] | None = None,
        power: float | None = None,
        then: Then = "stop",
        rewarmup: int | str = 0,
    ) -> Schedule:
        """Decide, while running, that a decay begins. Every rank must call it alike, at the same position.

        Args:
            length: of the decay; a number in the schedule's unit, or a string such as ``"20e9 tokens"``.
            start: position at which it begins; None for the next update.
            shape: name of a shape.
            min_lr_ratio: minimum / peak, one or a list of one for each param group; default 0.
            min_lr: the minimum itself instead, likewise.
            power: of the shape ``polynomial``.
            then: "stop" or "stable".
            rewarmup: length of the way back to the peak; with "stable".

        Returns:
            The schedule from now on, of the first param group.

        Raises:
            ScheduleError: a decay is running or planned, or this one is impossible; nothing is changed.
        """
        unit = self.schedule.unit
        decay = {"shape": shape, "power": power, "then": then}
        self._plan = self._plan.begin_decay(
            self.position,
            to_unit("decay_steps", length, self._batch, unit),
            start=None if start is None else to_unit("decay_start", start, self._batch, unit),
            rewarmup=to_unit("rewarmup_steps", rewarmup, self._batch, unit),
            min_lr_ratio=min_lr_ratio,
            min_lr=min_lr,
            **decay,
        )
        return self.schedule

    def cancel_decay(self) -> Schedule:
        """Withdraw every decay that has not begun, configured or decided. Every rank must call it alike.

        Raises:
            ScheduleError: there is none; nothing is changed.
        """
        self._plan = self._plan.cancel_decay(self.position)
        return self.schedule

    def state_dict(self) -> dict[str, Any]:
        """Schedules with their history, peaks and position, json-able."""
        return self._plan.state_dict(self.position)

    def _load(self, state: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> int:
        fields = in_own_units(overrides or {}, self._batch, self.schedule.unit)
        self._plan, position = self._plan.load(state, fields)
        return position


def to_unit(field: str, value: int | str, batch: Batch, unit: Unit) -> int:
    """A bare number is in ``unit`` already; a string says its own unit and is converted."""
    if not isinstance(value, str):
        return value  # the schedule checks it
    return batch.convert(field, parse_length(value, field), unit)


def in_own_units(overrides: Mapping[str, Any], batch: Batch, unit: Unit) -> dict[str, Any]:
    """Fields of a schedule that are to be overridden, with their lengths in ``unit``."""
    return {
        key: to_unit(key, value, batch, unit) if key in _OVERRIDDEN_LENGTHS else value
        for key, value in overrides.items()
    }


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Write ``rate`` into a param group, in place where the optimizer keeps its rate in a tensor."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
