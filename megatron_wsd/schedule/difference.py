"""How a resume under another schedule is refused: a table of saved against given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.wsd import Schedule

Groups = tuple[Sequence[Schedule], Sequence[float]]
"""Schedules and peaks of all param groups."""


def refuse_difference(saved: Groups, overridden: Groups, given: Groups) -> None:
    """Raise ScheduleError with a table of every field in which ``given`` is configured otherwise.

    Decisions made while running are left out on all sides: no config knows them.

    Args:
        saved: from a checkpoint.
        overridden: the same with the fields that were changed by name; there, either value is accepted.
        given: what is configured now.
    """
    sides = [([s.configured() for s in schedules], peaks) for schedules, peaks in (saved, overridden, given)]
    alike = all(schedule == schedules[0] for schedules, _ in sides for schedule in schedules)
    old, changed, new = (
        dict(_flat({"schedule": _tables(schedules, alike), "peaks": list(peaks)}))
        for schedules, peaks in sides
    )
    rows = [
        (key, str(changed.get(key, "-")), str(new.get(key, "-")))
        for key in sorted(changed.keys() | new.keys())
        if new.get(key) not in (old.get(key), changed.get(key))
    ]
    if not rows:
        return
    rows.insert(0, ("", "saved", "given"))
    table = "".join(f"\n  {key:<32} {left:>20} {right:>20}" for key, left, right in rows)
    raise ScheduleError(
        "scheduler state",
        "the schedule that was saved",
        f"another one:{table}\n",
        "Resume with the saved values, or override these fields by name.",
    )


def _tables(schedules: Sequence[Schedule], alike: bool) -> object:
    """One table for all param groups where no side has several."""
    return schedules[0].state_dict() if alike else [schedule.state_dict() for schedule in schedules]


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}[{index}]")
    else:
        yield path, value
