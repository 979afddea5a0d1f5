"""What multiplies the outer rate in a round."""

from __future__ import annotations

from typing import Any

import pytest
from island_reports import empty, offer, report
from outer_states import config_of

from megatron_wsd.diloco.agree import decide
from megatron_wsd.diloco.merge import rate_scale

DECAY = {
    "type": "WSD",
    "params": {
        "warmup_steps": 20,
        "decay_start": 260,
        "decay_steps": 40,
        "decay_shape": "linear",
        "min_lr_ratio": 0.5,
    },
}


@pytest.mark.parametrize(
    ("outer", "inner_step", "contributors", "expected"),
    [
        ({}, 100, 2, 1.0),
        ({}, 100, 1, 0.5),
        ({"participation": False}, 100, 1, 1.0),
        ({}, 270, 2, 1.0),  # its 10 steps began at 260, where the decay begins
        ({}, 290, 2, 0.5 + 0.5 * 0.5),  # linear to a half: at step 280, half-way
        ({}, 290, 1, 0.375),
        ({}, 400, 2, 0.5),  # after the decay it stays where that ended
        ({"lr_schedule": "constant"}, 290, 2, 1.0),
        ({"lr_schedule": {"warmup_steps": 200}}, 110, 2, 0.5),  # its own warm-up, at step 100
        ({"lr_schedule": {"warmup_steps": 200}}, 290, 1, 0.5),
        ({"optimizer": "adam"}, 290, 2, 0.75),
        ({"optimizer": "sgd"}, 290, 2, 1.0),  # SGD's steps shrink by themselves
        ({"optimizer": "nesterov"}, 290, 2, 1.0),
        ({"optimizer": "sgd", "lr_schedule": {"warmup_steps": 200}}, 110, 2, 0.5),
    ],
)
def test_outer_rate_follows_its_schedule_and_the_share(
    outer: dict[str, Any], inner_step: int, contributors: int, expected: float
) -> None:
    reports = [report(i, inner_step=inner_step, contributes=int(i < contributors)) for i in range(2)]
    config = config_of(outer=outer, scheduler=DECAY)
    assert rate_scale(config, config.schedule, decide(reports)) == pytest.approx(expected, rel=1e-12)


def test_outer_rate_looks_at_the_fragment_of_the_round_and_the_longest_contribution() -> None:
    config = config_of(outer={"participation": False}, scheduler=DECAY)
    # A shorter one, one of another fragment, and one that is not finite do not count: it began at 280 - 16.
    quorum = [
        report(0, empty(), offer(steps=16), inner_step=280),
        report(1, empty(), offer(steps=4), inner_step=280),
        report(2, offer(steps=280, waiting_ms=-1), offer(steps=50, finite=0), inner_step=280),
    ]
    decision = decide(quorum)
    assert (decision.fragment, decision.contributors) == (1, (0, 1))
    assert rate_scale(config, config.schedule, decision) == pytest.approx(1 - 0.5 * 4 / 40, rel=1e-12)


def test_outer_rate_of_an_island_that_trained_longer_than_the_run_is_old() -> None:
    # In asynchronous mode an island's own steps may be more than the position, which is a mean.
    config = config_of(outer={"lr_schedule": {"warmup_steps": 200}}, scheduler=DECAY)
    decision = decide([report(0, inner_step=100, steps=150)])
    assert rate_scale(config, None, decision) == config.outer_schedule.factor(0)  # type: ignore[union-attr]


def test_outer_rate_without_an_inner_schedule_is_constant() -> None:
    config = config_of()
    assert rate_scale(config, None, decide([report(0, inner_step=290)])) == 1.0


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ([{}, {}, {}, {}], 1.0),
        ([{}, {"contributes": 0}, {}, {"contributes": 0}], 0.5),  # nothing to offer
        ([{}, {"finite": 0}, {}, {}], 0.75),
        ([{}, {}, {}, {"outer_step": 4}], 0.75),  # to be healed first
        ([{}, {"contributes": 0}, {"finite": 0}, {"digest": 5}], 0.25),
        ([{"base": 0}, {"base": 0}, {}, {"contributes": 0}], 0.75),  # age is the business of the gates
    ],
)
def test_participation_is_the_share_of_all_live_islands(changes: list[dict[str, int]], share: float) -> None:
    decision = decide([report(i, **c) for i, c in enumerate(changes)])
    for optimizer in ("cgad", "adam", "adam_decay", "sgd", "nesterov", "delayed_nesterov"):
        config = config_of(outer={"optimizer": optimizer})
        assert rate_scale(config, None, decision) == share
        config = config_of(outer={"optimizer": optimizer, "participation": False})
        assert rate_scale(config, None, decision) == 1.0


def test_outer_rate_follows_a_decay_that_began_while_the_run_was_under_way() -> None:
    config = config_of(scheduler={"type": "WSD", "params": {"warmup_steps": 20}})
    assert config.schedule is not None
    decision = decide([report(0, inner_step=130)])  # its steps began at 120
    assert rate_scale(config, config.schedule, decision) == 1.0
    now = config.schedule.begin_decay(100, 40, shape="linear", min_lr_ratio=0.0)
    assert rate_scale(config, now, decision) == pytest.approx(0.5, rel=1e-12)
