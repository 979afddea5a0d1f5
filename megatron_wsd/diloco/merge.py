"""Gate and merge: many contributions of different ages become one pseudo-gradient, and its rate. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_wsd.config import OuterConfig
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


def rate_scale(outer: OuterConfig, schedule: Schedule | None, decision: Decision) -> float:
    """What multiplies the outer rate in a round, the same on every island.

    Adam would make every lone contribution a full step, so the rate is shared out (``participation``); and
    it would step as far at the end of the inner decay, when the islands hardly move, as before it
    (``follow_decay``). The steps of SGD shrink with its gradients by themselves.
    """
    scale = 1.0
    if outer.participation:
        scale *= len(decision.contributors) / len(decision.reports)
    adam = outer.optimizer in ("cgad", "adam_decay", "adam")
    if outer.follow_decay and adam and schedule is not None:
        start = max(0, decision.inner_step - max(decision.report(i).steps for i in decision.contributors))
        if schedule.phase(start) in ("decay", "done"):
            scale *= schedule.factor(start)
    return scale
