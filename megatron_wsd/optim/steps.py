"""The numbers of one outer step, and the 8-bit forms of what it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import torch

from megatron_wsd.errors import NativeError

if TYPE_CHECKING:
    from typing_extensions import Self

SMALLEST_EPS = 1e-20  # the codec stores a scale below 2^-100 as zero, which is then far below eps


@dataclass(frozen=True)
class AdamStep:
    """Numbers of one Adam step.

    Attributes:
        lr: learning rate, >= 0.
        betas: decay of m and of v, each in [0, 1).
        eps: outside the root, as in torch; at least 1e-20.
        weight_decay: decoupled, >= 0.
        step: number of this step, from 1: of the bias corrections and of the rounding.
        gate: in [0, 1]; multiplies the gradient before both moments.
        seed: of the stochastic rounding, 0 to 2^64 - 1.

    Raises:
        NativeError: one of them is out of range.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    gate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0.0, math.inf)
        for i, beta in enumerate(self.betas):
            if not 0.0 <= beta < 1.0:
                raise NativeError(f"betas[{i}]", "a number in [0, 1)", beta)
        check_number("eps", self.eps, SMALLEST_EPS, math.inf)
        check_number("weight_decay", self.weight_decay, 0.0, math.inf)
        check_number("gate", self.gate, 0.0, 1.0)
        _check_counter(self.step, self.seed)


@dataclass(frozen=True)
class SGDStep:
    """Numbers of one SGD step, as torch's SGD with dampening 0 takes them.

    Attributes:
        lr: learning rate, >= 0.
        momentum: in [0, 1).
        nesterov: step along g + momentum * buffer instead of along the buffer.
        weight_decay: added to the gradient, >= 0.
        step: number of this step, from 1: of the rounding of a bf16 anchor.
        seed: of that rounding, 0 to 2^64 - 1.

    Raises:
        NativeError: one of them is out of range.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    step: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0.0, math.inf)
        if not 0.0 <= self.momentum < 1.0:
            raise NativeError("momentum", "a number in [0, 1)", self.momentum)
        if self.nesterov and self.momentum == 0.0:
            raise NativeError("nesterov", "a momentum > 0", "momentum 0")
        check_number("weight_decay", self.weight_decay, 0.0, math.inf)
        _check_counter(self.step, self.seed)


@dataclass(frozen=True)
class MomentumStep:
    """Numbers of one step of Nesterov's momentum, delayed where the period is above 1.

    Attributes:
        lr: learning rate, >= 0.
        momentum: in (0, 1).
        period: steps between two that renew the momentum, >= 1; with 1 every step does.
        weight_decay: added to the gradient, >= 0.
        step: number of this step, from 1: of the period, and of the rounding.
        seed: of the stochastic rounding, 0 to 2^64 - 1.

    Raises:
        NativeError: one of them is out of range.
    """

    lr: float
    momentum: float
    period: int = 1
    weight_decay: float = 0.0
    step: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0.0, math.inf)
        if not 0.0 < self.momentum < 1.0:
            raise NativeError("momentum", "a number in (0, 1)", self.momentum)
        if not 1 <= self.period < 2**63:
            raise NativeError("momentum_period", "a count from 1", self.period)
        check_number("weight_decay", self.weight_decay, 0.0, math.inf)
        _check_counter(self.step, self.seed)


@dataclass(frozen=True)
class Vector8:
    """A vector of the state in the linear codec: value = code / 127 * scale of its block.

    Attributes:
        codes: int8, one an element; 0 is exactly 0.
        scale: fp32, one a block; the largest magnitude.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def zeros(cls, numel: int, block_size: int, device: torch.device | str = "cpu") -> Self:
        """A vector of zeros."""
        codes = torch.zeros(numel, dtype=torch.int8, device=device)
        return cls(codes, torch.zeros(-(-numel // block_size), device=device))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Both tensors, live, as those of the vector `name`."""
        return {f"{name}_codes": self.codes, f"{name}_scale": self.scale}


class CodedState:
    """Adam's moments in a codec: two codes an element, then two fp32 scales a block.

    Attributes:
        CODEC: number of the codec in the extension.
        CODES: dtypes of the two codes.
        ZEROS: the two codes that stand for m = v = 0 where the scales are 0.
    """

    CODEC: ClassVar[int]
    CODES: ClassVar[tuple[torch.dtype, torch.dtype]]
    ZEROS: ClassVar[tuple[int, int]]

    @classmethod
    def zeros(cls, numel: int, block_size: int, device: torch.device | str = "cpu") -> Self:
        """Fresh state: m = v = 0."""
        blocks = -(-numel // block_size)
        return cls(
            *(
                torch.full((numel,), zero, dtype=dtype, device=device)
                for dtype, zero in zip(cls.CODES, cls.ZEROS, strict=True)
            ),
            *(torch.zeros(blocks, dtype=torch.float32, device=device) for _ in range(2)),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The four tensors by name, live: codes, then scales."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class State8(CodedState):
    """Adam's moments in the ratio codec: r = m / (sqrt(v) + eps) and s = sqrt(v).

    Attributes:
        r_codes: int8, one an element; linear in r, 0 is exactly 0.
        s_codes: uint8, one an element; logarithmic in s.
        r_scale: fp32, one a block; the largest abs(r).
        s_scale: fp32, one a block; the largest s. 0 means that the block's moments are all 0.
    """

    CODEC = 0
    CODES = (torch.int8, torch.uint8)
    ZEROS = (0, 0)

    r_codes: torch.Tensor
    s_codes: torch.Tensor
    r_scale: torch.Tensor
    s_scale: torch.Tensor


@dataclass(frozen=True)
class DynamicState8(CodedState):
    """Adam's moments in the dynamic maps, laid out as bitsandbytes lays out its 8-bit blockwise state.

    Attributes:
        m_codes: uint8, one an element; into `native.dynamic_map(signed=True)`, 127 is exactly 0.
        v_codes: uint8, one an element; into `native.dynamic_map(signed=False)`, 0 is exactly 0.
        m_scale: fp32, one a block; the largest abs(m).
        v_scale: fp32, one a block; the largest v.
    """

    CODEC = 1
    CODES = (torch.uint8, torch.uint8)
    ZEROS = (127, 0)

    m_codes: torch.Tensor
    v_codes: torch.Tensor
    m_scale: torch.Tensor
    v_scale: torch.Tensor


def check_number(field: str, value: float, low: float, high: float) -> None:
    """Refuse NaN, infinities and what lies outside [low, high].

    Raises:
        NativeError: naming `field`.
    """
    if not (math.isfinite(value) and low <= value <= high):
        bound = f">= {low}" if high == math.inf else f"from {low} to {high}"
        raise NativeError(field, f"a finite number {bound}", value)


def _check_counter(step: int, seed: int) -> None:
    if not 1 <= step < 2**63:
        raise NativeError("step", "a count from 1", step)
    if not 0 <= seed < 2**64:
        raise NativeError("seed", "an integer from 0 to 2**64 - 1", seed)
