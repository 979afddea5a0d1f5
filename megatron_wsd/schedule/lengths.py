"""Lengths with a unit, such as ``"20e9 tokens"``, and the one place where units are converted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, cast

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import whole

Unit = Literal["steps", "samples", "tokens"]

UNITS: tuple[Unit, ...] = ("steps", "samples", "tokens")
"""From the coarsest to the finest."""

_LENGTH = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s+(step|sample|token)s?\s*")


@dataclass(frozen=True)
class Length:
    """``count`` optimizer updates, samples or tokens; samples and tokens are global over all islands."""

    count: int
    unit: Unit

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"


def parse_length(value: object, field: str = "length", minimum: int = 0) -> Length:
    """A length as users write it: ``"20e9 tokens"``, ``"1_000 samples"``, ``"2000 steps"``, or 2000 (steps).

    Args:
        value: an int, or a number followed by its unit.
        field: what it is called in an error.
        minimum: smallest count that is accepted.

    Raises:
        ScheduleError: no unit, an unknown one, or no whole number of them.
    """
    if isinstance(value, Length):
        whole(field, value.count, minimum)
        return value
    if not isinstance(value, str) or value == "auto":
        return Length(whole(field, value, minimum), "steps")
    match = _LENGTH.fullmatch(value)
    count = Decimal(match[1].replace("_", "")) if match else Decimal(-1)  # Decimal: 20.1e9 is a whole number
    if match is None or count != int(count) or count < minimum:
        raise ScheduleError(
            field,
            f"a whole number of at least {minimum}, alone for steps or followed by steps, samples or tokens",
            repr(value),
            'Write 2000, "2000 steps" or "20e9 tokens".',
        )
    return Length(int(count), cast(Unit, f"{match[2]}s"))


@dataclass(frozen=True)
class Batch:
    """What one update and one sample hold; None where that is not one number.

    Attributes:
        samples_per_step: samples of one optimizer update, over all ranks and islands. None while the batch
            size is ramped or islands come and go: then steps are not convertible, and nobody guesses.
        tokens_per_sample: the sequence length.

    Raises:
        ScheduleError: not whole numbers of at least 1.
    """

    samples_per_step: int | None = None
    tokens_per_sample: int | None = None

    def __post_init__(self) -> None:
        for name in ("samples_per_step", "tokens_per_sample"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), minimum=1)

    def per_step(self, unit: Unit) -> int | None:
        """How many ``unit`` one optimizer update consumes; None if that is not known."""
        return self._ratio("steps", unit)

    def convert(self, field: str, length: Length, unit: Unit) -> int:
        """``length`` in ``unit``; what does not divide evenly is rounded up, never short of ``length``.

        Raises:
            ScheduleError: what one holds of the other is not known.
        """
        if UNITS.index(length.unit) <= UNITS.index(unit):
            ratio = self._ratio(length.unit, unit)
            count = None if ratio is None else length.count * ratio
        else:
            ratio = self._ratio(unit, length.unit)
            count = None if ratio is None else -(-length.count // ratio)
        if count is None:
            raise ScheduleError(
                field,
                f"a length in {unit}, like the rest of the schedule",
                str(length),
                f"Give it in {unit}, or say samples_per_step and tokens_per_sample where they are constant.",
            )
        return count

    def _ratio(self, coarse: Unit, fine: Unit) -> int | None:
        parts = (self.samples_per_step, self.tokens_per_sample)
        product = 1
        for part in parts[UNITS.index(coarse) : UNITS.index(fine)]:
            if part is None:
                return None
            product *= part
        return product


def finest(lengths: list[Length]) -> Unit:
    """The unit a schedule with these lengths counts in: the finest that occurs; steps if there are none."""
    return max((length.unit for length in lengths), key=UNITS.index, default="steps")
