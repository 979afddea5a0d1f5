"""The floor: the same bytes as a step moves, with next to no arithmetic, measured in the same run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from step_bench.problem import Problem
from step_bench.traffic import BLOCK_SIZE, Traffic

SOURCE = Path(__file__).with_name("stream.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra")

Runner = Callable[[int], None]

STREAM = (
    "a C++ stream compiled for this processor reads the gradient, reads and rewrites parameter and state in "
    "place, block by block, in as many threads; the faster of ordinary and non-temporal stores counts"
)
COPY = "a copy on the device of half as many bytes, so that reads and writes together are the step's bytes"
TORCH_COPY = "torch's copy of half as many bytes, since no C++ compiler was found"


@cache
def library() -> ctypes.CDLL | None:
    """stream.cpp, compiled for this processor; None without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        built = str(Path(folder) / "stream.so")
        done = subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", built], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"{SOURCE.name} does not compile:\n{done.stderr}")
        return ctypes.CDLL(built)  # stays mapped when the file is gone


@cache
def _stream() -> Callable[..., None] | None:
    found = library()
    if found is None:
        return None
    function = found.stream
    address, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [address] * 5 + [count] * 3 + [ctypes.c_int] * 2 + [ctypes.c_uint32]
    function.restype = None
    return function


def method(device: torch.device) -> str:
    """In words, how the floor is measured on this device."""
    if device.type != "cpu":
        return COPY
    return STREAM if _stream() else TORCH_COPY


def runners(problem: Problem, traffic: Traffic) -> dict[str, Runner]:
    """Ways to move the bytes of `traffic`, by name; each takes a count of passes. The fastest counts."""
    if problem.device.type != "cpu" or _stream() is None:
        return {"copy": copy_runner(problem, round(traffic.total * problem.n / 2))}
    element = 1 if traffic.key == "adam8" else 4
    a = torch.zeros(element * problem.n, dtype=torch.uint8)
    b = torch.zeros_like(a)
    scales = torch.zeros(8 * problem.n // BLOCK_SIZE, dtype=torch.uint8) if element == 1 else None
    return {
        "stores": _stream_runner(problem, a, b, scales, element, bypass=False),
        "non-temporal stores": _stream_runner(problem, a, b, scales, element, bypass=True),
    }


def copy_runner(problem: Problem, count: int) -> Runner:
    """torch's copy of `count` bytes."""
    source = torch.ones(count, dtype=torch.uint8, device=problem.device)
    target = torch.zeros_like(source)

    def run(passes: int) -> None:
        for _ in range(passes):
            target.copy_(source)

    return run


def _stream_runner(
    problem: Problem,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor | None,
    element: int,
    *,
    bypass: bool,
) -> Runner:
    function = _stream()
    assert function is not None

    def run(passes: int) -> None:
        grad = problem.grads[0]
        tail = 0 if scales is None else scales.data_ptr()
        buffers = (problem.p.data_ptr(), grad.data_ptr(), a.data_ptr(), b.data_ptr(), tail)
        function(*buffers, element, problem.n, passes, problem.threads, int(bypass), 0)

    return run
