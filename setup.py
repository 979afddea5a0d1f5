"""Builds megatron_wsd._C. Everything else about the package is in pyproject.toml.

Needs a C++17 compiler, the headers of the running Python, and pybind11; no torch and no CUDA.
"""

from __future__ import annotations

import os
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

REMEDY = """
megatron_wsd could not build its C++ extension.

It needs a C++17 compiler and the headers of this Python. On Debian or Ubuntu:

    apt-get install g++ python3-dev

then run the installation again. (CXX=/path/to/compiler chooses another compiler.)
"""


class BuildExt(build_ext):
    """build_ext that says what to install when the machine cannot compile."""

    def build_extensions(self) -> None:
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
            sys.exit(f"{REMEDY}\nMissing: Python.h")
        try:
            super().build_extensions()
        except (CCompilerError, CompileError, ExecError, PlatformError, OSError) as error:
            sys.exit(f"{REMEDY}\nThe compiler said: {error}")


setup(
    ext_modules=[
        Extension(
            "megatron_wsd._C",
            sources=sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")),
            depends=sorted(glob("csrc/*.h") + glob("csrc/cpu/*.h") + glob("csrc/cpu/*.inc")),
            include_dirs=[pybind11.get_include()],
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
