"""The fronts on real optimizers: Megatron's own, DeepSpeed's ZeRO-3, and a command to several ranks.

Each test runs this file as a script, in processes of its own: all of these keep global state.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(mode: str, folder: Path, ranks: int = 1) -> list[dict[str, Any]]:
    """One process a rank; what each has written as its result."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    env |= {"WORLD_SIZE": str(ranks), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    processes = []
    for rank in range(ranks):
        command = [sys.executable, __file__, mode, str(folder)]
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(command, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(outputs)
    return [json.loads((folder / f"result_{rank}.json").read_text()) for rank in range(ranks)]


# ---- Megatron's own optimizer ----

LR, MIN_LR, OWN_LR, OWN_MIN_LR = 1e-2, 1e-3, 5e-3, 2e-3
WARMUP, START, LENGTH = 4, 20, 8


def megatron_mode(folder: Path) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import param_group_identifier_keys
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Upstream
    from megatron.core.transformer import TransformerConfig

    from megatron_wsd.schedule.megatron import OptimizerParamScheduler

    class CudaIsCpu(torch.overrides.TorchFunctionMode):
        """Megatron's optimizer asks for device="cuda" and CUDA tensor types by name."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None and "cuda" in str(kwargs["device"]):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            return func(*args, **kwargs)

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.cuda.current_stream = lambda: None  # type: ignore[assignment,return-value]
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
    )

    def build(cls: Any = OptimizerParamScheduler, **changes: Any) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        settings = OptimizerConfig(
            optimizer="adam", lr=changes.get("max_lr", LR), min_lr=changes.get("min_lr", MIN_LR),
            weight_decay=0.1, clip_grad=1.0,
        )  # fmt: skip
        # Megatron 0.16 tells loaded groups apart by wd_mult and is_decoupled_lr, not by their rates
        overrides = {
            ParamKey(name="*bias"): {"wd_mult": 0.0},
            ParamKey(name="*0.weight"): {
                "max_lr": OWN_LR, "min_lr": OWN_MIN_LR, "is_decoupled_lr": True,
            },
        }  # fmt: skip
        optimizer = get_megatron_optimizer(
            settings, [chunk], config_overrides=overrides, use_gloo_process_groups=False
        )
        given = {
            "init_lr": 0.0, "max_lr": LR, "min_lr": MIN_LR, "lr_warmup_steps": WARMUP, "lr_decay_steps": 100,
            "lr_decay_style": "WSD", "start_wd": 0.1, "end_wd": 0.3, "wd_incr_steps": 40,
            "wd_incr_style": "linear",
        }  # fmt: skip
        return chunk, optimizer, cls(optimizer, **given | changes)

    def train(chunk: Any, optimizer: Any, scheduler: Any, updates: range) -> None:
        for n in updates:
            if n == START and getattr(scheduler, "wsd_open_horizon", False):
                scheduler.begin_decay(LENGTH, shape="linear")
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(n))
            chunk(x).square().mean().backward()
            chunk.finish_grad_sync()
            groups = optimizer.param_groups
            used.append([(g["lr"], g["weight_decay"], g["max_lr"], g["wd_mult"]) for g in groups])
            updated, _, _ = optimizer.step()
            assert updated
            scheduler.step(1)

    def load(parts: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        for part, state in zip(parts, torch.load(folder / "saved.pt", weights_only=False), strict=True):
            part.load_state_dict(state)
        return parts

    def rates(parts: tuple[Any, Any, Any], updates: range) -> list[Any]:
        used.clear()
        train(*parts, updates)
        return list(used)

    used: list[Any] = []
    rest, result = range(24, 32), {}
    with CudaIsCpu():
        parts = build(wsd_open_horizon=True)
        result["used"] = rates(parts, range(24))
        torch.save([part.state_dict() for part in parts], folder / "saved.pt")
        result["used"] += rates(parts, rest)
        whole = [parameter.detach().clone() for parameter in parts[0].module.parameters()]
        equal = {"wsd_open_horizon": True, "use_checkpoint_opt_param_scheduler": False}
        parts = load(build(**equal))
        result["equal"] = rates(parts, rest)
        again = list(parts[0].module.parameters())
        result["same weights"] = all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))

        decays, ranges = {"start_wd": 0.2, "end_wd": 0.4}, {"max_lr": 2 * LR, "min_lr": 3 * MIN_LR}
        # from 0.19 on Megatron's optimizer, asked first, does not find a group whose rates are others
        other = decays if "max_lr" in param_group_identifier_keys else decays | ranges
        result["range"] = other.get("max_lr", LR), other.get("min_lr", MIN_LR)
        result["use_checkpoint"] = rates(load(build(wsd_open_horizon=True, **other)), rest)
        override = equal | {"override_opt_param_scheduler": True}
        result["override"] = rates(load(build(**override, **other)), rest)
        for changed, value in (decays | ranges).items():
            parts = build(**equal, **{changed: value})
            try:
                load(parts)
            except (AssertionError, ValueError):  # upstream's check, or ours for the range of a group
                assert parts[2].num_steps == 0
                result[f"refused {changed}"] = True

        planned = {"lr_decay_steps": START + LENGTH, "wsd_decay_steps": LENGTH, "wd_incr_style": "cosine"}
        for name, cls in (("ours", OptimizerParamScheduler), ("upstream", Upstream)):
            parts = build(cls, lr_wsd_decay_style="minus_sqrt", **planned)
            result[name] = rates(parts, range(32))
            result[f"{name} weights"] = [p.tolist() for p in parts[0].module.parameters()]
    return result


def test_megatrons_own_optimizer(tmp_path: Path) -> None:
    (result,) = run("megatron", tmp_path)
    ranges = {LR: MIN_LR, OWN_LR: OWN_MIN_LR}
    seen = set()
    for n, groups in enumerate(result["used"]):
        for lr, weight_decay, max_lr, wd_mult in groups:
            seen.add((max_lr, wd_mult))
            share = min(1.0, n / WARMUP) if n <= START else 1 - min(1.0, (n - START) / LENGTH)
            low = 0.0 if n <= START else ranges[max_lr]
            # a handful of roundings on either side
            assert lr == pytest.approx(low + share * (max_lr - low), rel=16 * 2.0**-53)
            expected = wd_mult * (0.1 + 0.2 * n / 40)
            assert weight_decay == pytest.approx(expected, rel=16 * 2.0**-53)
    assert {max_lr for max_lr, _ in seen} == ranges.keys()
    assert {wd_mult for _, wd_mult in seen} == {0.0, 1.0}

    saved = result["used"][24:]
    assert result["equal"] == result["use_checkpoint"] == saved
    assert result["same weights"]
    for n, groups in enumerate(result["override"], start=24):
        for lr, weight_decay, max_lr, wd_mult in groups:
            low = dict([result["range"], (OWN_LR, OWN_MIN_LR)])[max_lr]
            share = 1 - min(1.0, (n - START) / LENGTH)
            assert lr == pytest.approx(low + share * (max_lr - low), rel=16 * 2.0**-53)
            assert weight_decay == pytest.approx(wd_mult * (0.2 + 0.2 * n / 40), rel=16 * 2.0**-53)
    assert all(result[f"refused {field}"] for field in ("max_lr", "min_lr", "start_wd", "end_wd"))

    # what upstream can do as well: the same bits of rates, weight decays and weights
    assert result["ours"] == result["upstream"]
    assert result["ours weights"] == result["upstream weights"]


# ---- DeepSpeed ZeRO-3 ----

ZERO3 = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 100000,
    "scheduler": {"type": "WSD", "params": {"warmup_steps": 4, "min_lr": [1e-4, 0.0, 2e-3], "decay_start": 10,
                                            "decay_steps": 8, "decay_shape": "linear"}},
}  # fmt: skip
ZERO3_PEAKS = [1e-2, 0.0, 5e-3]


def zero3_mode(folder: Path) -> dict[str, Any]:
    import deepspeed
    import deepspeed.ops
    import torch

    import megatron_wsd  # noqa: F401  # registers WSD

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # needs a compiler, and only inference uses it
    )
    deepspeed.init_distributed("gloo")

    def build() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        groups = [
            {"params": list(layer.parameters()), "lr": lr}
            for layer, lr in zip(model, ZERO3_PEAKS, strict=True)
        ]
        optimizer = torch.optim.AdamW(groups)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=dict(ZERO3))[0]

    def train(engine: Any, updates: int) -> list[list[float]]:
        used = []
        for _ in range(updates):
            used.append([group["lr"] for group in engine.optimizer.optimizer.param_groups])
            for _ in range(3):  # micro-batches
                loss = engine(torch.ones(2, 8)).square().mean()
                engine.backward(loss)
                engine.step()
        return used

    engine = build()
    first = train(engine, 12)
    engine.save_checkpoint(str(folder / "saved"), tag="x")
    rest = train(engine, 8)
    resumed = build()
    resumed.load_checkpoint(str(folder / "saved"), tag="x")
    groups = resumed.optimizer.optimizer.param_groups
    return {
        "used": first + rest,
        "resumed": train(resumed, 8),
        "position": resumed.lr_scheduler.num_updates,
        "peaks": resumed.lr_scheduler.peaks,
        "own": all(a is b for a, b in zip(resumed.lr_scheduler.optimizer.param_groups, groups, strict=True)),
    }


def test_zero3_engine(tmp_path: Path) -> None:
    (result,) = run("zero3", tmp_path)
    lows = [1e-4, 0.0, 2e-3]
    for n, rates in enumerate(result["used"]):  # once an update, though there are three micro-batches in each
        for rate, peak, low in zip(rates, ZERO3_PEAKS, lows, strict=True):
            share = min(1.0, n / 4) if n < 10 else 1 - min(1.0, (n - 10) / 8)
            floor = 0.0 if n < 10 else low
            assert rate == pytest.approx(floor + share * (peak - floor), rel=16 * 2.0**-53, abs=1e-300)
    assert result["resumed"] == result["used"][12:]
    assert (result["position"], result["peaks"], result["own"]) == (20, ZERO3_PEAKS, True)


# ---- a command to several ranks ----


def control_mode(folder: Path) -> dict[str, Any]:
    import torch

    from megatron_wsd.schedule.megatron import OptimizerParamScheduler

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    # what one rank cannot do, none does: a group of rank 1 has a minimum of 0, which geometric never reaches
    group = {"max_lr": 1.0, "min_lr": 0.1 if rank == 0 else 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleOptimizer([group]), init_lr=0.0, max_lr=1.0, min_lr=0.1, lr_warmup_steps=0, lr_decay_steps=100,
        lr_decay_style="WSD", start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
        wsd_open_horizon=True, wsd_control_dir=folder,
    )  # fmt: skip
    rates = []
    for n in range(60):
        command = {15: {"length": 10, "shape": "geometric"}, 25: {"length": 10, "shape": "linear"}}.get(n)
        if command and rank == 1:  # written by anyone, at any time
            (folder / "new").write_text(json.dumps(command))
            (folder / "new").rename(folder / "decay_now.json")
        torch.distributed.barrier()  # only so that the test knows when it was written
        rates.append(group["lr"])
        scheduler.step(1)
    return {"rates": rates, "history": scheduler.schedule.history()}


class SimpleOptimizer:
    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups


def test_a_command_reaches_all_ranks_at_one_update_or_none(tmp_path: Path) -> None:
    one, two = run("control", tmp_path, ranks=2)
    for result, low in ((one, 0.1), (two, 0.0)):
        expected = [1.0] * 31 + [low + (1.0 - low) * (1 - k / 10) for k in range(1, 11)] + [low] * 19
        assert result["rates"] == pytest.approx(expected, rel=0, abs=4 * 2.0**-53)
    assert [(entry["at"], entry["decay"]["start"]) for entry in one["history"]] == [(30, 30)]
    assert one["history"] == two["history"]
    assert "min_lr / max_lr" in json.loads((tmp_path / "decay_now.refused.json").read_text())["reason"]


if __name__ == "__main__":
    modes: dict[str, Callable[[Path], dict[str, Any]]] = {
        "megatron": megatron_mode,
        "zero3": zero3_mode,
        "control": control_mode,
    }
    results = modes[sys.argv[1]](Path(sys.argv[2]))
    target = Path(sys.argv[2]) / f"result_{os.environ['RANK']}.json"
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as temporary:
        json.dump(results, temporary)
    os.replace(temporary.name, target)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that leaves in the normal way while a peer is gone
