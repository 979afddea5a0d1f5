"""Lengths with a unit, and their conversion."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule import Batch, Length, parse_length
from megatron_wsd.schedule.lengths import finest


@pytest.mark.parametrize(
    "text,length",
    [
        (2000, Length(2000, "steps")),
        ("2000 steps", Length(2000, "steps")),
        ("1 step", Length(1, "steps")),
        ("20e9 tokens", Length(20_000_000_000, "tokens")),
        ("20.1E9 tokens", Length(20_100_000_000, "tokens")),
        (" 1_000 samples ", Length(1000, "samples")),
        ("123456789012345678901 tokens", Length(123456789012345678901, "tokens")),  # more than a float holds
        (Length(3, "samples"), Length(3, "samples")),
    ],
)
def test_parsed(text: Any, length: Length) -> None:
    assert parse_length(text) == length
    assert parse_length(str(length)) == length


@pytest.mark.parametrize(
    "text",
    ["", "2000", "20B tokens", "20e9", "tokens", "1.5 steps", "-1 steps", "1e-3 tokens", "3 epochs", "auto",
     "2000steps", "nan tokens", "1e999 tokens", -1, 2.0, True, None, [3], "0 steps"],
)  # fmt: skip
def test_refused(text: Any) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_length(text, "decay_steps", minimum=1)
    assert caught.value.field == "decay_steps"


def test_converted_both_ways_and_never_short() -> None:
    batch = Batch(samples_per_step=4, tokens_per_sample=10)
    assert [batch.per_step(unit) for unit in ("steps", "samples", "tokens")] == [1, 4, 40]
    assert batch.convert("x", Length(3, "steps"), "tokens") == 120
    assert batch.convert("x", Length(121, "tokens"), "steps") == 4
    assert batch.convert("x", Length(120, "tokens"), "steps") == 3
    assert batch.convert("x", Length(5, "samples"), "samples") == 5


def test_a_ramped_batch_is_not_guessed() -> None:
    ramp = Batch(tokens_per_sample=10)
    assert ramp.convert("x", Length(3, "samples"), "tokens") == 30
    assert ramp.per_step("tokens") is None
    for length, unit in ((Length(3, "steps"), "tokens"), (Length(3, "tokens"), "steps")):
        with pytest.raises(ScheduleError, match="x: expected a length in"):
            ramp.convert("x", length, unit)  # type: ignore[arg-type]


def test_a_schedule_counts_in_the_finest_unit() -> None:
    assert finest([]) == "steps"
    assert finest([Length(1, "samples"), Length(1, "steps")]) == "samples"
    assert finest([Length(1, "tokens"), Length(1, "samples")]) == "tokens"
