"""The deepspeed command of an island, the environment of its ranks, and what the machine has."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_wsd.addresses import address_for, lighthouse_host_port
from megatron_wsd.cli import command as command_module
from megatron_wsd.cli.command import Island, deepspeed_env_lines
from megatron_wsd.cli.machine import island_devices, read_hostfile, tool
from megatron_wsd.diloco.faults import fail
from megatron_wsd.errors import ConfigError, IslandError

_NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DS_ACCELERATOR", "DS_ENV_FILE", *_NETWORKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command_module, "visible_cuda_devices", list)


def island(**changes: Any) -> Island:
    known: dict[str, Any] = {
        "island": 1,
        "islands": 2,
        "ranks": 2,
        "lighthouse": "http://127.0.0.1:29510",
        "run_dir": Path("/runs/a run"),
    }
    return Island(**{**known, **changes})


def test_the_command_is_the_real_deepspeed_with_the_complete_config_of_the_run() -> None:
    line = island(steps=30, resume=True).command(25001)
    assert line[:2] == tool("deepspeed") and line[0] == sys.executable
    script = line.index(str(command_module._TRAIN))
    assert line[2:script] == ["--num_gpus", "2", "--master_port", "25001"]
    assert line[script + 1 :] == [
        *("--config", "/runs/a run/island_1/config.json"),
        *("--run-dir", "/runs/a run", "--steps", "30", "--resume"),
    ]


def test_an_installed_package_without_a_checkout_runs_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "_TRAIN", Path("/nowhere/train.py"))
    line = island().command(25001)
    assert line[line.index("--module") + 1] == "megatron_wsd.train"


def test_every_rank_learns_its_island_and_cpu_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "cores", lambda: 16)
    assert island().environment("127.0.0.1:4000") == {
        "MEGATRON_WSD_ISLAND": "1",
        "MEGATRON_WSD_ISLANDS": "2",
        "MEGATRON_WSD_LIGHTHOUSE": "http://127.0.0.1:29510",
        "MEGATRON_WSD_STORE": "127.0.0.1:4000",
        "MEGATRON_WSD_RUN_DIR": "/runs/a run",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "4",
    }
    monkeypatch.setattr(command_module, "cores", lambda: 2)
    assert island().environment("x:1")["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert island().environment("x:1")["OMP_NUM_THREADS"] == "3"


def test_faults_reach_the_ranks_through_their_environment() -> None:
    faults = (
        fail(island=1, at="exchange", round=3, how="kill"),
        fail(island=0, at="step", round=1, how="hang", rank=1),
    )
    text = "island=1 at=within_exchange round=3 how=kill"
    other = "island=0 at=step round=1 how=hang rank=1"
    assert island(inject=faults).environment("x:1")["MEGATRON_WSD_INJECT"] == f"{text}; {other}"
    assert island(inject=faults).own_command()[-4:] == ["--inject", text, "--inject", other]
    assert "MEGATRON_WSD_INJECT" not in island().environment("x:1")
    for wrong, says in (({"island": 2}, "--inject island: expected 0 to 1, got 2"), ({"rank": 2}, "rank: ")):
        with pytest.raises(ConfigError, match=says):
            island(inject=(replace(faults[0], **wrong),))


def test_on_gpus_the_named_devices_are_taken_and_nothing_is_set_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_module, "visible_cuda_devices", lambda: ["2", "3"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    line = island().command(1)
    assert line[line.index("--include") + 1] == "localhost:2,3"
    assert "--num_gpus" not in line
    assert not {"DS_ACCELERATOR", "OMP_NUM_THREADS"} & island().environment("x:1").keys()
    with pytest.raises(ConfigError, match="--ranks: expected at most 2, the CUDA devices that are visible"):
        island(ranks=3).check_machine()


def test_islands_on_one_machine_take_turns_with_its_devices() -> None:
    devices = ["0", "1", "2", "3"]
    assert [island_devices(i, 2, devices) for i in range(3)] == [["0", "1"], ["2", "3"], ["0", "1"]]
    assert [island_devices(i, 1, ["5"]) for i in range(2)] == [["5"], ["5"]]


def test_an_island_of_several_machines(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two machines\nworker-0 slots=4\n\nworker-1 slots=4  # the new one\n")
    script = tmp_path / "my train.py"
    script.touch()
    many = island(ranks=8, hostfile=hostfile, interface="eth1", script=script)
    line = many.command(25001)
    assert line[2:6] == ["--hostfile", str(hostfile), "--master_port", "25001"]
    assert f"'{script}'" in line  # pdsh hands it to a shell
    added = many.environment("10.0.0.5:4000")
    assert added["MEGATRON_WSD_INTERFACE"] == "eth1"
    assert added["GLOO_SOCKET_IFNAME"] == added["NCCL_SOCKET_IFNAME"] == "eth1"


def test_groups_inside_an_island_use_its_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    added = island(interface="eth1").environment("10.0.0.5:4000")
    assert added["MEGATRON_WSD_INTERFACE"] == "eth1" and added["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")  # a pattern, which gloo does not take
    added = island(interface="eth1").environment("10.0.0.5:4000")
    assert added["NCCL_SOCKET_IFNAME"] == "^docker0" and added["GLOO_SOCKET_IFNAME"] == "eth1"


def test_without_pdsh_other_machines_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("worker-0 slots=2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--hostfile: expected pdsh .* Debian package pdsh"):
        island(hostfile=tmp_path / "hosts").check_machine()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "slots that add up to --ranks 8, got no host"),
        ("a slots=4\nb slots=3\n", r"slots that add up to --ranks 8, got 4 \+ 3 = 7"),
        ("a slots=4\na slots=4\n", "each host once, got a twice"),
        ("a 8\n", "lines like 'worker-0 slots=8', got 'a 8'"),
    ],
)
def test_a_hostfile_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_hostfile(tmp_path / "hosts", 8)


def test_what_deepspeed_exports_keeps_the_lines_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.launcher import runner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n\n")
    added = island().environment("10.0.0.5:4000")
    lines = deepspeed_env_lines(added)
    assert lines[0] == "NCCL_DEBUG=INFO"
    assert "MEGATRON_WSD_RUN_DIR=/runs/a run" in lines
    assert len(lines) == 1 + len(added)
    # of its own accord deepspeed exports none of ours, which is why the file is written
    assert not any(name.startswith(tuple(runner.EXPORT_ENVS)) for name in added)


def test_the_restart_command_starts_the_same_island() -> None:
    line = island(resume=True).own_command()
    assert line[:6] == [sys.executable, "-m", "megatron_wsd", "island", "--island", "1"]
    assert line[-1] == "--resume"
    assert "/runs/a run/config.json" in line


def test_the_address_towards_a_lighthouse_here_is_the_loopback() -> None:
    assert address_for("http://127.0.0.1:29510", None) == "127.0.0.1"
    assert address_for("http://localhost:29510", None) == "127.0.0.1"
    assert address_for("http://10.0.0.1:29510", "lo") == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=r"--interface: expected an interface with an IPv4 address, of .*lo"
    ):
        address_for("http://127.0.0.1:1", "nosuch0")


@pytest.mark.parametrize("address", ["", "host:29510", "https://host:29510", "http://host", "http://host:x"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match="--lighthouse: expected an address like http://HOST:PORT"):
        lighthouse_host_port(address)


def test_a_missing_program_says_how_to_get_it() -> None:
    with pytest.raises(IslandError, match=r"no-such-program: .*Run \./launch/setup\.sh"):
        tool("no-such-program")
