"""The Megatron front against upstream, to the last bit: rates and weight decays of every style."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Upstream

from megatron_wsd.schedule.megatron import OptimizerParamScheduler

STYLES: list[dict[str, Any]] = [
    {"lr_decay_style": style} for style in ("constant", "linear", "cosine", "inverse-square-root")
] + [
    {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "wsd_decay_steps": steps}
    for style in ("linear", "cosine", "exponential", "minus_sqrt")
    for steps in (1, 37, 190)
]


def build(cls: type[Upstream], style: dict[str, Any], warmup: float, wd_style: str) -> Upstream:
    # rates that are not dyadic, so that an expression in another order would show
    # and one with min + (max - min) != max, since upstream's stable rate is the former
    groups = [
        {},
        {"max_lr": 1.7e-4, "min_lr": 1.3e-6},
        {"max_lr": 2.4e-4},
        {"wd_mult": 0.0, "max_lr": 3e-5, "min_lr": 3e-5},
    ]
    end_wd = 0.1 if wd_style == "constant" else 0.3
    return cls(
        SimpleNamespace(param_groups=groups),
        init_lr=1.1e-7,
        max_lr=3e-4,
        min_lr=3.3e-5,
        lr_warmup_steps=warmup,
        lr_decay_steps=203,
        start_wd=0.1,
        end_wd=end_wd,
        wd_incr_steps=150,
        wd_incr_style=wd_style,
        **style,
    )


@pytest.mark.parametrize("wd_style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 13, 12.18])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_same_bits(style: dict[str, Any], warmup: float, wd_style: str) -> None:
    ours, theirs = (build(cls, style, warmup, wd_style) for cls in (OptimizerParamScheduler, Upstream))
    for _ in range(230):
        assert ours.optimizer.param_groups == theirs.optimizer.param_groups
        ours.step(1)
        theirs.step(1)


@pytest.mark.parametrize("increment", [3, 16, 64])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_same_bits_in_samples(style: dict[str, Any], increment: int) -> None:
    ours, theirs = (build(cls, style, 13, "cosine") for cls in (OptimizerParamScheduler, Upstream))
    for _ in range(230 // increment + 1):
        ours.step(increment)
        theirs.step(increment)
        assert ours.optimizer.param_groups == theirs.optimizer.param_groups


@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_states_pass_both_ways(style: dict[str, Any]) -> None:
    ours, theirs = (build(cls, style, 13, "linear") for cls in (OptimizerParamScheduler, Upstream))
    ours.step(190)
    theirs.load_state_dict(ours.state_dict())
    theirs.step(0)  # upstream leaves the weight decay of before the load in the groups
    assert theirs.optimizer.param_groups == ours.optimizer.param_groups

    theirs.step(5)
    ours.load_state_dict(theirs.state_dict())
    assert ours.num_steps == theirs.num_steps == 195
    assert theirs.optimizer.param_groups == ours.optimizer.param_groups
