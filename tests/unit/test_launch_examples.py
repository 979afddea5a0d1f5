"""``launch/``: scripts are well formed, and every command of the examples is one that its program takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped_data import lay_data

from megatron_wsd.cli.lighthouse import lighthouse_command
from megatron_wsd.config import load_config
from megatron_wsd.rundir import open_island

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "launch" / "examples"
CONFIG = load_config(ROOT / "launch" / "configs" / "7b_2x8_10gbps.json")

SCRIPTS = sorted(
    path
    for pattern in ("*.sh", "examples/*.sh", "examples/*.sbatch")
    for path in (ROOT / "launch").glob(pattern)
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_well_formed(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, script], check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The checkout that the examples mean, where island.sh does nothing but a dry run.

    ``bin`` in it has an ``ssh`` that runs the command here, and the ``scontrol`` of a job of two nodes.
    """
    folder = tmp_path / "a checkout"
    (folder / "launch").mkdir(parents=True)
    for name in ("configs", "examples", "train.py"):
        (folder / "launch" / name).symlink_to(ROOT / "launch" / name)
    programs = {
        "launch/island.sh": f'exec "{ROOT}/launch/island.sh" "$@" --dry-run',
        "bin/ssh": 'shift; exec bash -c "$*"',
        "bin/scontrol": "printf 'node-0\\nnode-1\\n'",
        "bin/python3": f'exec "{sys.executable}" "$@"',
    }
    (folder / "bin").mkdir()
    for name, line in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    lay_data(folder)
    return folder


def dry(checkout: Path, *command: str, **env: str) -> str:
    """What a command prints that starts islands, in the checkout."""
    path = f"{checkout}/bin:/usr/bin:/bin"
    base = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(checkout)}
    done = subprocess.run(
        command, cwd=checkout, env=base | env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (checkout / "runs").exists()
    return done.stdout


LIGHTHOUSE = "10.8.0.1:29510"


def island_of_the_config(printed: str, island: int) -> list[str]:
    """Check the dry run of an island; the command that would be run."""
    assert f"#   island {island} of 2: ranks 0-" in printed
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    words = shlex.split("\n".join(lines).replace("\\\n", " "))
    named = [word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word)]
    env = dict(named)
    assert env["MEGATRON_WSD_LIGHTHOUSE"] == f"http://{LIGHTHOUSE}"
    assert env["MEGATRON_WSD_INTERFACE"] == "wg0" != env["NCCL_SOCKET_IFNAME"]
    assert (env["MEGATRON_WSD_ISLAND"], env["MEGATRON_WSD_ISLANDS"]) == (str(island), "2")
    return words[len(named) :]


def the_lighthouse_is_that_of_the_config(words: list[str]) -> None:
    """Program and flags are those that ``launch`` would run for the config, at the address of the islands."""
    assert words[0] == "/opt/megatron_wsd/.venv/bin/torchft_lighthouse"
    flat = [part for word in words[1:] for part in word.split("=", 1)]
    wanted = lighthouse_command(CONFIG.islands, LIGHTHOUSE)
    assert flat == wanted[wanted.index("--bind") :]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_the_kubernetes_example_is_a_lighthouse_and_an_island(checkout: Path) -> None:
    deployment, job = documents("kubernetes.yaml")
    kinds = [(d["apiVersion"], d["kind"]) for d in (deployment, job)]
    assert kinds == [("apps/v1", "Deployment"), ("batch/v1", "Job")]
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert deployment["spec"]["replicas"] == 1
    (container,) = pod["spec"]["containers"]
    the_lighthouse_is_that_of_the_config([*container["command"], *container["args"]])

    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
    for each in (deployment, job):
        name = each["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63
        assert each["spec"]["template"]["spec"]["hostNetwork"] is True, "the VPN is the host's"
    args = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
    assert Path(args["run-dir"]).is_relative_to(mounts["run"]), "on the volume, not in the container"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(args["ranks"]) == CONFIG.islands.ranks
    assert spec["restartPolicy"] == "Never" and job["spec"]["backoffLimit"] == 0
    line = [*container["command"], *container["args"]]
    assert "--resume" not in island_of_the_config(dry(checkout, *line), 0)
    (again,) = re.findall(r"# - (--\S+)", (EXAMPLES / "kubernetes.yaml").read_text())
    assert again in island_of_the_config(dry(checkout, *line, again), 0)


def test_the_systemd_unit_runs_the_lighthouse_of_the_config() -> None:
    text = (EXAMPLES / "lighthouse.service").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    the_lighthouse_is_that_of_the_config(shlex.split(command))
    known = subprocess.run(
        [sys.executable, str(Path(sys.executable).parent / "torchft_lighthouse"), "--help"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert all(flag in known for flag in re.findall(r"--[a-z_]+", command))


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_example_starts_an_island_of_all_nodes_of_the_job(checkout: Path, nodes: int) -> None:
    script = (EXAMPLES / "slurm.sbatch").read_text()
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, re.MULTILINE)
    assert len(options) == script.count("\n#SBATCH") and ("gpus-per-node", "8") in options
    env = {"SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "7"}
    env |= {"SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_GPUS_ON_NODE": str(8 // nodes), "ISLAND": "1"}
    printed = dry(checkout, "bash", str(EXAMPLES / "slurm.sbatch"), **env)
    assert "--resume" not in island_of_the_config(printed, 1)
    if nodes > 1:
        assert "ranks 0-3 on node-0" in printed and "ranks 4-7 on node-1" in printed
    begun = open_island(checkout / "state", CONFIG, island=1, resume=False)
    begun.metrics(1).touch()
    again = dry(checkout, "bash", str(EXAMPLES / "slurm.sbatch"), **env, RUN=str(begun.path))
    assert "--resume" in island_of_the_config(again, 1), "submitted again, it goes on"


def test_the_ssh_example_starts_both_islands(checkout: Path) -> None:
    script = (EXAMPLES / "ssh.sh").read_text()
    here = checkout / "ssh.sh"
    assert "\ndir=/opt/megatron_wsd " in script
    # The shell here takes the outer quotes off, that of the other machine the inner ones.
    quoted = shlex.quote(shlex.quote(str(checkout)))
    here.write_text(script.replace("dir=/opt/megatron_wsd ", f"dir={quoted} "))
    printed = dry(checkout, "bash", str(here), "--dry-run")
    parts = re.split(r"^user@head-\d: ", printed, flags=re.MULTILINE)[1:]
    assert len(parts) == 2
    for island, part in enumerate(parts):
        island_of_the_config(part, island)


def test_every_example_is_looked_at() -> None:
    names = {"kubernetes.yaml", "lighthouse.service", "slurm.sbatch", "ssh.sh"}
    others = {"README.md", "hostfile", "plain_torch.py", "plain_torch.json"}  # run by other tests
    assert {p.name for p in EXAMPLES.iterdir() if p.is_file()} == names | others
