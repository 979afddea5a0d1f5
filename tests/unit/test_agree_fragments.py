"""Which fragment a round is about, who contributes to it, and how old that is."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from island_reports import empty, offer, report

from megatron_wsd.diloco.agree import MAX_FRAGMENTS, Offer, Report, Rules, decide
from megatron_wsd.errors import ExchangeError, IslandError

PATIENT = Rules(lockstep=False, quorum=2, grace_ms=1000)  # of asynchronous islands
INT64 = st.integers(-(2**63), 2**63 - 1)


# ---- numbers ----


def distinct_offers(count: int) -> tuple[Offer, ...]:
    """No two numbers of them are equal."""
    width = len(fields(Offer))
    return tuple(Offer(*range(1000 + width * i, 1000 + width * (i + 1))) for i in range(count))


@pytest.mark.parametrize("count", [1, 5, MAX_FRAGMENTS])
def test_any_number_of_offers_survives_the_wire(count: int) -> None:
    mine = report(3, *distinct_offers(count), done=1, order=4)
    assert Report.from_numbers(mine.numbers()) == mine


def test_all_reports_have_one_length() -> None:
    lengths = {len(report(0, *distinct_offers(count)).numbers()) for count in (1, 5, MAX_FRAGMENTS)}
    assert len(lengths) == 1


@given(st.data())
def test_every_int64_survives_the_wire(data: st.DataObject) -> None:
    head = {f.name: data.draw(INT64) for f in fields(Report) if f.name != "offers"}
    offers = data.draw(st.lists(st.builds(Offer, *[INT64] * len(fields(Offer))), min_size=1, max_size=4))
    mine = Report(**head, offers=tuple(offers))
    numbers = mine.numbers()
    assert all(type(n) is int and -(2**63) <= n < 2**63 for n in numbers)
    assert Report.from_numbers(numbers) == mine


# ---- which fragment ----


def test_the_fragment_that_has_waited_longest_is_next() -> None:
    a = report(0, offer(waiting_ms=2000), offer(waiting_ms=1500), empty())
    b = report(1, offer(waiting_ms=1700), offer(waiting_ms=2500), empty())
    # What counts is the offer that has waited longest, whoever made it.
    assert decide([a, b], rules=PATIENT).fragment == 1
    c = replace(a, offers=(offer(waiting_ms=2501), *a.offers[1:]))
    assert decide([c, b], rules=PATIENT).fragment == 0


def test_of_equals_the_lowest_fragment_is_next() -> None:
    offers = (empty(), offer(waiting_ms=9), offer(waiting_ms=9))
    assert decide([report(0, *offers), report(1, *offers)], rules=PATIENT).fragment == 1


def test_a_fragment_that_is_not_ready_waits_however_old_it_is() -> None:
    a = report(0, offer(waiting_ms=10**9), offer(waiting_ms=5))
    b = report(1, empty(), offer(waiting_ms=3))
    decision = decide([a, b], rules=PATIENT)  # fragment 0 lacks a contribution, fragment 1 has all
    assert decision.fragment == 1
    assert decision.contributors == (0, 1)


def test_nothing_offered_is_no_round_under_any_rules() -> None:
    for rules in (Rules(), PATIENT, Rules(lockstep=False, quorum=1, grace_ms=0)):
        decision = decide([report(0, empty(), empty()), report(1, empty(), empty())], rules=rules)
        assert decision.fragment is None
        assert decision.contributors == decision.dropped == decision.staleness == decision.ages == ()


def test_what_is_said_of_other_fragments_does_not_count() -> None:
    a = report(0, offer(base=1, waiting_ms=1, steps=3), offer(base=4, waiting_ms=2000, steps=7))
    b = report(1, empty(), offer(base=5, waiting_ms=2000, steps=8))
    decision = decide([a, b], rules=PATIENT)
    assert (decision.fragment, decision.contributors, decision.staleness) == (1, (0, 1), (1, 0))
    assert [decision.offer(i).steps for i in (0, 1)] == [7, 8]


# ---- when ----


def waiting(offering: int, islands: int, waited: int, **changes: Any) -> list[Report]:
    """Some islands offer, the newest of them just now; the others have nothing."""
    found = []
    for i in range(islands):
        mine = offer(waiting_ms=waited if i == 0 else 0) if i < offering else empty()
        found.append(report(i, mine, **changes))
    return found


@pytest.mark.parametrize(
    ("offering", "islands", "waited", "ready"),
    [
        (1, 3, 10**9, False),  # less than the quorum, however long
        (2, 3, 0, False),  # a quorum, but others may come within the grace
        (2, 3, 999, False),
        (2, 3, 1000, True),
        (3, 3, 0, True),  # everybody is there, so there is nobody to wait for
        (2, 2, 0, True),
        (1, 1, 0, True),  # fewer islands are alive than the quorum asks for
        (3, 4, 999, False),
        (3, 4, 1000, True),
    ],
)
def test_a_round_needs_a_quorum_and_then_grace_or_everybody(
    offering: int, islands: int, waited: int, ready: bool
) -> None:
    decision = decide(waiting(offering, islands, waited), rules=PATIENT)
    assert decision.fragment == (0 if ready else None)
    assert decision.contributors == (tuple(range(offering)) if ready else ())


def test_quorum_counts_no_more_than_the_islands_that_can_contribute() -> None:
    five = Rules(lockstep=False, quorum=5, grace_ms=1000)
    assert decide(waiting(2, 3, 10**9), rules=five).fragment is None
    # The third one must be healed first: it cannot contribute, and two are all that can.
    behind = report(2, empty(), outer_step=4)
    two = waiting(2, 2, 1000)
    assert decide([*two, behind], rules=five).fragment == 0
    assert decide([*waiting(2, 2, 999), behind], rules=five).fragment is None, "it may yet after the healing"
    assert decide([*waiting(1, 2, 10**9), behind], rules=five).fragment is None


def test_an_island_that_must_be_healed_makes_no_quorum() -> None:
    behind = report(0, offer(waiting_ms=10**9), outer_step=4)
    decision = decide([behind, report(1, offer(waiting_ms=5000)), report(2, empty())], rules=PATIENT)
    assert decision.healed == (0,) and decision.fragment is None


def test_an_island_that_has_ended_its_training_is_not_waited_for() -> None:
    """The last work of a slower island must not wait for ever for one that has nothing more to offer."""
    slow = report(1, offer(waiting_ms=1000), empty())
    assert decide([report(0, empty(), offer()), slow], rules=PATIENT).fragment is None
    assert decide([report(0, empty(), offer(), ending=1), slow], rules=PATIENT).fragment == 0
    early = report(1, offer(waiting_ms=999), empty())
    assert decide([report(0, empty(), offer(), ending=1), early], rules=PATIENT).fragment is None
    # What it has offered still counts, and a third one that trains on still has to come.
    assert decide([report(0, offer(), ending=1), report(1, offer())], rules=PATIENT).contributors == (0, 1)
    three = [report(0, empty(), ending=1), report(1, offer(waiting_ms=10**9)), report(2, empty())]
    assert decide(three, rules=PATIENT).fragment is None


def test_in_lockstep_whatever_was_offered_is_used() -> None:
    decision = decide(waiting(1, 3, 0), rules=Rules(lockstep=True, quorum=2, grace_ms=10**6))
    assert (decision.fragment, decision.contributors) == (0, (0,))


# ---- not finite ----


def test_what_is_not_finite_is_settled_at_once_and_named() -> None:
    bad = report(1, offer(finite=0))
    decision = decide([report(0, empty()), bad, report(2, empty())], rules=PATIENT)
    assert (decision.fragment, decision.contributors, decision.dropped) == (0, (), (1,))
    # What others have offered to the same fragment goes with it.
    decision = decide([report(0, offer()), bad, report(2, empty())], rules=PATIENT)
    assert (decision.fragment, decision.contributors, decision.dropped) == (0, (0,), (1,))


def test_what_is_not_finite_makes_no_quorum_elsewhere() -> None:
    a = report(0, offer(finite=0), offer(waiting_ms=10**6))
    b = report(1, offer(finite=0), empty())
    decision = decide([a, b, report(2, empty(), empty())], rules=PATIENT)
    assert (decision.fragment, decision.contributors, decision.dropped) == (0, (), (0, 1))


def test_no_contribution_is_not_called_broken() -> None:
    assert decide([report(0, offer()), report(1, empty(finite=0))]).dropped == ()


# ---- how old ----


def test_staleness_is_measured_for_every_contributor() -> None:
    bases = (5, 2, 0, 5, 4)
    quorum = [report(i, offer(base=base, finite=int(i != 3))) for i, base in enumerate(bases)]
    decision = decide(quorum)
    assert decision.contributors == (0, 1, 2, 4)
    assert decision.staleness == (0, 3, 5, 1)


@pytest.mark.parametrize(
    ("last_turn", "turn", "age"),
    [
        (5, 6, 0),  # committed at its last turn, and now at the next
        (5, 5, 0),  # late work, before the next turn
        (5, 7, 1),
        (2, 7, 4),
        (0, 1, 0),  # its very first turn
        (6, 5, 0),  # another island is further than these
    ],
)
def test_fragment_age_is_the_turns_that_were_missed(last_turn: int, turn: int, age: int) -> None:
    decision = decide([report(0, offer(last_turn=last_turn, turn=turn))])
    assert (decision.fragment_age, decision.turn) == (age, turn)


def test_the_island_that_is_furthest_says_which_turn_it_is() -> None:
    quorum = [report(0, offer(turn=6)), report(1, empty(turn=9)), report(2, empty(turn=99), outer_step=4)]
    decision = decide(quorum)  # the last one must be healed first: its turns are not known to be right
    assert (decision.turn, decision.fragment_age) == (9, 3)


def test_the_gate_sees_staleness_or_fragment_age_whichever_is_more() -> None:
    quorum = [report(i, offer(base=base, turn=8)) for i, base in enumerate((5, 1, 3, 4))]
    decision = decide(quorum)
    assert decision.fragment_age == 2
    assert decision.staleness == (0, 4, 2, 1)
    assert decision.ages == (2, 4, 2, 2)


# ---- the rest of it ----


def test_all_are_done_only_if_all_are() -> None:
    assert decide([report(0, done=1), report(1, done=1)]).all_done
    assert not decide([report(0, done=1), report(1)]).all_done
    assert not decide([report(0)]).all_done


def test_other_fragments_are_refused() -> None:
    with pytest.raises(IslandError, match=r"the same fragments on all islands, got 9 and ab") as caught:
        decide([report(1, plan=0xAB), report(0)])
    assert "island 0 and island 1" in str(caught.value)
    assert "sync.fragments" in str(caught.value)
    with pytest.raises(ExchangeError, match="just been started does not fit"):
        decide([report(0), report(1, empty(), plan=8, settled=0)], settled=True)


OFFERS = st.builds(
    lambda contributes, finite, base, turn, waiting_ms: offer(
        contributes=contributes, finite=finite, base=base, turn=turn, waiting_ms=waiting_ms
    ),
    contributes=st.integers(0, 1),
    finite=st.integers(0, 1),
    base=st.integers(0, 5),
    turn=st.integers(5, 9),
    waiting_ms=st.sampled_from([0, 500, 1000, 2000]),
)


@st.composite
def quorums(draw: st.DrawFn) -> list[Report]:
    """Islands at different steps, with different contents, different offers, in any order."""
    fragments = draw(st.integers(1, 3))
    numbers = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True))
    return [
        report(
            island,
            *draw(st.lists(OFFERS, min_size=fragments, max_size=fragments)),
            outer_step=draw(st.sampled_from([4, 5, 5, 5])),
            digest=draw(st.sampled_from([111, 111, 222])),
            inner_step=draw(st.integers(50, 70)),
            order=draw(st.sampled_from([0, 0, island + 1])),
            ending=draw(st.integers(0, 1)),
            done=draw(st.integers(0, 1)),
        )
        for island in numbers
    ]


RULES = st.builds(
    Rules, lockstep=st.booleans(), quorum=st.integers(1, 4), grace_ms=st.sampled_from([0, 1000])
)


@given(quorum=quorums(), rules=RULES, data=st.data())
def test_every_rank_decides_alike_in_whatever_order_it_sees_the_quorum(
    quorum: list[Report], rules: Rules, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(quorum))
    one, other = decide(quorum, rules=rules), decide(shuffled, rules=rules)
    assert replace(one, places=()) == replace(other, places=())
    for decision, seen in ((one, quorum), (other, shuffled)):
        for island in decision.islands:
            assert seen[decision.place(island)].island == island


@given(quorum=quorums(), rules=RULES)
def test_what_holds_for_every_decision(quorum: list[Report], rules: Rules) -> None:
    decision = decide(quorum, rules=rules)
    assert decision.islands == tuple(sorted(r.island for r in quorum))
    assert list(decision.contributors) == sorted(set(decision.contributors))
    assert list(decision.dropped) == sorted(set(decision.dropped))
    able = set(decision.islands) - set(decision.healed)
    assert able and decision.source in (able if decision.healed else {None})
    assert len({decision.report(i).digest for i in able}) == 1
    assert {decision.report(i).outer_step for i in able} == {decision.outer_step}
    if decision.fragment is None:
        assert not decision.contributors and not decision.dropped
        return
    offered = {i for i in able if decision.offer(i).contributes}
    assert set(decision.contributors) | set(decision.dropped) == offered != set()
    assert all(decision.offer(i).finite for i in decision.contributors)
    assert not any(decision.offer(i).finite for i in decision.dropped)
    assert decision.staleness == tuple(5 - decision.offer(i).base for i in decision.contributors)
    assert decision.ages == tuple(max(tau, decision.fragment_age) for tau in decision.staleness)
    if not rules.lockstep and not decision.dropped and len(decision.contributors) < len(quorum):
        could = [i for i in able if not decision.report(i).ending or decision.offer(i).contributes]
        assert len(decision.contributors) >= min(rules.quorum, len(could))
        assert max(decision.offer(i).waiting_ms for i in offered) >= rules.grace_ms
