"""Controlled delay: contributions held back for a number of outer rounds that is known. Pure.

The experiment of the papers on stale pseudo-gradients. The same code holds contributions back in the real
loop and in the simulator.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from megatron_wsd.config.block import DelayConfig
from megatron_wsd.errors import FieldError

if TYPE_CHECKING:
    from megatron_wsd.diloco.capture import Contribution
    from megatron_wsd.diloco.local import Local

T = TypeVar("T")


def delays(controlled: int | list[int] | DelayConfig, island: int) -> Callable[[int], int]:
    """The delay, in outer rounds, of an island's n-th contribution (n from 0).

    A distribution draws by a hash of (seed, island, n): a resumed run, and the simulator, draw the same.

        uniform:    low to high, both included, each as likely
        geometric:  P(k) = (1 - q) q^k for k = 0, 1, ..., with q = mean / (1 + mean), so that E k = mean

    Args:
        controlled: ``sync.controlled_delay``: for all islands, for each, or a distribution.
        island: number of the island.
    """
    if isinstance(controlled, list):
        own = controlled[island]
        return lambda n: own
    if isinstance(controlled, int):
        return lambda n: controlled
    if controlled.kind == "uniform":
        count = controlled.high - controlled.low + 1
        return lambda n: controlled.low + (_bits(controlled.seed, island, n) * count >> 64)
    root = math.log(controlled.mean / (1.0 + controlled.mean))
    # The middle of one of 2^53 equal parts of [0, 1]: its logarithm is never infinite.
    return lambda n: int(math.log(((_bits(controlled.seed, island, n) >> 11) + 0.5) * 2.0**-53) / root)


def _bits(seed: int, island: int, n: int) -> int:
    """64 uniform bits, a pure function of the three."""
    packed = struct.pack("<QQQ", seed, island, n)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class DelayLine(Generic[T]):
    """Holds items back, each for a number of rounds of its own."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, T]] = []

    def push(self, item: T, delay: int, now: int) -> None:
        """Hold ``item`` until round ``now + delay``; a delay of 0 lets ``pop(now)`` return it.

        Raises:
            FieldError: the delay is negative.
        """
        if delay < 0:
            raise FieldError("delay", "a number of rounds, at least 0", delay)
        self._waiting.append((now + delay, item))

    def pop(self, now: int) -> list[T]:
        """Take out the items whose round has come, the one that was pushed first first."""
        due = [item for when, item in self._waiting if when <= now]
        self._waiting = [(when, item) for when, item in self._waiting if when > now]
        return due

    def drop(self) -> None:
        """Forget all items."""
        self._waiting.clear()

    @property
    def items(self) -> list[T]:
        """The items that are held, in the order in which they were pushed."""
        return [item for _, item in self._waiting]

    def __len__(self) -> int:
        return len(self._waiting)


class HeldBack:
    """The contributions of an island under controlled delay.

    Those that are held are lost when a run stops; the counts, which the delays are drawn by, go on.

    Args:
        local: captures and encodes them.
        fragments: how many there are.
        delay: of the n-th contribution to a fragment, in turns of that fragment; see `delays`.
    """

    def __init__(self, local: Local, fragments: int, delay: Callable[[int], int]) -> None:
        self._local, self._delay = local, delay
        self._lines: list[DelayLine[Contribution]] = [DelayLine() for _ in range(fragments)]
        self._ready: list[list[Contribution]] = [[] for _ in range(fragments)]
        self._turns = [0] * fragments
        self._captured = [0] * fragments

    def counts(self) -> list[list[int]]:
        """Turns and captures of each fragment, for a checkpoint."""
        return [list(self._turns), list(self._captured)]

    def take_counts(self, counts: list[list[int]]) -> None:
        """Go on from what `counts` gave."""
        self._turns, self._captured = (list(numbers) for numbers in counts)

    def next(self, i: int, cursor: int) -> Contribution | None:
        """Capture, hold back, and give what is due at this turn of fragment ``i``: the oldest, one a turn.

        Args:
            i: number of the fragment.
            cursor: inner steps of the island.
        """
        now = self._turns[i]
        self._turns[i] += 1
        if self._local.fragments[i].steps:
            fresh = self._local.capture(i, cursor, keep=True)
            self._lines[i].push(fresh, self._delay(self._captured[i]), now)
            self._captured[i] += 1
        self._ready[i] += self._lines[i].pop(now)
        return self._local.encode(self._ready[i].pop(0)) if self._ready[i] else None
