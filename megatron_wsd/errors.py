"""The errors of this package.

Every message a user can cause names the field, what was expected, what came, and the way out.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TypeVar

_Own = TypeVar("_Own", bound="FieldError")

_SHORT = reprlib.Repr()  # a whole section that came where a number should be is no help in a message
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 6
_LONGEST = 600
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


class MegatronWSDError(Exception):
    """Base of every error raised on purpose by megatron_wsd."""


class FieldError(MegatronWSDError, ValueError):
    """A value the user gave is wrong.

    Args:
        field: dotted name of the key, flag, argument or file that is wrong.
        expected: what would have been accepted.
        got: what came.
        remedy: what to do about it; a full sentence.
    """

    def __init__(self, field: str, expected: str, got: object, remedy: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.remedy = remedy
        told = got if isinstance(got, str) else _SHORT.repr(got)
        if len(told) > _LONGEST and "\n" not in told:  # a table has lines, and stays whole
            told = f"{told[: _LONGEST // 2]}...{told[-_LONGEST // 2 :]}"
        text = f"{field}: expected {expected}, got {told}"
        # what came may be a sentence already, such as another error
        text += "" if told.endswith(".") else "."
        super().__init__(f"{text} {remedy}" if remedy else text)

    def under(self: _Own, field: str) -> _Own:
        """The same error, about the field by the name that the user knows it by."""
        return type(self)(field, self.expected, self.got, self.remedy)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.field, self.expected, self.got, self.remedy)


class ConfigError(FieldError):
    """The json config, or a flag that overrides it, cannot be used."""


class ScheduleError(FieldError):
    """A learning-rate schedule that cannot be built, or a state that belongs to another one."""


class DataError(FieldError):
    """A corpus, an index or a mix that cannot be read as asked."""


class CheckpointError(FieldError):
    """A checkpoint that is torn, missing or belongs to something else."""


class DamagedError(CheckpointError):
    """Files of a checkpoint that are not what was written; an older checkpoint may be whole."""


class NativeError(FieldError):
    """A buffer that must not cross into the C++ extension, or an extension that is not there."""


class IslandError(FieldError):
    """Islands that cannot work together: missing, different, or out of step."""


class GaveUp(IslandError):
    """Too many void rounds in a row. The state of this island is whole and can be saved."""


class NotFiniteError(IslandError):
    """What an island trains holds NaN or Inf, and does not recover. Its state must not be saved."""


class Refused(MegatronWSDError):
    """Several things at once stand against a start.

    Args:
        problems: one error each.
    """

    def __init__(self, problems: Sequence[MegatronWSDError]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))

    @classmethod
    def raise_all(cls, problems: Sequence[MegatronWSDError]) -> None:
        """Raise what is wrong, if anything is; a single error as it is."""
        if problems:
            raise problems[0] if len(problems) == 1 else cls(problems)


class StopRequested(MegatronWSDError):
    """Somebody asked the run to stop while it waited; nothing is wrong."""


class ExchangeError(MegatronWSDError):
    """An exchange between islands failed; the round is void and nothing has stepped."""


class TooFewIslands(ExchangeError):
    """Nothing failed, but islands are missing without which nothing may be committed."""


def said(error: Exception) -> str:
    """An error in one line: those of this package speak for themselves, others with their name."""
    if isinstance(error, MegatronWSDError):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
