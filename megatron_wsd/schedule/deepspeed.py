"""The schedule as DeepSpeed's json scheduler: ``"scheduler": {"type": "WSD", "params": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import naming, real, whole
from megatron_wsd.schedule.front import Front
from megatron_wsd.schedule.params import batch_from_params, peak_rates, plan_from_params
from megatron_wsd.schedule.plan import Plan


def register() -> None:
    """Let DeepSpeed find ``WSD`` by name; call it before ``deepspeed.initialize``. Safe to repeat.

    DeepSpeed has no registry: its engine looks the type up as an attribute of ``lr_schedules``. The list
    VALID_LR_SCHEDULES beside it stays as it is: the engine never reads it, and the two helpers that do go
    on to read the warm-up parameters of DeepSpeed's own schedules, which a WSD block does not have.
    """
    from deepspeed.runtime import lr_schedules

    lr_schedules.WSD = WSD


class WSD(Front):
    """Sets the rates of a DeepSpeed engine's optimizer, one ``step()`` for each optimizer update.

    Not a torch ``LRScheduler``: the engine passes its ZeRO wrapper, which torch's class refuses. The rate
    of the first update is set here, before any step. Each param group keeps a peak and a minimum of its own.
    The engine steps it once per optimizer update, and not on an update that fp16 skips.

    A schedule in samples or tokens is advanced by ``step(increment=...)``, for which the engine has
    ``engine.step(lr_kwargs={"increment": ...})``, by ``set_position``, or, where the params say what one
    update holds, by a bare ``step()``.

    Args:
        optimizer: a torch optimizer, or DeepSpeed's wrapper around one. Its groups' lr are the peaks
            (``initial_lr``, where a group already carries one), unless ``max_lr`` is given.
        **params: see ``schedule_from_params``.

    Attributes:
        optimizer: the innermost optimizer. Its groups are looked up at every write, since loading a
            checkpoint replaces them.

    Raises:
        ScheduleError: the params do not make a schedule, or there is no peak to scale.
    """

    def __init__(self, optimizer: Any, **params: Any) -> None:
        while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self.optimizer = optimizer
        with naming({}, prefix="scheduler.params."):
            given = peak_rates(params.get("max_lr"))
        self._plan = plan_from_params(params, _take_peaks(optimizer.param_groups, given))
        self._batch = batch_from_params(params)
        self.set_position(0)

    @property
    def position(self) -> int:
        """Completed updates, samples or tokens: whatever the schedule counts."""
        return self._position

    @property
    def num_updates(self) -> int:
        """Completed updates.

        Raises:
            ScheduleError: the schedule counts something else; see ``position``.
        """
        if self.schedule.unit != "steps":
            raise ScheduleError(
                "num_updates", "a schedule in steps", f"one in {self.schedule.unit}", "Read position."
            )
        return self._position

    def set_position(self, num_updates: int) -> None:
        """Go on as after ``num_updates`` completed updates: the rates are set for the next one.

        Args:
            num_updates: updates, or samples or tokens if that is what the schedule counts.

        Raises:
            ScheduleError: not a whole number of at least 0.
        """
        before = getattr(self, "_position", 0)
        self._position = whole("num_updates", num_updates)
        try:
            self._set_rates()
        except BaseException:
            self._position = before
            raise

    def step(self, *unexpected: object, increment: int | None = None) -> None:
        """One more update is done.

        Args:
            increment: samples or tokens that it took, over all ranks and islands; not for a schedule in
                steps.

        Raises:
            ScheduleError: called with a positional argument. After a TypeError the engine calls again with
                the train batch size; were that taken, a programming error would turn into a jump of the
                schedule. Or the increment is missing where it is not known, or given where it has no meaning.
        """
        if unexpected:
            raise ScheduleError(
                "scheduler step",
                "no argument: WSD counts optimizer updates",
                unexpected[0],
                "If DeepSpeed passed its train_batch_size, the cause is the TypeError shown above.",
            )
        unit = self.schedule.unit
        if unit == "steps":
            if increment is not None:
                raise ScheduleError("increment", "none: this schedule counts updates", increment)
            increment = 1
        elif increment is None:
            increment = self._batch.per_step(unit)
            if increment is None:
                raise ScheduleError(
                    "increment",
                    f"the {unit} of this update",
                    "nothing",
                    'Call engine.step(lr_kwargs={"increment": ...}), or say samples_per_step and '
                    "tokens_per_sample in scheduler.params.",
                )
        self.set_position(self._position + whole("increment", increment))

    def get_lr(self) -> list[float]:
        """Rate of the next update, one for each param group."""
        return self._plan.rates(self._position)

    def get_last_lr(self) -> list[float]:
        """The rates last set, which are those of the next update."""
        return self.get_lr()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Take over position and decisions and set the rates for it; loading twice changes nothing.

        Args:
            state_dict: of this front or the torch one.
            overrides: fields of the params that are to differ from the saved ones; recorded in
                ``schedule.changes``. Everything else is as saved.

        Raises:
            ScheduleError: the state belongs to another schedule or other peaks; nothing is changed.
        """
        self.set_position(self._load(state_dict, overrides))

    def restore(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state as it is, overrides included, for a caller that knows that it is of this run.

        Raises:
            ScheduleError: not such a state, or of another number of param groups; nothing is changed.
        """
        plan, position = Plan.from_state(state_dict)
        if len(plan.peaks) != len(self.peaks):
            raise ScheduleError("scheduler state", f"{len(self.peaks)} param groups", len(plan.peaks))
        self._plan = plan
        self.set_position(position)


def _take_peaks(groups: list[dict[str, Any]], given: list[float] | None) -> list[float]:
    if given is None:
        # Another scheduler may already have lowered lr; torch's convention keeps the peak in initial_lr.
        peaks = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in groups]
    else:
        peaks = given * len(groups) if len(given) == 1 else given
    if len(peaks) != len(groups):
        raise ScheduleError(
            "scheduler.params.max_lr", f"one rate, or {len(groups)} for as many param groups", peaks
        )
    for index, peak in enumerate(peaks):
        real(f"lr of param group {index}", peak)
    if not any(peaks):
        raise ScheduleError(
            "scheduler.params.max_lr",
            "a peak above 0 for at least one param group",
            peaks,
            "Set optimizer.params.lr, or max_lr here.",
        )
    return peaks
