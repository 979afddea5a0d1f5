"""Which data mix holds from which step: a pure function of the schedule and the orders. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_wsd.schedule import Schedule


def planned_mixes(
    schedule: Schedule, orders: Sequence[Mapping[str, Any]], mixes: Collection[str]
) -> list[tuple[int, str]]:
    """(step, mix) of every switch, ascending; ``stable`` holds before the first.

    A decay brings the mix that its order names, else ``decay`` if there is one; going back to the stable
    phase brings back ``stable``.

    Args:
        schedule: with everything that was decided so far, in steps.
        orders: those that were carried out; see `megatron_wsd.control.Order`.
        mixes: names in data.mixes.
    """
    named: dict[int, str] = {}
    for order in orders:
        if order["kind"] == "decay" and order["data_mix"] and "refused" not in order:
            named[order["step"] if order["at"] is None else order["at"]] = order["data_mix"]
    found: list[tuple[int, str]] = []
    for decay in schedule.decays:
        mix = named.get(decay.start, "decay" if "decay" in mixes else None)
        if mix is None:
            continue
        found.append((decay.start, mix))
        if decay.then == "stable":
            found.append((decay.end, "stable"))
    before = ["stable", *(mix for _, mix in found)]
    return [switch for switch, mix in zip(found, before, strict=False) if switch[1] != mix]
