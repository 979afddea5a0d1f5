"""Builds megatron_wsd._C and, where nvcc is, megatron_wsd._CUDA. All else is in pyproject.toml.

_C needs a C++17 compiler, the headers of the running Python, and pybind11. _CUDA needs nvcc besides, and
neither torch nor a GPU: a machine that builds images for others has none. It links the CUDA runtime
statically and is a module of its own, so that _C never depends on CUDA.

    MEGATRON_WSD_CUDA=auto    (default) build _CUDA where nvcc is; if that fails, say so and go on without it
    MEGATRON_WSD_CUDA=1       build it or fail
    MEGATRON_WSD_CUDA=0       do not
    TORCH_CUDA_ARCH_LIST      architectures, as torch takes them: "8.0;9.0+PTX"; default 8.0;9.0;10.0+PTX
    CUDA_HOME                 where nvcc is looked for first
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # one IEEE operation stays one: the same bits on every instruction set
    "-fno-math-errno",  # so that sqrtf is an instruction
    "-fno-trapping-math",  # so that loops with selects vectorise; changes no result
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-g0",
    f"-ffile-prefix-map={os.getcwd()}=.",  # no build path in the result
]
DEFAULT_ARCHS = "8.0;9.0;10.0+PTX"
CUDA_ARGS = [
    "-std=c++17",
    "-O3",
    "--fmad=false",  # as -ffp-contract=off
    "-Xcompiler=-fPIC,-ffp-contract=off,-fvisibility=hidden,-Wall",
    # nvcc hands these on through a shell, without quotes: a folder with a space in its name must stay out
    *([] if " " in os.getcwd() else [f"-Xcompiler=-ffile-prefix-map={os.getcwd()}=."]),
]

REMEDY = """
megatron_wsd could not build its C++ extension.

It needs a C++17 compiler and the headers of this Python. On Debian or Ubuntu:

    apt-get install g++ python3-dev

then run the installation again. (CXX=/path/to/compiler chooses another compiler.)
"""
CUDA_REMEDY = """
megatron_wsd could not build its CUDA extension.

It needs nvcc of CUDA 12 or 13, in PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin. Where there is no CUDA
toolkit, these packages hold one; CUDA_HOME is then the folder nvidia/cu13 beside them:

    pip install nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \\
        nvidia-cuda-runtime==13.0.96

MEGATRON_WSD_CUDA=0 builds for the CPU alone.
"""


def find_nvcc() -> str | None:
    """The CUDA compiler, or None."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (found := shutil.which("nvcc", path=f"{home}/bin")):
            return found
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def arch_flags(nvcc: str) -> list[str]:
    """-gencode for every architecture that is asked for; of the default ones, those that this nvcc knows."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    flags = []
    for name in (asked or DEFAULT_ARCHS).replace(";", " ").split():
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", name)
        if match is None:
            raise CompileError(f"TORCH_CUDA_ARCH_LIST: expected entries like 9.0 or 10.0+PTX, got {name!r}")
        number = "".join(match.group(1, 2, 3))
        if not asked and f"sm_{number}" not in listed.split():
            print(f"megatron_wsd: this nvcc does not know sm_{number}; built without it")
            continue
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match.group(4):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def extensions() -> list[Extension]:
    """What to build, by MEGATRON_WSD_CUDA and by what is there."""
    cpu = Extension(
        "megatron_wsd._C",
        sources=sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")),
        depends=sorted(glob("csrc/*.h") + glob("csrc/cpu/*.h") + glob("csrc/cpu/*.inc")),
        include_dirs=[pybind11.get_include()],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=["-pthread"],
        language="c++",
    )
    wanted = os.environ.get("MEGATRON_WSD_CUDA") or "auto"
    if wanted not in ("0", "1", "auto"):
        sys.exit(f"MEGATRON_WSD_CUDA: expected 0, 1 or auto, got {wanted!r}.")
    if wanted == "0":
        return [cpu]
    if find_nvcc() is None:
        if wanted == "1":
            sys.exit(f"{CUDA_REMEDY}\nMEGATRON_WSD_CUDA=1, and no nvcc was found.")
        print("megatron_wsd: no nvcc; built for the CPU alone (MEGATRON_WSD_CUDA=1 insists on CUDA)")
        return [cpu]
    cuda = Extension(
        "megatron_wsd._CUDA",
        sources=sorted(glob("csrc/cuda/*.cpp") + glob("csrc/cuda/*.cu")),
        depends=sorted(glob("csrc/*.h") + glob("csrc/cuda/*.h")),
        optional=wanted == "auto",
    )
    return [cpu, cuda]


class BuildExt(build_ext):
    """build_ext that says what to install when the machine cannot compile, and hands .cu files to nvcc."""

    def build_extensions(self) -> None:
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
            sys.exit(f"{REMEDY}\nMissing: Python.h")
        try:
            super().build_extensions()
        except (CCompilerError, CompileError, ExecError, PlatformError, OSError) as error:
            sys.exit(f"{REMEDY}\nThe compiler said: {error}")

    def build_extension(self, ext: Extension) -> None:
        if ext.name != "megatron_wsd._CUDA":
            super().build_extension(ext)
            return
        try:
            self._build_cuda(ext)
        except (CompileError, subprocess.CalledProcessError, OSError) as error:
            if not ext.optional:
                sys.exit(f"{CUDA_REMEDY}\n{error}")
            raise CompileError(f"{error}\nmegatron_wsd: built for the CPU alone") from error

    def _build_cuda(self, ext: Extension) -> None:
        """nvcc compiles and links all of it: it knows where its own headers and its runtime are."""
        result = Path(self.get_ext_fullpath(ext.name))
        newest = max(os.stat(f).st_mtime for f in [*ext.sources, *ext.depends, "setup.py"])
        if not self.force and result.is_file() and result.stat().st_mtime > newest:
            return
        nvcc = find_nvcc()
        assert nvcc is not None
        # relative, where that leaves out a space in the path of this folder
        folders = (pybind11.get_include(), sysconfig.get_paths()["include"])
        includes = [f"-I{os.path.relpath(f) if ' ' in f else f}" for f in folders]
        temp = Path(self.build_temp) / "cuda"
        temp.mkdir(parents=True, exist_ok=True)
        result.parent.mkdir(parents=True, exist_ok=True)
        objects = []
        for source in ext.sources:
            target = str(temp / (Path(source).name + ".o"))
            archs = ["--threads=0", *arch_flags(nvcc)] if source.endswith(".cu") else []
            run([nvcc, *CUDA_ARGS, *archs, *includes, "-c", source, "-o", target])
            objects.append(target)
        run([nvcc, "-shared", "--cudart=static", "-Xlinker=--exclude-libs,ALL", *objects, "-o", str(result)])


def run(command: list[str]) -> None:
    """Run a compiler and show what it ran."""
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
