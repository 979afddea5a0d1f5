"""Put the scheduler into Megatron's training code, with flags of its own beside upstream's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from argparse import ArgumentParser
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron.core import optimizer_param_scheduler as upstream
from megatron.core import package_info

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.front import to_unit
from megatron_wsd.schedule.lengths import Batch
from megatron_wsd.schedule.megatron.scheduler import OptimizerParamScheduler

KNOWN_LINES = ((0, 16), (0, 19))
"""Lines of megatron-core whose scheduler and whose use of it were read and compared."""

_TRAINING, _ARGUMENTS = "megatron.training.training", "megatron.training.arguments"
_CLASS, _ADD_FLAGS = "OptimizerParamScheduler", "add_megatron_arguments"
# where upstream's constructor and ours must agree: by name and in this order
_PARAMETERS = (
    *("self", "optimizer", "init_lr", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps"),
    *("lr_decay_style", "start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"),
    *("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler", "wsd_decay_steps"),
    "lr_wsd_decay_style",
)


def install() -> list[str]:
    """Let Megatron's training build this package's scheduler; call it before Megatron parses its arguments.

    ``megatron.core.optimizer_param_scheduler.OptimizerParamScheduler`` becomes ours. Where Megatron-LM's
    ``megatron.training`` is installed, it builds ours too, and its command line knows, beside upstream's:

        --wsd-decay-start N      where the decay begins; --lr-wsd-decay-iters or -samples is its length
        --wsd-open-horizon       no decay until one is begun on command
        --wsd-decay-shape NAME   any shape of megatron_wsd; goes before --lr-wsd-decay-style
        --wsd-decay-power P      of the shape polynomial
        --wsd-control-dir DIR    a file decay_now.json there begins or cancels the decay

    A bare number is in iterations under --train-iters and in samples under --train-samples; "20e9 tokens"
    and the like say it themselves. When a decay that was begun on command is over, and does not go back to
    stable, training ends there as it does at --train-iters.

    Returns:
        What was replaced; empty if it was installed before.

    Raises:
        ScheduleError: a version of megatron-core, or of its training, that is not known. Nothing is replaced.
    """
    if issubclass(upstream.OptimizerParamScheduler, OptimizerParamScheduler):
        return []
    version = (package_info.MAJOR, package_info.MINOR)
    if version not in KNOWN_LINES:
        known = " and ".join(f"{major}.{minor}.x" for major, minor in KNOWN_LINES)
        raise ScheduleError(
            "megatron-core",
            f"{known}, which install() knows",
            package_info.__version__,
            "Build megatron_wsd.schedule.megatron.OptimizerParamScheduler in your own code instead.",
        )
    parameters = tuple(inspect.signature(upstream.OptimizerParamScheduler.__init__).parameters)
    if parameters != _PARAMETERS:
        raise ScheduleError(
            "megatron-core's OptimizerParamScheduler", f"the parameters {_PARAMETERS}", f"{parameters}"
        )
    training, arguments = _training_modules()
    replaced = [f"{upstream.__name__}.{_CLASS}"]
    setattr(upstream, _CLASS, OptimizerParamScheduler)
    if training is not None and arguments is not None:
        setattr(training, _CLASS, _flagged(training))
        setattr(arguments, _ADD_FLAGS, _with_flags(getattr(arguments, _ADD_FLAGS)))
        replaced += [f"{_TRAINING}.{_CLASS}", f"{_ARGUMENTS}.{_ADD_FLAGS}"]
    return replaced


def _training_modules() -> tuple[ModuleType | None, ModuleType | None]:
    """Megatron-LM's training, which the wheels of megatron-core bring along from 0.19 on."""
    if importlib.util.find_spec("megatron.training") is None:
        return None, None
    modules = importlib.import_module(_TRAINING), importlib.import_module(_ARGUMENTS)
    for module, name in zip(modules, (_CLASS, _ADD_FLAGS), strict=True):
        if not hasattr(module, name):
            raise ScheduleError(
                module.__name__, f"{name}, to replace it", "none", "This Megatron is not known."
            )
    if not hasattr(modules[0], "get_args"):
        raise ScheduleError(_TRAINING, "a get_args to read the flags with", "none")
    return modules


def _with_flags(add_megatron_arguments: Callable[[ArgumentParser], ArgumentParser]) -> Callable[..., Any]:
    def add_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = add_megatron_arguments(parser)
        group = parser.add_argument_group(title="megatron_wsd")
        group.add_argument("--wsd-decay-start", help="where the WSD decay begins: a number, or '20e9 tokens'")
        group.add_argument("--wsd-open-horizon", action="store_true", help="no decay until told to")
        group.add_argument("--wsd-decay-shape", help="any shape of megatron_wsd, before --lr-wsd-decay-style")
        group.add_argument("--wsd-decay-power", type=float, help="of the shape polynomial")
        group.add_argument("--wsd-control-dir", help="a file decay_now.json in this folder begins the decay")
        return parser

    return add_arguments


def _flagged(training: ModuleType) -> type[OptimizerParamScheduler]:
    """The scheduler as Megatron's training builds it: with what its command line says."""

    class FlaggedScheduler(OptimizerParamScheduler):
        def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            flags = training.get_args()
            by_samples = getattr(flags, "train_samples", None) is not None
            ramped = any(
                getattr(flags, name, None) is not None
                for name in ("rampup_batch_size", "step_batch_size_schedule")
            )
            batch = Batch(None if ramped else flags.global_batch_size, getattr(flags, "seq_length", None))
            own: dict[str, Any] = {"wsd_control_dir": flags.wsd_control_dir, "wsd_batch": batch}
            own |= {"wsd_open_horizon": flags.wsd_open_horizon, "wsd_decay_power": flags.wsd_decay_power}
            if flags.wsd_decay_start is not None:
                start = flags.wsd_decay_start
                bare = f"{start} samples" if by_samples else f"{start} steps"
                text = bare if start.strip().isdigit() else start
                own["wsd_decay_start"] = to_unit("--wsd-decay-start", text, batch, "samples")
            if flags.wsd_decay_shape is not None:
                kwargs["lr_wsd_decay_style"] = flags.wsd_decay_shape
            super().__init__(optimizer, *args, **(kwargs | own))

        def _updated(self) -> None:
            super()._updated()
            if self._over():
                # Megatron's loop compares with train_iters, saves, and leaves as at the end of any run
                flags = training.get_args()
                flags.train_iters = min(flags.train_iters, flags.curr_iteration + 1)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if self._over():
                # Megatron does not tell the checkpoint's iteration yet; unless the batch grew it is this
                flags = training.get_args()
                iteration = max(1, self.num_steps // flags.global_batch_size)
                flags.train_iters = min(flags.train_iters, iteration)

        def _over(self) -> bool:
            """Whether a decay that was begun on command is over, and nothing comes after it."""
            schedule = self.schedule if self.lr_decay_style == "WSD" else None
            if schedule is None or schedule.end is None or self.num_steps < schedule.end:
                return False
            return schedule.decays[-1].decided_at is not None

    FlaggedScheduler.__name__ = FlaggedScheduler.__qualname__ = _CLASS
    return FlaggedScheduler
