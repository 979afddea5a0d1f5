"""CGAD as a torch optimizer: AdamW on gradients scaled by how stale they are, with 8-bit moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import numpy as np
import torch

from megatron_wsd.errors import CheckpointError, FieldError
from megatron_wsd.optim import native
from megatron_wsd.optim.gate import check_gate, staleness_gate
from megatron_wsd.optim.layout import SegmentTable, check_block_size
from megatron_wsd.optim.steps import AdamStep, State8

_CODED = ("r_codes", "s_codes", "r_scale", "s_scale")
_FLOAT = ("m", "v")


class CGAD(torch.optim.Optimizer):
    """Cosine-Gated Adam-Decay.

        g = gate(tau) grad;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        p = p (1 - lr weight_decay);  p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps)

    with the gate of `staleness_gate`. At staleness 0 it is torch.optim.AdamW. Every option may be set per
    parameter group. A group with `state_bits` 8 keeps *all* its moments in 8 bits (2.03 bytes a parameter),
    so give embeddings and norms a group with 32.

    Args:
        params: fp32, contiguous, on the CPU; parameters or groups.
        lr: learning rate, >= 0.
        betas: decay of m and v, in [0, 1).
        eps: outside the root, >= 1e-20.
        weight_decay: decoupled, >= 0.
        alpha: exponential decay of the gate a round, >= 0.
        tau_cut: staleness at which the gate closes, > 0.
        state_bits: 8 or 32.
        block_size: elements that share a scale: 64, 128, 256, 512 or 1024.
        seed: of the stochastic rounding of 8-bit moments.

    Raises:
        FieldError: an option is out of range, or a parameter is not fp32, contiguous and on the CPU.

    Reference:
        arXiv 2605.09126.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        alpha: float = 0.2,
        tau_cut: float = 32,
        state_bits: int = 8,
        block_size: int = 256,
        *,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "tau_cut": tau_cut,
            "state_bits": state_bits,
            "block_size": block_size,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class for its options.

        Raises:
            FieldError: as the constructor does; the group is not added then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _numbers(group, step=1, gate=1.0)
            check_gate(group["alpha"], group["tau_cut"])
            check_block_size(group["block_size"])
            if group["state_bits"] not in (8, 32):
                raise FieldError("state_bits", "8 or 32", group["state_bits"])
            for i, p in enumerate(group["params"]):
                native.check_flat(_table(p.numel(), 0, group["block_size"]), **{f"parameter {i}": p.detach()})
        except FieldError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, staleness: SupportsIndex = 0
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss, with gradients enabled.
            staleness: age of these gradients in outer rounds.

        Returns:
            What the closure returned, or None.

        Raises:
            FieldError: the staleness is no non-negative integer, or a gradient is not dense fp32, or holds
                NaN, Inf or magnitudes over 2^63; no parameter and no state has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        index = -1
        for group in self.param_groups:
            gate = staleness_gate(staleness, group["alpha"], group["tau_cut"])
            for p in group["params"]:
                index += 1
                if p.grad is None:
                    continue
                table = _table(p.numel(), index, group["block_size"])
                grad = _usable_gradient(p, index, table)
                numbers = _numbers(group, step=self.state.get(p, {}).get("step", 0) + 1, gate=gate)
                work.append((p, grad, table, numbers, group["state_bits"]))
        for p, grad, table, numbers, bits in work:
            self._update(p, grad, table, numbers, bits)
        return loss

    def _update(
        self, p: torch.Tensor, grad: torch.Tensor, table: SegmentTable, numbers: AdamStep, bits: int
    ) -> None:
        state = self.state[p]
        if not state:
            state.update(_fresh_state(p, table, bits))
        if bits == 8:
            coded = State8(*(state[name] for name in _CODED))
            native.cgad_step8(p.detach(), grad, coded, table, numbers, checked=True)
        else:
            native.cgad_step32(p.detach(), grad, state["m"], state["v"], table, numbers, checked=True)
        state["step"] = numbers.step
        torch.autograd.graph.increment_version(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict, codes bit for bit.

        torch's own loading casts every state tensor to the parameter's dtype; the tensors are therefore put
        in place anew afterwards.

        Raises:
            ValueError: the groups do not match (torch's own check).
            CheckpointError: a state tensor is missing, or its dtype or size does not fit its parameter.
        """
        state_dict = dict(state_dict)
        saved = dict(state_dict["state"])
        current = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        options = [group for group in state_dict["param_groups"] for _ in group["params"]]
        if len(ids) == len(current):
            for i, p, group in zip(ids, current, options, strict=True):
                if i in saved:
                    _check_saved(i, saved[i], p, group)
        super().load_state_dict({**state_dict, "state": {}})
        for i, p in zip(ids, current, strict=True):
            if i in saved:
                self.state[p] = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in saved[i].items()
                }


def _numbers(group: dict[str, Any], step: int, gate: float) -> AdamStep:
    return AdamStep(
        lr=float(group["lr"]),
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        gate=gate,
        seed=group["seed"],
    )


def _table(numel: int, index: int, block_size: int) -> SegmentTable:
    """A flat buffer that holds one whole parameter, known by its place among all parameters."""
    zero = np.zeros(1, dtype=np.int64)
    return SegmentTable(
        offset=zero,
        numel=np.array([numel], dtype=np.int64),
        key=np.array([index], dtype=np.uint64),
        element0=zero,
        block_size=block_size,
    )


def _fresh_state(p: torch.Tensor, table: SegmentTable, bits: int) -> dict[str, Any]:
    if bits == 8:
        coded = State8.zeros(p.numel(), table.block_size)
        return {"step": 0, **{name: getattr(coded, name) for name in _CODED}}
    return {
        "step": 0,
        **{name: torch.zeros_like(p, memory_format=torch.contiguous_format) for name in _FLOAT},
    }


def _usable_gradient(p: torch.Tensor, index: int, table: SegmentTable) -> torch.Tensor:
    assert p.grad is not None
    grad = p.grad.detach()
    if grad.layout == torch.strided:
        grad = grad.contiguous()
    native.check_flat(table, **{f"parameter {index}": p.detach(), f"gradient of parameter {index}": grad})
    if not native.gradient_ok(grad, table):
        raise FieldError(
            f"gradient of parameter {index}",
            "finite numbers of magnitude at most 2**63",
            "NaN, Inf or larger",
            "Nothing was stepped; skip this step.",
        )
    return grad


def _check_saved(i: int, saved: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
    table = _table(p.numel(), 0, group["block_size"])
    fitting = _fresh_state(p, table, group["state_bits"])
    if set(saved) != set(fitting):
        raise CheckpointError(f"state of parameter {i}", f"entries {sorted(fitting)}", sorted(saved))
    for name, mine in fitting.items():
        theirs = saved[name]
        if isinstance(mine, torch.Tensor) and (
            not isinstance(theirs, torch.Tensor) or theirs.dtype != mine.dtype or theirs.shape != mine.shape
        ):
            got = f"{theirs.dtype} {list(theirs.shape)}" if isinstance(theirs, torch.Tensor) else repr(theirs)
            raise CheckpointError(f"state {name!r} of parameter {i}", f"{mine.dtype} {list(mine.shape)}", got)
