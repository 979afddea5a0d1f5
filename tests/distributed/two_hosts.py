"""Islands on hosts of their own: network namespaces with addresses of their own, and links that can be cut.

A hub with a bridge stands for what lies between the clusters, and has the lighthouse. The hosts have names
that resolve to nothing, and each has a localhost of its own: what depends on either does not find the others.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_runner import _context as fork_context

NETWORK = "10.77.0."
HUB = f"{NETWORK}1"
WAN = "wan0"  # what a host calls its interface towards the others
NEEDED = ("unshare", "nsenter", "hostname", "ip", "ss")


class NoNamespacesError(RuntimeError):
    """This machine does not let us make a network of our own."""


def address(island: int) -> str:
    """Of the host of an island."""
    return f"{NETWORK}{10 + island}"


@dataclass(frozen=True)
class Namespace:
    """A network of its own.

    Attributes:
        pid: of the process that keeps it.
    """

    pid: int

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs ``command`` in it."""
        inside = ["nsenter", "--target", str(self.pid), "--user", "--net", "--uts", "--preserve-credentials"]
        return [*inside, *command]

    def sh(self, script: str) -> str:
        """Run a script in it.

        Raises:
            NoNamespacesError: a command failed.
        """
        done = subprocess.run(
            self.command(["sh", "-ec", script]), capture_output=True, text=True, check=False, timeout=20
        )
        if done.returncode:
            raise NoNamespacesError(f"{script.strip()}: {done.stderr.strip()}")
        return done.stdout


@dataclass(frozen=True)
class Network:
    """A hub and the hosts around it."""

    hub: Namespace
    hosts: list[Namespace]

    def cut(self, island: int) -> None:
        """What the host sends is lost from now on; its own interface stays up, as that of a VPN does."""
        self.hub.sh(f"ip link set port{island} down")

    def heal(self, island: int) -> None:
        """The link is back."""
        self.hub.sh(f"ip link set port{island} up")

    def restart_vpn(self, island: int, seconds: float) -> None:
        """The host loses its address, and with it every connection, for a while."""
        change = f"{address(island)}/24 dev {WAN}"
        self.hosts[island].sh(f"ip addr del {change}; sleep {seconds:g}; ip addr add {change}")

    def part(self, parted: bool) -> None:
        """Whether the hosts reach the hub alone, and not each other."""
        switch = "on" if parted else "off"
        for i in range(len(self.hosts)):
            self.hub.sh(f"ip link set port{i} type bridge_slave isolated {switch}")


@contextmanager
def network(count: int) -> Iterator[Network]:
    """A network of ``count`` hosts that nothing else on this machine sees.

    Needs no root where user namespaces are allowed.

    Raises:
        NoNamespacesError: a tool is missing, or namespaces are not permitted.
    """
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        raise NoNamespacesError(f"without {', '.join(missing)}")
    with ExitStack() as stack:
        hub = stack.enter_context(_kept(["unshare", "--map-root-user", "--net", "--uts"], "hub"))
        hub.sh(
            "ip link set lo up; ip link add br0 type bridge;"
            f" ip addr add {HUB}/24 dev br0; ip link set br0 up"
        )
        hosts = []
        for i in range(count):
            inside = ["nsenter", "--target", str(hub.pid), "--user", "--preserve-credentials"]
            host = stack.enter_context(_kept([*inside, "unshare", "--net", "--uts"], f"host-{i}"))
            hub.sh(
                f"ip link add port{i} type veth peer name {WAN} netns {host.pid};"
                f" ip link set port{i} master br0 up"
            )
            host.sh(f"ip link set lo up; ip addr add {address(i)}/24 dev {WAN}; ip link set {WAN} up")
            hosts.append(host)
        yield Network(hub, hosts)


@contextmanager
def _kept(maker: list[str], name: str) -> Iterator[Namespace]:
    """A namespace that lasts as long as its process, which ends with this one."""
    process = subprocess.Popen(
        [*maker, "sh", "-c", f"hostname {name} && echo made && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline():
            raise NoNamespacesError(process.stderr.read().strip())
        yield Namespace(process.pid)
    finally:
        process.kill()
        process.wait()


@contextmanager
def running(namespace: Namespace, command: Sequence[str], log: Path) -> Iterator[None]:
    """A program in a network, to the end of the block."""
    with log.open("ab") as file:
        process = subprocess.Popen(namespace.command(command), stdout=file, stderr=file)
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Forked:
    """A function in a process of its own in a network, forked from one that has imported everything."""

    def __init__(self, namespace: Namespace, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._process = fork_context().Process(target=_enter, args=(namespace.pid, target, arguments))
        self._process.start()

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Island(Forked):
    """The process of an island, on its host."""

    def __init__(self, host: Namespace, job: dict[str, Any]) -> None:
        self.out, self.home = Path(job["out"]), Path(job["run_dir"], f"island_{job['island']}")
        self.log = Path(job["run_dir"], f"island_{job['island']}.log")
        super().__init__(host, _island, (job, str(self.log)))

    def steps(self) -> int:
        """Inner steps that it has trained."""
        file = self.home / "steps"
        return int(file.read_text() or 0) if file.exists() else 0


@contextmanager
def launcher(namespace: Namespace, host: str) -> Iterator[str]:
    """The store of an island whose launcher runs on another machine than its ranks; yields host:port."""
    here, there = fork_context().Pipe()
    process = Forked(namespace, _keep_store, (host, there))
    try:
        yield f"{host}:{here.recv()}"
    finally:
        process.kill()


# ---- what runs on a host ----


def _store(host: str) -> tuple[Any, int]:
    """A store that listens at this address alone, as the launcher makes it; and its port."""
    from torch.distributed import TCPStore

    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    fd = listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def _enter(pid: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Go where a process is, and stay there; only one that has no threads yet may."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net", "uts")]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    target(*arguments)


def _keep_store(host: str, pipe: Any) -> None:
    store, port = _store(host)
    pipe.send(port)
    while os.getppid() != 1:  # the server of forks has ended, and so has the test
        time.sleep(0.5)
    del store


def _island(job: dict[str, Any], log: str) -> None:
    import loop_worker

    loop_worker.build = _build
    loop_worker.forked(job, "", log)


def _build(job: dict[str, Any]) -> tuple[Any, Any, Any]:
    """As `loop_worker.build`, at the address of this host."""
    import loop_worker
    import torch.distributed as dist

    from megatron_wsd.config import parse_config
    from megatron_wsd.diloco.island import IslandAddress
    from megatron_wsd.diloco.loop import Decoupled, Lockstep

    class Engine(loop_worker.PlainEngine):
        def train(self) -> None:
            super().train()
            os.pwrite(steps, f"{self.global_steps:<20}".encode(), 0)

    island, run_dir = job["island"], Path(job["run_dir"])
    home = run_dir / f"island_{island}"
    home.mkdir(parents=True, exist_ok=True)
    steps = os.open(home / "steps", os.O_WRONLY | os.O_CREAT)
    store, host, port = None, *(job.get("store") or ":0").rsplit(":", 1)
    if not host:
        host = address(island)
        store, port = _store(host)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = parse_config(job["config"], islands=job["islands"], ranks=1)
    place = IslandAddress(island, job["islands"], job["lighthouse"], (host, int(port)), run_dir)
    shards = loop_worker.PlainShards(0)
    engine = Engine(shards, island)
    kind = Lockstep if config.sync.mode == "sync" else Decoupled
    loop = kind(engine, config, place, 0, shards)
    loop.store = store  # type: ignore[attr-defined]  # must outlive the manager
    return loop, engine, shards
