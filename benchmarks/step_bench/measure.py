"""Interleaved timing: everyone takes a turn in every repetition, so that a disturbance meets all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

Runner = Callable[[int], None]


def clock(run: Runner, calls: int, device: torch.device) -> float:
    """Seconds a call, work on the device included."""
    _finish(device)
    begin = time.perf_counter()
    run(calls)
    _finish(device)
    return (time.perf_counter() - begin) / calls


def interleaved(
    runners: Mapping[str, Runner],
    repetitions: int,
    sample_s: float,
    device: torch.device,
    progress: Callable[[str], None],
) -> dict[str, list[float]]:
    """Time every runner `repetitions` times, in rounds; each round begins with another one.

    Args:
        runners: each takes a count of calls to make.
        repetitions: rounds.
        sample_s: a sample makes as many calls as fill this, and at least one.
        device: waited for before a clock is read.
        progress: told the name of each runner when its sample is done.

    Returns:
        Seconds a call, one number a round, by the runner's name.
    """
    names = list(runners)
    calls = {}
    for name in names:
        runners[name](1)
        calls[name] = max(1, math.ceil(sample_s / clock(runners[name], 1, device)))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repetitions):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            if calls[name] > 1:
                runners[name](1)  # its operands back into the caches, another's threads asleep
            samples[name].append(clock(runners[name], calls[name], device))
            progress(name)
    return samples


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
