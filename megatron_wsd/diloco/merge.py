"""Gate and merge: many contributions of different ages become one pseudo-gradient, and its rate. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_wsd.config import Config, OuterConfig
from megatron_wsd.diloco.agree import Decision
from megatron_wsd.optim.gate import staleness_gate
from megatron_wsd.schedule import Schedule


def age_gate(outer: OuterConfig, staleness: int) -> float:
    """What the outer optimizer makes of a contribution's age.

    CGAD: the staleness gate. Adam-Decay: its exponential alone, e^(-alpha tau). All others: 1.
    """
    if outer.optimizer == "cgad":
        return staleness_gate(staleness, outer.alpha, outer.tau_cut)
    if outer.optimizer == "adam_decay":
        return math.exp(-outer.alpha * staleness)
    return 1.0


def merge_coefficients(gates: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The factor of each contribution in the merged pseudo-gradient.

        c_k = gate_k w_k / sum_j w_j

    The weights are divided by their sum *without* the gates, so staleness never enlarges the result.

    Args:
        gates: of each contribution, in [0, 1].
        weights: of each, positive.
    """
    total = sum(weights)
    return [g * w / total for g, w in zip(gates, weights, strict=True)]


def rate_scale(config: Config, inner: Schedule | None, decision: Decision) -> float:
    """What multiplies the outer rate in a round, the same on every island.

    ``outer.participation``: contributors / islands, since Adam would make every lone contribution a full
    step. ``outer.lr_schedule``: with ``follow_inner``, the factor of the inner rate in the decay, when the
    round's steps began, since Adam would step as far at its end, when the islands hardly move, as before
    it (the steps of SGD shrink with its gradients by themselves, and are left alone); or a schedule of its
    own.

    Args:
        config: of the run.
        inner: the schedule of the inner rate, with everything that was decided so far.
        decision: of the round.
    """
    outer, scale = config.outer, 1.0
    if outer.participation:
        scale *= len(decision.contributors) / len(decision.reports)
    start = max(0, decision.inner_step - max(decision.report(i).steps for i in decision.contributors))
    if config.outer_schedule is not None:
        return scale * config.outer_schedule.factor(start)
    adam = outer.optimizer in ("cgad", "adam_decay", "adam")
    follows = outer.lr_schedule == "follow_inner" and adam and inner is not None
    if follows and inner is not None and inner.phase(start) in ("decay", "done"):
        scale *= inner.factor(start)
    return scale
