"""The configs that are shipped: loaded, planned, dry-run, and their page checked number by number."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from shipped_data import lay_data
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.cli.plan import bandwidths_of, seconds, size
from megatron_wsd.config import load_config
from megatron_wsd.planner import Plan, make_plan
from megatron_wsd.planner.plan import Question

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "launch" / "configs"
PAGE = (CONFIGS / "README.md").read_text()
# name -> flags of launch, and what its section of the page assumes: bandwidth, round trip, seconds of a step
SHIPPED: dict[str, tuple[tuple[str, ...], str, float, float | None]] = {
    "tiny_cpu": (("--islands", "2", "--ranks", "2"), "100gbps", 0.1e-3, 0.15),
    "25m": ((), "100gbps", 0.1e-3, 0.2),
    "1b": ((), "10gbps", 30e-3, None),
    "7b_2x8_1gbps": ((), "1gbps", 30e-3, None),
    "7b_2x8_10gbps": ((), "10gbps", 30e-3, None),
    "7b_2x8_100gbps": ((), "100gbps", 30e-3, None),
}


def planned(name: str) -> Plan:
    flags, link, rtt_s, step_s = SHIPPED[name]
    given = {flags[i].removeprefix("--"): int(flags[i + 1]) for i in range(0, len(flags), 2)}
    config = load_config(CONFIGS / f"{name}.json", **given)
    return make_plan(config, Question(bandwidths=bandwidths_of(link), rtt_s=rtt_s, step_s=step_s))


def section(name: str) -> str:
    return PAGE.split(f"## {name}.json", 1)[1].split("\n## ", 1)[0]


def test_every_config_is_in_the_table_of_these_tests_and_has_its_section() -> None:
    assert {f"{name}.json" for name in SHIPPED} == {p.name for p in CONFIGS.glob("*.json")}
    for name in SHIPPED:
        assert f"## {name}.json" in PAGE


@pytest.mark.parametrize("name", SHIPPED)
def test_the_page_says_what_the_planner_says(name: str) -> None:
    plan, text = planned(name), section(name)
    wire = next(e for e in plan.exchange if e.wire == plan.wire)
    link = plan.links[0]
    for what, number in {
        "parameters": f"{plan.parameters:,}",
        "tokens a step": f"{plan.tokens_per_step:,}",
        "bytes that a rank sends": f"{wire.rank_sent:,}",
        "bytes of an island": size(wire.island_sent),
        "seconds of a sync": seconds(link.sync_s[plan.wire]),
        "seconds of a step": seconds(plan.step_s),
        "share of training": f"{link.configured:.1%}",
        "memory of the device": size(plan.device_bytes),
        "memory of the host": size(plan.host_bytes),
    }.items():
        assert number in text, f"{what}: {number}"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_config_is_fit_for_the_link_that_it_is_for(name: str) -> None:
    plan = planned(name)
    link = plan.links[0]
    assert link.configured >= 0.9
    assert not plan.warnings
    config = load_config(CONFIGS / f"{name}.json", islands=2, ranks=plan.ranks)
    # a bucket of every rank at once takes less than half of what a message may take
    bucket = min(config.sync.bucket_bytes, next(e for e in plan.exchange if e.wire == plan.wire).rank_sent)
    assert 8 * bucket * plan.ranks / link.bits_per_s < config.sync.timeout_s / 2
    # and a round fits between two joins
    assert link.sync_s[plan.wire] < config.islands.join_timeout_s
    # the synchronous 7B configs are no slower than the least that the planner asks for
    if name.startswith("7b"):
        assert link.configured >= 0.95 and plan.device_bytes < 80e9


@pytest.mark.parametrize("name", SHIPPED)
def test_deepspeed_knows_every_key(name: str) -> None:
    raw: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    block = raw.pop("megatron_wsd")
    assert block["model"]
    zero = raw["zero_optimization"]
    known = {field.alias or key for key, field in DeepSpeedZeroConfig.model_fields.items()}
    assert set(zero) <= known
    assert DeepSpeedZeroConfig(**zero).stage == 3
    assert set(raw) <= {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "gradient_clipping", "bf16", "optimizer", "scheduler", "zero_optimization", "tensorboard",
    }  # fmt: skip
    assert set(raw.get("bf16", {})) <= {"enabled"} and set(raw["tensorboard"]) <= {"enabled", "job_name"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_dry_run_tells_everything_and_touches_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_data(tmp_path)
    flags = [*SHIPPED[name][0], "--run-dir", str(tmp_path / "run"), "--dry-run"]
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["launch", "--config", str(CONFIGS / f"{name}.json"), *flags])
    assert result.exit_code == 0, result.output
    plan, text = planned(name), result.output
    assert f"{size(plan.device_bytes)} on the device, {size(plan.host_bytes)} on the host" in text
    wire = next(e for e in plan.exchange if e.wire == plan.wire)
    assert f"{size(wire.rank_sent)} sent and {size(wire.rank_received)} received" in text
    last = "-" + str(plan.ranks - 1)
    assert f"#   island 1 of 2: ranks 0{last} on " in text
    commented = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    end = commented.index("}")
    resolved = json.loads("\n".join(commented[: end + 1]))
    assert resolved["megatron_wsd"]["sync"]["inner_steps"] == plan.inner_steps
    assert resolved["megatron_wsd"]["islands"]["count"] == 2
    assert sorted(tmp_path.rglob("*")) == before


# ---- island.sh ----


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


def test_island_sh_dry_run_on_several_machines(tmp_path: Path) -> None:
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
        "lo",
        "--nccl-interface",
        "ib0",
        "--restarts",
        "3",
        "--dry-run",
    ]
    flags += ["--hostfile", str(ROOT / "launch" / "examples" / "hostfile")]  # whose path may hold a space
    raw = json.loads((CONFIGS / "7b_2x8_10gbps.json").read_text())
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
    assert done.stdout.count("\n") == bare.stdout.count("\n")  # the commands are told all the same
    for word in (
        "# restarts: up to 3, 30 s after a failure",
        "island 1 of 2: ranks 0-7 on node-0",
        "island 1 of 2: ranks 8-15 on node-1",
        "lighthouse http://10.8.0.1:29510",
        "put the link into a VPN",
        "GLOO_SOCKET_IFNAME=lo",
        "NCCL_SOCKET_IFNAME=ib0",
        f"--hostfile {shlex.quote(str(ROOT / 'launch' / 'examples' / 'hostfile'))}",
    ):
        assert word in done.stdout, word
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize("name", ["ssh.sh", "slurm.sbatch", "kubernetes.yaml"])
def test_examples_use_flags_and_files_that_there_are(name: str) -> None:
    text = (ROOT / "launch" / "examples" / name).read_text()
    own = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "launch" / "island.sh").read_text()))
    helped = subprocess.run(
        [sys.executable, "-m", "megatron_wsd", "island", "--help"],
        cwd=ROOT, env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    known = own | set(re.findall(r"--[a-z][a-z-]+", helped))
    lines = text.split("launch/island.sh", 1)[1]
    used = {flag for flag in re.findall(r"--[a-z][a-z-]+", lines) if flag != "--more"}
    assert {"--island", "--islands", "--ranks", "--lighthouse", "--config", "--interface"} <= used
    assert used <= known
    for config in re.findall(r"launch/configs/\w+\.json", text):
        assert (ROOT / config).is_file()


def test_the_lighthouse_commands_of_the_examples_are_those_of_the_config() -> None:
    config = load_config(CONFIGS / "7b_2x8_10gbps.json")
    for name in ("lighthouse.service", "kubernetes.yaml"):
        text = (ROOT / "launch" / "examples" / name).read_text()
        for flag, value in (
            ("join_timeout_ms", round(config.islands.join_timeout_s * 1000)),
            ("heartbeat_timeout_ms", round(config.islands.heartbeat_timeout_s * 1000)),
            ("min_replicas", 1),
        ):
            assert re.search(rf"--{flag}[ =]{value}\b", text), (name, flag)
