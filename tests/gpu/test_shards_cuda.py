"""Reading and writing the shards of a real ZeRO-3 engine on a GPU: one rank, from either residence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_wsd.diloco.residence import HOST, Residence
from megatron_wsd.shards.zero3 import Zero3Shards

deepspeed = pytest.importorskip("deepspeed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch"),
]
JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "zero_allow_untested_optimizer": True,
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=JSON)
    yield made
    torch.distributed.destroy_process_group()


def test_both_residences_read_and_write_the_same(engine: Any) -> None:
    shards = Zero3Shards(engine)
    gpu = Residence(torch.device("cuda", 0))
    x = torch.randn(1, 300, device="cuda", dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    read: list[list[torch.Tensor]] = []
    for residence in (HOST, gpu):
        buffers = [residence.zeros(s.numel) for s in shards.shards]
        assert all(b.is_pinned() for b in buffers if residence is HOST)
        shards.read(buffers)
        read.append([b.cpu() for b in buffers])
    assert all(torch.equal(a, b) for a, b in zip(*read, strict=True))
    for sign, residence in ((1.0, HOST), (-1.0, gpu)):
        values = [residence.zeros(s.numel).add_(sign * (i + 1) / 8) for i, s in enumerate(shards.shards)]
        shards.write(values)
        for value in values:
            value.fill_(torch.nan)  # what was written no longer depends on it
        found = [HOST.zeros(s.numel) for s in shards.shards]
        shards.read(found)
        assert [float(f[0]) for f in found] == [sign * (i + 1) / 8 for i in range(len(found))]
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            working = [float(p.min()) for p in engine.module.parameters()]  # all elements of one are alike
            assert working == [float(p.max()) for p in engine.module.parameters()]
        assert working == [sign * (i + 1) / 8 for i in range(len(found))]
