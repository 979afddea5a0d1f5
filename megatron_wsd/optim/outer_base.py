"""The interface of the outer optimizers: one flat shard, one step at a time."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_wsd.errors import CheckpointError, FieldError, NativeError
from megatron_wsd.optim import native
from megatron_wsd.optim.backend import backend_of
from megatron_wsd.optim.digests import MASK, DigestSum
from megatron_wsd.optim.layout import FlatLayout, SegmentTable

if TYPE_CHECKING:
    from megatron_wsd.config.block import OuterConfig


@dataclass(frozen=True)
class OuterHyper:
    """Hyper-parameters of the outer optimizer; each optimizer reads those it has.

    Attributes:
        lr: outer learning rate.
        betas: Adam's decays.
        eps: Adam's, outside the root; at least 1e-20.
        weight_decay: decoupled for Adam, added to the gradient for SGD.
        momentum: SGD's, in [0, 1); Nesterov's, in (0, 1).
        momentum_period: steps between two that renew a delayed momentum.
        seed: of the stochastic rounding of 8-bit state and of bf16 anchors.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    momentum_period: int = 4
    seed: int = 0

    @classmethod
    def from_config(cls, outer: OuterConfig, seed: int) -> OuterHyper:
        """Those of the config's block ``outer``; `make_outer` takes ``outer.optimizer`` beside them."""
        with_momentum = outer.optimizer in ("nesterov", "delayed_nesterov")
        return cls(
            lr=outer.lr,
            betas=outer.betas,
            eps=outer.eps,
            weight_decay=outer.weight_decay,
            momentum=outer.momentum if with_momentum else 0.0,
            momentum_period=outer.momentum_period,
            seed=seed,
        )


@dataclass(frozen=True)
class StatePart:
    """A part of anchor and state that one kernel call steps.

    Attributes:
        name: enters the digest.
        table: where the segments of the part lie in its tensors.
        tensors: anchor and state of the part by name, live.
    """

    name: str
    table: SegmentTable
    tensors: dict[str, torch.Tensor]


class OuterOptimizer(ABC):
    """An optimizer of one rank's flat anchor.

    Args:
        layout: of anchor, pseudo-gradient and state.
        hyper: hyper-parameters.
        anchor_dtype: of the anchor: torch.float32, or torch.bfloat16 with stochastic rounding.
        device: where anchor and state are, and the step is taken.

    Attributes:
        anchor_dtype: as given.
        device: likewise.

    Raises:
        FieldError: no such anchor dtype.
        NativeError: a hyper-parameter is out of range.
    """

    def __init__(
        self,
        layout: FlatLayout,
        hyper: OuterHyper,
        anchor_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if anchor_dtype not in (torch.float32, torch.bfloat16):
            raise FieldError("anchor_dtype", "torch.float32 or torch.bfloat16", anchor_dtype)
        self.layout = layout
        self.hyper = hyper
        self.anchor_dtype, self.device = anchor_dtype, device
        self._t = 0
        self._known: tuple[int, tuple[tuple[int, int], ...]] | None = None

    @property
    def t(self) -> int:
        """Steps taken; may be set when state of another island or a checkpoint is taken over."""
        return self._t

    @t.setter
    def t(self, value: int) -> None:
        self._t = value
        self.forget_digest()

    def accepts(self, merged: torch.Tensor) -> bool:
        """Whether `step` can take this pseudo-gradient: no NaN, no Inf, every magnitude at most 2^63."""
        return native.gradient_ok(merged, self.layout.table)

    def step(
        self,
        anchor: torch.Tensor,
        merged: torch.Tensor,
        lr_scale: float = 1.0,
        *,
        checked: bool = False,
        copy: torch.Tensor | None = None,
    ) -> int:
        """Move the anchor against the merged pseudo-gradient; count the step.

        All in one pass over the shard, digest and copy included; and one pass over the pseudo-gradient before
        it unless `checked`: none of the shard may step if any of it cannot, and a pass that writes as it goes
        cannot know what comes later.

        Args:
            anchor: `anchor_dtype` [layout.total], changed in place.
            merged: fp32 [layout.total], already gated.
            lr_scale: multiplies the learning rate of this step.
            checked: the caller knows that `accepts(merged)`, for instance from `native.accumulate`.
            copy: bf16 [layout.total]; overwritten with the new anchor rounded to nearest, except for padding.

        Returns:
            `digest(anchor)` after the step.

        Raises:
            FieldError: `accepts(merged)` is False; nothing has changed.
            NativeError: a buffer is not as the layout says; nothing has changed.
        """
        self._check(anchor, merged, copy)
        if not checked and not self.accepts(merged):
            raise FieldError(
                "pseudo-gradient",
                "finite numbers of magnitude at most 2**63",
                "NaN, Inf or larger",
                "Nothing was stepped; drop the contribution that brought it.",
            )
        t = self.t + 1
        total = self._step(anchor, merged, self.hyper.lr * lr_scale, t, copy)
        self.t = t
        self._known = (self._finished(total), self._versions(anchor))
        return self._known[0]

    def _check(self, anchor: torch.Tensor, merged: torch.Tensor, copy: torch.Tensor | None) -> None:
        dtype = getattr(anchor, "dtype", None)
        if dtype != self.anchor_dtype:
            raise NativeError("anchor", f"dtype {self.anchor_dtype}", str(dtype))
        # Whole buffers are checked before a first part is stepped.
        buffers = {"anchor": anchor, "merged": merged} | ({} if copy is None else {"copy": copy})
        native.check_flat(self.layout.table, backend_of(anchor, self.layout.table), **buffers)

    @abstractmethod
    def _step(
        self, anchor: torch.Tensor, merged: torch.Tensor, lr: float, t: int, copy: torch.Tensor | None
    ) -> int:
        """Take the `t`-th step with checked buffers; return the sum of the digests of `_parts(anchor)`."""

    @abstractmethod
    def _parts(self, anchor: torch.Tensor) -> list[StatePart]:
        """Anchor and state as the kernels step them."""

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
        """64-bit digest of the anchor, the state and the step count. Padding does not count.

        Free after a step: it came out of the step's own pass. After any change to anchor or state that torch
        counts, or of `t`, it is read from memory, with the same result for the same contents. What torch does
        not count (numpy, a collective, other native code) must be told by `forget_digest`.
        """
        if self._known is not None and self._known[1] == self._versions(anchor):
            return self._known[0]
        total = 0
        for part in self._parts(anchor):
            found = DigestSum(part.name)
            native.digest_flat(part.table, part.tensors, found)
            total += found.total
        self._known = (self._finished(total), self._versions(anchor))
        return self._known[0]

    def forget_digest(self) -> None:
        """Let the next `digest` read anchor and state: they were written in a way that torch does not see."""
        self._known = None

    def _finished(self, total: int) -> int:
        packed = struct.pack("<Qq", total & MASK, self.t)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")

    def _versions(self, anchor: torch.Tensor) -> tuple[tuple[int, int], ...]:
        return tuple((t.data_ptr(), t._version) for t in (anchor, *self.state_tensors().values()))
