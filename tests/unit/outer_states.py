"""Configs and outer states for the tests of what is done with them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_wsd.config import Config, parse_config
from megatron_wsd.diloco.state import FragmentState, OuterState
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.outer import OuterHyper, make_outer

NAMES = ("a.weight", "b.weight")


def config_of(scheduler: dict[str, Any] | None = None, **block: Any) -> Config:
    """A config with these keys in its block ``megatron_wsd``."""
    raw: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    raw |= {"scheduler": scheduler} if scheduler else {}
    return parse_config(raw | {"megatron_wsd": block})


def fragment_of(names: tuple[str, ...] = NAMES, numel: int = 5000, kind: str = "cgad") -> FragmentState:
    """Never stepped; parameters named a, c and d with 8-bit moments, the others with fp32 ones."""
    layout = FlatLayout([Segment(n, parameter_key(n), numel, 0, n[0] in "acd") for n in names])
    optimizer = make_outer(kind, layout, OuterHyper(lr=1e-2, momentum=0.9 if "nesterov" in kind else 0.0))
    return FragmentState(layout, torch.zeros(layout.total), optimizer)


def advance(fragment: FragmentState, seed: int) -> None:
    """One outer step, and its counters, from a pseudo-gradient of random numbers."""
    draw = torch.Generator().manual_seed(seed)
    merged = torch.zeros(fragment.layout.total)
    for view in fragment.layout.views(merged):
        view.copy_(torch.randn(view.numel(), generator=draw))
    fragment.optimizer.step(fragment.anchor, merged)
    fragment.version += 1
    fragment.turn += 1
    fragment.tokens += 1000
    fragment.steps += 20
    fragment.taken = {island: 10 * fragment.version + island for island in (0, 1)}


def state_of(
    *fragments: tuple[str, ...], numel: int = 5000, steps: int = 3, kind: str = "cgad"
) -> OuterState:
    """Some rounds in: each fragment, given by its names, has taken ``steps``."""
    made = OuterState([fragment_of(names, numel, kind) for names in fragments or (NAMES,)])
    for n in range(steps):
        for i, fragment in enumerate(made.fragments):
            advance(fragment, 100 * i + n)
            made.outer_step += 1
        made.inner_step += 10
    return made
