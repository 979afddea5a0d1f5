"""One decay of a schedule: where it begins, how long it takes, how it falls, and what comes after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import real, whole
from megatron_wsd.schedule.shapes import Shape, find_shape

Then = Literal["stop", "stable"]

# where a registered shape is sampled, so that a state recognises the function and not only its name
_PROBES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Decay:
    """One decay: from the rate held at ``start`` down to the minimum, reached after ``length``.

    All positions and lengths are in the unit of the schedule.

    Attributes:
        start: completed updates at which it begins; lr(start) is still the full rate.
        length: how long it takes; lr(start + length) is the minimum. At least 1.
        shape: name of a shape; an alias is replaced by the canonical name.
        min_lr_ratio: the rate it ends at, as a share of the schedule's peak.
        power: of the shape ``polynomial``, and of no other.
        then: after the decay, "stop" (hold the minimum; the schedule is over) or "stable" (WSD-S: go back to
            the peak, and the horizon is open again).
        rewarmup: length of the linear way back to the peak; 0 jumps there. Only with "stable".
        min_lr: the minimum as an absolute rate, where it was given as one: it stays when the peak is
            changed, and min_lr_ratio follows.
        decided_at: completed updates when it was decided while running; None if it was configured.
        cancelled_at: completed updates when it was withdrawn, before it had begun.

    Raises:
        ScheduleError: a field is not usable, or the shape never arrives at a minimum of 0.
    """

    start: int
    length: int
    shape: str = "one_minus_sqrt"
    min_lr_ratio: float = 0.0
    power: float | None = None
    then: Then = "stop"
    rewarmup: int = 0
    min_lr: float | None = None
    decided_at: int | None = None
    cancelled_at: int | None = None
    _weight: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole("decay_start", self.start)
        whole("decay_steps", self.length, minimum=1)
        shape = find_shape(self.shape)
        ratio = real("min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)
        if shape.needs_minimum and ratio == 0.0:
            raise ScheduleError(
                "min_lr_ratio",
                f"more than 0 for decay_shape {self.shape!r}, which approaches 0 without reaching it",
                ratio,
                "Give a minimum such as 0.01, or take one_minus_sqrt, linear or cosine.",
            )
        self._check_power(shape)
        self._check_then()
        if self.min_lr is not None:
            object.__setattr__(self, "min_lr", real("min_lr", self.min_lr))
        for name in ("decided_at", "cancelled_at"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        # frozen dataclass: the way to store normalised values
        object.__setattr__(self, "shape", shape.name)
        object.__setattr__(self, "min_lr_ratio", ratio)
        object.__setattr__(self, "_weight", shape)

    def _check_power(self, shape: Shape) -> None:
        if shape.needs_power:
            power = real("decay_power", self.power if self.power is not None else "nothing", 0.0)
            if power == 0.0:
                raise ScheduleError("decay_power", "a number above 0", power)
            object.__setattr__(self, "power", power)
        elif self.power is not None:
            raise ScheduleError(
                "decay_power", f"none for decay_shape {shape.name!r}", self.power, "It belongs to polynomial."
            )

    def _check_then(self) -> None:
        if self.then not in ("stop", "stable"):
            raise ScheduleError("then", '"stop" or "stable"', self.then)
        if whole("rewarmup_steps", self.rewarmup) and self.then == "stop":
            raise ScheduleError(
                "rewarmup_steps", "none where the schedule stops after the decay", self.rewarmup,
                'Set then to "stable".',
            )  # fmt: skip

    @classmethod
    def until(cls, start: int, total_steps: int, shape: str, min_lr_ratio: float) -> Decay:
        """The decay that begins at ``start`` and is over at ``total_steps``.

        Raises:
            ScheduleError: nothing is left between the two.
        """
        return cls(start, length_until(start, total_steps), shape, min_lr_ratio)

    @property
    def end(self) -> int:
        """Completed updates at which the minimum is reached."""
        return self.start + self.length

    @property
    def settled(self) -> int:
        """Completed updates from which the rate is constant again: ``end``, or the end of the re-warm-up."""
        return self.end + self.rewarmup

    def weight(self, n: int, level: float = 1.0) -> float:
        """Share of the way from the minimum up to ``level`` that is left at n: 1 before, 0 after the decay.

        Args:
            n: completed updates.
            level: rate at which this decay began, as a share of the peak; more than 0.
        """
        return self.share(n, self.min_lr_ratio / level)

    def share(self, n: int, min_ratio: float) -> float:
        """As ``weight``, for a minimum of ``min_ratio`` times the rate at which the decay began."""
        return self._weight((n - self.start) / self.length, min_ratio, self.power)

    def state_dict(self) -> dict[str, Any]:
        """All fields that say something, json-able."""
        state: dict[str, Any] = {
            "start": self.start,
            "length": self.length,
            "shape": self.shape,
            "min_lr_ratio": self.min_lr_ratio,
            "then": self.then,
        }
        for name, default in _OPTIONAL.items():
            if getattr(self, name) != default:
                state[name] = getattr(self, name)
        if self._weight.registered:
            state["weights"] = self._probe()
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Decay:
        """The decay that wrote ``state``.

        Raises:
            ScheduleError: its shape is not registered, or another function is registered under its name.
            TypeError: fields are missing or unknown.
        """
        fields = dict(state)
        saved = fields.pop("weights", None)
        decay = cls(**fields)
        # 1e-9: the same function on another machine may round otherwise, another function shows
        if saved is not None and any(
            abs(a - b) > 1e-9 for a, b in zip(saved, decay._probe(), strict=True)
        ):  # fmt: skip
            raise ScheduleError(
                f"shape {decay.shape}",
                f"the function of the saved run, with weights {saved} at {_PROBES}",
                decay._probe(),
                "Register the same function under this name before loading.",
            )
        return decay

    def _probe(self) -> list[float]:
        return [self._weight(x, self.min_lr_ratio, self.power) for x in _PROBES]


_OPTIONAL = {"power": None, "rewarmup": 0, "min_lr": None, "decided_at": None, "cancelled_at": None}


def length_until(start: int, total_steps: int) -> int:
    """Length of a decay from ``start`` that is over at ``total_steps``.

    Raises:
        ScheduleError: nothing is left between the two.
    """
    whole("decay_start", start)
    if whole("total_steps", total_steps) <= start:
        raise ScheduleError(
            "total_steps",
            f"more than decay_start = {start}",
            f"{total_steps} (total_steps - decay_start = {total_steps - start} steps of decay)",
            "Let the decay begin earlier or the run end later.",
        )
    return total_steps - start
