"""``launch/island.sh``: restarts, signals, and what it prints without starting anything."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from shipped_data import lay_data

ROOT = Path(__file__).resolve().parents[2]

FAKE = """#!/usr/bin/env bash
echo "$NCCL_SOCKET_IFNAME $*" >>"$LOG"
IFS=, read -r -a codes <<<"$CODES"
count=$(wc -l <"$LOG")
code="${codes[count - 1]}"
if [[ "$code" == wait ]]; then
    trap 'echo saved >>"$LOG"; exit 0' TERM
    echo ready >>"$LOG"
    while :; do sleep 0.05; done
fi
exit "$code"
"""


@pytest.fixture
def island(tmp_path: Path) -> tuple[list[str], dict[str, str], Path]:
    """A copy of island.sh with a program in place of Python that notes how it is called and ends as told."""
    for folder in ("launch", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "island.sh", tmp_path / "launch")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    log = tmp_path / "log"
    log.touch()
    return [str(tmp_path / "launch" / "island.sh")], {"PATH": "/usr/bin:/bin", "LOG": str(log)}, log


@pytest.mark.parametrize(
    ("codes", "restarts", "status", "calls"),
    [
        ("0", "3", 0, 1),
        ("1,137,0", "3", 0, 3),
        ("1,1,1", "1", 1, 2),
        ("2,0", "3", 2, 1),  # an error to mend
        ("143,0", "3", 143, 1),  # somebody asked the island itself to end
        ("1", "0", 1, 1),
    ],
)
def test_a_failed_island_is_started_again_with_resume(
    island: tuple[list[str], dict[str, str], Path], codes: str, restarts: str, status: int, calls: int
) -> None:
    command, env, log = island
    flags = ["--island", "0", f"--restarts={restarts}", "--restart-pause-s", "0", "--nccl-interface", "ib0"]
    done = subprocess.run([*command, *flags], env={**env, "CODES": codes}, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    lines = log.read_text().splitlines()
    assert len(lines) == calls
    assert lines[0] == "ib0 -m megatron_wsd island --island 0"
    assert all("--resume" in line for line in lines[1:])


def test_the_pause_grows_while_it_fails_again_and_again(
    island: tuple[list[str], dict[str, str], Path],
) -> None:
    command, env, log = island
    programs = log.parent / "programs"
    programs.mkdir()
    (programs / "sleep").write_text('#!/bin/sh\necho "$1" >>"$LOG.pauses"\n')
    (programs / "sleep").chmod(0o755)
    env = {**env, "PATH": f"{programs}:{env['PATH']}", "CODES": ",".join(["1"] * 8)}
    done = subprocess.run([*command, "--restarts", "7"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    pauses = log.with_name("log.pauses").read_text().split()
    assert pauses == ["30", "60", "120", "240", "480", "480", "480"]
    told = done.stderr.splitlines()
    assert told[0].endswith("again in 30 s, 7 left") and told[6].endswith("again in 480 s, 1 left")
    assert told[7].endswith("exit status 1, and no restart is left")


def test_sigterm_reaches_the_island_once_and_ends_the_restarts(
    island: tuple[list[str], dict[str, str], Path],
) -> None:
    command, env, log = island
    flags = ["--restarts", "3", "--restart-pause-s", "0"]
    process = subprocess.Popen([*command, *flags], env={**env, "CODES": "wait,0"})
    try:
        while "ready" not in log.read_text():
            assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    assert log.read_text().splitlines()[1:] == ["ready", "saved"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--restarts"], "--restarts: expected a value, got nothing"),
        (["--restarts", "x"], "--restarts: expected a whole number, got 'x'"),
        (["--restart-pause-s=1.5"], "--restart-pause-s: expected whole seconds, got '1.5'"),
    ],
)
def test_wrong_flags_of_island_sh(flags: list[str], says: str) -> None:
    done = subprocess.run(
        [ROOT / "launch" / "island.sh", *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and says in done.stderr


def test_island_sh_dry_run_on_several_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS"):  # which an import of DeepSpeed may have set
        monkeypatch.delenv(name, raising=False)
    flags = [
        "--island",
        "1",
        "--islands",
        "2",
        "--ranks",
        "16",
        "--lighthouse",
        "http://10.8.0.1:29510",
        "--interface",
        "wg0",
        "--nccl-interface",
        "ib0",
        "--restarts",
        "3",
        "--dry-run",
    ]
    flags += ["--hostfile", str(ROOT / "launch" / "examples" / "hostfile")]  # whose path may hold a space
    raw = json.loads((ROOT / "launch" / "configs" / "7b_2x8_10gbps.json").read_text())
    raw["megatron_wsd"]["islands"]["ranks"] = 16
    raw["gradient_accumulation_steps"] = 8
    (tmp_path / "config.json").write_text(json.dumps(raw))
    line = [ROOT / "launch" / "island.sh", *flags, "--config", tmp_path / "config.json"]
    line += ["--run-dir", tmp_path / "run"]
    bare = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bare.returncode == 2
    assert "error: megatron_wsd.data.corpora.broad: expected a file, got " in bare.stderr
    lay_data(tmp_path)
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(t.count(" --hostfile ") == 1 for t in (bare.stdout, done.stdout))  # told all the same
    for word in (
        "# restarts: up to 3, 30 s and more after a failure",
        "island 1 of 2: ranks 0-7 on node-0",
        "island 1 of 2: ranks 8-15 on node-1",
        "lighthouse http://10.8.0.1:29510",
        "put the link into a VPN",
        "GLOO_SOCKET_IFNAME=wg0",
        "each machine takes the devices that it has",
        "warning: on this machine a start would be refused: --interface: expected an interface with an IPv4",
        "NCCL_SOCKET_IFNAME=ib0",
        f"--hostfile {shlex.quote(str(ROOT / 'launch' / 'examples' / 'hostfile'))}",
    ):
        assert word in done.stdout, word
    assert "DS_ACCELERATOR" not in done.stdout, "that this machine has no GPU says nothing of the others"
    assert not (tmp_path / "run").exists()
