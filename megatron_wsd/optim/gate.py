"""The staleness gate of CGAD: how much a late contribution still counts. No torch here."""

from __future__ import annotations

import math
import operator
from typing import Any, SupportsIndex

from megatron_wsd.errors import FieldError


def staleness_gate(tau: SupportsIndex, alpha: float = 0.2, tau_cut: float = 32) -> float:
    """The factor of a contribution that is `tau` outer rounds old.

        gate(tau) = 1/2 (1 + cos(pi tau / tau_cut)) exp(-alpha tau)   for tau <= tau_cut, else 0

    It is 1 at tau = 0 and falls to exactly 0 at tau_cut. It multiplies the pseudo-gradient before both
    moments; a staleness that is the same for every contribution at all times therefore cancels out of Adam.

    Args:
        tau: age in outer rounds, a non-negative integer (Python, numpy or a torch integer scalar).
        alpha: exponential decay a round, >= 0.
        tau_cut: age at which the gate closes, > 0.

    Returns:
        The gate in [0, 1], in double precision.

    Raises:
        FieldError: `tau` is no non-negative integer, or `alpha` or `tau_cut` is out of range.

    Reference:
        Cosine-Gated Adam-Decay, arXiv 2605.09126.
    """
    age = _age(tau)
    check_gate(alpha, tau_cut)
    if age > tau_cut:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * age / tau_cut)) * math.exp(-alpha * age)


def check_gate(alpha: float, tau_cut: float) -> None:
    """Refuse gate parameters that make no gate.

    Raises:
        FieldError: `alpha` is negative or not finite, `tau_cut` is not positive or not finite.
    """
    if not (_is_real(alpha) and math.isfinite(alpha) and alpha >= 0):
        raise FieldError("alpha", "a finite number >= 0", alpha)
    if not (_is_real(tau_cut) and math.isfinite(tau_cut) and tau_cut > 0):
        raise FieldError("tau_cut", "a finite number > 0", tau_cut)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _age(tau: Any) -> int:
    # operator.index() takes Python, numpy and torch integers and no float; bools of all three are kept out.
    is_bool = isinstance(tau, bool) or str(getattr(tau, "dtype", "")).endswith("bool")
    try:
        age = -1 if is_bool else operator.index(tau)
    except (TypeError, ValueError, RuntimeError):
        age = -1
    if age < 0:
        raise FieldError(
            "tau", "a non-negative integer", tau, "Staleness counts whole outer rounds; give it as an int."
        )
    return age
