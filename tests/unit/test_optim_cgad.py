"""CGAD as a torch optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from megatron_wsd.errors import CheckpointError, FieldError
from megatron_wsd.optim import CGAD


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(40, 33), (1,), (256,), (3, 5, 7)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]


def feed(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def run(optimizer: CGAD, params: list[torch.nn.Parameter], steps: range) -> None:
    for i in steps:
        feed(params, i)
        optimizer.step(staleness=i % 3)


def test_32_bits_at_staleness_zero_is_torch_adamw() -> None:
    ours, theirs = parameters(), parameters()
    a = CGAD(ours, lr=1e-2, weight_decay=0.1, state_bits=32)
    b = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for i in range(20):
        feed(ours, i)
        feed(theirs, i)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        # 20 steps of 0.01, each with some 100 roundings of 2^-24 relative, and 3 of the parameter itself.
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=20 * 2.0**-24 * (0.02 * 100 + 3 * 4))


@pytest.mark.parametrize("bits", [8, 32])
def test_staleness_gates_by_group(bits: int) -> None:
    p = parameters()
    optimizer = CGAD([{"params": p[:2]}, {"params": p[2:], "tau_cut": 2}], lr=0.1, eps=1e-2, state_bits=bits)
    start = [q.detach().clone() for q in p]
    feed(p, 0)
    optimizer.step(staleness=2)
    # The second group's gate is closed: a zero gradient, from fresh moments.
    assert all(not torch.equal(q, s) for q, s in zip(p[:2], start[:2], strict=True))
    assert all(torch.equal(q, s) for q, s in zip(p[2:], start[2:], strict=True))


def test_groups_have_their_own_options() -> None:
    p = parameters()
    optimizer = CGAD([{"params": p[:1]}, {"params": p[1:], "state_bits": 32, "lr": 0.0}], block_size=64)
    start = p[2].detach().clone()
    run(optimizer, p, range(2))
    assert optimizer.state[p[0]]["r_codes"].dtype == torch.int8
    assert optimizer.state[p[0]]["r_scale"].numel() == -(-40 * 33 // 64)
    assert optimizer.state[p[1]]["m"].dtype == torch.float32
    assert torch.equal(p[2], start)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("through_file", [False, True])
def test_state_dict_resumes_bit_for_bit(bits: int, through_file: bool) -> None:
    p = parameters()
    a = CGAD(p, lr=1e-2, state_bits=bits)
    run(a, p, range(4))
    state: dict[str, Any] = copy.deepcopy(a.state_dict())
    if through_file:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    q = [torch.nn.Parameter(x.detach().clone()) for x in p]
    b = CGAD(q, lr=1.0, state_bits=bits)
    b.load_state_dict(state)
    assert b.param_groups[0]["lr"] == 1e-2
    for x, y in zip(p, q, strict=True):
        for name, value in a.state[x].items():
            loaded = b.state[y][name]
            assert loaded == value if name == "step" else torch.equal(loaded, value)
            assert name == "step" or (loaded.dtype == value.dtype and loaded.data_ptr() != value.data_ptr())
    run(a, p, range(4, 8))
    run(b, q, range(4, 8))
    assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))


def test_load_refuses_what_does_not_fit() -> None:
    p = parameters()
    a = CGAD(p)
    run(a, p, range(1))
    good = a.state_dict()
    for change in ({"r_codes": torch.zeros(5, dtype=torch.int8)}, {"s_codes": torch.zeros(1320)}, {"x": 1}):
        bad = copy.deepcopy(good)
        bad["state"][0].update(change)
        with pytest.raises(CheckpointError, match="of parameter 0: expected"):
            CGAD(parameters()).load_state_dict(bad)
    with pytest.raises(ValueError, match="parameter group"):
        CGAD(parameters()[:2]).load_state_dict(good)


def test_parameters_without_gradient_are_left_alone() -> None:
    p = parameters()
    optimizer = CGAD(p)
    start = p[1].detach().clone()
    feed(p, 0)
    p[1].grad = None
    optimizer.step()
    assert torch.equal(p[1], start) and p[1] not in optimizer.state


@pytest.mark.parametrize("bits", [8, 32])
def test_unusable_gradient_changes_nothing(bits: int) -> None:
    p = parameters()
    optimizer = CGAD(p, state_bits=bits)
    run(optimizer, p, range(2))
    before = copy.deepcopy((optimizer.state_dict()["state"], [q.detach() for q in p]))
    feed(p, 5)
    p[3].grad[0, 0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(FieldError, match="gradient of parameter 3: expected finite"):
        optimizer.step()
    after = (optimizer.state_dict()["state"], [q.detach() for q in p])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_closure_and_version_counter() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = CGAD([p])
    version = p._version

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert p._version > version  # autograd must notice the change in place


def test_non_contiguous_gradient_is_taken() -> None:
    p, q = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(6, 4))
    g = torch.randn(4, 6)
    p.grad, q.grad = g.t(), g.t().contiguous()
    CGAD([p]).step()
    CGAD([q]).step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("staleness", [-1, 0.5, float("nan"), True])
def test_refuses_staleness(staleness: Any) -> None:
    p = parameters()
    feed(p, 0)
    with pytest.raises(FieldError, match="tau: expected a non-negative integer"):
        CGAD(p).step(staleness=staleness)


@pytest.mark.parametrize(
    "options,field",
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"alpha": -1.0}, "alpha"),
        ({"tau_cut": 0}, "tau_cut"),
        ({"state_bits": 16}, "state_bits"),
        ({"block_size": 100}, "block_size"),
    ],
)
def test_refuses_options(options: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError, match=field):
        CGAD(parameters(), **options)


@pytest.mark.parametrize(
    "parameter,message",
    [
        (
            torch.ones(4, dtype=torch.bfloat16),
            "parameter 0: expected dtype torch.float32, got torch.bfloat16",
        ),
        (torch.ones(4, dtype=torch.float64), "dtype torch.float32"),
        (torch.ones(4, 5).t(), "parameter 0: expected a contiguous tensor"),
        (torch.ones(4, device="meta"), "parameter 0: expected a tensor on the CPU"),
    ],
)
def test_refuses_parameters(parameter: torch.Tensor, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        CGAD([torch.nn.Parameter(parameter)])


def test_refuses_sparse_gradient() -> None:
    p = torch.nn.Parameter(torch.ones(4, 2))
    p.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(FieldError, match="gradient of parameter 0: expected a dense tensor"):
        CGAD([p]).step()
