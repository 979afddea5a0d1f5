"""The planner against real layouts, hand arithmetic, and the bounds of what a plan may say."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.cli.plan import bandwidths_of
from megatron_wsd.config import ModelConfig, parse_config
from megatron_wsd.diloco.faults import NO_FAULTS
from megatron_wsd.diloco.fragments import plan_fragments
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.state import FragmentState, OuterState
from megatron_wsd.errors import ConfigError
from megatron_wsd.optim.outer import OuterHyper, make_outer
from megatron_wsd.planner import (
    GPUS,
    PRESETS,
    WIRE_BYTES,
    Fleet,
    Link,
    Parameter,
    Traffic,
    advise,
    make_plan,
    memory_parts,
    parameters_of,
    peak,
    vocabulary,
)
from megatron_wsd.planner.exchange import (
    OUTER_NS,
    OUTER_NS_EACH,
    PAUSE_NS,
    QUORUM_TICK_S,
    asynchronous,
    period_steps,
    streaming,
    synchronous,
)
from megatron_wsd.planner.memory import outer_layouts, outer_state_bytes
from megatron_wsd.planner.plan import Question
from megatron_wsd.planner.speed import speed_of

ROOT = Path(__file__).resolve().parents[2]
SEVEN = ROOT / "launch" / "configs" / "7b_2x8_10gbps.json"
TINY = ROOT / "launch" / "configs" / "tiny_cpu.json"


def config(**block: Any) -> Any:
    raw = json.loads(TINY.read_text())
    raw["megatron_wsd"] |= block
    return parse_config(raw, islands=2, ranks=2)


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


def numbers(*arguments: str | Path) -> dict[str, Any]:
    code, text = run(*arguments, "--json")
    assert code == 0, text
    return dict(json.loads(text))


# ---- memory ----


def test_parameters_are_counted_as_the_7b_page_writes_them_out() -> None:
    model = PRESETS["7b"]
    layer = 4096 * (4096 + 2 * 8 * 128) + 4096**2 + 3 * 4096 * 14336 + 2 * 4096
    assert sum(p.global_numel for p in parameters_of(model, 32000)) == 32 * layer + 2 * 32000 * 4096 + 4096
    tied = model.model_copy(update={"tie_embeddings": True})
    assert sum(p.global_numel for p in parameters_of(tied, 32000)) == 32 * layer + 32000 * 4096 + 4096


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["cgad", "adam", "sgd", "nesterov", "delayed_nesterov"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_anchor_and_outer_moments_are_the_bytes_of_the_real_tensors(
    bits: int, dtype: str, optimizer: str, fragments: int
) -> None:
    outer = {"optimizer": optimizer, "state_bits": bits, "anchor_dtype": dtype}
    made = config(outer=outer, sync={"fragments": fragments})
    parameters = parameters_of(made.model, vocabulary(made))
    parts = {p.name: p.nbytes for p in memory_parts(made, parameters, vocabulary(made), flash=False)}
    hyper = OuterHyper(lr=1e-3, momentum=0.9 if "nesterov" in optimizer else 0.0)
    anchor = getattr(torch, "float32" if dtype == "fp32" else "bfloat16")
    held_anchor = held_state = 0
    for layout in outer_layouts(made, parameters):
        real = make_outer(optimizer, layout, hyper, anchor)
        state = sum(t.numel() * t.element_size() for t in real.state_tensors().values())
        assert outer_state_bytes(made, layout) == state
        held_anchor += torch.zeros(layout.total, dtype=anchor).nbytes
        held_state += state
    assert parts["anchor"] == held_anchor
    assert parts.get("outer moments", 0) == held_state
    # 2 codes and 2 scales of 4 bytes for 256 elements where moments are coded
    if bits == 8 and optimizer in ("cgad", "adam"):
        assert 2 + 8 / 256 < held_state / (held_anchor / anchor.itemsize) < 8


class NoShards:
    """In place of DeepSpeed: shards of zeros."""

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        for tensor in out:
            tensor.zero_()

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        pass


def storages() -> dict[int, int]:
    """Address and bytes of every storage of a tensor that is alive."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("wire", WIRE_BYTES)
@pytest.mark.parametrize(
    ("mode", "fragments", "dtype"),
    [("sync", 1, "bf16"), ("sync", 3, "fp32"), ("async", 1, "fp32"), ("async", 4, "bf16")],
)
def test_buffers_of_captures_are_the_bytes_of_the_real_tensors(
    mode: str, fragments: int, wire: str, dtype: str
) -> None:
    made = config(sync={"mode": mode, "fragments": fragments, "wire": wire}, outer={"anchor_dtype": dtype})
    parameters = parameters_of(made.model, vocabulary(made))
    parts = {p.name: p.nbytes for p in memory_parts(made, parameters, vocabulary(made), flash=False)}
    anchor = torch.float32 if dtype == "fp32" else torch.bfloat16
    states = [
        FragmentState(
            layout, torch.zeros(layout.total, dtype=anchor), make_outer("cgad", layout, OuterHyper(lr=1e-3))
        )
        for layout in outer_layouts(made, parameters)
    ]
    before = storages()
    plan = plan_fragments(parameters, fragments, "strided")
    local = Local(NoShards(), plan, OuterState(states), made, NO_FAULTS)  # type: ignore[arg-type]
    held = [local.encode(local.capture(i, 1)) for i in range(len(states))]
    if mode == "sync":  # one at a time
        largest = max(range(len(states)), key=lambda i: states[i].layout.total)
        held = [held[largest]]
    after = storages()
    real = sum(size for address, size in after.items() if address not in before)
    names = ("base", "captured pseudo-gradient", "error feedback", "scratch", "encoded contribution")
    assert sum(parts.get(name, 0) for name in names) == real
    assert len(held) == (1 if mode == "sync" else len(states))


def test_the_peak_is_the_worst_moment_and_a_round_comes_on_top() -> None:
    made = config(sync={"wire": "int8"})
    vocab = vocabulary(made)
    parts = memory_parts(made, parameters_of(made.model, vocab), vocab, flash=False)

    def at(moment: str) -> int:
        return sum(p.nbytes for p in parts if (p.moment, p.where) == (moment, "device"))

    assert peak(parts, "device") == at("always") + max(at("backward"), at("step"))
    assert peak(parts, "host") == sum(p.nbytes for p in parts if p.where == "host")
    assert {p.moment for p in parts if p.where == "host"} == {"always", "round"}


def test_deepspeed_keys_move_and_shrink_what_they_say() -> None:
    raw = json.loads(SEVEN.read_text())

    def parts(**zero: Any) -> dict[str, Any]:
        changed = json.loads(json.dumps(raw))
        changed["zero_optimization"] |= zero
        made = parse_config(changed)
        return {p.name: p for p in memory_parts(made, parameters_of(made.model, 32000), 32000, flash=False)}

    shard = 7_241_732_096 // 8
    before = parts()
    assert before["weights"].nbytes == before["gradients"].nbytes == 2 * shard
    assert before["fp32 masters"].nbytes == 4 * shard and before["inner moments"].nbytes == 8 * shard
    assert before["bucket of gradients"].nbytes == 2 * 200_000_000
    offloaded = parts(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    for name in ("weights", "gradients", "fp32 masters", "inner moments"):
        assert (before[name].where, offloaded[name].where) == ("device", "host")
    assert parts(sub_group_size=10**8)["fp32 gradients of a sub-group"].nbytes == 4 * 10**8
    assert "bucket of gradients" not in parts(contiguous_gradients=False)
    assert "temporaries of torch's Adam" not in before
    raw["optimizer"]["params"]["torch_adam"] = True
    assert parts()["temporaries of torch's Adam"].nbytes == 8 * shard
    few = parts(stage3_max_live_parameters=10**8)["gathered parameters"]
    assert few.nbytes < before["gathered parameters"].nbytes == 2 * (10**9 - 266_240)


def test_the_outer_half_is_counted_where_it_lives() -> None:
    raw = json.loads(SEVEN.read_text())
    found = {}
    for device in ("cpu", "cuda"):
        raw["megatron_wsd"]["outer"] = {**raw["megatron_wsd"].get("outer", {}), "device": device}
        made = parse_config(raw)
        parts = memory_parts(made, parameters_of(made.model, 32000), 32000, flash=False)
        found[device] = {p.name: p for p in parts}
    assert {p.where for p in found["cpu"].values() if p.moment == "round"} <= {"host"}
    for name, part in found["cpu"].items():
        other = found["cuda"][name]
        assert other.nbytes == part.nbytes
        assert other.where == "device"  # the inner half of this config is there anyway
    # what messages are sent from and received in
    (staging,) = set(found["cuda"]) - set(found["cpu"])
    assert found["cuda"][staging].where == "host"
    assert found["cuda"][staging].nbytes == found["cuda"]["incoming bucket"].nbytes


def test_tensor_parallelism_cuts_matrices_and_leaves_norms() -> None:
    raw = json.loads(SEVEN.read_text())
    raw["megatron_wsd"]["model"]["tensor_parallel"] = 4
    raw["train_batch_size"] //= 4
    made = parse_config(raw, ranks=8)
    assert made.model is not None
    parameters = {p.name: p for p in parameters_of(made.model, 32000)}
    h = made.model.hidden_size
    # 8 ranks are 2 groups of 4 that hold one model each: ZeRO-3 shards over 2.
    for name, numel in (
        ("embedding.word_embeddings.weight", 32000 * h // 8),
        ("output_layer.weight", 32000 * h // 8),
        ("decoder.layers.3.mlp.linear_fc2.weight", h * made.model.ffn_hidden_size // 8),
        ("decoder.layers.3.input_layernorm.weight", h // 2),
        ("decoder.final_layernorm.weight", h // 2),
    ):
        assert parameters[name].shard(8) == numel, name
    whole = parse_config(json.loads(SEVEN.read_text()))
    assert whole.model is not None
    plain = sum(p.shard(8) for p in parameters_of(whole.model, 32000))
    norms = (2 * made.model.num_layers + 1) * h
    assert sum(p.shard(8) for p in parameters.values()) == plain + norms // 2 - norms // 8
    names = [p.name for p in memory_parts(made, list(parameters.values()), 32000, flash=False)]
    assert "gathered parameters" in names
    pieces = sum(p.piece_numel for p in parameters.values())
    assert pieces == (sum(p.global_numel for p in parameters.values()) - norms) // 4 + norms


def test_without_attention_scores_less_is_kept() -> None:
    flash = numbers(SEVEN, "--flash")
    plain = numbers(SEVEN)
    s2 = 2 * 32 * 4096 * 4096 * 2  # bf16 scores of a layer and micro-batch
    # saved once in the layer that is recomputed, two gradients in it, and Megatron's own buffer
    assert plain["device_bytes"] - flash["device_bytes"] > 2 * s2


# ---- traffic and time ----


def traffic(
    wire: str = "fp32", islands: int = 2, fragments: tuple[int, ...] = (10**9,), bucket: int = 2**40
) -> Traffic:
    return Traffic(islands, 8, fragments, wire, bucket)


def test_bytes_by_hand() -> None:
    assert {w: traffic(w).sent() for w in WIRE_BYTES} == {
        "fp32": 4_000_000_000,
        "bf16": 2_000_000_000,
        "int8": 1_015_625_000,  # a scale of 4 bytes for 256 codes
        "int4": 562_500_000,  # a scale of 4 bytes for 64 codes of half a byte
    }
    three = traffic("bf16", islands=3)
    assert (three.sent(), three.received()) == (2_000_000_000, 4_000_000_000)
    alone = traffic(islands=1)
    assert alone.sent() == alone.received() == alone.wire_seconds(Link(1e9, 0.03), 10**9) == 0


def test_seconds_by_hand() -> None:
    # two contributors in turn, 8 ranks x 4e9 bytes over 10 Gbit/s: 2 x 25.6 s
    assert traffic().wire_seconds(Link(10e9, 0.0), 10**9) == pytest.approx(51.2)
    # four islands: 4 contributors, each sends two copies
    assert traffic(islands=4).wire_seconds(Link(10e9, 0.0), 10**9) == pytest.approx(4 * 2 * 25.6)
    # ten buckets of 4e8 bytes, each a round trip, for each contributor
    slow = traffic(bucket=4 * 10**8)
    assert slow.wire_seconds(Link(math.inf, 0.1), 10**9) == pytest.approx(2 * 10 * 0.1)
    whole = traffic().round_seconds(Link(10e9, 0.03), 10**9)
    own = (OUTER_NS + 2 * OUTER_NS_EACH) * 1.0  # 1e9 parameters, in seconds
    assert whole == pytest.approx(51.2 + 2 * 0.03 + QUORUM_TICK_S + 4 * 0.03 + own)


def test_utilisation_by_hand() -> None:
    link = Link(10e9, 0.0)
    rounds = traffic().sync_seconds(link)
    assert synchronous(traffic(), link, 50, 2.0) == pytest.approx(100 / (100 + rounds))
    pause = PAUSE_NS * 1.0
    assert asynchronous(traffic(), 50, 2.0) == pytest.approx(100 / (100 + pause))
    cut = traffic(fragments=(10**8,) * 10)
    each = cut.round_seconds(link, 10**8)
    # a fragment every 10 s, and a step hides 2 s: training waits for the rest
    assert each > 5.0
    waits = 10 * max(0.0, each - 2.0)
    assert streaming(cut, link, 50, 2.0, 1) == pytest.approx(100 / (100 + waits + pause))
    assert streaming(cut, link, 50, 2.0, 40) == pytest.approx(
        100 / (100 + 10 * max(0.0, each - 10.0) + pause)
    )
    assert period_steps(traffic(), link, 50, 2.0) == 50
    assert period_steps(traffic(), link, 5, 2.0) == pytest.approx(rounds / 2.0)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.floats(1e7, 1e13),
    step_s=st.floats(0.05, 100),
    target=st.floats(0.5, 0.99),
    islands=st.integers(2, 64),
    ranks=st.sampled_from([1, 8, 64]),
)
def test_advice_meets_the_target_and_the_config_checks(
    bits: float, step_s: float, target: float, islands: int, ranks: int
) -> None:
    layers = 12
    fleet = Fleet(parameters_of(PRESETS["150m"], 32000), islands, ranks, 2**26)
    advice = advise(fleet, layers, Link(bits, 0.03), step_s, target)
    assert advice.utilisation >= target - 1e-9
    assert advice.link_busy <= 1.0 and advice.inner_steps >= 16
    assert advice.fragments <= layers and advice.overlap_steps < advice.inner_steps
    sync = {
        "mode": advice.mode,
        "wire": advice.wire,
        "inner_steps": advice.inner_steps,
        "fragments": advice.fragments,
        "overlap_steps": advice.overlap_steps,
    }
    model = PRESETS["150m"].model_dump(mode="json")
    assert config(sync=sync, model=model).sync.wire == advice.wire


def test_more_bandwidth_and_fewer_bytes_never_make_it_worse() -> None:
    links = [Link(10 ** (7 + k / 4), 0.03) for k in range(24)]
    for wire in WIRE_BYTES:
        shares = [synchronous(traffic(wire), link, 30, 1.0) for link in links]
        assert shares == sorted(shares)
    for link in links:
        shares = [synchronous(traffic(wire), link, 30, 1.0) for wire in ("fp32", "bf16", "int8", "int4")]
        assert shares == sorted(shares)


def test_fragments_of_a_fleet_are_those_that_a_run_cuts() -> None:
    parameters = [
        Parameter("embedding.weight", (10, 8)),
        *(Parameter(f"layers.{i}.w", (8, 8)) for i in range(4)),
    ]
    fleet = Fleet(parameters, 2, 3, 2**20)
    assert fleet.traffic("fp32", 1).fragments == (27 + 4 * 22,)  # 80 / 3 and 64 / 3, rounded up
    assert fleet.traffic("fp32", 2).fragments == (44, 44, 27)


def test_speed_is_what_is_given_or_follows_from_flops() -> None:
    guess = speed_of(8 * 989e12 * 0.5, 8, mfu=0.5)
    assert guess.step_s == pytest.approx(1.0) and guess.guessed
    assert speed_of(1e15, 1, gpu="A100", mfu=1.0).step_s == pytest.approx(1e3 / GPUS["a100"][0])
    assert speed_of(1e15, 1, tflops=500, mfu=1.0).step_s == pytest.approx(2.0)
    measured = speed_of(1e15, 1, step_s=3.5, gpu="h200")
    assert (measured.step_s, measured.guessed, measured.memory_bytes) == (3.5, False, 141 * 10**9)


# ---- the whole plan ----


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
        ("stable", 2000, 4000),
    ]
    assert "no end" in run(tmp_path / "open.json")[1]


def test_other_models_islands_and_ranks_than_the_config_says() -> None:
    plan = numbers(SEVEN, "--model", "1t", "--islands", "64", "--ranks", "512")
    assert 0.9e12 < plan["parameters"] < 1.1e12
    assert (plan["islands"], plan["ranks"]) == (64, 512)
    assert plan["tokens_per_step"] == 2 * 16 * 512 * 64 * 8192
    received = {e["wire"]: e["rank_received"] // e["rank_sent"] for e in plan["exchange"]}
    assert set(received.values()) == {63}
    tiny = numbers(SEVEN, "--model", TINY)
    assert tiny["parameters"] == 820_352


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
    assert picture.shape[:2] == (780, 1800)
    assert picture[..., :3].std() > 0.05
    # the four modes of the left panel are drawn in their colours
    pixels = {tuple(p) for p in (picture[:, :900, :3] * 255).round().astype(int).reshape(-1, 3).tolist()}
    assert {(0x2C, 0xA0, 0x2C), (0x1F, 0x77, 0xB4), (0xE8, 0x71, 0x0A), (0x8C, 0x8C, 0x8C)} <= pixels


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


def test_seconds_and_utilisation_are_those_of_the_islands_benchmark() -> None:
    """As benchmarks/README.md has them: 4.24 s a round, and 0.95 of 5 steps a second.

    Two islands of one rank, 999,680 parameters in fp32 over 16 Mbit/s, H = 5 steps of 0.2 s. A plan has no
    overhead of protocols: it may be below, by less than a tenth.
    """
    parameters = [Parameter(f"layers.{i}.weight", (250, 1000)) for i in range(3)]
    parameters += [Parameter("layers.3.weight", (249, 1000)), Parameter("norm.weight", (680,))]
    traffic = Fleet(parameters, 2, 1, 64 << 20).traffic("fp32", 1)
    link = Link(16e6, 1e-4)
    assert 0.9 * 4.24 < traffic.sync_seconds(link) < 4.24
    assert synchronous(traffic, link, 5, 0.2) == pytest.approx(0.95 / 5.0, rel=0.1)
