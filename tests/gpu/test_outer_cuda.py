"""Outer rounds with the outer half on a GPU: real processes, real torchft, plain tensors as shards.

The islands are those of tests/distributed; all GPU processes share one device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="islands meet through torchft")
from loop_runner import Islands, config, lighthouse
from test_outer_devices import HOWS, run

from megatron_wsd.diloco.faults import fail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch"),
]
GPU: dict[str, Any] = {"device": "cuda", "limit_s": 200}
# Shards on the GPU, the outer half on the host: captures go through pinned memory.
PINNED: dict[str, Any] = {"device": "cpu", "shards": "cuda", "limit_s": 200}
BUSY = 20_000_000  # cycles, about 10 ms in which the training stream lags behind its thread


@pytest.fixture(autouse=True)
def whether_there_is_cuda_is_asked_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers are forked from a process that has imported torch: it must not have opened the device.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
def test_synchronous_rounds_have_the_bits_of_the_cpu(tmp_path: Path, how: dict[str, Any]) -> None:
    raw = config("sync", **how)
    expected, _ = run(tmp_path / "cpu", raw, {}, {})
    found, results = run(tmp_path / "cuda", raw, {**GPU, "busy_cycles": BUSY}, PINNED)
    assert len(expected) >= 7 and found == expected
    assert all(r["holds_anchor"] for r in results)


@pytest.mark.parametrize("adopt", ["mix", "rebase"])
def test_two_streams_work_on_one_memory(tmp_path: Path, adopt: str) -> None:
    """What one thread hands over before its stream has written it would reach the others as other bytes."""
    raw = config("async", fragments=2, wire="int8", adopt=adopt)
    busy = {**GPU, "busy_cycles": BUSY, "step_s": 0.005}
    digests, results = run(tmp_path, raw, busy, {**busy, "step_s": 0.01}, {"step_s": 0.01})
    assert len(digests) >= 4
    assert len({r["digest"] for r in results}) == 1 and all(r["holds_anchor"] for r in results)


@pytest.mark.parametrize("killed", [0, 1])
def test_one_heals_the_other_wherever_it_lives(tmp_path: Path, killed: int) -> None:
    raw = config("sync", fragments=2, wire="int8", islands={"min_islands": 1})
    where: list[dict[str, Any]] = [{}, GPU]
    with lighthouse() as address:
        islands = Islands(tmp_path, address, 2, raw, 200)
        other = islands.start(1 - killed, **where[1 - killed], step_s=0.1)
        first = islands.start(killed, [fail(island=killed, at="agree", round=4, how="kill")], **where[killed])
        first.wait(60)
        results = [islands.result(islands.start(killed, **where[killed])), islands.result(other)]
    assert results[0]["met_at"] > 0 and results[0]["digest"] == results[1]["digest"]


def test_a_checkpoint_moves_from_one_to_the_other(tmp_path: Path) -> None:
    raw = config("sync", fragments=2, wire="int8")
    ends = []
    for name, second in (("cpu", {}), ("moved", GPU)):
        with lighthouse() as address:
            Islands(tmp_path / name, address, 2, raw, 24).together([{"save_every": 24}, {"save_every": 24}])
            later = Islands(tmp_path / name, address, 2, raw, 45)
            ends.append([r["digest"] for r in later.together([{"resume": True, **second}, {"resume": True}])])
    assert ends[0] == ends[1]
