"""The momentum step refuses what must not cross into native code, and changes nothing then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.momentum import momentum_step, vector_tensors
from megatron_wsd.optim.steps import MomentumStep, Vector8

LAYOUT = FlatLayout([Segment("w", 1, 300, 0, True), Segment("b", 2, 40, 0, True)])
N = LAYOUT.total
FLAT = {"anchor": torch.float32, "grad": torch.float32}


def call(period: int = 2, coded: bool = True, checked: bool = False, **changed: Any) -> bool:
    """The step with good buffers, except for those named."""
    vector = (lambda: Vector8.zeros(N, 256)) if coded else (lambda: torch.zeros(N))
    t: dict[str, Any] = {"anchor": torch.zeros(N), "grad": torch.zeros(N), "momentum": vector()}
    t |= {"buffer": vector() if period > 1 else None, **changed}
    numbers = MomentumStep(0.1, 0.9, period)
    return momentum_step(
        t["anchor"], t["grad"], t["momentum"], t["buffer"], LAYOUT.table, numbers, checked=checked
    )


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("period", [1, 2])
def test_good_buffers_pass(period: int, coded: bool) -> None:
    assert call(period, coded)


@pytest.mark.parametrize("name", ["anchor", "grad"])
@pytest.mark.parametrize(
    "wrong", [torch.zeros(N).double(), torch.zeros(N + 1), torch.zeros(2 * N)[::2], None]
)
def test_flat_buffers_are_checked(name: str, wrong: Any) -> None:
    with pytest.raises(NativeError, match=f"{name}: expected"):
        call(**{name: wrong})


@pytest.mark.parametrize("name", ["momentum", "buffer"])
@pytest.mark.parametrize(
    ("vector", "says"),
    [
        (Vector8(torch.zeros(N), torch.zeros(N // 256)), "_codes: expected dtype torch.int8"),
        (Vector8(torch.zeros(N - 300, dtype=torch.int8), torch.zeros(N // 256)), "_codes: expected"),
        (Vector8(torch.zeros(N, dtype=torch.int8), torch.zeros(N // 256 + 1)), "_scale: expected 3 scales"),
        (Vector8(torch.zeros(N, dtype=torch.int8), torch.zeros(N // 256).double()), "_scale: expected dtype"),
    ],
)
def test_vectors_in_8_bits_are_checked(name: str, vector: Vector8, says: str) -> None:
    with pytest.raises(NativeError, match=f"{name}{says}"):
        call(**{name: vector})


def test_vectors_must_be_those_of_the_period() -> None:
    for period, buffer in ((1, Vector8.zeros(N, 256)), (2, None)):
        with pytest.raises(NativeError, match="a buffer exactly where the period is above 1"):
            call(period, buffer=buffer)
    with pytest.raises(NativeError, match="buffer: expected 8 bits exactly where the momentum has them"):
        call(buffer=torch.zeros(N))


def test_written_buffers_must_not_overlap() -> None:
    shared = Vector8.zeros(N, 256)
    with pytest.raises(NativeError, match=r"buffer_codes: .* apart from momentum_codes"):
        call(momentum=shared, buffer=shared)
    anchor = torch.zeros(N)
    with pytest.raises(NativeError, match="memory of its own, apart from anchor"):
        call(anchor=anchor, grad=anchor)


def test_a_gradient_that_cannot_be_used_changes_nothing() -> None:
    anchor, grad = torch.ones(N), torch.ones(N)
    momentum, buffer = Vector8.zeros(N, 256), Vector8.zeros(N, 256)
    grad[299] = float("inf")
    assert not call(anchor=anchor, grad=grad, momentum=momentum, buffer=buffer)
    assert bool((anchor == 1).all())
    assert all(bool((t == 0).all()) for t in vector_tensors(momentum, buffer).values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": float("nan")}, "lr: expected a finite number"),
        ({"momentum": 0.0}, r"momentum: expected a number in \(0, 1\), got 0.0"),
        ({"momentum": 1.0}, r"momentum: expected a number in \(0, 1\), got 1.0"),
        ({"momentum": float("nan")}, r"momentum: expected a number in \(0, 1\)"),
        ({"period": 0}, "momentum_period: expected a count from 1, got 0"),
        ({"weight_decay": -1.0}, "weight_decay: expected"),
        ({"step": 0}, "step: expected a count from 1"),
        ({"seed": -1}, "seed: expected"),
    ],
)
def test_numbers_out_of_range(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NativeError, match=says):
        MomentumStep(**{"lr": 0.1, "momentum": 0.9, **changes})
