"""Where two configs differ, key by key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_MISSING = "(absent)"


def differing(
    one: Mapping[str, Any], other: Mapping[str, Any], but: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """The dotted names of the leaves in which two jsons differ, with both values.

    Args:
        one: nested, as `Config.identity` gives it.
        other: to be compared with it.
        but: names to leave out.
    """
    left, right = flat(one), flat(other)
    found = {}
    for key in sorted((left.keys() | right.keys()) - set(but)):
        pair = (left.get(key, _MISSING), right.get(key, _MISSING))
        if pair[0] != pair[1]:
            found[key] = pair
    return found


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by their dotted names."""
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{name}.{key}" if name else key)
    return found
