"""What tests of several folders share: the CUDA extension, built to run on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "numerics" / "cuda_on_cpu"))


@pytest.fixture(scope="session")
def emulated_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the module; see `emulated.py`."""
    import emulated

    return emulated.build(tmp_path_factory.mktemp("cuda_on_cpu"))
