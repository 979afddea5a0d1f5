"""One island on two machines: island.sh with a hostfile, pdsh and ssh, as on a cluster.

Both machines are this one, under two addresses, with an sshd of the test's own on the loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_main_job import config

from megatron_wsd.cli.lighthouse import lighthouse_command
from megatron_wsd.config import load_config

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("127.0.0.1", "127.0.0.2")
PATIENCE_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, holds: Any, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Two machines behind ssh; gives the environment in which `ssh` reaches them without a password."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("pdsh") is None:
        pytest.skip("sshd and pdsh are not installed")
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(
        "".join(f"ListenAddress {host}:{port}\n" for host in HOSTS)
        + f'HostKey "{folder}/host"\nAuthorizedKeysFile "{folder}/user.pub"\nPidFile none\n'
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\n"
    )
    (folder / "config").write_text(
        f'Host *\n  Port {port}\n  IdentityFile "{folder}/user"\n  IdentitiesOnly yes\n  LogLevel ERROR\n'
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
    )
    own = folder / "bin" / "ssh"  # pdsh and deepspeed both take the first on the PATH
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{folder}/config" "$@"\n')
    own.chmod(0o755)
    environment = {**os.environ, "PATH": f"{own.parent}:{os.environ['PATH']}"}
    Path("/run/sshd").mkdir(exist_ok=True) if os.geteuid() == 0 else None
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        wait_for("sshd listens", lambda: answers(port) or server.poll() is not None, 30.0)
        reach = ["ssh", HOSTS[1], "true"]
        reached = subprocess.run(reach, env=environment, capture_output=True, text=True, timeout=60)
        if reached.returncode:
            pytest.skip(f"sshd lets nobody in here: {reached.stderr}{(folder / 'log').read_text()}")
        yield environment
    finally:
        server.kill()
        server.wait()


def test_an_island_on_two_machines_trains_and_saves_when_it_is_told_to_stop(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    path, run = config(tmp_path), tmp_path / "run"
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    port = free_port()
    timeouts = load_config(path, islands=1, ranks=2).islands
    lighthouse = subprocess.Popen(
        lighthouse_command(timeouts, f"127.0.0.1:{port}"), stderr=subprocess.DEVNULL
    )
    line = [ROOT / "launch" / "island.sh", "--config", path, "--run-dir", run, "--hostfile", hostfile]
    line += ["--island", "0", "--islands", "1", "--ranks", "2", "--interface", "lo"]
    line += ["--lighthouse", f"http://127.0.0.1:{port}"]
    metrics = run / "island_0" / "metrics.jsonl"

    def records() -> list[dict[str, Any]]:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(record) for record in lines]

    try:
        wait_for("the lighthouse answers", lambda: answers(port))
        with (tmp_path / "console").open("w") as console:
            island = subprocess.Popen(line, env=cluster, stdout=console, stderr=subprocess.STDOUT)
        try:
            # The stable phase would end at step 14: long before, it is told to stop.
            trained = lambda: any(r["kind"] == "step" for r in records())  # noqa: E731
            wait_for("a step", lambda: trained() or island.poll() is not None)
            island.send_signal(signal.SIGTERM)
            status = island.wait(PATIENCE_S)
        finally:
            island.kill()
    finally:
        lighthouse.kill()
        lighthouse.wait()
    told = (tmp_path / "console").read_text()
    assert status == 0, told
    assert "stopped at step" in told and "1 islands of 2 ranks" in told
    log = (run / "island_0" / "log.txt").read_text()
    assert "127.0.0.1: " in log and "127.0.0.2: " in log and "nnodes=2" in log
    last = records()[-1]
    assert (last["kind"], last["event"]) == ("event", "stop")
    (saved,) = (run / "island_0" / "checkpoints").glob("step_*")
    assert int(saved.name.removeprefix("step_")) == last["step"] < 14
    for host_rank in (0, 1):  # each machine wrote the shard of its rank
        assert list(saved.rglob(f"*rank_{host_rank}_*")) or list(saved.rglob(f"*rank{host_rank}*"))
