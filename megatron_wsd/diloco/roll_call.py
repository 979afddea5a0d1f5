"""Which islands have to be there before anything is committed: so that no two go apart."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.errors import TooFewIslands

log = logging.getLogger(__name__)


class RollCall:
    """Holds every quorum against the one before.

    Two things can make an island believe that it is alone when it is not. A lighthouse that was restarted has
    forgotten who was alive: whoever asks it first would get a quorum alone. And an island that was resumed
    cannot know whether those with whom it made its newest round have gone on without it, as ``least`` of them
    may: their rounds would have the numbers of its own. In both cases all must be back who were there before,
    or the operator says that those who are here go on.

    All ranks of the island must call the methods together.

    Args:
        group: the ranks of this island.
        least: fewest islands that may commit.

    Attributes:
        met: the islands of the newest quorum that was complete.
        in_doubt: whether the lighthouse was restarted and not all are back.
        consent: the file by which the operator lets those who are here go on; removed when they do, since it
            was given for the islands that are gone now. None: nobody can.
    """

    def __init__(self, group: IslandGroup, least: int) -> None:
        self._group, self._least = group, least
        self.met: tuple[int, ...] = ()
        self._here: tuple[int, ...] = ()
        self._quorum_id = 0
        self.in_doubt = self._resumed = False
        self._allowed: tuple[int, ...] = ()
        self.consent: Path | None = None

    def resume(self, met: Sequence[int]) -> None:
        """Begin from a state that was committed together with the islands ``met``."""
        self.met, self._resumed = tuple(met), True

    def call(self, quorum_id: int, here: tuple[int, ...]) -> bool:
        """Take in a quorum.

        Returns:
            Whether another lighthouse than before has answered: one that lives counts up with every change.
        """
        newborn = quorum_id < self._quorum_id or (quorum_id == self._quorum_id and here != self._here)
        self._quorum_id, self._here = quorum_id, here
        return newborn

    def doubt_lighthouse(self) -> None:
        """It has been restarted, as a rank of the island has seen."""
        log.warning("the lighthouse has been restarted")
        self.in_doubt = True

    def missing(self) -> int:
        """How many islands are not here that have to be; mostly 0."""
        gone = tuple(sorted(set(self.met) - set(self._here)))
        may_go_on = self._resumed and len(gone) >= self._least
        if not gone or not (self.in_doubt or may_go_on):
            return 0
        allowed = gone == self._allowed or (self.consent is not None and os.path.exists(self.consent))
        if self._group.broadcast([int(allowed)])[0]:
            if gone != self._allowed:
                log.warning("going on without islands %s, as the operator allows", list(gone))
            self._allowed = gone
            return 0
        why = "the lighthouse was restarted" if self.in_doubt else "this island was resumed"
        log.warning("%s and islands %s are not back yet", why, list(gone))
        return len(gone)

    def check_complete(self, missing: int) -> None:
        """Refuse to go on without islands that have to be here.

        Args:
            missing: the most that an island of this quorum misses, as `missing` tells it.

        Raises:
            TooFewIslands: it is not 0.
        """
        if missing and self.in_doubt:
            raise TooFewIslands(f"the lighthouse was restarted and islands are missing ({missing})")
        if missing:
            raise TooFewIslands(f"islands are missing ({missing}) that may have gone on without those here")
        if self._allowed and self._group.rank == 0 and self.consent is not None:
            self.consent.unlink(missing_ok=True)
        self.in_doubt = self._resumed = False
        self._allowed = ()
        self.met = self._here
