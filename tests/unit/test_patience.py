"""How long a run bears rounds that are void, islands that are missing, and numbers that are not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_wsd.config import Config, parse_config
from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.round import RoundResult
from megatron_wsd.diloco.watch import LossWatch, Patience
from megatron_wsd.errors import GaveUp, NotFiniteError
from megatron_wsd.shards.zero3 import is_finite

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
    patience = Patience(config(max_voids=3), island=1)
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
    patience = Patience(config({"start_timeout_s": 40.0}, max_voids=3), island=1)
    waited = sum(patience.note(WAITS) for _ in range(40))
    assert waited == 40.0
    with pytest.raises(GaveUp, match=r"islands.start_timeout_s: expected enough islands within 40 s"):
        patience.note(WAITS)


def test_waiting_is_no_failure() -> None:
    patience = Patience(config(max_voids=3), island=1)
    for _ in range(10):
        patience.note(FAILED)
        patience.note(FAILED)
        patience.note(WAITS)


def test_a_pause_is_no_hang() -> None:
    quick = {"heartbeat_timeout_s": 0.1, "join_timeout_s": 0.3, "hang_timeout_s": 0.8}
    patience = Patience(config(quick, max_voids=99, timeout_s=0.2), island=1)
    assert max(patience.note(FAILED) for _ in range(50)) == 0.2
    assert patience.note(WAITS) == 0.2


def settled(contributors: tuple[int, ...], dropped: tuple[int, ...] = (), fragment: int = 0) -> RoundResult:
    decision = Decision((), (), 4, None, (), fragment, contributors, dropped, (), 0, 0, 40, None)
    return RoundResult(committed=bool(contributors), fragment=fragment, decision=decision)


LOST, USED, OTHERS = settled((0,), (1,)), settled((0, 1)), settled((0,))


def test_three_lost_contributions_of_a_fragment_in_a_row_end_an_island() -> None:
    patience = Patience(config(max_voids=3), island=1)
    lines = [
        LOST,
        LOST,
        USED,
        LOST,
        OTHERS,
        LOST,
        settled((0,), (1,), fragment=1),
        settled((0,), (0,)),
        FAILED,
    ]
    for result in lines:
        patience.note(result)
    with pytest.raises(NotFiniteError, match=r"island 1: .* NaN or Inf in 3 in a row.*--resume"):
        patience.note(settled((), (0, 1)))  # a round of which nothing was left


def test_an_island_bears_what_others_lose() -> None:
    patience = Patience(config(), island=0)
    for _ in range(10):
        assert patience.note(LOST) == 0.0


class Ranks:
    """The group of an island whose other rank has lost so many steps."""

    def __init__(self, other: int = 0) -> None:
        self.other = other

    def gather(self, values: list[int]) -> list[list[int]]:
        return [values, [self.other]]


def watch(other: int = 0) -> LossWatch:
    return LossWatch(config(inner_steps=4), 1, Ranks(other))  # type: ignore[arg-type]


BAD, GOOD = torch.tensor(float("nan")), torch.tensor(2.0)


def test_a_loss_that_is_not_finite_for_three_periods_ends_an_island() -> None:
    losses = watch()
    losses.check(ended=True)
    for loss in (*[BAD] * 11, GOOD, *[BAD] * 10, torch.tensor(float("inf"))):
        losses.add(loss)
        losses.check()
    losses.add(BAD)
    with pytest.raises(
        NotFiniteError, match=r"island 1: expected a finite loss, got NaN or Inf for 12 inner"
    ):
        losses.check()


def test_at_the_end_the_last_loss_counts_on_any_rank() -> None:
    losses = watch()
    losses.add(BAD)
    losses.add(GOOD)
    losses.check(ended=True)
    losses.add(BAD)
    losses.check()
    with pytest.raises(NotFiniteError):
        losses.check(ended=True)
    with pytest.raises(NotFiniteError):
        watch(other=1).check(ended=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["master", "moment"])
def test_what_is_not_finite_is_found_in_masters_and_moments(value: float, where: str) -> None:
    masters = [torch.randn(50), torch.empty(0)]
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(50, dtype=torch.bfloat16), "codes": None}
    inner = SimpleNamespace(
        state={masters[0]: moments, masters[1]: {"codes": torch.ones(3, dtype=torch.uint8)}}
    )
    engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner, fp32_partitioned_groups_flat=masters))
    assert is_finite(engine)
    (masters[0] if where == "master" else moments["exp_avg"])[17] = value  # type: ignore[index]
    assert not is_finite(engine)
