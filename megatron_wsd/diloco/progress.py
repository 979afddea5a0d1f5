"""How far asynchronous islands have come, from what they have committed. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction


def progress(spans: Mapping[int, int]) -> int:
    """Whole inner steps of the run that are done.

    Args:
        spans: committed inner steps, summed over islands and fragments, by what makes one step of the run:
            islands times fragments. One entry, unless the number of islands was changed.
    """
    return math.floor(sum((Fraction(steps, whole) for whole, steps in spans.items()), Fraction(0)))
