"""Loading of the compiled extensions: `_C` for the CPU, `_CUDA` where torch has a CUDA device.

`MEGATRON_WSD_ISA` forces an instruction set (`scalar`, `avx2`, `avx512`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from megatron_wsd.errors import NativeError

ISA_VARIABLE = "MEGATRON_WSD_ISA"

log = logging.getLogger(__name__)


@functools.cache
def extension() -> Any:
    """The compiled CPU extension.

    Raises:
        NativeError: it is not built, or `MEGATRON_WSD_ISA` names what this processor does not have.
    """
    try:
        from megatron_wsd import _C
    except ImportError as error:
        raise NativeError(
            "megatron_wsd._C",
            "the compiled extension",
            str(error),
            "Build it with ./launch/setup.sh, or with `pip install -e .` (needs g++ and python3-dev).",
        ) from error
    module: Any = _C
    name = os.environ.get(ISA_VARIABLE)
    if name:
        _use_isa(module, name, ISA_VARIABLE)
    if module.build_info()["isa"] == "scalar":
        log.warning("the outer step runs without vector instructions (AVX2), 2 to 4 times slower")
    return module


@functools.cache
def cuda_extension() -> Any:
    """The compiled CUDA extension. Loaded only where torch finds a CUDA device.

    Raises:
        NativeError: torch finds no device, or the extension is not built.
    """
    if not torch.cuda.is_available():
        raise NativeError(
            "device", "a CUDA device that torch can use", "none", "Keep the outer state on the CPU."
        )
    try:
        from megatron_wsd import _CUDA
    except ImportError as error:
        raise NativeError(
            "megatron_wsd._CUDA",
            "the compiled CUDA extension",
            str(error),
            "Build it with `MEGATRON_WSD_CUDA=1 pip install -e .` where nvcc is, or keep the outer state on "
            "the CPU.",
        ) from error
    return _CUDA


def _use_isa(module: Any, name: str, field: str) -> str:
    known = module.build_info()["isa_available"]
    if name not in known:
        raise NativeError(field, f"one that this processor has: {', '.join(known)}", name)
    return str(module.use_isa(name))


def build_info() -> dict[str, Any]:
    """How the extensions were built and what they run on.

    Returns:
        `isa` in use, `isa_available`, `threads` of the machine, `compiler`, `cuda` (whether the step can run
        on a CUDA device of this machine).

    Raises:
        NativeError: the CPU extension is not built.
    """
    try:
        cuda_extension()
        cuda = True
    except NativeError:
        cuda = False
    return {**extension().build_info(), "cuda": cuda}


@contextlib.contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Run the kernels of this process with another instruction set, for tests and benchmarks.

    Raises:
        NativeError: the processor does not have it.
    """
    before = _use_isa(extension(), name, "isa")
    try:
        yield
    finally:
        extension().use_isa(before)
