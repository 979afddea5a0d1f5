"""The ``params`` of ``"scheduler": {"type": "WSD", "params": {...}}``, turned into schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.decay import Decay, length_until
from megatron_wsd.schedule.fields import naming, nearest, real
from megatron_wsd.schedule.lengths import Batch, Length, finest, parse_length
from megatron_wsd.schedule.plan import Plan, group_minimums
from megatron_wsd.schedule.wsd import Schedule

_DECAY_KEYS = (
    "decay_steps",
    "total_steps",
    "decay_shape",
    "decay_power",
    "min_lr_ratio",
    "min_lr",
    "then",
    "rewarmup_steps",
)
_BATCH_KEYS = ("samples_per_step", "tokens_per_sample")
_KEYS = ("warmup_steps", "warmup_init_ratio", "decay_start", "max_lr", *_DECAY_KEYS, *_BATCH_KEYS)
_LENGTHS = {"warmup_steps": 0, "decay_start": 0, "decay_steps": 1, "total_steps": 0, "rewarmup_steps": 0}


def schedule_from_params(
    params: Mapping[str, object],
    *,
    samples_per_step: int | None = None,
    tokens_per_sample: int | None = None,
    peak: float | None = None,
) -> Schedule:
    """The schedule that the json block describes, for the first param group.

    Lengths are whole numbers of optimizer updates, or strings such as ``"2000 steps"``, ``"1e6 samples"``,
    ``"20e9 tokens"`` (global over islands). The schedule counts in the finest unit that occurs; where several
    occur, the coarser ones are multiplied by what one update and one sample hold, and refused if that is not
    known, as it is not while the batch size is ramped.

    Keys, all optional (null counts as absent):
        warmup_steps: default 0.
        warmup_init_ratio: lr(0) / peak, default 0.0.
        decay_start: completed updates at which the decay begins; without it the stable phase has no end. A
            list makes cycles (WSD-S): a decay at each, all of them alike, and back to stable after each but
            the last.
        decay_steps or total_steps: exactly one, if there is a decay_start;
            total_steps = decay_start + decay_steps.
        decay_shape: default "one_minus_sqrt".
        decay_power: of the shape "polynomial".
        min_lr_ratio or min_lr: minimum / peak, or the minimum itself; one, or a list of one for each param
            group; default 0.
        then: "stop" (default) or "stable", after the last decay.
        rewarmup_steps: of the way back to the peak, default 0.
        max_lr: peak rate, or one for each param group. Without it the peak is the optimizer's own lr.
        samples_per_step, tokens_per_sample: as the arguments, which go before.

    Args:
        params: the block.
        samples_per_step: global batch; None if it is not constant.
        tokens_per_sample: sequence length.
        peak: the optimizer's lr, for a min_lr without max_lr.

    Raises:
        ScheduleError: an unknown key (the nearest one is suggested), "auto", or values that do not fit.
    """
    batch = {"samples_per_step": samples_per_step, "tokens_per_sample": tokens_per_sample}
    given = dict(params) | {key: value for key, value in batch.items() if value is not None}
    with naming({}, prefix="scheduler.params."):
        rates = peak_rates(given.get("max_lr"))
        if rates is None and isinstance(given.get("min_lr"), (int, float)) and peak is None:
            raise ScheduleError("min_lr", "a max_lr beside it, or min_lr_ratio", given["min_lr"])
        groups = max([len(rates or [1.0])] + [_count(given.get(key)) for key in ("min_lr", "min_lr_ratio")])
    rates = [peak if peak is not None else 1.0] if rates is None else rates
    return plan_from_params(given, rates * groups if len(rates) == 1 else rates).schedule


def _count(value: object) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 1


def plan_from_params(params: Mapping[str, object], peaks: Sequence[float]) -> Plan:
    """The schedules of all param groups; see ``schedule_from_params``.

    Args:
        params: the json block; its max_lr has been turned into ``peaks``.
        peaks: peak rate of each param group.

    Raises:
        ScheduleError: see ``schedule_from_params``.
    """
    with naming({}, prefix="scheduler.params."):
        for key in params:
            if key not in _KEYS:
                raise ScheduleError(str(key), "a known key", "an unknown one", nearest(key, _KEYS))
        given: dict[str, Any] = {key: value for key, value in params.items() if value is not None}
        peak_rates(given.get("max_lr"))
        starts = given.get("decay_start")
        starts = starts if isinstance(starts, list) else [] if starts is None else [starts]
        _check_keys(given, starts)
        lengths = {key: parse_length(given[key], key, low) for key, low in _LENGTHS.items()
                   if key in given and key != "decay_start"}  # fmt: skip
        begins = [parse_length(start, "decay_start") for start in starts]
        unit = finest([*lengths.values(), *begins])
        batch = batch_from_params(given)

        def count(key: str, length: Length) -> int:
            return batch.convert(key, length, unit)

        counts = {key: count(key, length) for key, length in lengths.items()}
        decays = _decays(given, counts, [count("decay_start", start) for start in begins])
        minimums: Sequence[dict[str, Any]] = [{}] * len(peaks)
        if decays:
            minimums = group_minimums(given.get("min_lr_ratio"), given.get("min_lr"), peaks)
        return Plan(
            tuple(
                Schedule(
                    warmup_steps=counts.get("warmup_steps", 0),
                    decays=tuple(Decay(**decay, **minimum) for decay in decays),
                    warmup_init_ratio=given.get("warmup_init_ratio", 0.0),
                    unit=unit,
                )
                for minimum in minimums
            ),
            tuple(peaks),
        )


def batch_from_params(params: Mapping[str, object]) -> Batch:
    """What the params say about one update and one sample."""
    return Batch(**{key: params.get(key) for key in _BATCH_KEYS})  # type: ignore[arg-type]  # Batch checks


def peak_rates(max_lr: object) -> list[float] | None:
    """``max_lr`` as a list of one rate (for all param groups) or one for each group; None if not given."""
    if max_lr is None:
        return None
    rates = max_lr if isinstance(max_lr, (list, tuple)) else [max_lr]
    return [real("max_lr", rate) for rate in rates]


def _check_keys(given: Mapping[str, Any], starts: Sequence[object]) -> None:
    if not starts:
        # A minimum or a total that nothing would ever use is a forgotten decay_start.
        for key in _DECAY_KEYS:
            if key in given:
                raise ScheduleError(
                    "decay_start",
                    f"a number of updates, since {key} is given",
                    "nothing",
                    f"Add decay_start, or remove {key} for a stable phase without end.",
                )
        return
    lengths = [key for key in ("decay_steps", "total_steps") if key in given]
    if len(lengths) != 1:
        raise ScheduleError(
            "decay_steps",
            "exactly one of decay_steps and total_steps beside decay_start",
            "both" if lengths else "neither",
            "total_steps = decay_start + decay_steps.",
        )
    if len(starts) > 1 and "total_steps" in given:
        raise ScheduleError("total_steps", "decay_steps instead, beside several decay_start", "it")


def _decays(given: Mapping[str, Any], counts: Mapping[str, int], starts: list[int]) -> list[dict[str, Any]]:
    """Arguments of each ``Decay``, but for its minimum."""
    decays: list[dict[str, Any]] = []
    for index, start in enumerate(starts):
        again = index + 1 < len(starts) or given.get("then") == "stable"
        length = (
            counts["decay_steps"] if "decay_steps" in counts else length_until(start, counts["total_steps"])
        )
        decay = {
            "start": start,
            "length": length,
            "shape": given.get("decay_shape", "one_minus_sqrt"),
            "power": given.get("decay_power"),
            "then": "stable" if again else given.get("then", "stop"),
            "rewarmup": counts.get("rewarmup_steps", 0) if again or len(starts) == 1 else 0,
        }
        decays.append(decay)
    return decays
