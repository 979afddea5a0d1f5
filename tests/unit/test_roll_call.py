"""Which islands have to be there: after a restart of the lighthouse, and when an island was resumed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_wsd.diloco import lighthouse
from megatron_wsd.diloco.lighthouse import LighthouseWatch
from megatron_wsd.diloco.roll_call import RollCall
from megatron_wsd.errors import IslandError, TooFewIslands


class OneRank:
    rank = 0

    def broadcast(self, values: list[int]) -> list[int]:
        return values


def roll(least: int = 1, consent: Path | None = None) -> RollCall:
    group: Any = OneRank()
    made = RollCall(group, least)
    made.consent = consent
    return made


def through(roll: RollCall, quorum: int, *here: int) -> None:
    """One quorum, as `Membership` and `OuterHalf` go through it."""
    if roll.call(quorum, here):
        roll.doubt_lighthouse()
    roll.check_complete(roll.missing())


def test_islands_that_go_while_the_lighthouse_lives_are_not_missed() -> None:
    called = roll()
    through(called, 1, 0, 1)
    through(called, 2, 0)
    assert called.met == (0,)


@pytest.mark.parametrize("second", [1, 2])
def test_after_a_restart_of_the_lighthouse_all_have_to_be_back(second: int) -> None:
    called = roll(least=2)
    through(called, 2, 0, 1, 2)
    with pytest.raises(TooFewIslands, match="the lighthouse was restarted"):
        through(called, second, 0, 1)  # a number below that of before, or the same with others
    assert called.met == (0, 1, 2)
    through(called, second + 1, 0, 1, 2)
    through(called, second + 2, 0, 1)


def test_a_resumed_island_waits_for_those_who_may_have_gone_on(tmp_path: Path) -> None:
    consent = tmp_path / "go-on"
    called = roll(consent=consent)
    called.resume([0, 1])
    for quorum in (5, 6):
        with pytest.raises(TooFewIslands, match="may have gone on"):
            through(called, quorum, 1)
    consent.touch()
    through(called, 7, 1)
    assert called.met == (1,) and not consent.exists()
    through(called, 8, 1)


@pytest.mark.parametrize(
    ("least", "met", "here"),
    [
        (1, (1,), (1,)),
        (2, (0, 1, 2), (1, 2)),
        (1, (0, 1), (0, 1)),
        (1, (), (0,)),
        (3, (0, 1, 2, 3), (0, 1, 2)),
    ],
)
def test_but_not_for_those_who_cannot(least: int, met: tuple[int, ...], here: tuple[int, ...]) -> None:
    called = roll(least)
    called.resume(met)
    through(called, 3, *here)
    assert called.met == here


def test_what_another_island_misses_is_waited_for_too() -> None:
    called = roll()
    through(called, 3, 0, 1)
    with pytest.raises(TooFewIslands):
        called.check_complete(1)


def test_an_allowance_holds_until_the_quorum_is_complete(tmp_path: Path) -> None:
    """An island of the same folder may be through first and have removed the file."""
    consent = tmp_path / "go-on"
    called = roll(consent=consent)
    called.resume([0, 1, 2])
    consent.touch()
    called.call(4, (1,))
    assert called.missing() == 0
    consent.unlink()
    called.call(5, (1,))
    assert called.missing() == 0
    called.call(6, (2,))  # for others it was not given
    assert called.missing() == 2


def test_a_lighthouse_that_goes_and_comes_is_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, False, False, True, True, False])
    told: list[tuple[bool, str]] = []
    over = threading.Event()
    watch = LighthouseWatch("http://there:1", every_s=0.001)

    def check(address: str, timeout_s: float) -> None:
        answer = next(answers, None)
        if answer is None:
            watch.stop()
            over.set()
        elif not answer:
            raise IslandError("--lighthouse", "one that answers", "http://there:1: refused")

    monkeypatch.setattr(lighthouse, "check_lighthouse", check)
    watch.start(lambda answers, text: told.append((answers, text)))
    assert over.wait(20)
    assert [answers for answers, _ in told] == [False, True, False, True]
    assert "http://there:1: refused" in told[0][1] and "no round can begin" in told[0][1]
    assert "answers again" in told[1][1]
