"""The configs that are shipped: loaded, planned, dry-run, and their page checked number by number."""

from __future__ import annotations

import json
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
