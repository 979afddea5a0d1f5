"""The command as a whole: help, version, and errors of one line that come before anything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from shipped_data import lay_data
from typer.testing import CliRunner

import megatron_wsd
from megatron_wsd.cli import app

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}))
    return file


def test_version_and_help_name_every_command() -> None:
    assert run("--version") == (0, f"megatron-wsd {megatron_wsd.__version__}\n")
    code, text = run("--help")
    assert code == 0
    for command in ("launch", "island", "prepare-data", "report", "doctor"):
        assert command in text


def test_no_command_imports_torch_before_it_is_needed() -> None:
    config = ROOT / "launch" / "configs" / "tiny_cpu.json"
    program = (
        "import sys; from megatron_wsd.cli import app\n"
        f"app(['launch', '--config', {str(config)!r}, '--run-dir', '/nowhere/run', '--dry-run'], "
        "standalone_mode=False)\n"
        "slow = {'torch', 'deepspeed', 'megatron.core', 'torchft', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {slow}' if slow else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_m_is_the_command_and_an_error_is_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_wsd",
        "launch",
        "--config",
        "no.json",
        "--run-dir",
        str(tmp_path / "r"),
    ]
    env = {**os.environ, "MEGATRON_WSD_DEBUG": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "megatron-wsd: error: --config: expected a json file, got no.json, which does not exist. "
        "Check the path.\n"
    )
    assert not (tmp_path / "r").exists()


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_WSD_DEBUG", "1")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(result.exception, megatron_wsd.errors.ConfigError)


ISLAND = ("island", "--islands", "2", "--ranks", "2", "--lighthouse", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("launch", "--islands", "0"), "--islands: expected at least 1, got 0"),
        (("launch", "--steps", "0"), "--steps: expected at least 1, got 0"),
        (("launch", "--script", "/no/train.py"), "--script: expected a Python file"),
        (("launch", "--inject", "island=0 at=comit round=1 how=kill"), "--inject at: expected one of"),
        (("launch", "--inject", "island=7 at=commit round=1 how=kill"), "--inject island: expected 0 to"),
        ((*ISLAND, "--island", "0", "--inject", "island=0 at=step round=1 how=nan"), "--inject how=nan: "),
        ((*ISLAND, "--island", "2"), "--island: expected 0 to 1 of 2 islands, got 2"),
        (
            (*ISLAND[:-1], "host:29510", "--island", "0"),
            "--lighthouse: expected an address like http://HOST:PORT",
        ),
        (
            (*ISLAND, "--island", "0", "--hostfile", "/no/hostfile"),
            "--hostfile /no/hostfile: expected a readable",
        ),
        ((*ISLAND, "--island", "0", "--script", "/no/train.py"), "--script: expected a Python file"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, config: Path, arguments: Sequence[str], says: str
) -> None:
    code, text = run(*arguments, "--config", config, "--run-dir", tmp_path / "run")
    assert code == 2
    assert text.startswith(f"megatron-wsd: error: {says}"), text
    assert text.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_lighthouse_that_is_not_there_is_told_and_nothing_is_written(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["megatron_wsd.cli.island"], "_LIGHTHOUSE_WAIT_S", 0.3)
    flags = ("--config", config, "--run-dir", tmp_path / "run", "--script", __file__)
    code, text = run(*ISLAND, "--island", "0", *flags)
    assert code == 2
    assert "expected a torchft lighthouse that answers at http://127.0.0.1:9" in text
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_lighthouse_and_every_island_and_writes_nothing(
    tmp_path: Path, config: Path
) -> None:
    flags = ("--islands", "2", "--ranks", "3", "--steps", "7", "--resume", "--script", __file__, "--dry-run")
    code, text = run("launch", *flags, "--config", config, "--run-dir", tmp_path / "a run")
    assert code == 2 and f"--resume: expected a run to go on with, got {tmp_path / 'a run'}" in text
    assert "--bind 127.0.0.1:29510 --min_replicas 1 --join_timeout_ms 600000" in text
    for island in (0, 1):
        assert f"# island {island}\nMEGATRON_WSD_ISLAND={island} \\\nMEGATRON_WSD_ISLANDS=2 \\\n" in text
    assert text.count(f"--run-dir '{tmp_path / 'a run'}' --steps 7 --resume\n") == 2
    assert not (tmp_path / "a run").exists()


@pytest.mark.parametrize(
    ("name", "islands", "ranks"), [("tiny_cpu.json", 2, 2), ("7b_2x8_100gbps.json", 2, 8)]
)
def test_the_configs_that_are_shipped_load_and_dry_run(
    tmp_path: Path, name: str, islands: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_data(tmp_path)
    flags = ("--islands", islands, "--ranks", ranks, "--run-dir", tmp_path / "run", "--dry-run")
    code, text = run("launch", "--config", ROOT / "launch" / "configs" / name, *map(str, flags))
    assert code == 0, text
    assert text.replace("'", "").count("launch/train.py --config") == islands  # quoted if there is a space


def test_a_full_disk_is_one_line(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "island_0").mkdir()
    records = [{"kind": "step", "time": 1, "step": 1, "loss": 1, "lr": 1, "phase": "stable", "tokens": 1}]
    (tmp_path / "run" / "island_0" / "metrics.jsonl").write_text(json.dumps(records[0]) + "\n")
    monkeypatch.setattr("megatron_wsd.files.secrets.token_hex", lambda n: "x")
    temporary = tmp_path / "run" / ".summary.json.x.tmp"
    temporary.symlink_to("/dev/full")
    code, text = run("report", tmp_path / "run")
    assert code == 2
    assert "No space left on device. Free some space" in text
