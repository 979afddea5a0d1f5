"""How long an inner step takes: as measured by the user, or from assumed FLOP/s."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from megatron_wsd.errors import ConfigError

GPUS = {
    "v100": (125.0, 32),
    "a10": (125.0, 24),
    "l40s": (362.0, 48),
    "a100": (312.0, 80),
    "h100": (989.0, 80),
    "h200": (989.0, 141),
    "b200": (2250.0, 180),
    "mi300x": (1307.0, 192),
}
"""Dense bf16 peak in TFLOP/s (fp16 for v100) and memory in GB, from the makers' data sheets."""


@dataclass(frozen=True)
class Speed:
    """Seconds of an inner step and what they rest on.

    Attributes:
        step_s: seconds of one inner step of one island.
        assumed: sentences for the list of assumptions.
        memory_bytes: of the device; None if it is not known.
        guessed: from FLOP/s, not measured.
    """

    step_s: float
    assumed: tuple[str, ...]
    memory_bytes: int | None = None
    guessed: bool = False


def speed_of(
    flops_per_step: float,
    ranks: int,
    *,
    step_s: float | None = None,
    gpu: str | None = None,
    tflops: float | None = None,
    mfu: float = 0.4,
) -> Speed:
    """The speed of one island.

    Args:
        flops_per_step: of one inner step of the island.
        ranks: of the island, one device each.
        step_s: measured seconds of a step; nothing else counts then but the memory of the device.
        gpu: name in `GPUS`, or nothing for h100.
        tflops: peak of one device, instead of the table's.
        mfu: share of the peak that is reached.

    Raises:
        ConfigError: an unknown device, or a number out of range.
    """
    name = (gpu or "h100").lower()
    if name not in GPUS:
        near = difflib.get_close_matches(name, GPUS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Give --tflops for another one."
        raise ConfigError("--gpu", f"one of {', '.join(GPUS)}", gpu, hint)
    for flag, value in (("--step-time-s", step_s), ("--tflops", tflops)):
        if value is not None and not 1e-9 <= value <= 1e9:
            raise ConfigError(flag, "a number above 0, at most 1e9", value)
    if not 0 < mfu <= 1:
        raise ConfigError("--mfu", "a share above 0, at most 1", mfu, "0.4 is usual for dense models.")
    peak, gigabytes = GPUS[name]
    memory = gigabytes * 10**9 if tflops is None or gpu else None
    if step_s is not None:
        return Speed(step_s, (f"an inner step takes {step_s:g} s, as given",), memory if gpu else None)
    peak = tflops or peak
    source = "as given" if tflops else f"{name}, dense bf16"
    seconds = flops_per_step / (ranks * peak * 1e12 * mfu)
    told = f"a device reaches {mfu:.0%} of {peak:g} TFLOP/s ({source}); better: --step-time-s, measured"
    if gpu is None and tflops is None:
        told = (
            f"no device is named, so an {name.upper()} is assumed: {mfu:.0%} of {peak:g} TFLOP/s in bf16; "
            "for another one give --gpu or --tflops, for a CPU a measured --step-time-s"
        )
    return Speed(seconds, (told,), memory, guessed=True)
