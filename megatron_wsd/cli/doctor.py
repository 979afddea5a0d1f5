"""``megatron-wsd doctor``: what this environment can do, and what to do about what it cannot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from megatron_wsd.cli.machine import cores, tool
from megatron_wsd.errors import MegatronWSDError
from megatron_wsd.inner import NOT_NVIDIAS, apex_is_nvidias, apex_version

_SETUP = "Run ./launch/setup.sh."
_APEX = "Nothing here needs it. For its fused optimizers build NVIDIA's apex from its repository."


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``needed``: without it the quickstart cannot run."""

    name: str
    ok: bool
    needed: bool
    found: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as json.")] = False,
) -> None:
    """List versions and capabilities; exit code 1 if something that the quickstart needs is missing."""
    found = findings()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        _print(found)
    raise typer.Exit(0 if all(f.ok for f in found if f.needed) else 1)


def findings() -> list[Finding]:
    """Everything the doctor looks at, in the order of the report."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        lambda: _package("deepspeed", command="deepspeed"),
        lambda: _package("megatron-core"),
        lambda: _package("torchft", command="torchft_lighthouse"),
        _extension,
        _cuda,
        _apex,
        _inner,
        lambda: _program("g++", "Install the Debian package g++; only building the extension needs it."),
        lambda: _program("nvcc", "Install the CUDA toolkit to build CUDA kernels; the CPU needs none."),
        lambda: _program("pdsh", "Install the Debian package pdsh; for islands of several machines."),
    ]
    return [check() for check in checks]


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "what", "found", "remedy")
    for f in found:
        mark = (
            "[green]ok[/green]" if f.ok else "[bold red]missing[/bold red]" if f.needed else "[dim]none[/dim]"
        )
        table.add_row(mark, f.name, f.found, "" if f.ok else f.remedy)
    console = Console()
    console.print(table)
    lacking = [f.name for f in found if f.needed and not f.ok]
    console.print(
        f"[bold red]The quickstart cannot run: {', '.join(lacking)}.[/bold red]"
        if lacking
        else "[green]The quickstart can run.[/green]"
    )


def _python() -> Finding:
    version = sys.version_info[:2]
    found = f"{platform.python_version()}, {platform.machine()}, {cores()} cores"
    remedy = "Use Python 3.10 to 3.13: PYTHON=python3.11 ./launch/setup.sh"
    return Finding("python", (3, 10) <= version <= (3, 13), True, found, remedy)


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as e:  # OSError: a library of its wheel that this system cannot load
        return Finding("torch", False, True, str(e), _SETUP)
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    found = f"{torch.__version__}, {'gloo' if gloo else 'NO gloo'}, {torch.get_num_threads()} threads"
    return Finding("torch", gloo, True, found, "Install a torch that is built with gloo.")


def _package(name: str, command: str | None = None) -> Finding:
    try:
        found = importlib.metadata.version(name)
        if command is not None:
            found += f", {tool(command)[-1]}"
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, True, "not installed", _SETUP)
    except MegatronWSDError as e:
        return Finding(name, False, True, str(e), _SETUP)
    return Finding(name, True, True, found)


def _extension() -> Finding:
    try:
        from megatron_wsd.optim.native import build_info

        info = build_info()
    except (ImportError, MegatronWSDError) as e:
        return Finding("extension", False, True, str(e), _SETUP)
    found = ", ".join(f"{key} {_plain(value)}" for key, value in info.items())
    return Finding("extension", True, True, found)


def _plain(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cuda() -> Finding:
    none = "Runs on the CPU. For GPUs install NVIDIA's driver and a CUDA build of torch."
    try:
        import torch
    except (ImportError, OSError):
        return Finding("CUDA", False, False, "torch cannot be imported", _SETUP)
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        )
        return Finding("CUDA", False, False, f"no device ({built})", none)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    counted = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    return Finding("CUDA", True, False, f"{torch.version.cuda}: {counted}")


def _apex() -> Finding:
    """NVIDIA's apex, or the package of another purpose that has its name on PyPI.

    It is tried in a process of its own: an apex built for another torch can end the interpreter.
    """
    if importlib.util.find_spec("apex") is None:
        return Finding("apex", False, False, "not installed", _APEX)
    probe = [sys.executable, "-c", "import apex.optimizers; apex.optimizers.FusedAdam"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 0:
        return Finding("apex", True, False, f"NVIDIA's, {apex_version()}")
    if not apex_is_nvidias():
        return Finding(
            "apex", False, False, f"{apex_version()}: {NOT_NVIDIAS}", f"pip uninstall apex. {_APEX}"
        )
    why = _last_line(done)
    found = f"{apex_version()}, does not load: {why}"
    return Finding("apex", False, False, found, "Build it anew for this torch.")


def _inner() -> Finding:
    """What ``"inner": "auto"`` takes here; in a process of its own, as it loads apex and DeepSpeed's ops."""
    code = "from megatron_wsd.inner import describe; print(describe())"
    environ = {"DS_ACCELERATOR": "cpu", **os.environ} if not _cuda().ok else None
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environ
    )
    if done.returncode:
        remedy = 'Set "inner": "torch", or mend what is named.'
        return Finding("inner AdamW", False, False, _last_line(done), remedy)
    return Finding("inner AdamW", True, False, done.stdout.strip().splitlines()[-1])


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _program(name: str, remedy: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, False, False, "not on PATH", remedy)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    version = re.search(r"(?:release |\) |pdsh-)(\d+(?:\.\d+)+)", done.stdout + done.stderr)
    return Finding(name, True, False, f"{version[1]}, {path}" if version else path)
