"""An island that lacks outer state, or has a wrong one, takes over that of another."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_wsd.config import Config
from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.faults import Faults
from megatron_wsd.diloco.island import IslandGroup
from megatron_wsd.diloco.membership import Membership
from megatron_wsd.diloco.snapshot import SnapshotServer, fetch
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.diloco.wire import broadcast_json
from megatron_wsd.errors import ExchangeError, IslandError, said

log = logging.getLogger(__name__)


class Healer:
    """Gives and takes outer state, for one rank.

    Args:
        config: for the timeouts and the bandwidth to reckon with.
        island: number of this island.
        group: the ranks of this island.
        seat: this rank among its equals.
        state: anchors and outer optimizers.
        faults: to be injected.
    """

    def __init__(
        self,
        config: Config,
        island: int,
        group: IslandGroup,
        seat: Membership,
        state: OuterState,
        faults: Faults,
    ) -> None:
        self._config, self._island, self._group, self._seat = config, island, group, seat
        self._state, self._faults = state, faults
        self._outvoted = False
        self._server: SnapshotServer | None = None

    def close(self) -> None:
        """Heal nobody any more."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def note_outvoted(self, decision: Decision) -> None:
        """A state that went wrong at an equal step is healed once; twice means broken hardware.

        Raises:
            IslandError: it is the second time.
        """
        if decision.report(self._island).outer_step < decision.outer_step:
            return
        if self._outvoted:
            raise IslandError(
                f"island {self._island}",
                "the outer state of the majority",
                "a different one for the second time",
                "Suspect memory or disk of this island; restart it with --resume on other hardware.",
            )
        self._outvoted = True
        log.error("outer state differs from the majority at step %d: healing", decision.outer_step)

    def heal(self, decision: Decision, received: Callable[[], None]) -> None:
        """The leader says where its outer state can be fetched; the healed overwrite theirs with it.

        The others go on to the next quorum, which waits for the healed: nothing changes meanwhile. All ranks
        of the island must call it.

        Args:
            decision: whose ``healed`` take the state of its ``source``.
            received: called when the state is there, while nobody else can see it.

        Raises:
            ExchangeError: it failed on some rank; an island whose state is torn by that stands behind
                everybody until a healing succeeds.
        """
        assert decision.source is not None
        receiving = self._island in decision.healed
        problem, offer = "", {}
        try:
            if decision.source == self._island:
                self._server = self._server or SnapshotServer(
                    self._state, self._seat.host, self._config.sync.timeout_s, self._faults
                )
                offer = self._server.offer()
            place = decision.place(decision.source)
            offer = broadcast_json(self._seat, offer, place, receiving=decision.source != self._island)
        except Exception as e:  # told to the other ranks, then to the other islands
            problem = said(e)
            self._seat.abort()
        if not self._group.all_agree(not problem):
            self._seat.vote(False)
            raise ExchangeError(f"healing: {problem or 'another rank of this island failed'}")
        if not receiving:
            return
        try:
            self._faults.here("healing", decision.outer_step)
            limits = self._config.sync.timeout_s, self._config.islands.heal_mbit_per_s
            fetch(offer, self._state, *limits, self._seat.beat)
            with self._state.still:
                received()
                self._state.residence.finish()
            self._seat.bytes_moved += offer["bytes"]
        except Exception as e:
            problem = said(e)
        self._seat.beat(self._group.timeout_s)  # another rank may need longer, or be at it still
        if not self._group.all_agree(not problem):
            self._state.outer_step = -1  # torn: it stands behind everybody until a healing succeeds
            raise ExchangeError(f"healing: {problem or 'another rank of this island failed'}")
