"""Gate, merge, step: contributions of different ages become one pseudo-gradient, which moves the anchor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from megatron_wsd.config import Config, OuterConfig
from megatron_wsd.diloco.agree import Decision
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.diloco.wire import Chunk
from megatron_wsd.optim import wire
from megatron_wsd.optim.gate import staleness_gate
from megatron_wsd.optim.layout import FlatLayout, is_embedding
from megatron_wsd.schedule import Schedule

# Unit vectors whose mean is shorter than this point nowhere in common.
CANCELLED = 0.01


def age_gate(outer: OuterConfig, age: int) -> float:
    """What the outer optimizer makes of a contribution's age.

    CGAD: the staleness gate. Adam-Decay: its exponential alone, e^(-alpha tau). All others: 1.
    """
    if outer.optimizer == "cgad":
        return staleness_gate(age, outer.alpha, outer.tau_cut)
    if outer.optimizer == "adam_decay":
        return math.exp(-outer.alpha * age)
    return 1.0


def merge_coefficients(gates: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The factor of each contribution in the merged pseudo-gradient.

        c_k = gate_k w_k / sum_j w_j

    The weights are divided by their sum *without* the gates, so staleness never enlarges the result.

    Args:
        gates: of each contribution, in [0, 1].
        weights: of each, positive.
    """
    total = sum(weights)
    return [g * w / total for g, w in zip(gates, weights, strict=True)]


def decision_coefficients(config: Config, decision: Decision) -> tuple[list[float], list[float]]:
    """Gates and coefficients of a decision's contributors, in their order."""
    gates = [age_gate(config.outer, age) for age in decision.ages]
    by_tokens = config.sync.merge == "tokens"
    weights = [float(max(1, decision.offer(i).tokens)) if by_tokens else 1.0 for i in decision.contributors]
    return gates, merge_coefficients(gates, weights)


class Merge:
    """The sum of one round, contribution by contribution and chunk by chunk.

    ``mean`` and ``tokens``: merged = sum_k c_k g_k, in fp32, in the order of the island numbers.

    ``radial``: radial-directional averaging (Decoupled DiLoCo, arXiv 2604.21428), for every parameter but
    embeddings, which are averaged:

        merged = R * D / |D|,   R = sum_k c_k |g_k|,   D = sum_k c_k g_k / |g_k|

    with the norms of whole parameters. Directions that cancel, |D| < 0.01 sum_k c_k, are not blown up: there
    merged = R * D / sum_k c_k, which is as short as they disagree.

    Args:
        kind: ``sync.merge``.
        fmt: of the payloads.
        layout: of the fragment.
        merged: fp32 [layout.total], overwritten.
        coefficients: c_k of each contributor.
    """

    def __init__(
        self,
        kind: str,
        fmt: wire.WireFormat,
        layout: FlatLayout,
        merged: torch.Tensor,
        coefficients: Sequence[float],
    ) -> None:
        self._fmt, self.layout, self.merged = fmt, layout, merged
        self.coefficients = coefficients
        self.radial = kind == "radial"
        self._is_radial = torch.tensor([not is_embedding(s.name) for s in layout.ordered])
        self._reach = torch.zeros(len(layout.ordered), dtype=torch.float64)  # R
        merged.zero_()

    def factors(self, place: int, norms: torch.Tensor | None) -> torch.Tensor | None:
        """Per segment, what multiplies the contribution at ``place`` of the contributors; None: c_k for all.

        Args:
            norms: float64 [segments], of the whole parameters; for ``radial`` only.
        """
        if not self.radial:
            return None
        assert norms is not None
        coefficient = self.coefficients[place]
        self._reach += coefficient * norms
        unit = torch.where(norms > 0, coefficient / norms.clamp(min=1e-300), 0.0)
        plain = torch.full_like(unit, coefficient)
        # What no fp32 number can hold is as good as zero: its norm is below 1e-38.
        unit = torch.where(unit < 1e38, unit, 0.0)
        return torch.where(self._is_radial, unit, plain)

    def add(self, chunk: Chunk, payload: torch.Tensor, place: int, factors: torch.Tensor | None) -> bool:
        """merged += coefficient * decode(payload); whether what was written can be stepped.

        Args:
            chunk: of the fragment.
            payload: uint8, encoded.
            place: of the contribution among the contributors.
            factors: what `factors` gave for it.
        """
        part = self.merged[chunk.start : chunk.end]
        if factors is None:
            return wire.accumulate(self._fmt, payload, part, self.coefficients[place])
        return wire.accumulate_segments(self._fmt, payload, part, chunk.start, self.layout.table, factors)

    def finish(self, total_sumsq: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give radial parameters their length.

        Args:
            total_sumsq: from sums of squares of this rank's shards, float64 [segments], to those of the whole
                parameters; called on all ranks of the island.
        """
        if not self.radial:
            return
        length = total_sumsq(wire.segment_sumsq(self.merged, self.layout.table)).sqrt()
        agreement = sum(self.coefficients)
        short = length < CANCELLED * agreement
        scale = torch.where(
            short, self._reach / max(agreement, 1e-300), self._reach / length.clamp(min=1e-300)
        )
        factors = torch.where(self._is_radial, scale, torch.ones_like(scale))
        wire.scale_segments(self.merged, self.layout.table, factors)


def begin_merge(
    config: Config, decision: Decision, fmt: wire.WireFormat, layout: FlatLayout, room: torch.Tensor
) -> tuple[list[float], Merge | None]:
    """The gates of a round, and its empty sum.

    Args:
        config: of the run.
        decision: of a round with contributors.
        fmt: of the payloads.
        layout: of the fragment.
        room: fp32, at least layout.total, for the sum; overwritten.

    Returns:
        Gates of the contributors; the sum, or None: all gates are 0, and with ``outer.all_gated`` ``skip``
        such a round does not take place.
    """
    gates, coefficients = decision_coefficients(config, decision)
    if not any(gates) and config.outer.all_gated == "skip":
        return gates, None
    return gates, Merge(config.sync.merge, fmt, layout, room[: layout.total], coefficients)


def add_up(
    merge: Merge,
    chunks: Sequence[Chunk],
    norms: Callable[[int], torch.Tensor],
    payload: Callable[[int, Chunk], torch.Tensor],
) -> bool:
    """Add the contributions in the order of the contributors, each chunk by chunk.

    Args:
        merge: the empty sum.
        chunks: of the fragment.
        norms: place of a contributor -> norms of its parameters, float64 [segments]; asked if ``radial``.
        payload: place of a contributor, chunk -> its payload, uint8; asked for every one that counts.

    Returns:
        Whether the sum can be stepped.
    """
    fits = True
    for place, coefficient in enumerate(merge.coefficients):
        if coefficient == 0.0:
            continue  # as all islands know, it would add nothing
        factors = merge.factors(place, norms(place) if merge.radial else None)
        # Every message is received, whatever came of the one before.
        added = [merge.add(chunk, payload(place, chunk), place, factors) for chunk in chunks]
        fits = all(added)
    return fits


def payload_sumsq(
    fmt: wire.WireFormat, layout: FlatLayout, chunks: Sequence[Chunk], payload: torch.Tensor
) -> torch.Tensor:
    """Sums of squares of a contribution as the others will decode it, float64 [segments]."""
    decoded = torch.zeros(layout.total, device=payload.device)
    for c in chunks:
        wire.decode(fmt, payload[c.first_byte : c.last_byte], decoded[c.start : c.end])
    return wire.segment_sumsq(decoded, layout.table)


def rate_scale(config: Config, inner: Schedule | None, decision: Decision) -> float:
    """What multiplies the outer rate in a round, the same on every island.

    ``outer.participation``: contributors / islands, since Adam would make every lone contribution a full
    step. ``outer.lr_schedule``: with ``follow_inner``, the factor of the inner rate in the decay, when the
    round's steps began, since Adam would step as far at its end, when the islands hardly move, as before
    it (the steps of SGD shrink with its gradients by themselves, and are left alone); or a schedule of its
    own.

    Args:
        config: of the run.
        inner: the schedule of the inner rate, with everything that was decided so far.
        decision: of the round.
    """
    outer, scale = config.outer, 1.0
    if outer.participation:
        scale *= len(decision.contributors) / len(decision.reports)
    start = max(0, decision.inner_step - max(decision.offer(i).steps for i in decision.contributors))
    if config.outer_schedule is not None:
        return scale * config.outer_schedule.factor(start)
    adam = outer.optimizer in ("cgad", "adam_decay", "adam")
    follows = outer.lr_schedule == "follow_inner" and adam and inner is not None
    if follows and inner is not None and inner.phase(start) in ("decay", "done"):
        scale *= inner.factor(start)
    return scale


def step_fragment(
    config: Config,
    schedule: Schedule | None,
    state: OuterState,
    decision: Decision,
    merged: torch.Tensor,
) -> None:
    """The outer step of a round that was committed, and its counters.

    Args:
        config: of the run.
        schedule: of the inner rate, with everything that was decided so far.
        state: changed.
        decision: of the round.
        merged: fp32 [layout.total], of the fragment; known to be finite.
    """
    assert decision.fragment is not None
    fragment = state.fragments[decision.fragment]
    scale = rate_scale(config, schedule, decision)
    fragment.optimizer.step(fragment.anchor, merged, scale, checked=True)
    offers = {island: decision.offer(island) for island in decision.contributors}
    with state.counting:
        fragment.version += 1
        fragment.turn = max(fragment.turn, decision.turn)
        fragment.tokens += sum(o.tokens for o in offers.values())
        fragment.steps += (steps := sum(o.steps for o in offers.values()))
        whole = (config.islands.count or 1) * len(state.fragments)
        state.spans[whole] = state.spans.get(whole, 0) + steps
        fragment.taken.update({island: o.cursor for island, o in offers.items()})
        fragment.taken_steps.update({island: o.steps for island, o in offers.items()})
        state.outer_step = decision.outer_step + 1
        state.inner_step = max(state.inner_step, decision.inner_step)
