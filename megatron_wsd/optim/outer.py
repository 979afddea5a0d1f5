"""Outer optimizers on one flat shard, behind one interface.

Contributions are gated where they are merged, so no optimizer here knows about staleness: CGAD on a merged,
gated pseudo-gradient is AdamW.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from megatron_wsd.errors import CheckpointError, FieldError
from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout
from megatron_wsd.optim.steps import AdamStep, SGDStep, State8


@dataclass(frozen=True)
class OuterHyper:
    """Hyper-parameters of the outer optimizer; each optimizer reads those it has.

    Attributes:
        lr: outer learning rate.
        betas: Adam's decays.
        eps: Adam's, outside the root; at least 1e-20.
        weight_decay: decoupled for Adam, added to the gradient for SGD.
        momentum: SGD's, in [0, 1).
        nesterov: SGD's.
        seed: of the stochastic rounding of 8-bit moments.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    seed: int = 0


class OuterOptimizer(ABC):
    """An optimizer of one rank's flat anchor.

    Args:
        layout: of anchor, pseudo-gradient and state.
        hyper: hyper-parameters.

    Attributes:
        t: steps taken; may be set when state of another island or a checkpoint is taken over.

    Raises:
        NativeError: a hyper-parameter is out of range.
    """

    def __init__(self, layout: FlatLayout, hyper: OuterHyper) -> None:
        self.layout = layout
        self.hyper = hyper
        self.t = 0

    def accepts(self, merged: torch.Tensor) -> bool:
        """Whether `step` can take this pseudo-gradient: no NaN, no Inf, every magnitude at most 2^63."""
        return native.gradient_ok(merged, self.layout.table)

    def step(self, anchor: torch.Tensor, merged: torch.Tensor, lr_scale: float = 1.0) -> None:
        """Move the anchor against the merged pseudo-gradient; count the step.

        Args:
            anchor: fp32 [layout.total], changed in place.
            merged: fp32 [layout.total], already gated.
            lr_scale: multiplies the learning rate of this step.

        Raises:
            FieldError: `accepts(merged)` is False; nothing has changed.
            NativeError: a buffer is not as the layout says; nothing has changed.
        """
        if not self.accepts(merged):
            raise FieldError(
                "pseudo-gradient",
                "finite numbers of magnitude at most 2**63",
                "NaN, Inf or larger",
                "Nothing was stepped; drop the contribution that brought it.",
            )
        self._step(anchor, merged, self.hyper.lr * lr_scale, self.t + 1)
        self.t += 1

    @abstractmethod
    def _step(self, anchor: torch.Tensor, merged: torch.Tensor, lr: float, t: int) -> None:
        """Take the `t`-th step with a checked pseudo-gradient; change nothing if a buffer is refused."""

    @abstractmethod
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The state by name: flat tensors, live; writing into them changes the optimizer."""

    def load_state(self, tensors: dict[str, torch.Tensor], t: int) -> None:
        """Copy `tensors` into the state.

        Args:
            tensors: as `state_tensors` gives them.
            t: steps that led there.

        Raises:
            CheckpointError: a name is missing or unknown, a dtype or shape differs; nothing has changed.
        """
        own = self.state_tensors()
        if set(own) != set(tensors):
            raise CheckpointError("outer state", f"tensors {sorted(own)}", sorted(tensors))
        for name, mine in own.items():
            theirs = tensors[name]
            if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
                raise CheckpointError(
                    f"outer state {name!r}",
                    f"{mine.dtype} {list(mine.shape)}",
                    f"{theirs.dtype} {list(theirs.shape)}",
                    "It was written with another model, sharding or state_bits.",
                )
        for name, mine in own.items():
            mine.copy_(tensors[name])
        self.t = t

    def digest(self, anchor: torch.Tensor) -> int:
        """64-bit digest of the anchor, the state and the step count."""
        value = native.digest(anchor, self.t)
        for _, tensor in sorted(self.state_tensors().items()):
            value = native.digest(tensor, value)
        return value


class CGADOuter(OuterOptimizer):
    """AdamW with 8-bit moments in the quantised part of the layout and fp32 moments in the rest.

    A layout without quantised segments makes it the fp32 reference.
    """

    def __init__(self, layout: FlatLayout, hyper: OuterHyper) -> None:
        super().__init__(layout, hyper)
        self._numbers = AdamStep(
            lr=hyper.lr,
            betas=hyper.betas,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=1,
            seed=hyper.seed,
        )
        self._coded = State8.zeros(layout.quantised_total, layout.block_size)
        self._m = torch.zeros(layout.total - layout.quantised_total, dtype=torch.float32)
        self._v = torch.zeros_like(self._m)

    def _step(self, anchor: torch.Tensor, merged: torch.Tensor, lr: float, t: int) -> None:
        numbers = replace(self._numbers, lr=lr, step=t)
        # The whole anchor is checked before its first part is stepped.
        native.check_flat(self.layout.table, anchor=anchor, merged=merged)
        cut, layout = self.layout.quantised_total, self.layout
        native.cgad_step8(anchor[:cut], merged[:cut], self._coded, layout.table8, numbers, checked=True)
        native.cgad_step32(
            anchor[cut:], merged[cut:], self._m, self._v, layout.table32, numbers, checked=True
        )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        c = self._coded
        return {
            "r_codes": c.r_codes,
            "s_codes": c.s_codes,
            "r_scale": c.r_scale,
            "s_scale": c.s_scale,
            "m": self._m,
            "v": self._v,
        }


class SGDOuter(OuterOptimizer):
    """SGD with momentum, plain or Nesterov, as torch defines it; no state where the momentum is 0."""

    def __init__(self, layout: FlatLayout, hyper: OuterHyper) -> None:
        super().__init__(layout, hyper)
        self._numbers = SGDStep(
            lr=hyper.lr,
            momentum=hyper.momentum,
            nesterov=hyper.nesterov,
            weight_decay=hyper.weight_decay,
        )
        self._buffer = torch.zeros(layout.total, dtype=torch.float32) if hyper.momentum else None

    def _step(self, anchor: torch.Tensor, merged: torch.Tensor, lr: float, t: int) -> None:
        numbers = replace(self._numbers, lr=lr)
        native.sgd_step(anchor, merged, self._buffer, self.layout.table, numbers, checked=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {} if self._buffer is None else {"momentum": self._buffer}


def make_outer(kind: str, layout: FlatLayout, hyper: OuterHyper) -> OuterOptimizer:
    """The outer optimizer of that name.

    Args:
        kind: `cgad`, `adam_decay`, `adam` (the three differ in how contributions are gated before the merge,
            not in the step), `sgd` (plain), or `nesterov` (the DiLoCo recipe; needs `hyper.momentum` > 0).
        layout: of the flat buffers; its quantised part decides which moments are kept in 8 bits.
        hyper: hyper-parameters.

    Raises:
        FieldError: no such kind.
        NativeError: a hyper-parameter is out of range.
    """
    if kind in ("cgad", "adam_decay", "adam"):
        return CGADOuter(layout, hyper)
    if kind == "sgd":
        return SGDOuter(layout, replace(hyper, nesterov=False))
    if kind == "nesterov":
        return SGDOuter(layout, replace(hyper, nesterov=True))
    raise FieldError("outer.optimizer", "cgad, adam_decay, adam, sgd or nesterov", kind)
