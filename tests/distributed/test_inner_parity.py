"""What can run here of the inner AdamWs, under ZeRO-3, and of the kinds of attention, against each other."""

from __future__ import annotations

from typing import Any

import pytest
from engine_processes import island
from engine_worker import attention, parity

from megatron_wsd.inner import deepspeed_trouble

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.1,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1, "torch_adam": True},
    },
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, "sub_group_size": 5000},
    "steps_per_print": 10**9,
    "megatron_wsd": {
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 96,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "seq_length": 16,
        },
    },
}
STEPS = 5
CLASSES = {"torch": "AdamW", "torch_fused": "AdamW", "deepspeed_cpu": "DeepSpeedCPUAdam"}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    kinds = ["torch", "torch_fused"] + ([] if deepspeed_trouble("cpu_adam") else ["deepspeed_cpu"])
    return island(parity, 2, CONFIG, kinds, STEPS)


@pytest.mark.parametrize("kind", ["torch_fused", "deepspeed_cpu"])
def test_every_inner_optimizer_takes_the_same_steps(ranks: list[dict[str, Any]], kind: str) -> None:
    if kind not in ranks[0]:
        pytest.skip(f"DeepSpeedCPUAdam: {deepspeed_trouble('cpu_adam')}")
    for rank in ranks:
        ours, plain = rank[kind], rank["torch"]
        assert (ours["class"], plain["class"]) == (CLASSES[kind], "AdamW")
        assert (ours["fused"], plain["fused"]) == (kind == "torch_fused", False)
        # One update is at most about lr = 1e-2 and a weight about 1: they round to 1e-2 x 8 x 2^-24 and
        # 2^-24 a step, which is 6e-8; an error of a weight comes back in the gradient, and lr / eps = 10
        # times that in the next step: over 5 steps less than 1e-6 x 5.
        assert plain["losses"] == pytest.approx(ours["losses"], abs=5e-6)
        for name, value in plain["shards"].items():
            assert value.numel() == 0 or (value - ours["shards"][name]).abs().max().item() < 5e-6, name
        moved = max(abs(a - plain["losses"][0]) for a in plain["losses"])
        assert moved > 1e-3, "the comparison can fail"


def test_attention_without_a_matrix_of_scores_is_that_of_megatron() -> None:
    (found,) = island(attention, 1, CONFIG, ["local", "sdpa"])
    assert found["local"]["masked"] and not found["sdpa"]["masked"]
    # Sums of at most 32 terms of order 1 in another order, through two layers; gradients are below 1.
    assert found["sdpa"]["loss"] == pytest.approx(found["local"]["loss"], abs=1e-5)
    for name, gradient in found["local"]["gradients"].items():
        assert gradient.abs().max() > 1e-4, name
        assert (gradient - found["sdpa"]["gradients"][name]).abs().max().item() < 1e-5, name
