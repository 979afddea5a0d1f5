"""The one importer of the C++ extension: tensors are checked here before a pointer crosses.

Every kernel gives the same bits for every instruction set and thread count, and leaves the padding between
segments alone. `MEGATRON_WSD_ISA` forces an instruction set (`scalar`, `avx2`, `avx512`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim.buffers import BufferCheck
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.steps import AdamStep, SGDStep, State8, check_number

ISA_VARIABLE = "MEGATRON_WSD_ISA"


@functools.cache
def extension() -> ModuleType:
    """The compiled extension.

    Raises:
        NativeError: it is not built, or `MEGATRON_WSD_ISA` names what this processor does not have.
    """
    try:
        from megatron_wsd import _C
    except ImportError as error:
        raise NativeError(
            "megatron_wsd._C",
            "the compiled extension",
            str(error),
            "Build it with ./launch/setup.sh, or with `pip install -e .` (needs g++ and python3-dev).",
        ) from error
    name = os.environ.get(ISA_VARIABLE)
    if name:
        _use_isa(_C, name, ISA_VARIABLE)
    return _C


def _use_isa(module: Any, name: str, field: str) -> str:
    known = module.build_info()["isa_available"]
    if name not in known:
        raise NativeError(field, f"one that this processor has: {', '.join(known)}", name)
    return str(module.use_isa(name))


def build_info() -> dict[str, Any]:
    """How the extension was built and what it runs on.

    Returns:
        `isa` in use, `isa_available`, `threads` of the machine, `compiler`, `cuda`.

    Raises:
        NativeError: the extension is not built.
    """
    return dict(extension().build_info())


@contextlib.contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Run the kernels of this process with another instruction set, for tests and benchmarks.

    Raises:
        NativeError: the processor does not have it.
    """
    before = _use_isa(extension(), name, "isa")
    try:
        yield
    finally:
        extension().use_isa(before)


def check_flat(table: SegmentTable, **buffers: torch.Tensor) -> None:
    """Refuse fp32 buffers that are not flat as `table` says, or that overlap.

    Raises:
        NativeError: naming the buffer.
    """
    check = BufferCheck(table)
    for name, tensor in buffers.items():
        check.flat(name, tensor, torch.float32, written=True)
    check.aliasing()


def gradient_ok(grad: torch.Tensor, table: SegmentTable, threads: int | None = None) -> bool:
    """Whether a step can take this gradient: no NaN, no Inf, and every abs(g) <= 2^63.

    Beyond that the square overflows fp32 and the second moment would stay infinite for ever.

    Args:
        grad: fp32, flat as `table` says; padding is not looked at.
        table: where the segments lie.
        threads: by default torch's.
    """
    check = BufferCheck(table)
    address = check.flat("grad", grad, torch.float32)
    return bool(extension().gradient_ok(_segments(table), address, _threads(threads)))


def cgad_step8(
    anchor: torch.Tensor,
    grad: torch.Tensor,
    state: State8,
    table: SegmentTable,
    hyper: AdamStep,
    *,
    threads: int | None = None,
    checked: bool = False,
) -> bool:
    """One AdamW step with 8-bit moments, in place in `anchor` and `state`.

        m = beta1 m + (1 - beta1) gate g;  v = beta2 v + (1 - beta2) (gate g)^2
        p = p (1 - lr weight_decay);  p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps)

    as torch.optim.AdamW has it; the moments are then rounded stochastically into the ratio codec, by a hash
    of (seed, parameter key, element within the parameter, step).

    Args:
        anchor: fp32, flat as `table` says; changed.
        grad: fp32, likewise.
        state: changed.
        table: where the segments lie.
        hyper: the numbers of this step.
        threads: by default torch's.
        checked: the caller has asked `gradient_ok` already.

    Returns:
        False if the gradient is not usable (see `gradient_ok`); nothing has changed then.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or overlaps another.
    """
    check = BufferCheck(table)
    p = check.flat("anchor", anchor, torch.float32, written=True)
    g = check.flat("grad", grad, torch.float32)
    coded = check.state(state, written=True)
    check.aliasing()
    segments, n = _segments(table), _threads(threads)
    if not checked and not extension().gradient_ok(segments, g, n):
        return False
    extension().cgad_step8(segments, p, g, *coded, _adam(hyper), n)
    return True


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
) -> bool:
    """The same step as `cgad_step8` with fp32 moments `m` and `v`, flat as the anchor; all three changed.

    Returns:
        False if the gradient is not usable (see `gradient_ok`); nothing has changed then.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or overlaps another.
    """
    check = BufferCheck(table)
    p = check.flat("anchor", anchor, torch.float32, written=True)
    g = check.flat("grad", grad, torch.float32)
    moments = [check.flat(name, t, torch.float32, written=True) for name, t in (("m", m), ("v", v))]
    check.aliasing()
    segments, n = _segments(table), _threads(threads)
    if not checked and not extension().gradient_ok(segments, g, n):
        return False
    extension().cgad_step32(segments, p, g, *moments, _adam(hyper), n)
    return True


def sgd_step(
    anchor: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor | None,
    table: SegmentTable,
    hyper: SGDStep,
    *,
    threads: int | None = None,
    checked: bool = False,
) -> bool:
    """One SGD step as torch.optim.SGD with dampening 0 defines it, in place in `anchor` and `momentum`.

        g = g + weight_decay p;  b = momentum b + g;  p -= lr (g + momentum b if nesterov else b)

    Args:
        anchor: fp32, flat as `table` says; changed.
        grad: fp32, likewise.
        momentum: the buffer b, fp32, likewise, zeros at first; None where `hyper.momentum` is 0.
        table: where the segments lie.
        hyper: the numbers of this step.
        threads: by default torch's.
        checked: the caller has asked `gradient_ok` already.

    Returns:
        False if the gradient is not usable (see `gradient_ok`); nothing has changed then.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, overlaps another, or is missing.
    """
    if (momentum is None) != (hyper.momentum == 0.0):
        got = "none" if momentum is None else "a buffer"
        raise NativeError("momentum", "a buffer exactly where hyper.momentum > 0", got)
    check = BufferCheck(table)
    p = check.flat("anchor", anchor, torch.float32, written=True)
    g = check.flat("grad", grad, torch.float32)
    b = 0 if momentum is None else check.flat("momentum", momentum, torch.float32, written=True)
    check.aliasing()
    segments, n = _segments(table), _threads(threads)
    if not checked and not extension().gradient_ok(segments, g, n):
        return False
    extension().sgd_step(segments, p, g, b, hyper.lr, hyper.momentum, hyper.nesterov, hyper.weight_decay, n)
    return True


def decode8(state: State8, table: SegmentTable, hyper: AdamStep, m: torch.Tensor, v: torch.Tensor) -> None:
    """Write the moments that `state` stands for into `m` and `v`, fp32, flat as `table` says.

    Args:
        state: as the step `hyper.step` left it.
        table: where the segments lie.
        hyper: of that step; its `betas[1]`, `eps` and `step` enter the ratio.
        m: first moment, overwritten except for padding.
        v: second moment, likewise.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or overlaps another.
    """
    check = BufferCheck(table)
    coded = check.state(state, written=False)
    moments = [check.flat(name, t, torch.float32, written=True) for name, t in (("m", m), ("v", v))]
    check.aliasing()
    extension().decode8(_segments(table), *coded, _adam(hyper), *moments, _threads(None))


def encode8(m: torch.Tensor, v: torch.Tensor, table: SegmentTable, hyper: AdamStep, state: State8) -> None:
    """The inverse of `decode8`, rounding stochastically as the step `hyper.step` would.

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
    extension().encode8(_segments(table), *moments, _adam(hyper), *coded, _threads(None))


def digest(tensor: torch.Tensor, salt: int = 0) -> int:
    """A 64-bit digest of the bytes of a tensor, in which every bit and its position count.

    Args:
        tensor: contiguous, on the CPU, any dtype.
        salt: another salt, another digest; 0 to 2^64 - 1.
    """
    address = BufferCheck().buffer("tensor", tensor, None)
    return int(extension().digest64(address, tensor.numel() * tensor.element_size(), salt, _threads(None)))


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a contiguous fp32 CPU tensor holds no NaN and no Inf."""
    address = BufferCheck().buffer("tensor", tensor, torch.float32)
    return bool(extension().all_finite(address, tensor.numel(), _threads(None)))


def accumulate(out: torch.Tensor, x: torch.Tensor, weight: float) -> None:
    """out += weight * x in fp32: the product is rounded, then the sum; never fused.

    Args:
        out: fp32, contiguous, on the CPU; changed.
        x: likewise, as many elements, no overlap with `out`.
        weight: rounded to fp32 first; finite.

    Raises:
        NativeError: a buffer has the wrong device, dtype, layout or size, or they overlap.
    """
    check = BufferCheck()
    addresses = (check.buffer("out", out, torch.float32, written=True), check.buffer("x", x, torch.float32))
    if out.numel() != x.numel():
        raise NativeError("x", f"{out.numel()} elements, as out has", f"{x.numel()}")
    check.aliasing()
    check_number("weight", weight, -3.4e38, 3.4e38)
    extension().accumulate(*addresses, out.numel(), weight, _threads(None))


def _threads(threads: int | None) -> int:
    if threads is None:
        return torch.get_num_threads()
    if not 1 <= threads <= 4096:
        raise NativeError("threads", "a count from 1 to 4096", threads)
    return threads


def _segments(t: SegmentTable) -> Any:
    try:
        return extension().Segments(t.offset, t.numel, t.key, t.element0, t.block_size)
    except (ValueError, TypeError) as error:
        raise NativeError("table", "segments that FlatLayout could have made", str(error)) from error


def _adam(h: AdamStep) -> Any:
    return extension().AdamHyper(
        lr=h.lr,
        beta1=h.betas[0],
        beta2=h.betas[1],
        eps=h.eps,
        weight_decay=h.weight_decay,
        gate=h.gate,
        step=h.step,
        seed=h.seed,
    )
