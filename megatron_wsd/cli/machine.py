"""What this machine has, found out without importing torch."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path

from megatron_wsd.errors import ConfigError, IslandError


def tool(name: str) -> list[str]:
    """How to run the Python program ``name`` of this environment, else of PATH.

    Raises:
        IslandError: there is none.
    """
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        # not by its first line, which the kernel cannot read if the path has a space or is long
        return [sys.executable, str(beside)]
    found = shutil.which(name)
    if found is None:
        raise IslandError(
            name, f"the command beside {sys.executable} or on PATH", "none", "Run ./launch/setup.sh."
        )
    return [found]


def visible_cuda_devices() -> list[str]:
    """The CUDA devices that a process started now would see, as deepspeed numbers them; [] without any."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[: count.value] if named else [str(i) for i in range(count.value)]


def island_devices(island: int, ranks: int, devices: list[str]) -> list[str]:
    """The devices of one of several islands on one machine: the next ``ranks`` of them, round and round.

    Raises:
        ConfigError: there are fewer devices than ranks, so that two ranks of one island would share one.
    """
    if ranks > len(devices):
        raise ConfigError(
            "--ranks",
            f"at most {len(devices)}, the CUDA devices that are visible",
            ranks,
            "Give fewer ranks, or a --hostfile with more machines.",
        )
    return [devices[(island * ranks + r) % len(devices)] for r in range(ranks)]


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_hostfile(path: Path, ranks: int) -> dict[str, int]:
    """Slots of each host of a deepspeed hostfile (lines ``host slots=N``), which must add up to ``ranks``.

    Raises:
        ConfigError: it is missing, a line cannot be read, or the slots are not ``ranks``.
    """
    field = f"--hostfile {path}"
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except OSError as e:
        raise ConfigError(field, "a readable file", e.strerror or str(e), "Check the path.") from None
    hosts: dict[str, int] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)(\s+#.*)?", line)
        if match is None:
            raise ConfigError(field, "lines like 'worker-0 slots=8'", repr(line))
        if match[1] in hosts:
            raise ConfigError(field, "each host once", f"{match[1]} twice")
        hosts[match[1]] = int(match[2])
    if sum(hosts.values()) != ranks:
        raise ConfigError(
            field,
            f"slots that add up to --ranks {ranks}",
            " + ".join(map(str, hosts.values())) + f" = {sum(hosts.values())}" if hosts else "no host",
            "One hostfile lists the machines of one island.",
        )
    return hosts
