"""One one-rank island without DeepSpeed: the real outer half and real torchft on plain tensors.

A scenario is a function ``(Island) -> json-able``; each island runs it in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_wsd.config import Config, parse_config
from megatron_wsd.diloco.capture import Contribution
from megatron_wsd.diloco.island import IslandAddress, IslandGroup
from megatron_wsd.diloco.membership import Membership
from megatron_wsd.diloco.round import OuterHalf, RoundResult
from megatron_wsd.diloco.state import FragmentState, OuterState
from megatron_wsd.errors import MegatronWSDError
from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.outer import OuterHyper, make_outer

SIZES = (1000, 1, 257, 512)


def pseudo_gradient(island: int, round_: int) -> list[torch.Tensor]:
    """What an island offers in a round, known to every test."""
    g = torch.Generator().manual_seed(100 * island + round_)
    return [torch.randn(n, generator=g) * 0.01 for n in SIZES]


@dataclass
class Island:
    """What a scenario gets."""

    number: int
    config: Config
    half: OuterHalf
    seat: Membership
    state: OuterState

    def contribution(self, round_: int) -> Contribution:
        """The pseudo-gradient of a round as the loop would capture it."""
        layout = self.state.fragments[0].layout
        flat = torch.zeros(layout.total)
        for view, part in zip(layout.views(flat), pseudo_gradient(self.number, round_), strict=True):
            view.copy_(part)
        made = Contribution(
            0, flat, native.all_finite(flat), self.state.outer_step, 10, 100, 10 * round_ + 10
        )
        made.payload = flat.view(torch.uint8)
        return made

    def meet(self, everyone: int) -> RoundResult:
        """Empty-handed rounds until all are there."""
        healed = False
        while True:
            result = self.half.run_round({}, 0)
            healed = result.healed = healed or result.healed
            if result.again:
                continue
            if not result.void and (result.committed or len(result.decision.islands) == everyone):  # type: ignore[union-attr]
                self.half.settled = True
                return result

    def round(self, round_: int, inner_step: int | None = None) -> RoundResult:
        """One round, tried again while void."""
        healed = False
        while True:
            step = 10 * (round_ + 1) if inner_step is None else inner_step
            pending = {} if healed else {0: self.contribution(round_)}
            result = self.half.run_round(pending, step)
            healed = result.healed = healed or result.healed
            if not (result.void or result.again):
                return result

    def anchor(self) -> list[list[float]]:
        """The anchor, parameter by parameter."""
        only = self.state.fragments[0]
        return [v.tolist() for v in only.layout.views(only.anchor)]


def build(number: int, islands: int, lighthouse: str, raw: dict[str, Any], weight_seed: int = 0) -> Island:
    """Make a one-rank island of this process."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = parse_config(raw, islands=islands, ranks=1)
    address = IslandAddress(number, islands, lighthouse, ("localhost", store.port), None)
    group = IslandGroup(60)
    quantised = config.outer.state_bits == 8
    layout = FlatLayout(
        [Segment(f"p{i}", parameter_key(f"p{i}"), n, 0, quantised and n > 300) for i, n in enumerate(SIZES)]
    )
    dtype = torch.bfloat16 if config.outer.anchor_dtype == "bf16" else torch.float32
    anchor = torch.zeros(layout.total, dtype=dtype)
    g = torch.Generator().manual_seed(weight_seed)
    for view in layout.views(anchor):
        view.copy_(torch.randn(view.numel(), generator=g))
    hyper = OuterHyper(lr=config.outer.lr, betas=config.outer.betas, eps=config.outer.eps)
    optimizer = make_outer(config.outer.optimizer, layout, hyper, dtype)
    state = OuterState([FragmentState(layout, anchor, optimizer)])
    seat = Membership(address, group, config)
    half = OuterHalf(config, number, group, seat, state)
    island = Island(number, config, half, seat, state)
    island.store = store  # type: ignore[attr-defined]  # must outlive the manager
    return island


def main(scenarios: dict[str, Callable[[Island], Any]]) -> None:
    """Run the scenario named on the command line; its result goes to a file as json."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    try:
        island = build(
            job["island"], job["islands"], job["lighthouse"], job["config"], job.get("weight_seed", 0)
        )
        result: Any = scenarios[job["scenario"]](island)
    except MegatronWSDError as e:
        result = {"error": type(e).__name__, "text": str(e)}
    with open(job["out"], "w") as f:
        json.dump(result, f)
    os._exit(0)
