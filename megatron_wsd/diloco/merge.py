"""Gate and merge: many contributions of different ages become one pseudo-gradient. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_wsd.optim.gate import staleness_gate


def merge_coefficients(
    staleness: Sequence[int], weights: Sequence[float], *, alpha: float, tau_cut: int, gated: bool = True
) -> list[float]:
    """The factor of each contribution in the merged pseudo-gradient.

        c_k = gate(tau_k) w_k / sum_j w_j

    The weights are divided by their sum *without* the gate, so staleness never enlarges the result.

    Args:
        staleness: age of each contribution in outer rounds.
        weights: positive weight of each.
        alpha: decay of the gate.
        tau_cut: cut of the gate.
        gated: False for outer optimizers that ignore age.
    """
    total = sum(weights)
    gates = [staleness_gate(tau, alpha, tau_cut) if gated else 1.0 for tau in staleness]
    return [g * w / total for g, w in zip(gates, weights, strict=True)]
