"""Tensor parallel x ZeRO-3 in an island: the same training as without, outer rounds in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_processes import island
from engine_worker import tensor_parallel, trainer
from loop_runner import lighthouse

from megatron_wsd.optim.layout import parameter_key
from megatron_wsd.records import of_kind, read_metrics

PIECES = READERS = 2
STEPS = 8
LINEAR = {"outer": {"optimizer": "nesterov", "lr": 0.7, "state_bits": 32}, "sync": {"inner_steps": 3}}
ROUNDED = {"outer": {"optimizer": "cgad"}, "sync": {"inner_steps": 2, "wire": "int4"}}
# A weight is off by the rounding of sums in another order: a gradient g by about 10 x 2^-24 g. Clipping keeps
# |g| <= 0.1, and Adam makes of an error d of a gradient at most lr / eps d = 10 d a step: over 8 steps 5e-6,
# and the outer optimizer, at most 1.7 lr = 1.2 of it a round, hardly adds. Losses are of order 4, off by
# their own 10 x 2^-24 x 4 = 2e-6, and by that of the weights times a gradient of norm 1.
TOLERANCE = 2e-5


def config(pieces: int, readers: int, **block: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // readers,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WSD", "params": {}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "steps_per_print": 10**9,
        "megatron_wsd": {
            "islands": {"start_timeout_s": 60},
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 96,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "seq_length": 16,
                "tensor_parallel": pieces,
            },
            **block,
        },
    }


def as_island(address: str, work: Any, ranks: int, *args: Any, **env: str) -> list[Any]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return island(
        work,
        ranks,
        *args,
        MEGATRON_WSD_ISLAND="0",
        MEGATRON_WSD_ISLANDS="1",
        MEGATRON_WSD_LIGHTHOUSE=address,
        MEGATRON_WSD_STORE=f"localhost:{store.port}",
        **env,
    )


def run(address: str, pieces: int, readers: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What each rank found: of the run that is linear in the gradients, and of the one that rounds."""
    runs = [(config(pieces, readers, **LINEAR), STEPS), (config(pieces, readers, **ROUNDED), 4)]
    ranks = as_island(address, tensor_parallel, pieces * readers, runs)
    return [r[0] for r in ranks], [r[1] for r in ranks]


def put_together(ranks: list[dict[str, Any]], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A whole parameter from what the ranks hold, in the shape that it has without tensor parallelism."""

    def piece(of: int) -> torch.Tensor:
        key = name if name in ranks[of]["shards"] else f"{name}/piece {of}"
        return torch.cat([ranks[reader * PIECES + of]["shards"][key] for reader in range(READERS)])

    pieces = [piece(of) for of in range(PIECES)]
    if name in ranks[0]["shards"]:
        return pieces[0].view(shape)
    if "linear_proj" in name or "linear_fc2" in name:  # cut by columns
        return torch.cat([p.view(shape[0], -1) for p in pieces], dim=1)
    if "linear_fc1" in name:  # gate and up, each cut by rows
        halves = zip(*(p.chunk(2) for p in pieces), strict=True)
        pieces = [half for two in halves for half in two]
    return torch.cat(pieces).view(shape)


def test_two_pieces_train_as_one() -> None:
    with lighthouse() as address:
        (whole,), (rounded_whole,) = run(address, 1, 1)
        ranks, rounded = run(address, PIECES, READERS)

    assert whole["rounds"] == 2 and rounded_whole["rounds"] == 2
    assert max(whole["losses"]) - min(whole["losses"]) > 1e3 * TOLERANCE, "the comparison can fail"
    for rank in ranks:
        assert rank["losses"] == pytest.approx(whole["losses"], abs=TOLERANCE)
        assert rank["norm"] == pytest.approx(whole["norm"], rel=1e-4)
        assert rank["parameters"] == whole["parameters"]
    assert whole["norm"] > 0.1, "gradients are clipped"
    for name, shape in whole["shapes"].items():
        theirs, ours = whole["shards"][name].view(shape), put_together(ranks, name, shape)
        assert (theirs - ours).abs().max().item() < TOLERANCE, name

    # What both ranks of a group hold whole stays equal to the last bit, through a wire that rounds to 4 bits.
    assert rounded[0]["rounds"] == 2 and all(min(r["errors"]) > 0 for r in rounded)
    twice = [name for name in rounded[0]["shards"] if "piece" not in name]
    assert len(twice) == 5 and all("layernorm" in name for name in twice)
    for name in twice:
        for reader in range(READERS):
            first, second = (rounded[reader * PIECES + of]["shards"][name] for of in range(PIECES))
            assert torch.equal(first, second), name

    # Moments are kept in 8 bits by the size of the whole parameter, a piece of which is below the limit.
    assert rounded_whole["eight_bit"] == [f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in (0, 1)]
    assert all(r["eight_bit"] == rounded_whole["eight_bit"] for r in rounded)
    assert rounded[0]["keys"] == rounded[2]["keys"], "shards of one piece"
    for name, key in rounded[0]["keys"].items():
        if name in twice:
            assert key == rounded[1]["keys"][name] == parameter_key(name)
        else:
            assert key not in rounded[1]["keys"].values()


def test_the_trainer_with_two_pieces_and_a_resume(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(4000)))
    data = {"corpora": {"broad": f"text:{text}"}, "cache_dir": str(tmp_path / "data")}
    log = {"interval_steps": 1, "eval_interval": 2, "eval_batches": 2, "peak_tflops": 1e-6}
    block = {"data": data, "log": log, **LINEAR}
    found = {}
    with lighthouse() as address:
        for name, cut, lives in (("whole", 1, [STEPS]), ("cut", PIECES, [4, STEPS])):
            where = tmp_path / name
            for life, steps in enumerate(lives):
                job = (config(cut, 1, **block), str(where), steps, life > 0)
                as_island(address, trainer, cut, *job, MEGATRON_WSD_RUN_DIR=str(where))
            found[name] = read_metrics(where / "island_0" / "metrics.jsonl")

    losses = {name: [r["loss"] for r in of_kind(records, "step")] for name, records in found.items()}
    assert losses["cut"] == pytest.approx(losses["whole"], abs=TOLERANCE) and len(losses["cut"]) == STEPS
    validations = {name: [r["loss"] for r in of_kind(records, "eval")] for name, records in found.items()}
    assert validations["cut"] == pytest.approx(validations["whole"], abs=TOLERANCE) and validations["cut"]
    starts = of_kind(found["cut"], "start")
    assert [s["resumed"] for s in starts] == [False, True]
    assert starts[0]["inner"] == "torch AdamW (torch_adam is true)" and starts[0]["layers"] == "local"
    assert starts[0]["parameters"] == of_kind(found["whole"], "start")[0]["parameters"]
    for record in of_kind(found["cut"], "step"):
        assert record["clipped"] == (record["grad_norm"] > 0.1)
        # 6 FLOPs a parameter that multiplies, of 1e6 FLOP/s a rank
        assert record["mfu"] > record["tokens_per_s"] * 6 * 20_000 / (PIECES * 1e6)
