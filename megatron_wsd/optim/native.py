"""The way from tensors to kernels: everything is checked here before a pointer crosses.

Every kernel gives the same bits for every instruction set, thread count and device, and leaves the padding
between segments alone. Steps, `gradient_ok` and digests run where their tensors lie: on the CPU, or on a CUDA
device if the extension for it was built. All else is for the CPU.

Two things a step does on request, in the same pass: a bf16 copy of the new anchor (to nearest, the working
copy of a model), and the digest of all it wrote.

A step looks for NaN, Inf and abs(g) > 2^63 before it writes: none may reach a part of a shard while other
parts have stepped already, and a pass over memory cannot know what comes later in it. So a step alone reads
the gradient twice. `accumulate`, which makes a merged gradient, tells the same of what it writes; with its
word the step is told `checked=True` and reads it once.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.backend import Backend, backend_of
from megatron_wsd.optim.buffers import BufferCheck
from megatron_wsd.optim.digests import DigestSum, digest, digest_flat
from megatron_wsd.optim.extension import ISA_VARIABLE, build_info, extension, forced_isa
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.segments import thread_count
from megatron_wsd.optim.step_call import Step
from megatron_wsd.optim.steps import AdamStep, CodedState, SGDStep, check_number

__all__ = [
    "ISA_VARIABLE",
    "DigestSum",
    "accumulate",
    "all_finite",
    "build_info",
    "cgad_step8",
    "cgad_step32",
    "check_flat",
    "decode8",
    "digest",
    "digest_flat",
    "dynamic_map",
    "encode8",
    "extension",
    "forced_isa",
    "gradient_ok",
    "sgd_step",
]


def check_flat(table: SegmentTable, backend: Backend | None = None, /, **buffers: torch.Tensor) -> None:
    """Refuse buffers that are not fp32 and flat as `table` says, or that overlap.

    A buffer named `anchor` may be bf16, and one named `copy` must be.

    Args:
        table: where the segments lie.
        backend: for what device; by default the CPU.
        **buffers: to be checked.

    Raises:
        NativeError: naming the buffer.
    """
    check = BufferCheck(table) if backend is None else backend.check()
    for name, tensor in buffers.items():
        if name == "anchor":
            check.anchor(tensor)
        else:
            check.flat(name, tensor, torch.bfloat16 if name == "copy" else torch.float32, written=True)
    check.aliasing()


def gradient_ok(grad: torch.Tensor, table: SegmentTable, threads: int | None = None) -> bool:
    """Whether a step can take this gradient: no NaN, no Inf, and every abs(g) <= 2^63.

    Beyond that the square overflows fp32 and the second moment would stay infinite for ever.

    Args:
        grad: fp32, flat as `table` says; padding is not looked at.
        table: where the segments lie.
        threads: of the CPU; by default torch's.

    Raises:
        NativeError: the buffer has the wrong dtype, layout or size.
    """
    backend = backend_of(grad, table, threads)
    address = backend.check().flat("grad", grad, torch.float32)
    return backend.gradient_ok(address)


def cgad_step8(
    anchor: torch.Tensor,
    grad: torch.Tensor,
    state: CodedState,
    table: SegmentTable,
    hyper: AdamStep,
    *,
    threads: int | None = None,
    checked: bool = False,
    copy: torch.Tensor | None = None,
    digest: DigestSum | None = None,
) -> bool:
    """One AdamW step with 8-bit moments, in place in `anchor` and `state`.

        m = beta1 m + (1 - beta1) gate g;  v = beta2 v + (1 - beta2) (gate g)^2
        p = p (1 - lr weight_decay);  p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps)

    as torch.optim.AdamW has it. The moments then go into the codec of `state`: the ratio codec (`State8`)
    rounds stochastically, the dynamic maps (`DynamicState8`, CPU only) to nearest. A bf16 anchor is rounded
    stochastically. All such rounding is a hash of (seed, parameter key, element within the parameter, step).

    Args:
        anchor: fp32 or bf16, flat as `table` says; changed.
        grad: fp32, likewise.
        state: changed.
        table: where the segments lie; on a CUDA device with blocks of 256.
        hyper: the numbers of this step.
        threads: of the CPU; by default torch's.
        checked: the caller knows that `gradient_ok(grad)`.
        copy: bf16, flat; overwritten with the new anchor rounded to nearest, except for padding.
        digest: what `digest_flat` of {"anchor": anchor, **state.tensors()} would add is added to it.

    Returns:
        False if the gradient is not usable (see `gradient_ok`); nothing has changed then. Always True if
        `checked`.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or overlaps another.
    """
    step = Step(anchor, grad, table, threads, copy, digest, state.tensors())
    codec, coded = step.backend.codec(state), step.check.state(state, written=True)
    return step.run(
        checked, lambda b, call: b.module.cgad_step8(b.segments, call, codec, coded, adam(hyper, b))
    )


def cgad_step32(
    anchor: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    table: SegmentTable,
    hyper: AdamStep,
    *,
    threads: int | None = None,
    checked: bool = False,
    copy: torch.Tensor | None = None,
    digest: DigestSum | None = None,
) -> bool:
    """The same step as `cgad_step8` with fp32 moments `m` and `v`, flat as the anchor; all three changed.

    Its digest is that of {"anchor": anchor, "m": m, "v": v}.

    Returns:
        False if the gradient is not usable (see `gradient_ok`); nothing has changed then.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or overlaps another.
    """
    step = Step(anchor, grad, table, threads, copy, digest, {"m": m, "v": v})
    moments = [step.check.flat(name, t, torch.float32, written=True) for name, t in (("m", m), ("v", v))]
    return step.run(checked, lambda b, call: b.module.cgad_step32(b.segments, call, *moments, adam(hyper, b)))


def sgd_step(
    anchor: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor | None,
    table: SegmentTable,
    hyper: SGDStep,
    *,
    threads: int | None = None,
    checked: bool = False,
    copy: torch.Tensor | None = None,
    digest: DigestSum | None = None,
) -> bool:
    """One SGD step as torch.optim.SGD with dampening 0 defines it, in place in `anchor` and `momentum`.

        g = g + weight_decay p;  b = momentum b + g;  p -= lr (g + momentum b if nesterov else b)

    Args:
        anchor: fp32, or bf16 (rounded stochastically), flat as `table` says; changed.
        grad: fp32, likewise.
        momentum: the buffer b, fp32, likewise, zeros at first; None where `hyper.momentum` is 0.
        table: where the segments lie.
        hyper: the numbers of this step.
        threads: by default torch's.
        checked: the caller knows that `gradient_ok(grad)`.
        copy: bf16, flat; overwritten with the new anchor rounded to nearest, except for padding.
        digest: that of {"anchor": anchor, "momentum": momentum if there is one} is added to it.

    Returns:
        False if the gradient is not usable (see `gradient_ok`); nothing has changed then.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, overlaps another, or is missing.
    """
    if (momentum is None) != (hyper.momentum == 0.0):
        got = "none" if momentum is None else "a buffer"
        raise NativeError("momentum", "a buffer exactly where hyper.momentum > 0", got)
    state = {} if momentum is None else {"momentum": momentum}
    step = Step(anchor, grad, table, threads, copy, digest, state)
    b = 0 if momentum is None else step.check.flat("momentum", momentum, torch.float32, written=True)
    numbers = step.backend.module.SgdHyper(
        lr=hyper.lr,
        momentum=hyper.momentum,
        weight_decay=hyper.weight_decay,
        nesterov=hyper.nesterov,
        step=hyper.step,
        seed=hyper.seed,
    )
    return step.run(
        checked, lambda e, call: e.module.sgd_step(e.segments, call, b, numbers), digested_on_gpu=False
    )


def decode8(
    state: CodedState, table: SegmentTable, hyper: AdamStep, m: torch.Tensor, v: torch.Tensor
) -> None:
    """Write the moments that `state` stands for into `m` and `v`, fp32, flat as `table` says.

    Args:
        state: as the step `hyper.step` left it.
        table: where the segments lie.
        hyper: of that step; its `betas[1]`, `eps` and `step` enter the ratio of the ratio codec.
        m: first moment, overwritten except for padding.
        v: second moment, likewise.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or overlaps another.
    """
    check = BufferCheck(table)
    coded = check.state(state, written=False)
    moments = [check.flat(name, t, torch.float32, written=True) for name, t in (("m", m), ("v", v))]
    check.aliasing()
    backend = backend_of(m, table, None)
    extension().decode8(
        backend.segments, state.CODEC, coded, adam(hyper, backend), *moments, thread_count(None)
    )


def encode8(
    m: torch.Tensor, v: torch.Tensor, table: SegmentTable, hyper: AdamStep, state: CodedState
) -> None:
    """The inverse of `decode8`, rounding as the step `hyper.step` would.

    Args:
        m: first moment, fp32, flat as `table` says; finite.
        v: second moment, likewise; finite and >= 0.
        table: where the segments lie.
        hyper: of the step after which these moments stand.
        state: overwritten except for padding.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or overlaps another.
    """
    check = BufferCheck(table)
    moments = [check.flat(name, t, torch.float32) for name, t in (("m", m), ("v", v))]
    coded = check.state(state, written=True)
    check.aliasing()
    backend = backend_of(m, table, None)
    extension().encode8(
        backend.segments, state.CODEC, *moments, adam(hyper, backend), coded, thread_count(None)
    )


def dynamic_map(*, signed: bool) -> torch.Tensor:
    """The values of the dynamic map: fp32 [256], strictly increasing, with an exact 0 and 1.

    Decade i = 0..6 holds n = 2^i (signed) or 2^(i + 1) (unsigned) values, 10^(i - 6) times the middles of n
    equal parts of [0.1, 1]; the signed map has their negatives too, but not -1.

    Reference:
        8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
    """
    return torch.tensor(extension().dynamic_map(signed), dtype=torch.float32)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a contiguous fp32 CPU tensor holds no NaN and no Inf."""
    address = BufferCheck().buffer("tensor", tensor, torch.float32)
    return bool(extension().all_finite(address, tensor.numel(), thread_count(None)))


def accumulate(out: torch.Tensor, x: torch.Tensor, weight: float) -> bool:
    """out += weight * x in fp32: the product is rounded, then the sum; never fused.

    Looks at what it writes, so that nobody needs to read it again to know whether a step can take it.

    Args:
        out: fp32, contiguous, on the CPU; changed.
        x: likewise, as many elements, no overlap with `out`.
        weight: rounded to fp32 first; finite.

    Returns:
        Whether all that was written is finite and at most 2^63 in magnitude, as `gradient_ok` wants it.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or they overlap.
    """
    check = BufferCheck()
    addresses = (check.buffer("out", out, torch.float32, written=True), check.buffer("x", x, torch.float32))
    if out.numel() != x.numel():
        raise NativeError("x", f"{out.numel()} elements, as out has", f"{x.numel()}")
    check.aliasing()
    check_number("weight", weight, -3.4e38, 3.4e38)
    return bool(extension().accumulate(*addresses, out.numel(), weight, thread_count(None)))


def adam(h: AdamStep, backend: Backend) -> Any:
    """The numbers of a step as the extension of `backend` takes them."""
    return backend.module.AdamHyper(
        lr=h.lr,
        beta1=h.betas[0],
        beta2=h.betas[1],
        eps=h.eps,
        weight_decay=h.weight_decay,
        gate=h.gate,
        step=h.step,
        seed=h.seed,
    )
