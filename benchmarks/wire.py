#!/usr/bin/env python3
"""What encoding, merging and error feedback of a contribution cost, beside torch and beside moving bytes.

    .venv/bin/python benchmarks/wire.py
    .venv/bin/python benchmarks/wire.py --elements 24 --threads 1
    .venv/bin/python benchmarks/wire.py --device cuda --elements 28

Everyone takes turns in one run. README.md beside this file says what is counted and keeps the last figures.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from step_bench import floor, machine, measure

from megatron_wsd.optim import wire
from megatron_wsd.optim.wire import GROUP, WireFormat

FORMATS = ("fp32", "bf16", "int8", "int4_linear", "int4_e3m0")
Runner = Callable[[int], None]


@dataclass
class Problem:
    """A contribution, and what it is added to."""

    source: torch.Tensor
    merged: torch.Tensor
    threads: int

    @property
    def blocks(self) -> torch.Tensor:
        """The contribution, one row a block of 256."""
        return self.source.view(-1, GROUP)

    def bytes_(self, count: float) -> torch.Tensor:
        """So many of them, all 0, where the contribution is."""
        return torch.zeros(round(count), dtype=torch.uint8, device=self.source.device)


def times(call: Callable[[], object]) -> Runner:
    """`call`, as often as one asks."""

    def run(count: int) -> None:
        for _ in range(count):
            call()

    return run


def ours(problem: Problem, name: str) -> dict[str, Runner]:
    """Encode, accumulate, and the residual in place."""
    fmt, t = WireFormat.of(name), problem.threads
    payload = problem.bytes_(fmt.encoded_bytes(problem.source.numel()))
    wire.encode(fmt, problem.source, payload)
    left = problem.source.clone()
    return {
        "encode": times(lambda: wire.encode(fmt, problem.source, payload, t)),
        "accumulate": times(lambda: wire.accumulate(fmt, payload, problem.merged, 0.5, t)),
        "residual": times(lambda: wire.residual(fmt, left, payload, left, t)),
    }


def torch_int8(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 as one writes it in torch: codes and scales."""
    scale = blocks.abs().amax(1, keepdim=True).div_(127).clamp_min_(1e-30)
    return blocks.div(scale).round_().to(torch.int8), scale


def torchs(problem: Problem) -> dict[str, Runner]:
    """The same three in torch."""
    codes, scale = torch_int8(problem.blocks)
    rows, left = problem.merged.view(-1, GROUP), problem.blocks.clone()
    return {
        "encode": times(lambda: torch_int8(problem.blocks)),
        "accumulate": times(lambda: rows.add_(codes.float().mul_(scale), alpha=0.5)),
        "residual": times(lambda: left.sub_(codes.float().mul_(scale))),
    }


def check_torch(problem: Problem) -> None:
    """Both round the same block maxima to the same levels, but for a tie that their roundings decide."""
    fmt, n = WireFormat.of("int8"), problem.source.numel()
    payload = problem.bytes_(fmt.encoded_bytes(n))
    mine = wire.encode(fmt, problem.source, payload)[:n].view(torch.int8).view(-1, GROUP)
    codes, _ = torch_int8(problem.blocks)
    differ = (mine.int() - codes.int()).abs()
    assert int(differ.max()) <= 1 and float((differ > 0).float().mean()) < 1e-3


def copy_floor(problem: Problem, group_bytes: int, in_place: bool) -> dict[str, Runner]:
    """On a GPU: a copy of half as many bytes, so that reads and writes together are as many."""
    half = problem.source.numel() * moved(group_bytes, in_place) / 2
    source, target = problem.bytes_(half), problem.bytes_(half)
    return {"copy": times(lambda: target.copy_(source))}


def moved(group_bytes: int, in_place: bool) -> float:
    """Bytes an element of encode, or of accumulate and residual; the scales are not among them."""
    return (8 if in_place else 4) + group_bytes // 64 * 64 / GROUP


def floors(problem: Problem, group_bytes: int, in_place: bool) -> dict[str, Runner]:
    """The bytes of encode, or of accumulate and residual, with ordinary and with non-temporal stores."""
    if problem.source.device.type == "cuda":
        return copy_floor(problem, group_bytes, in_place)
    library = floor.library()
    assert library is not None, "the floor needs a C++ compiler"
    function = library.transfer
    address, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [address] * 2 + [count] * 4 + [flag] * 3 + [ctypes.c_uint32]
    function.restype = None
    coded = group_bytes // 64 * 64  # without the scales
    payload = torch.zeros(problem.source.numel() // GROUP * coded, dtype=torch.uint8)
    if in_place:
        buffers = (problem.merged.data_ptr(), payload.data_ptr(), 4 * GROUP, coded)
    else:
        buffers = (payload.data_ptr(), problem.source.data_ptr(), coded, 4 * GROUP)
    blocks = problem.source.numel() // GROUP

    def runner(bypass: bool) -> Runner:
        def run(passes: int) -> None:
            assert payload is not None  # kept alive
            function(*buffers, blocks, passes, problem.threads, int(in_place), int(bypass), 0)

        return run

    return {"stores": runner(False), "bypass": runner(True)}


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--elements", type=int, default=24, help="power of two; default 24")
    parser.add_argument("--threads", type=int, default=machine.threads_of_machine())
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sample-s", type=float, default=0.05, help="shortest sample, seconds")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device")
    torch.set_num_threads(given.threads)
    n = 1 << given.elements
    draw = torch.Generator().manual_seed(given.seed)
    source, merged = (torch.randn(n, generator=draw).to(device) for _ in range(2))
    problem = Problem(source, merged, given.threads)
    print(f"device {device}, elements 2^{given.elements}, threads {given.threads}, seed {given.seed}")
    print(*(f"{k} {v}" for k, v in {**machine.describe(device), **machine.versions()}.items()), sep=", ")
    check_torch(problem)
    runners: dict[str, Runner] = {}
    bytes_: dict[str, float] = {}
    for name in FORMATS:
        group_bytes = WireFormat.of(name).group_bytes
        for verb, run in ours(problem, name).items():
            runners[f"{name} {verb}"] = run
            bytes_[f"{name} {verb}"] = (4 if verb == "encode" else 8) + group_bytes / GROUP
        for in_place in (False, True):
            for how, run in floors(problem, group_bytes, in_place).items():
                runners[f"{name} floor {in_place} {how}"] = run
    for verb, run in torchs(problem).items():
        runners[f"torch int8 {verb}"] = run
    busy = machine.others_cpu_s()
    samples = measure.interleaved(runners, given.repetitions, given.sample_s, device, lambda name: None)
    print(f"others used {machine.others_cpu_s() - busy:.1f} CPU s in the run")
    ns = {name: median(found) / n * 1e9 for name, found in samples.items()}
    print("\n| format | bytes | ns an element | share of the floor | torch takes |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for verb in ("encode", "accumulate", "residual"):
        for name in FORMATS:
            key = f"{name} {verb}"
            in_place = verb != "encode"
            at = f"{name} floor {in_place} "
            # The floor moves the codes; the scales are added in proportion.
            share = bytes_[key] / moved(WireFormat.of(name).group_bytes, in_place)
            least = min(found for other, found in ns.items() if other.startswith(at)) * share
            peer = f"{ns[f'torch int8 {verb}'] / ns[key]:.1f} times" if name == "int8" else ""
            print(f"| {verb}, {name} | {bytes_[key]:.2f} | {ns[key]:.3f} | {least / ns[key]:.0%} | {peer} |")


if __name__ == "__main__":
    main()
