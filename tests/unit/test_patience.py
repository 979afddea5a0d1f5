"""How long a run bears rounds that are void, and islands that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_wsd.config import Config, parse_config
from megatron_wsd.diloco.round import RoundResult
from megatron_wsd.diloco.watch import Patience
from megatron_wsd.errors import GaveUp

FAILED = RoundResult(void=True, reason="a peer is gone")
WAITS = RoundResult(void=True, waiting=True, reason="island 2 is not there")
COMMITTED = RoundResult(committed=True)


def config(islands: dict[str, Any] | None = None, **sync: Any) -> Config:
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "megatron_wsd": {"islands": islands or {}, "sync": sync},
    }
    return parse_config(raw, islands=3, ranks=1)


def test_gives_up_after_so_many_void_rounds_in_a_row() -> None:
    patience = Patience(config(max_voids=3))
    assert [patience.note(FAILED) > 0, patience.note(FAILED) > 0, patience.note(COMMITTED)] == [
        True,
        True,
        0.0,
    ]
    patience.note(FAILED)
    patience.note(FAILED)
    with pytest.raises(
        GaveUp, match=r"sync.max_voids: expected a round that commits within 3 .* a peer is gone"
    ):
        patience.note(FAILED)


def test_islands_that_are_missing_are_waited_for_as_long_as_at_a_start() -> None:
    patience = Patience(config({"start_timeout_s": 40.0}, max_voids=3))
    waited = sum(patience.note(WAITS) for _ in range(40))
    assert waited == 40.0
    with pytest.raises(GaveUp, match=r"islands.start_timeout_s: expected enough islands within 40 s"):
        patience.note(WAITS)


def test_waiting_is_no_failure() -> None:
    patience = Patience(config(max_voids=3))
    for _ in range(10):
        patience.note(FAILED)
        patience.note(FAILED)
        patience.note(WAITS)


def test_a_pause_is_no_hang() -> None:
    quick = {"heartbeat_timeout_s": 0.1, "join_timeout_s": 0.3, "hang_timeout_s": 0.8}
    patience = Patience(config(quick, max_voids=99, timeout_s=0.2))
    assert max(patience.note(FAILED) for _ in range(50)) == 0.2
    assert patience.note(WAITS) == 0.2
