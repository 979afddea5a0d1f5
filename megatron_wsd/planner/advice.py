"""Which exchange to choose for a link: the least change from exact, synchronous rounds that will do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_wsd.planner.exchange import Fleet, Link, asynchronous, synchronous

FEWEST = 16  # inner steps: below, rounds cost more than closer anchors bring
USUAL = 32  # the DiLoCo scaling laws (arXiv 2503.09799) were measured at 30
MANY = 64
TRIED = 500  # the most that DiLoCo (arXiv 2311.08105) trained with
LAYERS = 3  # of a fragment, as in Streaming DiLoCo (arXiv 2501.18512)
LINK_SHARE = 0.8  # of the time that an asynchronous run may keep the link busy; the rest is for hiccups


@dataclass(frozen=True)
class Advice:
    """Values for the block ``sync``, and what they come to.

    Attributes:
        mode: ``sync`` or ``async``.
        wire: format of the exchange.
        inner_steps: H.
        fragments: P.
        overlap_steps: between capture and adoption; 0 in synchronous mode.
        utilisation: share of the time that trains.
        link_busy: share of the time that the link carries rounds.
        why: one clause.
    """

    mode: str
    wire: str
    inner_steps: int
    fragments: int
    overlap_steps: int
    utilisation: float
    link_busy: float
    why: str


def usual_fragments(layers: int) -> int:
    """P for fragments of three layers; 1 for a model of few."""
    return max(1, layers // LAYERS)


def advise(fleet: Fleet, layers: int, link: Link, step_s: float, target: float) -> Advice:
    """The first of these that meets the target: synchronous in fp32, bf16, int8, int4 with H up to 32, then
    asynchronous in fragments of three layers in int8 with H up to 64, then in int4 with the H that it takes.

    Args:
        fleet: the islands and their model.
        layers: of the model.
        link: between the islands.
        step_s: seconds of an inner step.
        target: share of the time that shall train, between 0 and 1.
    """
    for wire in ("fp32", "bf16", "int8", "int4"):
        whole = fleet.traffic(wire, 1)
        seconds = whole.sync_seconds(link)
        steps = max(FEWEST, _steps(seconds, step_s, target))
        if steps <= USUAL:
            share = synchronous(whole, link, steps, step_s)
            why = f"waiting {seconds:.3g} s every {steps} steps is within the target"
            return Advice("sync", wire, steps, 1, 0, share, 1 - share, why)
    for wire, most in (("int8", MANY), ("int4", math.inf)):
        cut = fleet.traffic(wire, usual_fragments(layers))
        seconds = cut.sync_seconds(link)
        steps = max(
            FEWEST, math.ceil(seconds / (LINK_SHARE * step_s)), _steps(cut.pause_seconds(), step_s, target)
        )
        if steps <= most:
            break
    longest = max(cut.round_seconds(link, numel) for numel in cut.fragments)
    overlap = min(max(1, math.ceil(longest / step_s)), steps - 1)
    busy = seconds / (steps * step_s)
    why = f"rounds travel for {seconds:.3g} s beside {steps} steps of training"
    if steps > TRIED:
        why += f"; more than the {TRIED} steps that have been tried: take a smaller model or a faster link"
    share = asynchronous(cut, steps, step_s)
    return Advice("async", wire, steps, usual_fragments(layers), overlap, share, busy, why)


def _steps(pause_s: float, step_s: float, target: float) -> int:
    """Least H with H t / (H t + pause) >= target."""
    return math.ceil(pause_s * target / (1 - target) / step_s)
