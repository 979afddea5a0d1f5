"""The staleness gate against its table, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_wsd.errors import FieldError
from megatron_wsd.optim.gate import staleness_gate

CASES = json.loads((Path(__file__).parents[1] / "cases" / "gate.json").read_text())


@pytest.mark.parametrize("tau,expected", CASES["gate"].items())
def test_table(tau: str, expected: float) -> None:
    # The table holds ten good digits; its entry for 1 is off in the twelfth.
    assert staleness_gate(int(tau)) == pytest.approx(expected, rel=1e-10, abs=0)


# The definition in 30-digit arithmetic.
@pytest.mark.parametrize(
    "tau,expected",
    [
        (1, 0.816759546899007577107627932882),
        (2, 0.663880040173305067762649883828),
        (16, 0.0203811019891831075830396310722),
        (31, 0.00000488613160679067571152477527665),
    ],
)
def test_double_precision(tau: int, expected: float) -> None:
    # 1 + cos loses up to pi / (32 - tau) / 2 of its digits near the cut: 1 / (1 + cos) = 200 units at 31.
    assert staleness_gate(tau) == pytest.approx(
        expected, rel=512 * 2.0**-53 if tau == 31 else 2.0**-50, abs=0
    )


def test_ends_are_exact() -> None:
    assert staleness_gate(0) == 1.0
    assert staleness_gate(32) == 0.0
    assert staleness_gate(10**30) == 0.0


def test_falls_with_age() -> None:
    gates = [staleness_gate(tau) for tau in range(40)]
    assert all(a > b for a, b in pairwise(gates[:33]))
    assert set(gates[32:]) == {0.0}


def test_without_decay_the_middle_is_one_half() -> None:
    assert staleness_gate(16, alpha=0.0) == pytest.approx(0.5, abs=1e-15)
    assert staleness_gate(4, alpha=0.0, tau_cut=8) == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize(
    "tau", [3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)]
)
def test_integer_scalars_of_all_kinds(tau: Any) -> None:
    assert staleness_gate(tau) == staleness_gate(3)


REFUSED = [
    *(float(x) if isinstance(x, str) else x for x in CASES["refused"]),
    True,
    np.bool_(True),
    torch.tensor(True),
    1.0,
    torch.tensor(1.0),
    torch.tensor([1, 2]),
    torch.tensor(-1),
    "1",
    None,
]


@pytest.mark.parametrize("tau", REFUSED, ids=repr)
def test_refuses_what_is_no_age(tau: Any) -> None:
    with pytest.raises(FieldError, match="tau: expected a non-negative integer"):
        staleness_gate(tau)


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf"), True, "0.2"])
def test_refuses_bad_alpha(alpha: Any) -> None:
    with pytest.raises(FieldError, match="alpha: expected"):
        staleness_gate(1, alpha=alpha)


@pytest.mark.parametrize("tau_cut", [0, -1, float("nan"), float("inf"), True, None])
def test_refuses_bad_cut(tau_cut: Any) -> None:
    with pytest.raises(FieldError, match="tau_cut: expected"):
        staleness_gate(1, tau_cut=tau_cut)


def test_needs_no_torch() -> None:
    code = "import sys; from megatron_wsd.optim.gate import staleness_gate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
