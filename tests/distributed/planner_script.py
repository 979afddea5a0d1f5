"""Measures what the planner estimates, on a rank of a real engine with the real model. Prints one json line.

    RANK=0 WORLD_SIZE=1 planner_script.py CONFIG STORE

STORE is a new file, the same for all ranks. Told are names and shapes of the parameters, the bytes of what
ZeRO-3 holds after a step, and those of what autograd saves for one micro-batch.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from megatron_wsd.config import load_config
from megatron_wsd.models.cpu import prepare_for_cpu, without_shm_comm
from megatron_wsd.models.gpt import CausalInputs, build_gpt
from megatron_wsd.models.parallel import TensorParallelUnit
from megatron_wsd.planner import vocabulary


def unique(tensors: list[torch.Tensor], known: set[int] | None = None) -> int:
    """Bytes of the distinct storages of ``tensors`` that are not among ``known``."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for address, size in found.items() if address not in (known or set()))


def saved(model: Any, tokens: torch.Tensor, inputs: CausalInputs) -> int:
    """Bytes that autograd keeps between forward and backward, parameters not counted."""
    kept: list[torch.Tensor] = []
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        positions, mask = inputs(tokens)
        loss = model(tokens, positions, mask, labels=tokens).float().mean()
    size = unique(kept, parameters)
    del loss
    return size


def whole_shape(parameter: Any, pieces: int) -> list[int]:
    """Of a parameter of which this rank has all, or one of so many pieces."""
    shape = list(parameter.shape)
    if pieces > 1 and getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= pieces
    return shape


def main() -> None:
    """See the module."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    prepare_for_cpu()
    without_shm_comm()
    import deepspeed
    from megatron.core import parallel_state

    config = load_config(sys.argv[1], islands=1, ranks=size)
    assert config.model is not None
    store = torch.distributed.FileStore(sys.argv[2], size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    deepspeed.init_distributed()
    pieces = config.tensor_parallel
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=pieces)
    mpu = TensorParallelUnit() if pieces > 1 else None
    readers = None if mpu is None else mpu.get_data_parallel_group()
    vocab = vocabulary(config)
    half = config.deepspeed.get("bf16", {}).get("enabled", False)
    plain = build_gpt(config.model, vocab).to(torch.bfloat16 if half else torch.float32)
    shapes = [[name, whole_shape(p, pieces)] for name, p in plain.named_parameters()]
    told: dict[str, Any] = {"parameters": shapes}
    tokens = torch.randint(0, vocab, (config.micro_batch, config.model.seq_length))
    inputs = CausalInputs(torch.device("cpu"))
    told["saved"] = saved(plain, tokens, inputs)

    with deepspeed.zero.Init(config_dict_or_path=config.deepspeed, mpu=mpu, data_parallel_group=readers):
        model = build_gpt(config.model, vocab)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config.deepspeed, mpu=mpu
    )
    positions, mask = inputs(tokens)
    engine.backward(engine(tokens, positions, mask, labels=tokens).float().mean())
    engine.step()
    zero = engine.optimizer
    weights = [p.ds_tensor for p in model.parameters()]
    masters = list(zero.fp32_partitioned_groups_flat)
    state = [t for s in zero.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
    told |= {
        "weights": unique(weights),
        "fp32 masters": unique(masters, {w.untyped_storage().data_ptr() for w in weights}),
        "inner moments": unique(state),
        "gradients": unique([zero.grad_partitions_flat_buffer]),
        "bucket of gradients": unique([bucket.buffer for bucket in zero.ipg_buckets.values()]),
    }
    if rank == 0:
        print("MEASURED " + json.dumps(told), flush=True)
    torch.distributed.barrier()  # the others may still read from this one
    os._exit(0)  # native threads of gloo outlive a normal exit


if __name__ == "__main__":
    main()
