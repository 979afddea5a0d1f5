"""The schedules of all param groups of one optimizer: what a front computes, saves, and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.decay import length_until
from megatron_wsd.schedule.difference import refuse_difference
from megatron_wsd.schedule.fields import nearest, real, whole
from megatron_wsd.schedule.wsd import Change, Decay, Phase, Schedule

_DECAY_FIELDS = {
    "decay_start": "start",
    "decay_steps": "length",
    "decay_shape": "shape",
    "decay_power": "power",
    "min_lr_ratio": "min_lr_ratio",
    "min_lr": "min_lr",
    "then": "then",
    "rewarmup_steps": "rewarmup",
}
_GROUP_FIELDS = ("max_lr", "min_lr", "min_lr_ratio")

OVERRIDABLE = ("warmup_steps", "warmup_init_ratio", "total_steps", "max_lr", *_DECAY_FIELDS)
"""Fields that may be changed on a resume, named as in the json params."""


@dataclass(frozen=True)
class Plan:
    """One schedule for each param group. They differ in their minimum at most, never in a position.

    Attributes:
        schedules: in the order of the param groups.
        peaks: peak rate of each.
    """

    schedules: tuple[Schedule, ...]
    peaks: tuple[float, ...]

    @property
    def schedule(self) -> Schedule:
        """That of the first group; position, phases and history are the same in all."""
        return self.schedules[0]

    def rates(self, n: int) -> list[float]:
        """Rate of the update after n completed ones, for each group."""
        return [s.rate(n, peak) for s, peak in zip(self.schedules, self.peaks, strict=True)]

    def phase(self, n: int) -> Phase:
        """Phase of the update after n completed ones."""
        return self.schedule.phase(n)

    def begin_decay(
        self, now: int, length: int, *, min_lr_ratio: object = None, min_lr: object = None, **decay: Any
    ) -> Plan:
        """See ``Schedule.begin_decay``; ``min_lr_ratio`` or ``min_lr`` may be a list, one for each group."""
        minimums = group_minimums(min_lr_ratio, min_lr, self.peaks)
        schedules = (
            schedule.begin_decay(now, length, **decay, **minimum)
            for schedule, minimum in zip(self.schedules, minimums, strict=True)
        )
        return replace(self, schedules=tuple(schedules))

    def cancel_decay(self, now: int) -> Plan:
        """See ``Schedule.cancel_decay``."""
        return replace(self, schedules=tuple(schedule.cancel_decay(now) for schedule in self.schedules))

    # ---- one field at a time ----

    def override(self, now: int, given: Mapping[str, Any]) -> tuple[Plan, list[Change]]:
        """This plan with the fields in ``given`` changed, and what that changed.

        Fields of a decay mean the last one. A minimum given as an absolute rate stays when the peak changes,
        one given as a ratio follows it. With decay_start and a length, a decay is added where there is none.

        Args:
            now: completed updates, for the record.
            given: field (see ``OVERRIDABLE``) -> value, in the unit of the schedule.

        Raises:
            ScheduleError: an unknown field, a field of a decay that is not there, a start in the past, or an
                impossible result.
        """
        for key in given:
            if key not in OVERRIDABLE:
                raise ScheduleError(str(key), "a field of the schedule", "another", nearest(key, OVERRIDABLE))
        for one, other in (("min_lr", "min_lr_ratio"), ("total_steps", "decay_steps")):
            if one in given and other in given:
                raise ScheduleError(one, f"either it or {other}", "both")
        start, decays = given.get("decay_start"), self.schedule.decays
        if isinstance(start, int) and start < now and start != (decays[-1].start if decays else None):
            done = f"at least {now}, the {self.schedule.unit} that are completed"
            raise ScheduleError("decay_start", done, start, "That has passed: give a later one.")
        peaks = self.peaks
        if "max_lr" in given:
            peaks = tuple(per_group("max_lr", given["max_lr"], len(peaks)))
        common = {key: value for key, value in given.items() if key not in _GROUP_FIELDS}
        minimums: list[dict[str, Any]] = [{} for _ in peaks]
        if "min_lr" in given or "min_lr_ratio" in given:
            minimums = group_minimums(given.get("min_lr_ratio"), given.get("min_lr"), peaks)
        changed = tuple(
            _overridden(schedule, common | minimum, peak)
            for schedule, minimum, peak in zip(self.schedules, minimums, peaks, strict=True)
        )
        changes = _changes(now, self, Plan(changed, peaks))
        logged = tuple(replace(s, changes=(*s.changes, *changes)) for s in changed)
        return Plan(logged, peaks), changes

    # ---- state ----

    def state_dict(self, position: int) -> dict[str, Any]:
        """A json-able state from which the rate of every update of every param group can be told.

        Args:
            position: completed updates (or samples, or tokens).
        """
        schedules = [schedule.state_dict() for schedule in self.schedules]
        return {"version": 2, "schedules": schedules, "peaks": list(self.peaks), "position": position}

    @classmethod
    def from_state(cls, state: object) -> tuple[Plan, int]:
        """The plan and the position in ``state``; states without a version, of one schedule, load too.

        Raises:
            ScheduleError: not such a state.
        """
        keys = state.keys() if isinstance(state, Mapping) else set()
        if not isinstance(state, Mapping) or keys not in (
            {"version", "schedules", "peaks", "position"},
            {"schedule", "peaks", "num_updates"},
        ):
            raise ScheduleError(
                "scheduler state",
                "a state saved by a megatron_wsd scheduler",
                sorted(keys) if isinstance(state, Mapping) else state,
                "The checkpoint was written without one, or with another scheduler; "
                "load it without the scheduler's state and set the position by hand.",
            )
        if not isinstance(state["peaks"], (list, tuple)):
            raise ScheduleError("scheduler state", "a list of peaks", state["peaks"])
        peaks = tuple(real(f"peaks[{i}]", peak) for i, peak in enumerate(state["peaks"]))
        if "schedule" in state:
            schedules = (Schedule.from_state(state["schedule"]),) * max(1, len(peaks))
            return cls(schedules, peaks), whole("num_updates", state["num_updates"])
        if state["version"] != 2 or len(state["schedules"]) != len(peaks) or not peaks:
            raise ScheduleError("scheduler state", "version 2, a schedule for each peak", dict(state))
        schedules = tuple(Schedule.from_state(schedule) for schedule in state["schedules"])
        return cls(schedules, peaks), whole("position", state["position"])

    def load(self, state: object, overrides: Mapping[str, Any] | None = None) -> tuple[Plan, int]:
        """The saved plan, with its decisions and ``overrides``, and the saved position.

        Args:
            state: written by ``state_dict``.
            overrides: fields that are to differ from the saved ones; this plan, which is the one configured
                now, may have either value there.

        Raises:
            ScheduleError: not such a state, or what was configured then differs from what is now in a field
                that is not overridden; the message is a table of saved against given.
        """
        saved, position = Plan.from_state(state)
        changed = saved.override(position, overrides)[0] if overrides else saved
        refuse_difference(*((plan.schedules, plan.peaks) for plan in (saved, changed, self)))
        return changed, position


def apply_overrides(
    state: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Change]]:
    """A saved state of the torch or DeepSpeed front with some fields changed; everything else stays.

    Args:
        state: written by the front's ``state_dict``.
        overrides: field (see ``OVERRIDABLE``) -> value; lengths in the unit of the schedule.

    Returns:
        The new state, which records the changes, and those changes; values that were there already are none.

    Raises:
        ScheduleError: see ``Plan.override``.
    """
    saved, position = Plan.from_state(state)
    plan, changes = saved.override(position, overrides)
    return plan.state_dict(position), changes


def per_group(field: str, value: object, groups: int) -> list[float]:
    """``value`` as one number for each of ``groups`` param groups: one for all, or a list.

    Raises:
        ScheduleError: another number of values, or no numbers.
    """
    values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
    if len(values) != groups:
        raise ScheduleError(field, f"one number, or {groups} for as many param groups", values)
    return [real(field, item) for item in values]


def group_minimums(ratio: object, absolute: object, peaks: Sequence[float]) -> list[dict[str, Any]]:
    """``min_lr_ratio`` and ``min_lr`` of a decay, for each param group; a ratio of 0 if neither is given.

    Raises:
        ScheduleError: both are given, or a minimum is above the peak of its group.
    """
    if absolute is None:
        ratios = per_group("min_lr_ratio", 0.0 if ratio is None else ratio, len(peaks))
        return [{"min_lr_ratio": item, "min_lr": None} for item in ratios]
    if ratio is not None:
        raise ScheduleError("min_lr", "either it or min_lr_ratio", "both")
    lows = per_group("min_lr", absolute, len(peaks))
    return [_absolute(low, peak, index) for index, (low, peak) in enumerate(zip(lows, peaks, strict=True))]


def _absolute(low: float, peak: float, index: int) -> dict[str, Any]:
    if low > peak > 0.0:
        raise ScheduleError(
            "min_lr", f"at most {peak:g}, the peak of param group {index}", low,
            "Give a list with a minimum for each group.",
        )  # fmt: skip
    # a group with a peak of 0 is frozen: it stays there, whatever the others do
    return {"min_lr": low, "min_lr_ratio": low / peak} if peak else {"min_lr": 0.0, "min_lr_ratio": 1.0}


def _overridden(schedule: Schedule, given: Mapping[str, Any], peak: float) -> Schedule:
    own = {key: given[key] for key in ("warmup_steps", "warmup_init_ratio") if key in given}
    fields = {_DECAY_FIELDS[key]: value for key, value in given.items() if key in _DECAY_FIELDS}
    decays = list(schedule.decays)
    if fields or "total_steps" in given:
        if "total_steps" in given and ("start" in fields or decays):
            start = fields["start"] if "start" in fields else decays[-1].start
            fields["length"] = length_until(start, given["total_steps"])
        if not decays and not {"start", "length"} <= fields.keys():
            raise ScheduleError(
                next(iter(given)), "a field of a schedule that has a decay", "an open horizon",
                "Begin a decay on command, or give decay_start and decay_steps as well.",
            )  # fmt: skip
        if fields.get("shape") not in (None, "polynomial"):
            fields.setdefault("power", None)
        decays = [*decays[:-1], replace(decays[-1], **fields) if decays else Decay(**fields)]
    # a minimum that was given as a rate is one still, whatever the peak is now
    decays = [d if d.min_lr is None else replace(d, **_absolute(d.min_lr, peak, 0)) for d in decays]
    return replace(schedule, decays=tuple(decays), **own)


def _changes(now: int, old: Plan, new: Plan) -> list[Change]:
    """What differs between two plans, a list of values where the param groups differ."""

    def values(plan: Plan) -> dict[str, Any]:
        rows: dict[str, list[Any]] = {"max_lr": list(plan.peaks)}
        for schedule in plan.schedules:
            last = schedule.decays[-1] if schedule.decays else None
            named = {key: getattr(last, attribute, None) for key, attribute in _DECAY_FIELDS.items()}
            named |= {key: getattr(schedule, key) for key in ("warmup_steps", "warmup_init_ratio")}
            for key, value in named.items():
                rows.setdefault(key, []).append(value)
        return {key: row[0] if all(v == row[0] for v in row) else row for key, row in rows.items()}

    before, after = values(old), values(new)
    return [Change(now, key, before[key], after[key]) for key in after if before[key] != after[key]]
