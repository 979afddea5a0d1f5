"""The whole plan and its command: what it says, what it assumes, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from matplotlib.figure import Figure
from matplotlib.image import imread
from planner_cases import ROOT, SEVEN, TINY, config, numbers, run

from megatron_wsd.cli import app
from megatron_wsd.cli.plan import bandwidths_of
from megatron_wsd.config import ModelConfig
from megatron_wsd.errors import ConfigError
from megatron_wsd.planner import GPUS, PRESETS, make_plan
from megatron_wsd.planner.plan import Question


def test_the_whole_plan_of_7b() -> None:
    plan = numbers(SEVEN, "--wan", "100gbps,1 Gbit/s", "--step-time-s", "16")
    assert plan["parameters"] == 7_241_732_096 and plan["tokens_per_step"] == 2_097_152
    assert [link["bits_per_s"] for link in plan["links"]] == [1e9, 1e11]
    assert (plan["end_step"], plan["tokens"]) == (477_000, 477_000 * 2_097_152)
    assert [p["name"] for p in plan["phases"]] == ["warmup", "stable", "decay"]
    assert sum(p["tokens"] for p in plan["phases"]) == plan["tokens"]
    assert plan["phases"][1]["rate_first"] == plan["phases"][1]["rate_last"] == 3e-4
    sent = {e["wire"]: (e["rank_sent"], e["island_sent"]) for e in plan["exchange"]}
    assert sent["fp32"] == (3_620_866_048, 8 * 3_620_866_048)
    for link in plan["links"]:
        assert link["wall_s"] == pytest.approx(477_000 * 16 / link["configured"])
        assert link["data_parallel"] < link["sync"] <= link["streaming"] <= link["asynchronous"]
    assert any("step takes 16 s, as given" in line for line in plan["assumed"])


def test_a_run_without_an_end_has_no_wall_time(tmp_path: Path) -> None:
    raw = json.loads(SEVEN.read_text())
    raw["scheduler"]["params"] = {"warmup_steps": 2000}
    (tmp_path / "open.json").write_text(json.dumps(raw))
    plan = numbers(tmp_path / "open.json")
    assert plan["end_step"] is plan["tokens"] is plan["links"][0]["wall_s"] is None
    assert [(p["name"], p["first"], p["last"]) for p in plan["phases"]] == [
        ("warmup", 0, 2000),
        ("stable", 2000, None),
    ]
    assert plan["phases"][1]["tokens"] is None and plan["phases"][1]["rate_last"] == 3e-4
    text = run(tmp_path / "open.json")[1]
    assert re.search(r"stable +2,000 +open", text) and "no end" in text
    (told,) = [
        line for line in text.splitlines() if line.startswith("assumed: nothing of the length of the run")
    ]
    assert "decay_start and decay_steps" in told


def test_other_models_islands_and_ranks_than_the_config_says() -> None:
    plan = numbers(SEVEN, "--model", "1t", "--islands", "64", "--ranks", "512")
    assert 0.9e12 < plan["parameters"] < 1.1e12
    assert (plan["islands"], plan["ranks"]) == (64, 512)
    assert plan["tokens_per_step"] == 2 * 16 * 512 * 64 * 8192
    received = {e["wire"]: e["rank_received"] // e["rank_sent"] for e in plan["exchange"]}
    assert set(received.values()) == {63}
    tiny = numbers(SEVEN, "--model", TINY)
    assert tiny["parameters"] == 820_352


def test_a_named_model_is_that_model_and_the_plan_says_which() -> None:
    # as published: Mistral 7B, Llama 2 13B and 70B, Llama 3.1 405B
    published = {"7b": 7_241_732_096, "13b": 13_015_864_320, "70b": 68_976_648_192, "405b": 405_853_388_800}
    for name, parameters in published.items():
        plan = numbers(SEVEN, "--model", name)
        assert plan["parameters"] == parameters
    code, text = run(SEVEN, "--model", "13b")
    assert code == 0
    assert "assumed: the model is 13b: 40 layers, hidden size 5,120, ffn 13,824, 40 heads in 40 query" in text
    assert "of the config are tensor_parallel (1), batch sizes, schedule, exchange and data" in text
    assert "the model is" not in run(SEVEN)[1]


def test_a_named_model_is_cut_as_the_config_cuts_its_own(tmp_path: Path) -> None:
    raw = json.loads(SEVEN.read_text())
    raw["megatron_wsd"]["model"]["tensor_parallel"] = 4
    raw["train_batch_size"] //= 4
    (tmp_path / "c.json").write_text(json.dumps(raw))
    cut, whole = numbers(tmp_path / "c.json", "--model", "70b"), numbers(SEVEN, "--model", "70b")
    assert cut["tokens_per_step"] * 4 == whole["tokens_per_step"]
    assert "tensor_parallel (4)" in cut["assumed"][0]
    raw["megatron_wsd"]["model"]["tensor_parallel"] = 8
    raw["train_batch_size"] //= 2
    (tmp_path / "c.json").write_text(json.dumps(raw))
    assert (
        "tensor_parallel: expected a divisor of num_query_groups, 4"
        in run(tmp_path / "c.json", "--model", "25m")[1]
    )


def test_the_help_names_every_model_and_device() -> None:
    group: Any = typer.main.get_command(app)
    told = {param.name: param.help for param in group.commands["plan"].params}
    assert set(PRESETS) <= set(re.findall(r"\w+", told["model"]))
    assert set(GPUS) <= set(re.findall(r"\w+", told["gpu"]))


def test_epochs_are_told_where_the_corpora_are(tmp_path: Path) -> None:
    plan = numbers(TINY, "--islands", "2", "--ranks", "2")
    assert [p["corpus"] for p in plan["data"]] == ["broad", "high_quality"]
    assert all(p["end"] == 320 and 0 < p["epochs"] < 1 for p in plan["data"])
    (short := tmp_path / "short.txt").write_text("x" * 2000)
    raw = json.loads(TINY.read_text())
    raw["megatron_wsd"]["data"]["corpora"]["high_quality"] = f"text:{short}"
    (tmp_path / "c.json").write_text(json.dumps(raw))
    text = run(tmp_path / "c.json", "--islands", "2", "--ranks", "2")[1]
    assert "Data to step 320" in text and re.search(r"high_quality +1.79k +48 epochs", text)
    assert "warning: corpus high_quality: 48 epochs to step 320" in text
    missing = numbers(SEVEN)
    assert missing["data"] == []
    assert sum(a.startswith("nothing of the epochs of a corpus: ") for a in missing["assumed"]) == 2


def test_what_does_not_fit_and_what_does_not_keep_up_is_warned_of(tmp_path: Path) -> None:
    raw = json.loads(SEVEN.read_text())
    raw["megatron_wsd"]["sync"] = {"mode": "async", "inner_steps": 8}
    (tmp_path / "c.json").write_text(json.dumps(raw))
    text = " ".join(run(tmp_path / "c.json", "--wan", "100mbps", "--gpu", "a10")[1].split())
    assert "warning: a rank needs about 30 GB of the device's 24 GB" in text
    assert "warning: at 100 Mbit/s the rounds of one period take" in text
    assert "longer than inner_steps = 8" in text
    short = run(TINY, "--islands", "2", "--ranks", "2")[1]
    assert "measure one, and give --step-time-s" in short
    assert "warning" not in run(SEVEN)[1]


def test_the_table_has_every_number_of_the_json() -> None:
    text = run(SEVEN)[1]
    for word in (
        "fp32 masters", "outer moments", "error feedback", "most at once, device", "int4", "asynchronous",
        "Advice for 95%", "overlap_steps", "decay", "assumed: ",
    ):  # fmt: skip
        assert word in text, word


def test_the_picture(tmp_path: Path) -> None:
    out = tmp_path / "plan.png"
    code, text = run(SEVEN, "--plot", out)
    assert code == 0 and f"wrote {out}" in text
    picture = imread(out)
    assert picture.shape[:2] == (930, 1800)
    assert picture[..., :3].std() > 0.05
    # the four modes of the left panel are drawn in their colours
    pixels = {tuple(p) for p in (picture[:, :900, :3] * 255).round().astype(int).reshape(-1, 3).tolist()}
    assert {(0x2C, 0xA0, 0x2C), (0x1F, 0x77, 0xB4), (0xE8, 0x71, 0x0A), (0x8C, 0x8C, 0x8C)} <= pixels


@pytest.mark.parametrize("flags", [(), ("--model", "405b", "--ranks", "512"), ("--wan", "1mbps")])
def test_no_word_of_the_picture_lies_on_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **more: Any) -> None:
        save(self, *args, **more)
        drawn.append(self)

    monkeypatch.setattr(Figure, "savefig", keep)
    assert run(SEVEN, *flags, "--plot", tmp_path / "plan.png")[0] == 0
    legends = [axes.get_legend().get_window_extent() for axes in drawn[0].axes]
    for axes, legend in zip(drawn[0].axes, legends, strict=True):
        assert not axes.texts
        assert legend.y1 < axes.xaxis.get_tightbbox().y0 and legend.x1 < drawn[0].bbox.x1 and legend.y0 >= 0
    assert legends[0].x1 < legends[1].x0


def test_no_torch_for_a_plan() -> None:
    program = (
        "import sys; from megatron_wsd.cli import app\n"
        f"app(['plan', {str(SEVEN)!r}, '--json'], standalone_mode=False)\n"
        "slow = {'torch', 'deepspeed', 'megatron.core', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {slow}' if slow else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--wan", "10"), "--wan: expected bandwidths with their unit and commas between them, got 10."),
        (("--wan", "1gbps,,"), "--wan: expected bandwidths"),
        (("--wan", "0gbps"), "--wan: expected bandwidths"),
        (("--rtt-ms", "-1"), "--rtt-ms: expected 0 or more"),
        (("--model", "7bb"), "--model: expected one of 25m, "),
        (("--model", "no.json"), "--model: expected a json file, got no.json, which does not exist"),
        (("--gpu", "h10"), "--gpu: expected one of v100, "),
        (("--step-time-s", "0"), "--step-time-s: expected a number above 0"),
        (("--tflops", "nan"), "--tflops: expected a number above 0"),
        (("--mfu", "40"), "--mfu: expected a share above 0, at most 1"),
        (("--target-utilisation", "1"), "--target-utilisation: expected a share between 0 and 1"),
        (("--islands", "0"), "--islands: expected at least 1"),
        (("--ranks", "0"), "--ranks: expected at least 1"),
        (("--plot", "/no/folder/x.png"), "--plot: expected a png in a folder that is there"),
    ],
)
def test_a_wrong_flag_is_named(flags: tuple[str, str], says: str) -> None:
    code, text = run(SEVEN, *flags)
    assert code == 2
    assert text.startswith(f"megatron-wsd: error: {says}"), text


def test_configs_that_cannot_be_planned(tmp_path: Path) -> None:
    raw = json.loads(SEVEN.read_text())
    del raw["megatron_wsd"]["model"]["vocab_size"]
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw))
    assert "megatron_wsd.model.vocab_size: expected a number" in run(file)[1]
    del raw["megatron_wsd"]["model"]
    file.write_text(json.dumps(raw))
    assert "megatron_wsd.model: expected the shape of a model" in run(file)[1]
    assert run(file, "--model", "7b")[0] == 0
    file.write_text("{")
    assert "expected valid json" in run(file, "--model", "7b")[1]
    raw["megatron_wsd"]["sync"]["fragments"] = 9
    file.write_text(json.dumps(raw))
    code, text = run(file, "--model", "25m")
    assert code == 2 and "megatron_wsd.sync.fragments" in text


def test_bandwidths_are_read_in_every_way_people_write_them() -> None:
    assert bandwidths_of("10gbps, 1 Gbit/s,250Mbps,1.5tbps,10Gbps") == (0.25e9, 1e9, 10e9, 1.5e12)
    with pytest.raises(ConfigError, match="--wan"):
        bandwidths_of("10 GB/s")  # bytes, which would be off by eight


def test_presets_are_models_that_a_config_takes() -> None:
    for name, model in PRESETS.items():
        assert isinstance(model, ModelConfig)
        made = config(model=model.model_dump(mode="json"))
        assert make_plan(made, Question()).parameters > 0, name
