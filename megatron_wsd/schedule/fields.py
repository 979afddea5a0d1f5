"""What a schedule accepts as a number, and how a refusal reads."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from megatron_wsd.errors import ScheduleError


def whole(field: str, value: object, minimum: int = 0) -> int:
    """``value`` if it is an int of at least ``minimum``, else ScheduleError.

    bool and float are refused even where they equal an int: ``1e5`` steps is a typing error more often
    than an intention, and a state must read back as what was written.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ScheduleError(field, f"a whole number of at least {minimum}", value, _auto(value))
    return value


def real(field: str, value: object, low: float = 0.0, high: float = math.inf) -> float:
    """``value`` as a float if it is a finite number in [``low``, ``high``], else ScheduleError."""
    expected = (
        f"a finite number of at least {low:g}" if high == math.inf else f"a number in [{low:g}, {high:g}]"
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ScheduleError(field, expected, value, _auto(value))
    try:
        number = float(value)
    except OverflowError:  # an int of more than 308 digits
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise ScheduleError(field, expected, value)
    return number


def _auto(value: object) -> str:
    if value != "auto":
        return ""
    return '"auto" is filled in by Hugging Face\'s trainer before DeepSpeed sees it; write the number.'


def nearest(word: object, known: Iterable[str]) -> str:
    """A remedy for an unknown ``word``: the nearest known one, then all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    suggestion = f"Did you mean {close[0]!r}? " if close else ""
    return f"{suggestion}Known: {', '.join(names)}."


@contextmanager
def naming(names: Mapping[str, str], prefix: str = "") -> Iterator[None]:
    """Re-raise a ScheduleError in the words of the front that the user called.

    Args:
        names: the schedule's word -> the front's word, replaced in the whole message.
        prefix: put before the field only, such as ``"scheduler.params."``.
    """
    try:
        yield
    except ScheduleError as error:

        def reword(text: str) -> str:
            return re.sub(r"[a-z_]+", lambda word: names.get(word[0], word[0]), text)

        got = reword(error.got) if isinstance(error.got, str) else error.got
        raise ScheduleError(
            prefix + reword(error.field), reword(error.expected), got, reword(error.remedy)
        ) from None
