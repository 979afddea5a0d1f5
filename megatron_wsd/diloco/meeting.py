"""How the islands of a run find each other after a start, before the first round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megatron_wsd.config import Config
from megatron_wsd.diloco.island import IslandAddress, IslandGroup
from megatron_wsd.diloco.round import OuterHalf, RoundResult
from megatron_wsd.errors import IslandError, StopRequested
from megatron_wsd.metrics import say

log = logging.getLogger(__name__)
_TELL_S = 10.0  # from one word to the user to the next


class Meeting:
    """Empty-handed rounds until all are there who have to be.

    Args:
        half: the outer half of this rank.
        config: for the timeouts and the fewest islands.
        address: who this island is.
        group: the ranks of this island.
        stopping: asked between two rounds whether the run is to be stopped; one rank that says so is enough.
    """

    def __init__(
        self,
        half: OuterHalf,
        config: Config,
        address: IslandAddress,
        group: IslandGroup,
        stopping: Callable[[], bool],
    ) -> None:
        self._half, self._islands, self._address = half, config.islands, address
        self._group, self._stopping = group, stopping

    def hold(self, position: Callable[[], int], met: Callable[[RoundResult], None]) -> RoundResult:
        """Meet; all ranks of the island must call it.

        Args:
            position: of the schedule, as this island counts it.
            met: called with the result of every round of the meeting.

        Returns:
            That of the last one.

        Raises:
            IslandError: islands are missing, or cannot work together.
            StopRequested: ``stopping`` said so.
        """
        count, started, told = self._address.islands, time.monotonic(), 0.0
        while True:
            result = self._half.run_round({}, position())
            met(result)
            if result.again:  # who was healed, or has healed, meets the others once more
                self._go_on("while an island was being healed")
                continue
            decision = result.decision
            here = decision.islands if decision else (self._address.island,)
            under_way = decision is not None and any(r.settled for r in decision.reports)
            if not result.void and (len(here) == count or result.committed or under_way):
                return result
            self._go_on("while waiting for the other islands")
            if result.void and result.seconds > self._islands.join_timeout_s:
                started = time.monotonic()  # others are alive and have not come to their round yet
            waited = time.monotonic() - started
            missing = sorted(set(range(count)) - set(here))
            if self._group.broadcast([int(waited > self._islands.start_timeout_s)])[0]:
                if result.void or self._fresh or len(here) < (self._islands.min_islands or 1):
                    raise self._late(missing, result)
                log.warning("going on with islands %s of %d", list(here), count)
                return result
            if waited - told > _TELL_S and self._group.rank == 0:
                told = waited
                say(f"waiting for islands {missing}")
            time.sleep(0.5)

    @property
    def _fresh(self) -> bool:
        return self._half.state.outer_step <= 0

    def _go_on(self, when: str) -> None:
        if not self._group.all_agree(not self._stopping()):
            raise StopRequested(f"stopped {when}")

    def _late(self, missing: list[int], result: RoundResult) -> IslandError:
        timeout_s, remedy = (
            self._islands.start_timeout_s,
            "Look at their logs, start them, or raise the timeout.",
        )
        if result.waiting and not self._fresh:
            control = f"{self._address.run_dir or 'RUN'}/control"
            remedy = (
                "Start them. Where they have finished, their newest anchor is the result. If they are gone "
                f"for good: mkdir -p {control} && touch {control}/go-on, then --resume."
            )
        return IslandError(
            "megatron_wsd.islands.start_timeout_s",
            f"all {self._address.islands} islands within {timeout_s:g} s",
            f"none of islands {missing}" + (f" ({result.reason})" if result.void else ""),
            remedy,
        )
