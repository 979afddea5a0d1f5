"""The warmup-stable-decay schedule as a pure function of completed updates.

``lr(n)`` is the rate of the update that takes the model from n to n + 1 completed updates, and

    lr(n) / peak = i + (1 - i) n / W               n < W            warmup
                 = level                           between decays   stable   (1 until the first decay)
                 = m + (level - m) w(x, m/level)   s <= n < s + L   decay    (x = (n - s) / L)
                 = m of the last decay             after it         done

with i warmup_init_ratio, W warmup_steps, and s, L, m, w start, length, min_lr_ratio and shape of a decay
(MiniCPM, arXiv:2404.06395). n may count updates, samples or tokens; all lengths of one schedule are in the
same unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import real, whole
from megatron_wsd.schedule.shapes import Shape, find_shape

Phase = Literal["warmup", "stable", "decay", "done"]

STATE_VERSION = 1


@dataclass(frozen=True)
class Decay:
    """One decay: from the rate held at ``start`` down to the minimum, reached after ``length``.

    Attributes:
        start: completed updates at which it begins; lr(start) is still the full rate.
        length: how long it takes; lr(start + length) is the minimum. At least 1.
        shape: name of a shape; an alias is replaced by the canonical name.
        min_lr_ratio: the rate it ends at, as a share of the schedule's peak.

    Raises:
        ScheduleError: a field is not usable, or the shape never arrives at a minimum of 0.
    """

    start: int
    length: int
    shape: str = "one_minus_sqrt"
    min_lr_ratio: float = 0.0
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
        # frozen dataclass: the way to store normalised values
        object.__setattr__(self, "shape", shape.name)
        object.__setattr__(self, "min_lr_ratio", ratio)
        object.__setattr__(self, "_weight", shape)

    @classmethod
    def until(cls, start: int, total_steps: int, shape: str, min_lr_ratio: float) -> Decay:
        """The decay that begins at ``start`` and is over at ``total_steps``.

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
        return cls(start, total_steps - start, shape, min_lr_ratio)

    @property
    def end(self) -> int:
        """Completed updates at which the minimum is reached."""
        return self.start + self.length

    def weight(self, n: int, level: float = 1.0) -> float:
        """Share of the way from the minimum up to ``level`` that is left at n: 1 before, 0 after the decay.

        Args:
            n: completed updates.
            level: rate at which this decay began, as a share of the peak; more than 0.
        """
        return self._weight((n - self.start) / self.length, self.min_lr_ratio / level)

    def state_dict(self) -> dict[str, Any]:
        """All fields, json-able."""
        return {
            "start": self.start,
            "length": self.length,
            "shape": self.shape,
            "min_lr_ratio": self.min_lr_ratio,
        }


@dataclass(frozen=True)
class Schedule:
    """Warm-up, a stable phase, and any number of decays; pure and immutable.

    Without a decay the stable phase has no end. A second decay begins at the rate where the first one ended,
    so appending one never changes the rate of an earlier update.

    Attributes:
        warmup_steps: lr(warmup_steps) is the first at the full peak; 0 for no warm-up.
        decays: in order of their start.
        warmup_init_ratio: lr(0) / peak, if there is a warm-up.

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

    def __post_init__(self) -> None:
        whole("warmup_steps", self.warmup_steps)
        object.__setattr__(
            self, "warmup_init_ratio", real("warmup_init_ratio", self.warmup_init_ratio, 0.0, 1.0)
        )
        object.__setattr__(self, "decays", tuple(self.decays))
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
            free_from, why, level = decay.end, f"where the decay from {decay.start} ends", decay.min_lr_ratio

    @property
    def end(self) -> int | None:
        """Completed updates at which the last decay is over; None while the horizon is open."""
        return self.decays[-1].end if self.decays else None

    def factor(self, n: int) -> float:
        """lr(n) / peak, in [0, 1].

        Args:
            n: completed updates (or samples, or tokens), at least 0.
        """
        if whole("n", n) < self.warmup_steps:
            return self.warmup_init_ratio + (1.0 - self.warmup_init_ratio) * (n / self.warmup_steps)
        level = 1.0
        for decay in self.decays:
            if n < decay.start:
                break
            low = decay.min_lr_ratio
            level = low + (level - low) * decay.weight(n, level)
        return level

    def phase(self, n: int) -> Phase:
        """Phase of the update that follows n completed ones; "done" from ``end`` on."""
        if whole("n", n) < self.warmup_steps:
            return "warmup"
        if self.end is not None and n >= self.end:
            return "done"
        return "decay" if any(decay.start <= n < decay.end for decay in self.decays) else "stable"

    def with_decay(
        self, start: int, length: int, shape: str = "one_minus_sqrt", min_lr_ratio: float = 0.0
    ) -> Schedule:
        """This schedule with one more decay at its end; see ``Decay`` for the arguments."""
        decay = Decay(start, length, shape, min_lr_ratio)
        return Schedule(self.warmup_steps, (*self.decays, decay), self.warmup_init_ratio)

    def state_dict(self) -> dict[str, Any]:
        """The whole schedule, json-able and versioned; ``from_state`` gives an equal one."""
        return {
            "version": STATE_VERSION,
            "warmup_steps": self.warmup_steps,
            "warmup_init_ratio": self.warmup_init_ratio,
            "decays": [decay.state_dict() for decay in self.decays],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Schedule:
        """The schedule that wrote ``state``.

        Raises:
            ScheduleError: not such a state, of another version, or with fields missing or unknown.
        """
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            raise ScheduleError(
                "schedule state",
                f"a state of version {STATE_VERSION}",
                state,
                "It was written by something else, or by a newer megatron_wsd.",
            )
        try:
            fields = {key: value for key, value in state.items() if key != "version"}
            return cls(**(fields | {"decays": tuple(Decay(**decay) for decay in fields["decays"])}))
        except (TypeError, KeyError) as error:
            raise ScheduleError(
                "schedule state", "exactly the fields that state_dict() writes", dict(state), f"({error})"
            ) from error
