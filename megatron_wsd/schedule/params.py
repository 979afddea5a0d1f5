"""The ``params`` of ``"scheduler": {"type": "WSD", "params": {...}}``, turned into a schedule."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import naming, nearest, real
from megatron_wsd.schedule.wsd import Decay, Schedule

_DECAY_KEYS = ("decay_steps", "total_steps", "decay_shape", "min_lr_ratio")
_KEYS = ("warmup_steps", "warmup_init_ratio", "decay_start", "max_lr", *_DECAY_KEYS)


def schedule_from_params(params: Mapping[str, object]) -> Schedule:
    """The schedule that the json block describes. All lengths are in optimizer updates.

    Keys, all optional (null counts as absent):
        warmup_steps: default 0.
        warmup_init_ratio: lr(0) / peak, default 0.0.
        decay_start: completed updates at which the decay begins; without it the stable phase has no end.
        decay_steps or total_steps: exactly one, if there is a decay_start;
            total_steps = decay_start + decay_steps.
        decay_shape: default "one_minus_sqrt".
        min_lr_ratio: minimum / peak, default 0.0.
        max_lr: peak rate, or one for each param group; checked here, used by the DeepSpeed front. Without it
            the peak is the optimizer's own lr.

    Raises:
        ScheduleError: an unknown key (the nearest one is suggested), "auto", or values that do not fit.
    """
    with naming({}, prefix="scheduler.params."):
        for key in params:
            if key not in _KEYS:
                raise ScheduleError(str(key), "a known key", "an unknown one", nearest(key, _KEYS))
        given = {key: value for key, value in params.items() if value is not None}
        peak_rates(given.get("max_lr"))
        return Schedule(
            warmup_steps=given.get("warmup_steps", 0),  # type: ignore[arg-type]  # Schedule checks it
            decays=_decays(given),
            warmup_init_ratio=given.get("warmup_init_ratio", 0.0),  # type: ignore[arg-type]
        )


def peak_rates(max_lr: object) -> list[float] | None:
    """``max_lr`` as a list of one rate (for all param groups) or one for each group; None if not given."""
    if max_lr is None:
        return None
    rates = max_lr if isinstance(max_lr, (list, tuple)) else [max_lr]
    return [real("max_lr", rate) for rate in rates]


def _decays(given: Mapping[str, object]) -> tuple[Decay, ...]:
    lengths = [key for key in ("decay_steps", "total_steps") if key in given]
    if "decay_start" not in given:
        # A minimum or a total that nothing would ever use is a forgotten decay_start.
        for key in _DECAY_KEYS:
            if key in given:
                raise ScheduleError(
                    "decay_start",
                    f"a number of updates, since {key} is given",
                    "nothing",
                    f"Add decay_start, or remove {key} for a stable phase without end.",
                )
        return ()
    if len(lengths) != 1:
        raise ScheduleError(
            "decay_steps",
            "exactly one of decay_steps and total_steps beside decay_start",
            "both" if lengths else "neither",
            "total_steps = decay_start + decay_steps.",
        )
    build = Decay if lengths == ["decay_steps"] else Decay.until
    return (
        build(
            given["decay_start"],  # type: ignore[arg-type]  # Decay checks all four
            given[lengths[0]],  # type: ignore[arg-type]
            given.get("decay_shape", "one_minus_sqrt"),  # type: ignore[arg-type]
            given.get("min_lr_ratio", 0.0),  # type: ignore[arg-type]
        ),
    )
