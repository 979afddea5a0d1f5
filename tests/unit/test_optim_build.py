"""What setup.py does on machines that lack something. It runs for real, with compilers that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_NVCC = "import shutil; shutil.which = lambda *_, **__: None\n"
RUN = "import runpy, sys; sys.argv = {argv!r}; runpy.run_path('setup.py', run_name='__main__')"


def setup_py(argv: list[str], before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("MEGATRON_WSD_CUDA", "TORCH_CUDA_ARCH_LIST")}
    code = before + RUN.format(argv=["setup.py", *argv])
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env={**kept, **env}, capture_output=True, text=True)


def build(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return setup_py(
        ["build_ext", "--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")], **env
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_compiler(tmp_path: Path) -> None:
    out = build(tmp_path, CXX="/nowhere/c++", CC="/nowhere/cc", MEGATRON_WSD_CUDA="0")
    assert out.returncode != 0
    assert "could not build its C++ extension" in out.stderr
    assert "apt-get install g++ python3-dev" in out.stderr


def test_no_nvcc() -> None:
    insists = setup_py(["--version"], NO_NVCC, MEGATRON_WSD_CUDA="1")
    assert insists.returncode != 0
    assert "could not build its CUDA extension" in insists.stderr
    assert "no nvcc was found" in insists.stderr and "nvidia-cuda-nvcc" in insists.stderr
    for value in ("auto", ""):
        content = setup_py(["--version"], NO_NVCC, MEGATRON_WSD_CUDA=value)
        assert content.returncode == 0
        assert "no nvcc; built for the CPU alone" in content.stdout
    silent = setup_py(["--version"], NO_NVCC, MEGATRON_WSD_CUDA="0")
    assert silent.returncode == 0 and "nvcc" not in silent.stdout


def test_unknown_setting() -> None:
    out = setup_py(["--version"], MEGATRON_WSD_CUDA="yes")
    assert out.returncode != 0
    assert "MEGATRON_WSD_CUDA: expected 0, 1 or auto, got 'yes'." in out.stderr


def test_nvcc_that_fails(tmp_path: Path) -> None:
    # A C++ compiler that does nothing makes the rest of the build quick.
    quick = {"CXX": "true", "CC": "true", "CUDA_HOME": str(tmp_path)}
    script(tmp_path / "bin" / "nvcc", "echo broken toolkit >&2; exit 3")
    falls_back = build(tmp_path / "a", MEGATRON_WSD_CUDA="auto", **quick)
    assert falls_back.returncode == 0
    assert "broken toolkit" in falls_back.stderr
    assert "built for the CPU alone" in falls_back.stdout + falls_back.stderr
    insists = build(tmp_path / "b", MEGATRON_WSD_CUDA="1", **quick)
    assert insists.returncode != 0
    assert "could not build its CUDA extension" in insists.stderr


def test_architectures(tmp_path: Path) -> None:
    # An nvcc that knows two of the default architectures and writes down what it is asked for.
    log = tmp_path / "asked"
    known = "if [ $1 = --list-gpu-code ]; then echo sm_80; echo sm_90; exit 0; fi"
    script(tmp_path / "bin" / "nvcc", f"{known}\necho \"$@\" >>'{log}'")
    quick = {"CXX": "true", "CC": "true", "CUDA_HOME": str(tmp_path), "MEGATRON_WSD_CUDA": "1"}
    out = build(tmp_path / "a", **quick)
    assert out.returncode == 0, out.stderr
    assert "this nvcc does not know sm_100; built without it" in out.stdout
    asked = log.read_text()
    assert "code=sm_80" in asked and "code=sm_90" in asked and "100" not in asked
    log.unlink()
    assert build(tmp_path / "b", TORCH_CUDA_ARCH_LIST="8.6 9.0a+PTX", **quick).returncode == 0
    asked = log.read_text()
    for flag in ("code=sm_86", "code=sm_90a", "code=compute_90a"):
        assert flag in asked
    assert "sm_80" not in asked and "compute_86,code=compute" not in asked
    wrong = build(tmp_path / "c", TORCH_CUDA_ARCH_LIST="Hopper", **quick)
    assert wrong.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST: expected entries like 9.0 or 10.0+PTX, got 'Hopper'" in wrong.stderr


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
def test_the_cpu_extension_does_not_depend_on_cuda() -> None:
    from megatron_wsd import _C

    listed = subprocess.run(["ldd", _C.__file__], capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("ldd cannot read the extension")
    assert "cuda" not in listed.stdout.lower()
