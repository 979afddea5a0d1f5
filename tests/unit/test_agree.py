"""The decision that all ranks of all islands draw from the reports of a quorum."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from island_reports import report

from megatron_wsd.diloco.agree import Report, ask_for_configs, combine_digests, decide, to_int64
from megatron_wsd.errors import ExchangeError, IslandError


def test_report_survives_the_wire() -> None:
    mine = report(3, digest=to_int64(2**64 - 5))
    assert Report.from_numbers(mine.numbers()) == mine
    assert all(-(2**63) <= n < 2**63 for n in mine.numbers())


def test_all_equal_contribute_in_the_order_of_island_numbers() -> None:
    decision = decide([report(2), report(0), report(1)])
    assert decision.contributors == (0, 1, 2)
    assert decision.staleness == (0, 0, 0)
    assert decision.healed == () and decision.source is None
    assert [decision.place(i) for i in (0, 1, 2)] == [1, 2, 0]


def test_decision_does_not_depend_on_the_order_of_the_quorum() -> None:
    reports = [
        report(0, outer_step=4, inner_step=50),
        report(1),
        report(2, contributes=0),
        report(3, finite=0),
    ]
    decisions = {replace(decide(order), places=()) for order in itertools.permutations(reports)}
    assert len(decisions) == 1


def test_island_behind_is_healed_and_contributes_nothing() -> None:
    decision = decide([report(0, outer_step=3, digest=9, inner_step=40), report(1), report(2)])
    assert decision.healed == (0,)
    assert decision.source == 1
    assert decision.contributors == (1, 2)
    assert decision.outer_step == 5
    assert decision.inner_step == 60


def test_minority_at_equal_step_is_healed() -> None:
    decision = decide([report(0, digest=9), report(1), report(2)])
    assert (decision.source, decision.healed, decision.contributors) == (1, (0,), (1, 2))


def test_tie_at_equal_step_goes_to_the_side_of_the_lowest_island() -> None:
    decision = decide([report(1, digest=9), report(0)])
    assert (decision.source, decision.healed, decision.contributors) == (0, (1,), (0,))


def test_non_finite_contribution_is_dropped_and_named() -> None:
    decision = decide([report(0), report(1, finite=0)])
    assert decision.contributors == (0,)
    assert decision.dropped == (1,)


def test_staleness_is_measured_from_the_base() -> None:
    decision = decide([report(0), report(1, base=2)])
    assert decision.staleness == (0, 3)


def test_lowest_leader_with_an_order_proposes_it() -> None:
    assert decide([report(0), report(1)]).proposer is None
    assert decide([report(2, order=7), report(0), report(1, order=9)]).proposer == 1
    behind = report(0, outer_step=3, order=5)
    assert decide([behind, report(1)]).proposer is None, "who must be healed first cannot order"


def test_torn_island_never_leads() -> None:
    decision = decide([report(0, outer_step=-1, digest=1), report(1, outer_step=0, contributes=0)])
    assert decision.source == 1 and decision.healed == (0,)
    with pytest.raises(ExchangeError, match="none holds a whole outer state"):
        decide([report(0, outer_step=-1)])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"config": 8}, "the same config"),
        ({"data": 8}, "the same corpora"),
        ({"ranks": 4}, "equally many ranks"),
        ({"plan": 8}, "the same fragments"),
        ({"protocol": 99}, "the same version"),
    ],
)
def test_islands_that_cannot_work_together_are_refused(changes: dict[str, int], text: str) -> None:
    with pytest.raises(IslandError, match=text) as caught:
        decide([report(0), report(1, **changes)])
    assert "island 0 and island 1" in str(caught.value)


def test_configs_that_are_told_are_compared_key_by_key() -> None:
    configs = {
        0: {"megatron_wsd": {"outer": {"lr": 0.01, "betas": [0.9, 0.95]}, "sync": {"wire": "fp32"}}},
        1: {"megatron_wsd": {"outer": {"lr": 0.02, "betas": [0.9, 0.95]}}, "bf16": {"enabled": True}},
    }
    differ = [report(1, config=8), report(0)]
    assert ask_for_configs(differ)
    with pytest.raises(IslandError) as caught:
        decide(differ, configs=configs)
    assert str(caught.value) == (
        "island 0 and island 1: expected the same config on all islands, got bf16.enabled (absent) and True; "
        "megatron_wsd.outer.lr 0.01 and 0.02; megatron_wsd.sync.wire fp32 and (absent). "
        "Only logging, checkpoints, timeouts and folders may differ."
    )
    with pytest.raises(ExchangeError, match=r"megatron_wsd\.outer\.lr 0\.01 and 0\.02"):
        decide(differ, settled=True, configs=configs)


@pytest.mark.parametrize("changes", [{"config": 7}, {"protocol": 99}, {"ranks": 4}, {"island": 0}])
def test_configs_are_asked_for_only_where_they_differ_and_all_can_tell(changes: dict[str, int]) -> None:
    assert report(0).config == 7
    assert not ask_for_configs([report(0), replace(report(1), **{"config": 8, **changes})])


def test_different_initial_weights_are_refused() -> None:
    fresh = [report(i, outer_step=0, base=0, digest=i, settled=0, contributes=0) for i in range(2)]
    with pytest.raises(IslandError, match="same initial weights"):
        decide(fresh)


@pytest.mark.parametrize(
    "changes", [{"config": 8}, {"data": 8}, {"ranks": 4}, {"plan": 8}, {"protocol": 99}, {"island": 1}]
)
def test_a_newcomer_that_does_not_fit_costs_a_round_and_ends_itself(changes: dict[str, Any]) -> None:
    newcomer = {"settled": 0, "contributes": 0, "outer_step": 0, "base": 0}
    quorum = [replace(report(0, **newcomer), **changes), report(1), report(2)]
    with pytest.raises(ExchangeError, match="just been started does not fit"):
        decide(quorum, settled=True)
    with pytest.raises(IslandError):
        decide(quorum, settled=False)


def test_two_islands_of_one_number_are_refused() -> None:
    with pytest.raises(IslandError, match="a number of its own"):
        decide([report(1), report(1)])


def test_combined_digest_depends_on_every_rank_and_their_order() -> None:
    assert combine_digests([1, 2]) != combine_digests([2, 1])
    assert combine_digests([1, 2]) != combine_digests([1, 3])
    assert combine_digests([-1]) == combine_digests([2**64 - 1])
    assert 0 <= combine_digests([2**64 - 1, 5]) < 2**63
