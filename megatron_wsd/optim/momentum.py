"""The step of Nesterov's momentum, also delayed, with what it keeps in fp32 or in 8 bits.

As in `native` everything is checked before a pointer crosses, every instruction set and thread count gives
the same bits, and padding is left alone.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.digests import DigestSum
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.step_call import Step
from megatron_wsd.optim.steps import MomentumStep, Vector8

Vector: TypeAlias = torch.Tensor | Vector8


def momentum_step(
    anchor: torch.Tensor,
    grad: torch.Tensor,
    momentum: Vector,
    buffer: Vector | None,
    table: SegmentTable,
    hyper: MomentumStep,
    *,
    threads: int | None = None,
    checked: bool = False,
    copy: torch.Tensor | None = None,
    digest: DigestSum | None = None,
) -> bool:
    """One step of Nesterov's momentum, delayed by a period of N steps, in place in all but `grad`.

        g = g + weight_decay p
        at the N-th step of a period:  m = mu m + (d + g) / N;  d = 0;  p -= lr (mu m + g / N)
        at the others:                 d = d + g;                       p -= lr g / N

    With N = 1 it is torch's SGD with Nesterov's momentum; over a period of any other N the anchor moves as by
    one such step with the mean of the gradients. Vectors in 8 bits are rounded stochastically, by a hash of
    (seed, parameter key, element within the parameter, step), when they change.

    Args:
        anchor: fp32, or bf16 (rounded stochastically), flat as `table` says; changed.
        grad: fp32, likewise.
        momentum: m, fp32 or in 8 bits, zeros at first.
        buffer: d, likewise; None exactly where the period is 1.
        table: where the segments lie.
        hyper: the numbers of this step.
        threads: by default torch's.
        checked: the caller knows that `native.gradient_ok(grad)`.
        copy: bf16, flat; overwritten with the new anchor rounded to nearest, except for padding.
        digest: that of the anchor and of the vectors, by the names `vector_tensors` gives, is added to it.

    Returns:
        False if the gradient is not usable (see `native.gradient_ok`); nothing has changed then.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, overlaps another, or is missing.

    Reference:
        Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135, Algorithm 3 with c = 0.
    """
    if (buffer is None) != (hyper.period == 1):
        got = "none" if buffer is None else "a buffer"
        raise NativeError("buffer", "a buffer exactly where the period is above 1", got)
    if buffer is not None and isinstance(buffer, Vector8) != isinstance(momentum, Vector8):
        raise NativeError("buffer", "8 bits exactly where the momentum has them", type(buffer).__name__)
    state = vector_tensors(momentum, buffer)
    step = Step(anchor, grad, table, threads, copy, digest, state)
    vectors = [_addresses(step, name, v) for name, v in (("momentum", momentum), ("buffer", buffer))]
    numbers = step.backend.module.MomentumHyper(
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
        period=hyper.period,
        step=hyper.step,
        seed=hyper.seed,
    )
    return step.run(
        checked,
        lambda e, call: e.module.momentum_step(e.segments, call, *vectors, numbers),
        digested_on_gpu=False,
    )


def vector_tensors(momentum: Vector, buffer: Vector | None) -> dict[str, torch.Tensor]:
    """The tensors of both by name, live; of one in 8 bits `NAME_codes` and `NAME_scale`."""
    found: dict[str, torch.Tensor] = {}
    for name, vector in (("momentum", momentum), ("buffer", buffer)):
        if vector is not None:
            found |= vector.tensors(name) if isinstance(vector, Vector8) else {name: vector}
    return found


def _addresses(step: Step, name: str, vector: Vector | None) -> tuple[int, int]:
    """Of a vector that is written, and of its scales; 0 for what there is not."""
    if vector is None:
        return 0, 0
    if not isinstance(vector, Vector8):
        return step.check.flat(name, vector, torch.float32, written=True), 0
    codes, scale = vector.tensors(name).items()
    return step.check.flat(*codes, torch.int8, written=True), step.check.blocks(*scale, written=True)
