#!/usr/bin/env python3
"""How long training stands still for a capture and an adoption, by where the outer half lives.

    .venv/bin/python benchmarks/capture.py
    .venv/bin/python benchmarks/capture.py --device cuda --elements 28

With ``--device cuda`` the shards are on the GPU and the outer half once on the host, once on the GPU. It is
the very code of the outer loop, in asynchronous mode: read the shards, subtract, look for NaN, add what is
fed back, encode; then read, move what was trained since onto the new anchor, and write.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from step_bench import machine

from megatron_wsd.config import Config, parse_config
from megatron_wsd.diloco.faults import NO_FAULTS
from megatron_wsd.diloco.fragments import Fragment
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.residence import HOST, Residence
from megatron_wsd.diloco.state import make_state
from megatron_wsd.shards.zero3 import Shard

WIRES = ("fp32", "bf16", "int8", "int4")
PARAMETERS = 64  # into which the elements are cut


class PlainShards:
    """Parameters in plain tensors, copied as `Zero3Shards` copies those of DeepSpeed."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._device = device
        draw = torch.Generator().manual_seed(0)
        self._values = [torch.randn(elements // PARAMETERS, generator=draw) for _ in range(PARAMETERS)]
        self._values = [value.to(device) for value in self._values]
        shape = (1, elements // PARAMETERS)
        self.shards = [Shard(f"w{i}", shape, 0, shape[1]) for i in range(PARAMETERS)]

    def train(self) -> None:
        """Move every parameter."""
        for value in self._values:
            value.add_(1e-3)

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """As `Shards.read`."""
        for target, value in zip(out, self._values, strict=True):
            target.copy_(value, non_blocking=True)
        finish(self._device)

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """As `Shards.write`."""
        for target, value in zip(self._values, values, strict=True):
            target.copy_(value, non_blocking=True)
        finish(self._device)


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def config_of(wire: str) -> Config:
    """Of an asynchronous run in that format."""
    sync = {"mode": "async", "wire": wire, "adopt": "rebase"}
    raw = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    return parse_config({**raw, "megatron_wsd": {"sync": sync}}, islands=2, ranks=1)


def pauses(shards: PlainShards, residence: Residence, wire: str, repetitions: int) -> tuple[float, float]:
    """Median seconds of a capture and of an adoption; the first of each is not counted."""
    config = config_of(wire)
    plan = [Fragment("all", tuple(range(PARAMETERS)))]
    state = make_state(config, shards, plan, residence)
    local = Local(shards, plan, state, config, NO_FAULTS)
    captures, adoptions = [], []
    for step in range(1, repetitions + 2):
        shards.train()
        local.count(1)
        finish(residence.device)
        began = time.perf_counter()
        flight = local.fragments[0].flight = local.encode(local.capture(0, step))
        captures.append(time.perf_counter() - began)
        assert flight.finite
        local.publish(0, committed=True, reset=False)
        finish(residence.device)
        began = time.perf_counter()
        local.merge_in(0)
        finish(residence.device)
        adoptions.append(time.perf_counter() - began)
    return median(captures[1:]), median(adoptions[1:])


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the shards are")
    parser.add_argument("--elements", type=int, default=24, help="power of two; default 24")
    parser.add_argument("--threads", type=int, default=machine.threads_of_machine())
    parser.add_argument("--repetitions", type=int, default=7)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: this torch sees no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(given.threads)
    n = 1 << given.elements
    print(f"shards on {device}, elements 2^{given.elements}, threads {given.threads}")
    print(*(f"{k} {v}" for k, v in {**machine.describe(device), **machine.versions()}.items()), sep=", ")
    print("\n| outer half | wire | a capture | an adoption | ns a parameter of both |")
    print("| --- | --- | ---: | ---: | ---: |")
    shards = PlainShards(n, device)
    for residence in [HOST] + ([Residence(device)] if device.type == "cuda" else []):
        for wire in WIRES:
            capture, adoption = pauses(shards, residence, wire, given.repetitions)
            both = (capture + adoption) / n * 1e9
            print(
                f"| {residence.device.type} | {wire} | {1e3 * capture:.1f} ms | {1e3 * adoption:.1f} ms "
                f"| {both:.2f} |"
            )


if __name__ == "__main__":
    main()
