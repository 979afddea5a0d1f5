"""What torch's rounding adds to pinned buffers, against the buffers that the outer half asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_islands import MemoryShards

from megatron_wsd.config import load_config, parse_config
from megatron_wsd.diloco.faults import NO_FAULTS
from megatron_wsd.diloco.fragments import plan_fragments
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.residence import Residence
from megatron_wsd.diloco.state import make_state
from megatron_wsd.planner.memory import pinned_rounding
from megatron_wsd.planner.model import Parameter

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"


@pytest.mark.parametrize(
    ("mode", "fragments", "dtype"),
    [("sync", 1, "bf16"), ("sync", 3, "fp32"), ("async", 1, "fp32"), ("async", 3, "bf16")],
)
def test_it_is_what_a_power_of_two_adds_to_each(
    mode: str, fragments: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = load_config(TINY, islands=2, ranks=1).resolved()
    raw["megatron_wsd"]["sync"] |= {"mode": mode, "fragments": fragments}
    raw["megatron_wsd"]["outer"]["anchor_dtype"] = dtype
    made = parse_config(raw)
    asked: list[int] = []
    plain = Residence.zeros

    def noted(residence: Residence, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        asked.append(numel * dtype.itemsize)
        return plain(residence, numel, dtype)

    monkeypatch.setattr(Residence, "zeros", noted)
    shards: Any = MemoryShards(torch.Generator().manual_seed(1))
    plan = plan_fragments(shards.shards, fragments, made.sync.fragment_order)
    local = Local(shards, plan, make_state(made, shards, plan), made, NO_FAULTS)
    for i in range(len(plan)):
        local.capture(i, 1)

    pieces = [Parameter(s.name, s.shape) for s in shards.shards]
    rounded = [next(2**k for k in range(40) if 2**k >= size) for size in asked]
    assert pinned_rounding(made, pieces) == sum(rounded) - sum(asked) > 0
    raw["megatron_wsd"]["outer"]["device"] = "cuda"
    assert pinned_rounding(parse_config(raw), pieces) == 0
