"""One island as the launcher sees it: its `deepspeed` command and the environment of its ranks."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

import megatron_wsd
from megatron_wsd.addresses import address_for, is_here, is_loopback, lighthouse_host_port
from megatron_wsd.cli.machine import (
    cores,
    island_devices,
    read_hostfile,
    tool,
    visible_cuda_devices,
)
from megatron_wsd.diloco.faults import FLAG, VARIABLE, Fault, join_faults
from megatron_wsd.errors import ConfigError, MegatronWSDError
from megatron_wsd.rundir import RunDir

_TRAIN = Path(megatron_wsd.__file__).resolve().parent.parent / "launch" / "train.py"


_RANKS_PER_CORE = 16


@dataclass(frozen=True, kw_only=True)
class Island:
    """What the flags of ``megatron-wsd island`` say, checked. Paths are absolute."""

    island: int
    islands: int
    ranks: int
    lighthouse: str
    run_dir: Path
    steps: int | None = None
    resume: bool = False
    hostfile: Path | None = None
    script: Path | None = None
    interface: str | None = None
    inject: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.island < self.islands:
            raise ConfigError("--island", f"0 to {self.islands - 1} of {self.islands} islands", self.island)
        if self.steps is not None and self.steps < 1:
            raise ConfigError("--steps", "at least 1", self.steps)
        if self.script is not None and not self.script.is_file():
            raise ConfigError("--script", "a Python file", f"{self.script}, which is none", "Check the path.")
        for fault in self.inject:
            for name, value, count in (
                ("island", fault.island, self.islands),
                ("rank", fault.rank, self.ranks),
            ):
                if value is not None and value >= count:
                    raise ConfigError(f"{FLAG} {name}", f"0 to {count - 1}", value)
        lighthouse_host_port(self.lighthouse)
        if self.hostfile is not None:
            read_hostfile(self.hostfile, self.ranks)

    def check_machine(self) -> None:
        """Refuse what this machine cannot run; apart from the rest since a dry run is for any machine.

        Raises:
            ConfigError: fewer CUDA devices than ranks, or no pdsh to reach the machines of a hostfile.
        """
        if self.hostfile is None:
            if devices := visible_cuda_devices():
                island_devices(0, self.ranks, devices)
            elif self.ranks * self.islands > _RANKS_PER_CORE * cores():
                raise ConfigError(
                    "--ranks",
                    f"at most {_RANKS_PER_CORE} ranks a core on a machine without GPUs, {cores()} cores here",
                    f"{self.islands} islands x {self.ranks} ranks",
                    "Take fewer, or a machine with GPUs.",
                )
        elif shutil.which("pdsh") is None:
            raise ConfigError(
                "--hostfile",
                "pdsh on this machine, through which deepspeed reaches the others",
                "none",
                "Install the Debian package pdsh, and let ssh to the hosts work without a password.",
            )

    @property
    def elsewhere(self) -> list[str]:
        """The machines of the hostfile that are not this one."""
        if self.hostfile is None:
            return []
        return [host for host in read_hostfile(self.hostfile, self.ranks) if not is_here(host)]

    def check_reachable(self) -> None:
        """Refuse addresses of the loopback interface that ranks on other machines would be told.

        Raises:
            ConfigError: the lighthouse, or the store of this island, is at such a one.
        """
        others = self.elsewhere
        if not others:
            return
        host, _ = lighthouse_host_port(self.lighthouse)
        if is_loopback(host):
            raise ConfigError(
                "--lighthouse",
                f"an address at which {others[0]} of the hostfile reaches it",
                f"{host}, where it would look for it on itself",
                "Give the address of the lighthouse in the network that all machines share.",
            )
        try:
            address = address_for(self.lighthouse, self.interface)
        except MegatronWSDError:
            return  # told by whoever asks for the address itself
        if is_loopback(address):
            raise ConfigError(
                "--interface",
                f"a network in which {others[0]} of the hostfile reaches this machine",
                f"{self.interface or 'none'}, so that its address would be {address}",
                "Name the network towards the other islands, in which all machines of this one are.",
            )

    def command(self, master_port: int) -> list[str]:
        """The `deepspeed` command line of this island."""
        launch = tool("deepspeed")
        if self.hostfile is not None:
            launch += ["--hostfile", str(self.hostfile)]
        elif os.environ.get("CUDA_VISIBLE_DEVICES") and (devices := visible_cuda_devices()):
            # --num_gpus would take the first devices of the machine whatever the variable says
            launch += ["--include", "localhost:" + ",".join(devices[: self.ranks])]
        else:
            launch += ["--num_gpus", str(self.ranks)]
        launch += ["--master_port", str(master_port)]
        script = self.script or (_TRAIN if _TRAIN.is_file() else None)
        # an installed package has no launch/ beside it; pdsh hands the line to a remote shell unquoted
        launch += ["--module", "megatron_wsd.train"] if script is None else []
        launch += [] if script is None else [shlex.quote(str(script)) if self.hostfile else str(script)]
        launch += ["--config", str(RunDir(self.run_dir).island_config(self.island))]
        launch += ["--run-dir", str(self.run_dir)]
        launch += ["--steps", str(self.steps)] if self.steps is not None else []
        return launch + (["--resume"] if self.resume else [])

    def environment(self, store: str) -> dict[str, str]:
        """What is added to the environment of every rank; ``store`` is host:port of the island's store."""
        added = {
            "MEGATRON_WSD_ISLAND": str(self.island),
            "MEGATRON_WSD_ISLANDS": str(self.islands),
            "MEGATRON_WSD_LIGHTHOUSE": self.lighthouse,
            "MEGATRON_WSD_STORE": store,
            "MEGATRON_WSD_RUN_DIR": str(self.run_dir),
        }
        if self.inject:
            added[VARIABLE] = join_faults(self.inject)
        if self.interface is not None:
            added["MEGATRON_WSD_INTERFACE"] = self.interface
            # DeepSpeed's groups stay inside the island, whose own network may be another, faster one, and
            # must not break with a VPN that is started anew.
            inside = os.environ.get("NCCL_SOCKET_IFNAME", self.interface)
            added["NCCL_SOCKET_IFNAME"] = inside
            # NCCL takes patterns as well; gloo takes names alone.
            named = inside if inside in psutil.net_if_addrs() else self.interface
            added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", named)
        if self.elsewhere:  # they may have what this machine lacks: DeepSpeed finds out on each of them
            added |= {n: os.environ[n] for n in ("DS_ACCELERATOR", "OMP_NUM_THREADS") if n in os.environ}
        elif not visible_cuda_devices():
            threads = max(1, cores() // (self.islands * self.ranks))
            added["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "cpu")
            added["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        return added

    def own_command(self) -> list[str]:
        """The ``megatron-wsd island`` command line that starts this island, or starts it again."""
        line = [sys.executable, "-m", "megatron_wsd", "island", "--island", str(self.island)]
        line += ["--islands", str(self.islands), "--ranks", str(self.ranks), "--lighthouse", self.lighthouse]
        line += ["--config", str(self.run_dir / "config.json"), "--run-dir", str(self.run_dir)]
        line += ["--steps", str(self.steps)] if self.steps is not None else []
        line += ["--hostfile", str(self.hostfile)] if self.hostfile is not None else []
        line += ["--script", str(self.script)] if self.script is not None else []
        line += ["--interface", self.interface] if self.interface is not None else []
        line += [word for fault in self.inject for word in (FLAG, str(fault))]
        return line + (["--resume"] if self.resume else [])


def island_program() -> list[str]:
    """What starts one island by hand: ``island.sh`` of this checkout; without one ``megatron-wsd island``."""
    script = _TRAIN.with_name("island.sh")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "megatron_wsd", "island"]


def deepspeed_env_lines(added: dict[str, str]) -> list[str]:
    """The lines of the file that DS_ENV_FILE names, from which deepspeed exports to other machines.

    The runner exports only variables with certain prefixes of its own accord. Naming a file of ours hides
    the user's ``.deepspeed_env``, so its lines come first.
    """
    own = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines: list[str] = []
    for folder in (Path.home(), Path.cwd()):
        file = folder / own  # an absolute name stays as it is
        if file.is_file():
            lines += [line for line in file.read_text().splitlines() if "=" in line and line not in lines]
    return lines + [f"{name}={value}" for name, value in added.items()]
