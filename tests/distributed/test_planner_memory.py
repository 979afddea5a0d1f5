"""The planner's memory against a real engine and the real model, on one rank and on two that share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_wsd.config import Config, load_config
from megatron_wsd.planner import memory_parts, parameters_of, vocabulary
from megatron_wsd.planner.activations import activations
from megatron_wsd.planner.memory import element_bytes

SCRIPT = Path(__file__).with_name("planner_script.py")
TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, recomputed, tied": {"recompute": True, "tie_embeddings": True},
    "bf16": {"bf16": True},
    "bf16, recomputed, every head its own keys": {"bf16": True, "recompute": True, "num_query_groups": 4},
    "bf16, every head its own keys": {"bf16": True, "num_query_groups": 4},
    "tensor parallel": {"tensor_parallel": 2},
    "tensor parallel, recomputed, over 4 ranks": {"tensor_parallel": 2, "recompute": True, "ranks": 4},
    "tensor parallel, every head its own keys": {"tensor_parallel": 2, "num_query_groups": 4},
}


def measure(folder: Path, **changes: Any) -> tuple[Config, dict[str, Any]]:
    raw = json.loads(TINY.read_text())
    raw["train_micro_batch_size_per_gpu"] = 2
    raw["bf16"] = {"enabled": changes.pop("bf16", False)}
    ranks = changes.pop("ranks", changes.get("tensor_parallel", 1))
    raw["zero_optimization"]["reduce_bucket_size"] = 300_000
    raw.pop("tensorboard")
    shape = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 176, "seq_length": 48}
    raw["megatron_wsd"]["model"] |= shape | changes
    file = folder / "config.json"
    file.write_text(json.dumps(raw))
    with open(folder / "out", "w") as out:
        started = [
            subprocess.Popen(
                [sys.executable, SCRIPT, file, folder / "store"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            )
            for rank in range(ranks)
        ]
    try:
        for process in started:
            process.wait(300)
    finally:
        for process in started:
            process.kill()
    text = (folder / "out").read_text()
    line = next((x for x in text.splitlines() if x.startswith("MEASURED ")), None)
    assert line is not None, text[-6000:]
    return load_config(file, islands=1, ranks=ranks), json.loads(line.removeprefix("MEASURED "))


@pytest.mark.parametrize("case", CASES)
def test_parameters_states_and_activations_are_the_bytes_of_the_real_ones(case: str, tmp_path: Path) -> None:
    config, real = measure(tmp_path, **CASES[case])
    assert config.model is not None
    vocab = vocabulary(config)
    parameters = parameters_of(config.model, vocab)
    assert sorted([p.name, list(p.shape)] for p in parameters) == sorted(real["parameters"])
    parts = {p.name: p.nbytes for p in memory_parts(config, parameters, vocab, flash=False)}
    for name in ("weights", "fp32 masters", "inner moments", "gradients", "bucket of gradients"):
        assert parts.get(name, 0) == real[name], name
    found = activations(config.model, vocab, config.micro_batch, element_bytes(config), flash=False)
    assert found.saved == real["saved"]
