"""What every contender is given: one parameter, its gradients, and the numbers of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from step_bench.traffic import BLOCK_SIZE

GRADIENTS = 8
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.01

# A first step changes a parameter by about LR. Below 8 in magnitude half an ulp of fp32 is 2.4e-7; four
# roundings (decay, quotient, product, difference) make 1e-6, and all else is far smaller.
FIRST_STEP_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Problem:
    """One flat parameter that all contenders of a configuration share, one after the other.

    Attributes:
        p: fp32 [n], the parameter; changed by every step.
        grads: fp32 [n] each; views into one buffer, shifted by a block each, so that no two steps in a row
            see the same gradient and no memory is spent on it.
        threads: of the CPU.
        seed: of all random numbers.
    """

    p: torch.Tensor
    grads: tuple[torch.Tensor, ...]
    threads: int
    seed: int

    @classmethod
    def make(cls, n: int, device: torch.device, threads: int, seed: int) -> Problem:
        """A parameter from N(0, 1), cut to [-7, 7], and heavy-tailed gradients of about 1e-2."""
        random = torch.Generator(device).manual_seed(seed)
        p = torch.randn(n, generator=random, device=device).clamp_(-7, 7)
        g = torch.randn(n + (GRADIENTS - 1) * BLOCK_SIZE, generator=random, device=device)
        g.mul_(torch.randn(g.shape, generator=random, device=device).exp_()).mul_(1e-2)
        return cls(p, tuple(g[k * BLOCK_SIZE :][:n] for k in range(GRADIENTS)), threads, seed)

    @property
    def n(self) -> int:
        """Parameters."""
        return self.p.numel()

    @property
    def device(self) -> torch.device:
        """Where the parameter lies."""
        return self.p.device


def first_step(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """AdamW's first step from zero moments in float64: p (1 - lr wd) - lr g / (|g| + eps).

    Both bias corrections cancel: m / bc1 = g and sqrt(v / bc2) = |g|.
    """
    p64, g64 = p.double(), g.double()
    return p64 * (1 - LR * WEIGHT_DECAY) - LR * g64 / (g64.abs() + EPS)
