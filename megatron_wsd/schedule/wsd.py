"""The warmup-stable-decay schedule as a pure function of completed updates.

``lr(n)`` is the rate of the update that takes the model from n to n + 1 completed updates, and

    lr(n) / peak = i + (1 - i) n / W               n < W            warmup
                 = level                           between decays   stable   (1 until the first decay)
                 = m + (level - m) w(x, m/level)   s <= n < s + L   decay    (x = (n - s) / L)
                 = m of the last decay             after it         done     (then = "stop")
                 = m + (1 - m) (n - s - L) / R     n < s + L + R    warmup   (then = "stable", WSD-S)
                 = 1                               after it         stable   (then = "stable")

with i warmup_init_ratio, W warmup_steps, s, L, m, w start, length, min_lr_ratio and shape of a decay and R
its re-warm-up (MiniCPM, arXiv:2404.06395; WSD-S, arXiv:2410.05192). n counts updates, samples or tokens; all
lengths of one schedule are in the same unit. What was decided while running (``begin_decay``,
``cancel_decay``, ``override``) is part of the schedule, which stays a pure function of n and of that history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.decay import Decay, Then
from megatron_wsd.schedule.fields import real, whole
from megatron_wsd.schedule.lengths import UNITS, Unit

Phase = Literal["warmup", "stable", "decay", "done"]

STATE_VERSION = 2


@dataclass(frozen=True)
class Change:
    """One field that was changed on a resume.

    Attributes:
        at: completed updates when it was changed.
        field: name as in the json params.
        old: value before; None if there was none.
        new: value since.
    """

    at: int
    field: str
    old: Any
    new: Any

    def state_dict(self) -> dict[str, Any]:
        """All fields, json-able."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class Schedule:
    """Warm-up, a stable phase, and any number of decays; pure and immutable.

    Without a decay the stable phase has no end. A decay begins at the rate that is held at its start, so
    appending one never changes the rate of an earlier update.

    Attributes:
        warmup_steps: lr(warmup_steps) is the first at the full peak; 0 for no warm-up.
        decays: in order of their start, configured and decided.
        warmup_init_ratio: lr(0) / peak, if there is a warm-up.
        unit: what n and all lengths count.
        cancelled: decays that were withdrawn before they began; they have no effect.
        changes: fields that were changed on a resume, oldest first; a record without effect of its own.

    Raises:
        ScheduleError: a length is impossible, or a decay begins inside the warm-up, begins before the one in
            front of it has ended, or would have to raise the rate.

    Example:
        >>> run = Schedule(warmup_steps=10).with_decay(start=90, length=10, shape="linear", min_lr_ratio=0.1)
        >>> [run.factor(n) for n in (0, 5, 10, 90, 95, 100)], run.phase(95), run.end
        ([0.0, 0.5, 1.0, 1.0, 0.55, 0.1], 'decay', 100)
    """

    warmup_steps: int
    decays: tuple[Decay, ...] = ()
    warmup_init_ratio: float = 0.0
    unit: Unit = "steps"
    cancelled: tuple[Decay, ...] = ()
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        whole("warmup_steps", self.warmup_steps)
        if self.unit not in UNITS:
            raise ScheduleError("unit", f"one of {', '.join(UNITS)}", self.unit)
        object.__setattr__(
            self, "warmup_init_ratio", real("warmup_init_ratio", self.warmup_init_ratio, 0.0, 1.0)
        )
        for name in ("decays", "cancelled", "changes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_order()

    def _check_order(self) -> None:
        free_from, why, level = self.warmup_steps, "where warmup_steps ends", 1.0
        for decay in self.decays:
            if decay.start < free_from:
                raise ScheduleError(
                    "decay_start",
                    f"at least {free_from}, {why}",
                    f"{decay.start} ({free_from} - {decay.start} = {free_from - decay.start} too early)",
                    "Move decay_start or shorten what comes before it.",
                )
            if level == 0.0 or decay.min_lr_ratio > level:
                raise ScheduleError(
                    "min_lr_ratio",
                    f"a minimum below {level:g} of the peak, where the decay from {decay.start} begins",
                    f"{decay.min_lr_ratio:g}",
                    "A decay only lowers the rate.",
                )
            free_from, why = decay.settled, f"where the decay from {decay.start} ends"
            level = decay.min_lr_ratio if decay.then == "stop" else 1.0

    @property
    def end(self) -> int | None:
        """Completed updates at which the last decay is over; None while the horizon is open."""
        return self.decays[-1].end if self.decays and self.decays[-1].then == "stop" else None

    def factor(self, n: int) -> float:
        """lr(n) / peak, in [0, 1].

        Args:
            n: completed updates (or samples, or tokens), at least 0.
        """
        if whole("n", n) < self.warmup_steps:
            return self.warmup_init_ratio + (1.0 - self.warmup_init_ratio) * (n / self.warmup_steps)
        return self._after_warmup(n, 1.0, [decay.min_lr_ratio for decay in self.decays])

    def rate(self, n: int, peak: float) -> float:
        """lr(n) for a peak of ``peak``.

        It is peak * factor(n), except where a minimum was given as an absolute rate: that is met exactly.
        """
        if n < self.warmup_steps or all(decay.min_lr is None for decay in self.decays):
            return peak * self.factor(n)
        lows = [peak * d.min_lr_ratio if d.min_lr is None else d.min_lr for d in self.decays]
        return self._after_warmup(whole("n", n), peak, lows)

    def _after_warmup(self, n: int, peak: float, lows: list[float]) -> float:
        level = peak
        for decay, low in zip(self.decays, lows, strict=True):
            if n <= decay.start:  # at its start the rate that is held still, to the last bit
                break
            if n < decay.end or decay.then == "stop":
                # a group whose peak is 0 has no way to go, and any ratio will do
                level = low + (level - low) * decay.share(n, low / level if level else 1.0)
            elif n < decay.settled:
                level = low + (peak - low) * ((n - decay.end) / decay.rewarmup)
            else:
                level = peak
        return level

    def phase(self, n: int) -> Phase:
        """Phase of the update that follows n completed ones; "done" from ``end`` on."""
        if whole("n", n) < self.warmup_steps or any(d.end <= n < d.settled for d in self.decays):
            return "warmup"
        if self.end is not None and n >= self.end:
            return "done"
        return "decay" if any(decay.start <= n < decay.end for decay in self.decays) else "stable"

    def with_decay(
        self,
        start: int,
        length: int,
        shape: str = "one_minus_sqrt",
        min_lr_ratio: float = 0.0,
        **more: Any,
    ) -> Schedule:
        """This schedule with one more decay at its end; see ``Decay`` for the arguments."""
        return replace(self, decays=(*self.decays, Decay(start, length, shape, min_lr_ratio, **more)))

    # ---- decided while running ----

    def begin_decay(
        self,
        now: int,
        length: int,
        *,
        start: int | None = None,
        shape: str = "one_minus_sqrt",
        min_lr_ratio: float = 0.0,
        power: float | None = None,
        then: Then = "stop",
        rewarmup: int = 0,
        min_lr: float | None = None,
    ) -> Schedule:
        """This schedule with a decay that was decided at ``now``; the decision is kept in the state.

        Args:
            now: completed updates.
            length: of the decay, in the schedule's unit.
            start: completed updates at which it begins; None for ``now``, the next update.
            shape, min_lr_ratio, power, then, rewarmup, min_lr: see ``Decay``.

        Raises:
            ScheduleError: a decay is running or planned (a second one is refused, not stacked), ``start`` is
                in the past or in the warm-up, or the decay itself is impossible.
        """
        whole("now", now)
        for decay in self.decays:
            if now < decay.end:
                running = decay.start < now
                raise ScheduleError(
                    "begin_decay",
                    f"no decay that is running or planned at {now}",
                    f"one from {decay.start} to {decay.end}, {'running' if running else 'planned'}",
                    "A running decay is not replaced." if running else "Cancel the planned one first.",
                )
        start = now if start is None else whole("decay_start", start)
        if start < now:
            raise ScheduleError(
                "decay_start",
                f"at least {now}, the {self.unit} that are completed",
                start,
                "That has passed: give a later one.",
            )
        return self.with_decay(
            start, length, shape, min_lr_ratio,
            power=power, then=then, rewarmup=rewarmup, min_lr=min_lr, decided_at=now,
        )  # fmt: skip

    def cancel_decay(self, now: int) -> Schedule:
        """This schedule without its decays that have not begun at ``now``, configured or decided.

        A decay has begun with its second update: the rate at its ``start`` is still the full one.

        Raises:
            ScheduleError: there is none.
        """
        whole("now", now)
        ahead = [decay for decay in self.decays if now <= decay.start]
        if not ahead:
            begun = f"the decay from {self.decays[-1].start} has begun" if self.decays else "none is planned"
            raise ScheduleError("cancel_decay", f"a decay that begins at {now} or later", begun)
        kept = tuple(decay for decay in self.decays if decay.start < now)
        gone = tuple(replace(decay, cancelled_at=now) for decay in ahead)
        return replace(self, decays=kept, cancelled=(*self.cancelled, *gone))

    def configured(self) -> Schedule:
        """The schedule without what was decided while running: what the config of the run says."""
        decays = [d for d in self.decays + self.cancelled if d.decided_at is None]
        decays = sorted((replace(d, cancelled_at=None) for d in decays), key=lambda d: d.start)
        return replace(self, decays=tuple(decays), cancelled=(), changes=())

    def history(self) -> list[dict[str, Any]]:
        """What was decided while running, in order of the completed updates at which it was decided.

        Each entry is json-able and has "at" and "decision": "begin_decay" or "cancel_decay" with the "decay",
        or "override" with "field", "old" and "new".
        """
        entries: list[dict[str, Any]] = []
        for decay in self.cancelled + self.decays:  # within one update, what is gone came first
            for at, decision in ((decay.decided_at, "begin_decay"), (decay.cancelled_at, "cancel_decay")):
                if at is not None:
                    entries.append({"at": at, "decision": decision, "decay": decay.state_dict()})
        entries += [{"decision": "override", **change.state_dict()} for change in self.changes]
        return sorted(entries, key=lambda entry: entry["at"])

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """The whole schedule with its history, json-able and versioned; ``from_state`` gives an equal one."""
        return {
            "version": STATE_VERSION,
            "unit": self.unit,
            "warmup_steps": self.warmup_steps,
            "warmup_init_ratio": self.warmup_init_ratio,
            "decays": [decay.state_dict() for decay in self.decays],
            "cancelled": [decay.state_dict() for decay in self.cancelled],
            "changes": [change.state_dict() for change in self.changes],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Schedule:
        """The schedule that wrote ``state``; states of version 1 load too.

        Raises:
            ScheduleError: not such a state, of another version, or with fields missing or unknown.
        """
        if not isinstance(state, Mapping) or state.get("version") not in (1, STATE_VERSION):
            raise ScheduleError(
                "schedule state",
                f"a state of version {STATE_VERSION} or 1",
                state,
                "It was written by something else, or by a newer megatron_wsd.",
            )
        try:
            given = {key: value for key, value in state.items() if key != "version"}
            given["decays"] = tuple(Decay.from_state(decay) for decay in given["decays"])
            if state["version"] != 1:  # version 1 knew steps, and no decisions
                given["unit"] = given.pop("unit")
                given["cancelled"] = tuple(Decay.from_state(decay) for decay in given["cancelled"])
                given["changes"] = tuple(Change(**change) for change in given["changes"])
            return cls(**given)
        except (TypeError, KeyError, ValueError) as error:
            if isinstance(error, ScheduleError):
                raise
            raise ScheduleError(
                "schedule state", "exactly the fields that state_dict() writes", dict(state), f"({error})"
            ) from error
