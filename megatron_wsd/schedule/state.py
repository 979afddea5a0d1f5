"""What the torch and DeepSpeed fronts save, and how they refuse the state of another schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import whole
from megatron_wsd.schedule.wsd import Schedule


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Write ``rate`` into a param group, in place where the optimizer keeps its rate in a tensor."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def save_position(schedule: Schedule, peaks: Sequence[float], num_updates: int) -> dict[str, Any]:
    """A json-able state from which the rate of every update of every param group can be told.

    Args:
        schedule: goes in whole, with its version.
        peaks: peak rate of each param group, in their order.
        num_updates: completed updates.
    """
    return {"schedule": schedule.state_dict(), "peaks": list(peaks), "num_updates": num_updates}


def load_position(state: object, schedule: Schedule, peaks: Sequence[float]) -> int:
    """Completed updates in ``state``, if it was saved by this schedule with these peaks.

    Raises:
        ScheduleError: not such a state, or one that differs; the message is a table of saved against given.
    """
    if not isinstance(state, Mapping) or state.keys() != {"schedule", "peaks", "num_updates"}:
        raise ScheduleError(
            "scheduler state",
            "a state saved by a megatron_wsd scheduler",
            sorted(state) if isinstance(state, Mapping) else state,
            "The checkpoint was written without one, or with another scheduler; "
            "load it without the scheduler's state and set the position by hand.",
        )
    saved = Schedule.from_state(state["schedule"])
    refuse_difference(save_position(saved, state["peaks"], 0), save_position(schedule, peaks, 0))
    return whole("num_updates", state["num_updates"])


def refuse_difference(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ScheduleError with a table of every field in which two states differ.

    Args:
        saved: nested mappings, lists and numbers from a checkpoint.
        given: the same from the schedule that is to go on.
    """
    old, new = dict(_flat(saved)), dict(_flat(given))
    rows = [
        (key, str(old.get(key, "-")), str(new.get(key, "-")))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if not rows:
        return
    table = "".join(
        f"\n  {key:<32} {left:>20} {right:>20}" for key, left, right in [("", "saved", "given"), *rows]
    )
    raise ScheduleError(
        "scheduler state",
        "the schedule that was saved",
        f"another one:{table}\n",
        "Resume with the saved values.",
    )


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}[{index}]")
    else:
        yield path, value
