"""What the figures were measured on."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_wsd.optim import native

PACKAGES = ("megatron_wsd", "torch", "deepspeed", "bitsandbytes", "torchao", "numpy")


def threads_of_machine() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Runnable processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def others_cpu_s() -> float:
    """CPU seconds that everything but this process has used on this machine, time stolen from it included.

    Differences of it tell how quiet the machine was between two moments.
    """
    all_ = psutil.cpu_times()
    mine = psutil.Process().cpu_times()
    busy = sum(all_) - all_.idle - getattr(all_, "iowait", 0.0) - getattr(all_, "guest", 0.0)
    return busy - mine.user - mine.system


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, memory, caches, instruction set in use, compiler; the GPU where one is measured."""
    build = native.build_info()
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": threads_of_machine(),
        "isa": build["isa"],
        "isa_available": list(build["isa_available"]),
        "caches": _caches(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "transparent_hugepages": _huge_pages(),
        "virtual_machine": "hypervisor" in _first_field("flags").split(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "compiler": build["compiler"],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["gpu_capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = torch.version.cuda
        found["gpu_driver"] = _driver()
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that take part; absent ones are left out."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["torch"] = torch.__version__
    return found


def _first_field(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def _cpu_model() -> str:
    name = _first_field("model name") or platform.processor() or platform.machine()
    family, model = _first_field("cpu family"), _first_field("model\t")
    return f"{name}, family {family} model {model}" if family else name


def _caches() -> str:
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            if (folder / "type").read_text().strip() != "Instruction":
                found["L" + (folder / "level").read_text().strip()] = (folder / "size").read_text().strip()
    return ", ".join(f"{level} {size}" for level, size in found.items()) or "unknown"


def _huge_pages() -> str:
    with contextlib.suppress(OSError):
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return text.partition("[")[2].partition("]")[0]
    return "unknown"


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return "unknown"
