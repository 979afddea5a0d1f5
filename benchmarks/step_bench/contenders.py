"""Everyone who takes the AdamW step, behind one interface. Those that are not there say why."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_wsd.optim import native
from megatron_wsd.optim.layout import Segment, SegmentTable, parameter_key
from megatron_wsd.optim.steps import AdamStep, DynamicState8, State8
from step_bench import problem as numbers
from step_bench.problem import FIRST_STEP_TOLERANCE, Problem, first_step
from step_bench.traffic import BLOCK_SIZE, Traffic, adam8, adam32

Step = Callable[[torch.Tensor], None]
State = Callable[[], Iterable[torch.Tensor]]


class AbsentError(Exception):
    """A contender that cannot take part; the message says why, and stands in the table."""


@dataclass(frozen=True)
class Contender:
    """How one implementation is called.

    Attributes:
        key: short name.
        label: as in table and plot.
        traffic: the bytes its step must move.
        devices: types of device it is tried on.
        make: from a problem to its step (of one gradient) and its state tensors.
        ours: built here.
    """

    key: str
    label: str
    traffic: Traffic
    devices: tuple[str, ...]
    make: Callable[[Problem], tuple[Step, State]]
    ours: bool = False


def _counted(problem: Problem) -> Iterator[AdamStep]:
    step = 0
    while True:
        step += 1
        yield AdamStep(
            lr=numbers.LR,
            betas=numbers.BETAS,
            eps=numbers.EPS,
            weight_decay=numbers.WEIGHT_DECAY,
            step=step,
            seed=problem.seed,
        )


def _table(problem: Problem) -> SegmentTable:
    return SegmentTable.build([Segment("p", parameter_key("p"), problem.n, 0, True)], BLOCK_SIZE)


def _on_device(state: State8, device: torch.device) -> State8:
    return State8(*(t.to(device) for t in (state.r_codes, state.s_codes, state.r_scale, state.s_scale)))


def _ours(
    step: Callable[..., bool],
    problem: Problem,
    moments: tuple[State8 | DynamicState8 | torch.Tensor, ...],
    checked: bool = True,
) -> Step:
    """The one place where this package's kernels are called, on the CPU and on a GPU alike.

    Args:
        checked: as the outer loop calls it, which has learned from the pass that merged the gradient that it
            is finite. False: the step looks for itself, in a read of the gradient before anything is written.
    """
    table, hyper = _table(problem), _counted(problem)
    on_cpu = {"threads": problem.threads} if problem.device.type == "cpu" else {}

    def run(grad: torch.Tensor) -> None:
        if not step(problem.p, grad, *moments, table, next(hyper), checked=checked, **on_cpu):
            raise RuntimeError("the step refused a finite gradient")

    return run


def _ours8(problem: Problem) -> tuple[Step, State]:
    state = _on_device(State8.zeros(problem.n, BLOCK_SIZE), problem.device)
    tensors = (state.r_codes, state.s_codes, state.r_scale, state.s_scale)
    return _ours(native.cgad_step8, problem, (state,)), lambda: tensors


def _ours8_alone(problem: Problem) -> tuple[Step, State]:
    state = _on_device(State8.zeros(problem.n, BLOCK_SIZE), problem.device)
    tensors = (state.r_codes, state.s_codes, state.r_scale, state.s_scale)
    return _ours(native.cgad_step8, problem, (state,), checked=False), lambda: tensors


def _ours8_dynamic(problem: Problem) -> tuple[Step, State]:
    state = DynamicState8.zeros(problem.n, BLOCK_SIZE)
    return _ours(native.cgad_step8, problem, (state,)), lambda: _fields(state)


def _fields(state: DynamicState8) -> list[torch.Tensor]:
    return [t for t in vars(state).values() if isinstance(t, torch.Tensor)]


def _ours32(problem: Problem) -> tuple[Step, State]:
    moments = (torch.zeros_like(problem.p), torch.zeros_like(problem.p))
    return _ours(native.cgad_step32, problem, moments), lambda: moments


def _torch_optimizer(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
) -> Callable[..., object]:
    def build(problem: Problem) -> tuple[Step, State]:
        parameter = torch.nn.Parameter(problem.p)
        optimizer = make([parameter])

        def run(grad: torch.Tensor) -> None:
            parameter.grad = grad
            optimizer.step()

        return run, lambda: _leaves(optimizer.state[parameter].values())

    return build


def _leaves(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Plain tensors of more than one element; a tensor subclass is opened into what it wraps."""
    for value in values:
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from _leaves(getattr(value, name) for name in names)
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            yield value


def _hyper() -> dict[str, object]:
    return {
        "lr": numbers.LR,
        "betas": numbers.BETAS,
        "eps": numbers.EPS,
        "weight_decay": numbers.WEIGHT_DECAY,
    }


def _plain8(problem: Problem) -> tuple[Step, State]:
    """The 8-bit step as one would write it in torch: decode, Adam, encode, one operation after the other.

    The same codec as ours (ratio in int8, root of v log-spaced over 24 octaves, both rounded stochastically),
    with torch's generator in place of the counter hash; blocks of 256.
    """
    p = problem.p.view(-1, BLOCK_SIZE)
    r_code = torch.zeros_like(p, dtype=torch.int8)
    s_code = torch.zeros_like(p, dtype=torch.uint8)
    r_scale, s_scale = torch.zeros_like(p[:, :1]), torch.zeros_like(p[:, :1])
    levels_per_octave = 255 / 24
    (beta1, beta2), hyper = numbers.BETAS, _counted(problem)
    eps_before = 0.0

    def run(grad: torch.Tensor) -> None:
        nonlocal eps_before
        g, t = grad.view(-1, BLOCK_SIZE), next(hyper).step
        s = torch.exp2((s_code.float() - 255) / levels_per_octave) * s_scale
        m = r_code.float() * (r_scale / 127) * (s + eps_before)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * s * s + (1 - beta2) * g * g
        root2 = math.sqrt(1 - beta2**t)
        s = v.sqrt()
        # sqrt(v / bc2) + eps = (sqrt(v) + eps sqrt(bc2)) / sqrt(bc2)
        eps_before = numbers.EPS * root2
        r = m / (s + eps_before)
        p.mul_(1 - numbers.LR * numbers.WEIGHT_DECAY)
        p.sub_(r, alpha=numbers.LR * root2 / (1 - beta1**t))
        r_scale.copy_(r.abs().amax(1, keepdim=True))
        s_scale.copy_(s.amax(1, keepdim=True))
        r_code.copy_((r * (127 / r_scale) + torch.rand_like(r)).floor_().nan_to_num_().clamp_(-127, 127))
        level = torch.log2(s / s_scale) * levels_per_octave + 255
        s_code.copy_((level + torch.rand_like(s)).floor_().nan_to_num_().clamp_(0, 255))

    return run, lambda: (r_code, s_code, r_scale, s_scale)


def _deepspeed(problem: Problem) -> tuple[Step, State]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # Its kernel is built on first use, which takes minutes.
    return _torch_optimizer(lambda ps: DeepSpeedCPUAdam(ps, adamw_mode=True, **_hyper()))(problem)


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise AbsentError("not installed")


def _bitsandbytes(problem: Problem) -> tuple[Step, State]:
    _need("bitsandbytes")
    import bitsandbytes

    return _torch_optimizer(lambda ps: bitsandbytes.optim.AdamW8bit(ps, **_hyper()))(problem)


def _torchao(problem: Problem) -> tuple[Step, State]:
    _need("torchao")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # a deprecation inside torchao
    from torchao.optim import AdamW8bit

    return _torch_optimizer(lambda ps: AdamW8bit(ps, block_size=BLOCK_SIZE, **_hyper()))(problem)


ALL: tuple[Contender, ...] = (
    Contender("ours8", "CGAD 8-bit (ours)", adam8(), ("cpu", "cuda"), _ours8, ours=True),
    Contender("ours8_alone", "CGAD 8-bit, own check", adam8(), ("cpu", "cuda"), _ours8_alone, ours=True),
    Contender("ours8_dynamic", "CGAD dynamic map", adam8(), ("cpu",), _ours8_dynamic, ours=True),
    Contender("ours32", "CGAD fp32 (ours)", adam32(), ("cpu", "cuda"), _ours32, ours=True),
    Contender(
        "torch_fused",
        "torch AdamW fused, fp32",
        adam32(),
        ("cpu", "cuda"),
        _torch_optimizer(lambda ps: torch.optim.AdamW(ps, fused=True, **_hyper())),
    ),
    Contender(
        "torch_foreach",
        "torch AdamW foreach, fp32",
        adam32(),
        ("cpu", "cuda"),
        _torch_optimizer(lambda ps: torch.optim.AdamW(ps, foreach=True, **_hyper())),
    ),
    Contender("deepspeed", "DeepSpeedCPUAdam, fp32", adam32(), ("cpu",), _deepspeed),
    Contender("torch_plain8", "plain torch, 8-bit", adam8(), ("cpu", "cuda"), _plain8),
    Contender("bitsandbytes8", "bitsandbytes AdamW, 8-bit", adam8(), ("cpu", "cuda"), _bitsandbytes),
    Contender("torchao8", "torchao AdamW, 8-bit", adam8(), ("cpu", "cuda"), _torchao),
)


def build(contender: Contender, problem: Problem, checked: bool) -> tuple[Step, State]:
    """Make a contender and let it take one step, which builds and compiles what it needs.

    Args:
        contender: which.
        problem: its parameter is changed.
        checked: compare that step with AdamW's in float64.

    Raises:
        AbsentError: it is not installed, has no path for this device, or does not take AdamW's step.
    """
    if problem.device.type not in contender.devices:
        raise AbsentError(f"no {problem.device.type} path")
    grad = problem.grads[0]
    wanted = first_step(problem.p, grad) if checked else None
    try:
        # Peers print about missing accelerators; the table is no place for that.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            step, state = contender.make(problem)
            step(grad)
    except AbsentError:
        raise
    except NotImplementedError as error:
        raise AbsentError(f"no {problem.device.type} path: {_first_line(error)}") from error
    except Exception as error:  # a peer that fails must not end the others' run
        raise AbsentError(f"failed: {_first_line(error)}") from error
    if wanted is not None:
        wrong = float((problem.p.double() - wanted).abs().max())
        if not wrong <= FIRST_STEP_TOLERANCE:
            raise AbsentError(f"its first step is {wrong:.1e} away from AdamW's")
    return step, state


def state_bytes(tensors: Iterable[torch.Tensor], n: int) -> float:
    """Bytes of optimizer state a parameter, as allocated."""
    return sum(t.numel() * t.element_size() for t in tensors) / n


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:160]}"
