"""The CUDA extension itself, its kernels and its Python face, built by a C++ compiler and run on the CPU.

`cuda_runtime.h` beside this file stands in for CUDA's. `everything_on_gpu` then sends the tensors of the CPU
the way that those of a device take: through the same checks, the same bindings and the same kernels.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_wsd.optim import backend

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "cuda"
COMPILER = shutil.which("g++") or shutil.which("c++")
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-w", "-g0")


def build(folder: Path) -> Path:
    """Compile it into ``folder``; the path of the module."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    import pybind11

    includes = (f"-I{path}" for path in (HERE, pybind11.get_include(), sysconfig.get_paths()["include"]))
    command = [COMPILER, *FLAGS, *includes]
    sources = sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cpp")])
    objects = [folder / f"{source.name}.o" for source in sources]

    def compile_one(source: Path, target: Path) -> None:
        subprocess.run([*command, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    module = folder / "_CUDA.so"
    subprocess.run([COMPILER, "-shared", *map(str, objects), "-o", str(module), "-pthread"], check=True)
    return module


def load(path: Path) -> ModuleType:
    """The module at ``path``."""
    spec = importlib.util.spec_from_file_location("_CUDA", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def send_everything(module: ModuleType) -> None:
    """From now on the tensors of the CPU go to ``module``."""
    backend.cuda_extension = lambda: module  # type: ignore[assignment]
    backend.is_cuda = lambda tensor: isinstance(tensor, torch.Tensor)  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]


@contextmanager
def everything_on_gpu(module: ModuleType) -> Iterator[None]:
    """While it is open the tensors of the CPU go to ``module``."""
    before = backend.cuda_extension, backend.is_cuda, torch.cuda.current_stream
    send_everything(module)
    try:
        yield
    finally:
        backend.cuda_extension, backend.is_cuda, torch.cuda.current_stream = before
