"""The outer steps in float64, written from their definitions; shared by the numerics tests.

AdamW: Loshchilov and Hutter 2019 as torch.optim.AdamW documents it. SGD: as torch.optim.SGD documents it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.steps import AdamStep, State8

Array = npt.NDArray[np.float64]
U = 2.0**-24  # unit roundoff of fp32


class AdamW64:
    """p, m, v in float64."""

    def __init__(self, p: Array) -> None:
        self.p, self.m, self.v, self.t = p.astype(np.float64), np.zeros_like(p), np.zeros_like(p), 0

    def step(
        self, g: Array, lr: float, betas: tuple[float, float], eps: float, wd: float, gate: float
    ) -> Array:
        """One step; returns the update m_hat / (sqrt(v_hat) + eps)."""
        self.t += 1
        g = gate * g.astype(np.float64)
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        m_hat, v_hat = self.m / (1 - betas[0] ** self.t), self.v / (1 - betas[1] ** self.t)
        update = m_hat / (np.sqrt(v_hat) + eps)
        self.p = self.p * (1 - lr * wd) - lr * update
        return update


def layout_of(*numels: int, block_size: int = 256, quantised: bool = True) -> FlatLayout:
    """Parameters p0, p1, ... of these sizes, each whole."""
    return FlatLayout(
        [Segment(f"p{i}", parameter_key(f"p{i}"), n, 0, quantised) for i, n in enumerate(numels)], block_size
    )


def numbers(step: int = 1, **changes: object) -> AdamStep:
    """An AdamStep with defaults."""
    values = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "step": step, **changes}
    return AdamStep(**values)  # type: ignore[arg-type]


def copy8(state: State8) -> State8:
    """A deep copy."""
    return State8(state.r_codes.clone(), state.s_codes.clone(), state.r_scale.clone(), state.s_scale.clone())


def bits(*tensors: torch.Tensor) -> list[bytes]:
    """The bytes of tensors, for comparisons that see the sign of zero and NaN."""
    return [t.detach().numpy().tobytes() for t in tensors]


def state_bits(state: State8) -> list[bytes]:
    """The bytes of a coded state."""
    return bits(state.r_codes, state.s_codes, state.r_scale, state.s_scale)


def gradients(kind: str, numel: int, seed: int) -> Callable[[], torch.Tensor]:
    """A source of pseudo-gradients: mild, heavy, lognormal, outlier or sparse."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(numel, generator=generator)

    scale = torch.exp(2.0 * normal())
    outlier = torch.ones(numel)
    outlier[::256] = 1e3

    def draw() -> torch.Tensor:
        if kind == "mild":
            return normal()
        if kind == "heavy":  # Student's t with 2 degrees of freedom: no variance
            return normal() / (0.5 * (normal() ** 2 + normal() ** 2)).sqrt().clamp_min(1e-3)
        if kind == "lognormal":
            return normal() * scale
        if kind == "outlier":
            return normal() * outlier
        rows = torch.rand(numel // 64, generator=generator) < 0.05
        return normal() * rows.repeat_interleave(64)

    return draw


KINDS = ("mild", "heavy", "lognormal", "outlier", "sparse")
