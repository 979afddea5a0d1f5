"""The schedule as DeepSpeed's json scheduler: ``"scheduler": {"type": "WSD", "params": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import real, whole
from megatron_wsd.schedule.params import peak_rates, schedule_from_params
from megatron_wsd.schedule.state import load_position, save_position, set_rate
from megatron_wsd.schedule.wsd import Phase, Schedule


def register() -> None:
    """Let DeepSpeed find ``WSD`` by name; call it before ``deepspeed.initialize``. Safe to repeat.

    DeepSpeed has no registry: its engine looks the type up as an attribute of ``lr_schedules``. The list
    VALID_LR_SCHEDULES beside it stays as it is: the engine never reads it, and the two helpers that do go
    on to read the warm-up parameters of DeepSpeed's own schedules, which a WSD block does not have.
    """
    from deepspeed.runtime import lr_schedules

    lr_schedules.WSD = WSD


class WSD:
    """Sets the rates of a DeepSpeed engine's optimizer, one ``step()`` for each optimizer update.

    Not a torch ``LRScheduler``: the engine passes its ZeRO wrapper, which torch's class refuses. The rate
    of the first update is set here, before any step. Each param group keeps a peak of its own.

    Args:
        optimizer: a torch optimizer, or DeepSpeed's wrapper around one. Its groups' lr are the peaks
            (``initial_lr``, where a group already carries one), unless ``max_lr`` is given.
        **params: see ``schedule_from_params``. ``max_lr`` is one peak for all groups or a list of one each.

    Attributes:
        schedule: the pure schedule.
        peaks: peak rate of each param group.
        optimizer: the innermost optimizer. Its groups are looked up at every write, since loading a
            checkpoint replaces them.

    Raises:
        ScheduleError: the params do not make a schedule, or there is no peak to scale.
    """

    def __init__(self, optimizer: Any, **params: Any) -> None:
        self.schedule: Schedule = schedule_from_params(params)
        while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self.optimizer = optimizer
        self.peaks = _take_peaks(optimizer.param_groups, peak_rates(params.get("max_lr")))
        self.set_position(0)

    @property
    def num_updates(self) -> int:
        """Completed updates."""
        return self._num_updates

    @property
    def phase(self) -> Phase:
        """Phase of the next update."""
        return self.schedule.phase(self._num_updates)

    def set_position(self, num_updates: int) -> None:
        """Go on as after ``num_updates`` completed updates: the rates are set for the next one.

        Raises:
            ScheduleError: not a whole number of at least 0.
        """
        factor = self.schedule.factor(whole("num_updates", num_updates))
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            set_rate(group, peak * factor)
        self._num_updates = num_updates

    def step(self, *unexpected: object) -> None:
        """One more update is done.

        Raises:
            ScheduleError: called with an argument. After a TypeError the engine calls again with the train
                batch size; were that taken, a programming error would turn into a jump of the schedule.
        """
        if unexpected:
            raise ScheduleError(
                "scheduler step",
                "no argument: WSD counts optimizer updates",
                unexpected[0],
                "If DeepSpeed passed its train_batch_size, the cause is the TypeError shown above.",
            )
        self.set_position(self._num_updates + 1)

    def get_lr(self) -> list[float]:
        """Rate of the next update, one for each param group."""
        factor = self.schedule.factor(self._num_updates)
        return [peak * factor for peak in self.peaks]

    def get_last_lr(self) -> list[float]:
        """The rates last set, which are those of the next update."""
        return self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Schedule, peaks and position, json-able."""
        return save_position(self.schedule, self.peaks, self._num_updates)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the position and set the rates for it; loading twice changes nothing.

        Raises:
            ScheduleError: the state belongs to another schedule or other peaks; nothing is changed.
        """
        self.set_position(load_position(state_dict, self.schedule, self.peaks))


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
