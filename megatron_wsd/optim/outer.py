"""Outer optimizers on one flat shard, behind one interface.

Contributions are gated where they are merged, so no optimizer here knows about staleness: CGAD on a merged,
gated pseudo-gradient is AdamW.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_wsd.errors import FieldError
from megatron_wsd.optim import native
from megatron_wsd.optim.digests import DigestSum
from megatron_wsd.optim.layout import FlatLayout
from megatron_wsd.optim.momentum import Vector, momentum_step, vector_tensors
from megatron_wsd.optim.outer_base import OuterHyper, OuterOptimizer, StatePart
from megatron_wsd.optim.steps import AdamStep, MomentumStep, SGDStep, State8, Vector8

__all__ = [
    "CGADOuter",
    "MomentumOuter",
    "OuterHyper",
    "OuterOptimizer",
    "SGDOuter",
    "StatePart",
    "make_outer",
]


class CGADOuter(OuterOptimizer):
    """AdamW with 8-bit moments in the quantised part of the layout and fp32 moments in the rest.

    A layout without quantised segments makes it the fp32 reference.
    """

    def __init__(
        self,
        layout: FlatLayout,
        hyper: OuterHyper,
        anchor_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layout, hyper, anchor_dtype, device)
        self._numbers = AdamStep(
            lr=hyper.lr,
            betas=hyper.betas,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=1,
            seed=hyper.seed,
        )
        self._coded = State8.zeros(layout.quantised_total, layout.block_size, device)
        self._m = torch.zeros(layout.total - layout.quantised_total, dtype=torch.float32, device=device)
        self._v = torch.zeros_like(self._m)

    def _step(
        self, anchor: torch.Tensor, merged: torch.Tensor, lr: float, t: int, copy: torch.Tensor | None
    ) -> int:
        numbers = replace(self._numbers, lr=lr, step=t)
        cut = self.layout.quantised_total
        copies = (None, None) if copy is None else (copy[:cut], copy[cut:])
        part8, part32 = self._parts(anchor)
        digest8, digest32 = DigestSum(part8.name), DigestSum(part32.name)
        native.cgad_step8(
            part8.tensors["anchor"],
            merged[:cut],
            self._coded,
            part8.table,
            numbers,
            checked=True,
            copy=copies[0],
            digest=digest8,
        )
        native.cgad_step32(
            part32.tensors["anchor"],
            merged[cut:],
            self._m,
            self._v,
            part32.table,
            numbers,
            checked=True,
            copy=copies[1],
            digest=digest32,
        )
        return digest8.total + digest32.total

    def _parts(self, anchor: torch.Tensor) -> list[StatePart]:
        cut = self.layout.quantised_total
        return [
            StatePart("coded", self.layout.table8, {"anchor": anchor[:cut], **self._coded.tensors()}),
            StatePart("plain", self.layout.table32, {"anchor": anchor[cut:], "m": self._m, "v": self._v}),
        ]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {**self._coded.tensors(), "m": self._m, "v": self._v}


class SGDOuter(OuterOptimizer):
    """SGD as torch defines it, with heavy-ball momentum in fp32; no state where the momentum is 0."""

    def __init__(
        self,
        layout: FlatLayout,
        hyper: OuterHyper,
        anchor_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layout, hyper, anchor_dtype, device)
        self._numbers = SGDStep(
            lr=hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
            seed=hyper.seed,
        )
        self._buffer = torch.zeros(layout.total, device=device) if hyper.momentum else None

    def _step(
        self, anchor: torch.Tensor, merged: torch.Tensor, lr: float, t: int, copy: torch.Tensor | None
    ) -> int:
        numbers = replace(self._numbers, lr=lr, step=t)
        digest = DigestSum("sgd")
        native.sgd_step(
            anchor,
            merged,
            self._buffer,
            self.layout.table,
            numbers,
            checked=True,
            copy=copy,
            digest=digest,
        )
        return digest.total

    def _parts(self, anchor: torch.Tensor) -> list[StatePart]:
        return [StatePart("sgd", self.layout.table, {"anchor": anchor, **self.state_tensors()})]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {} if self._buffer is None else {"momentum": self._buffer}


class MomentumOuter(OuterOptimizer):
    """Nesterov's momentum, the DiLoCo recipe; with a period above 1 the delayed one.

        g = g + weight_decay p
        at the N-th step of a period:  m = mu m + (d + g) / N;  d = 0;  p -= lr (mu m + g / N)
        at the others:                 d = d + g;                       p -= lr g / N

    Delayed, a stale pseudo-gradient enters the momentum only through the mean of N of them, while each moves
    the anchor at once; over a period the anchor moves as by one step of Nesterov's with that mean. m and d
    are kept in 8 bits in the quantised part of the layout, in fp32 in the rest; d only where the period is
    above 1.

    Reference:
        Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135, Algorithm 3 with c = 0.
    """

    def __init__(
        self,
        layout: FlatLayout,
        hyper: OuterHyper,
        anchor_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        period: int = 1,
    ) -> None:
        super().__init__(layout, hyper, anchor_dtype, device)
        self._numbers = MomentumStep(
            lr=hyper.lr,
            momentum=hyper.momentum,
            period=period,
            weight_decay=hyper.weight_decay,
            seed=hyper.seed,
        )
        coded, plain = layout.quantised_total, layout.total - layout.quantised_total
        delayed = period > 1
        self._coded: tuple[Vector, Vector | None] = (
            Vector8.zeros(coded, layout.block_size, device),
            Vector8.zeros(coded, layout.block_size, device) if delayed else None,
        )
        self._plain: tuple[Vector, Vector | None] = (
            torch.zeros(plain, device=device),
            torch.zeros(plain, device=device) if delayed else None,
        )

    def _step(
        self, anchor: torch.Tensor, merged: torch.Tensor, lr: float, t: int, copy: torch.Tensor | None
    ) -> int:
        numbers = replace(self._numbers, lr=lr, step=t)
        cut = self.layout.quantised_total
        coded, plain = self._parts(anchor)
        total = 0
        for part, (momentum, buffer), where in (
            (coded, self._coded, slice(None, cut)),
            (plain, self._plain, slice(cut, None)),
        ):
            digest = DigestSum(part.name)
            momentum_step(
                part.tensors["anchor"],
                merged[where],
                momentum,
                buffer,
                part.table,
                numbers,
                checked=True,
                copy=None if copy is None else copy[where],
                digest=digest,
            )
            total += digest.total
        return total

    def _parts(self, anchor: torch.Tensor) -> list[StatePart]:
        cut = self.layout.quantised_total
        coded = {"anchor": anchor[:cut], **vector_tensors(*self._coded)}
        plain = {"anchor": anchor[cut:], **vector_tensors(*self._plain)}
        return [
            StatePart("coded", self.layout.table8, coded),
            StatePart("plain", self.layout.table32, plain),
        ]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {**vector_tensors(*self._coded), **vector_tensors(*self._plain)}


def make_outer(
    kind: str,
    layout: FlatLayout,
    hyper: OuterHyper,
    anchor_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> OuterOptimizer:
    """The outer optimizer of that name.

    Args:
        kind: `cgad`, `adam_decay`, `adam` (the three differ in how contributions are gated before the merge,
            not in the step), `sgd` (plain), `nesterov` (the DiLoCo recipe; needs `hyper.momentum` > 0), or
            `delayed_nesterov` (the same, renewed every `hyper.momentum_period` steps).
        layout: of the flat buffers; what is kept of its quantised part is kept in 8 bits.
        hyper: hyper-parameters.
        anchor_dtype: torch.float32, or torch.bfloat16: half the memory, rounded stochastically.
        device: where anchor and state are; a CUDA device takes layouts with blocks of 256.

    Raises:
        FieldError: no such kind or anchor dtype.
        NativeError: a hyper-parameter is out of range.
    """
    if kind in ("cgad", "adam_decay", "adam"):
        return CGADOuter(layout, hyper, anchor_dtype, device)
    if kind == "sgd":
        return SGDOuter(layout, hyper, anchor_dtype, device)
    if kind == "nesterov":
        return MomentumOuter(layout, hyper, anchor_dtype, device)
    if kind == "delayed_nesterov":
        return MomentumOuter(layout, hyper, anchor_dtype, device, period=hyper.momentum_period)
    raise FieldError("outer.optimizer", "cgad, adam_decay, adam, sgd, nesterov or delayed_nesterov", kind)
