"""Dealing an endless order to islands, and dealing what is left of it anew when their number changes.

I islands share the numbers 0, 1, 2, ... as cards are dealt: draw j of island i is the number j * I + i. When
islands of different speed stop, island i having made t_i draws, the front is ragged: some numbers above the
lowest free one are taken. Those that are free, in ascending order, are then dealt to the new islands; a draw
of a new island is found by counting, without a table, however large the numbers are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def taken_below(x: int, draws: Sequence[int]) -> int:
    """How many numbers below ``x`` are taken: sum_i min(t_i, ceil((x - i) / I)).

    Args:
        x: at least 0.
        draws: t_i of each of the I islands.
    """
    islands = len(draws)
    return sum(min(t, max(0, -((i - x) // islands))) for i, t in enumerate(draws))


def free_number(n: int, draws: Sequence[int]) -> int:
    """The n-th number, from 0, that no island has taken.

    It is the largest x with no more than n free numbers below it. Behind the ragged front this is n plus all
    draws; within the front it is found by bisection, O(I log I max(t)).

    Args:
        n: at least 0.
        draws: t_i of each of the I islands.
    """
    total = sum(draws)
    front = len(draws) * max(draws, default=0)  # from here on everything is free
    if n + total >= front:
        return n + total
    numbers = range(n, front)
    return numbers[bisect_right(numbers, n, key=lambda x: x - taken_below(x, draws)) - 1]


def dealt(draw: int, island: int, islands: int, before: Sequence[Sequence[int]]) -> int:
    """The number that is draw ``draw``, from 0, of an island.

    Args:
        draw: counted since the number of islands last changed.
        island: in [0, islands).
        islands: how many there are now.
        before: for each earlier number of islands, oldest first, the draws that each island made under it.
    """
    number = draw * islands + island
    for draws in reversed(before):
        number = free_number(number, draws)
    return number
