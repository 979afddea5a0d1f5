"""Memory of a rank, part by part: against real tensors and hand arithmetic."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from planner_cases import SEVEN, config, numbers

from megatron_wsd.config import parse_config
from megatron_wsd.diloco.faults import NO_FAULTS
from megatron_wsd.diloco.fragments import plan_fragments
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.state import FragmentState, OuterState
from megatron_wsd.optim.outer import OuterHyper, make_outer
from megatron_wsd.planner import (
    PRESETS,
    WIRE_BYTES,
    memory_parts,
    parameters_of,
    peak,
    vocabulary,
)
from megatron_wsd.planner.memory import outer_layouts, outer_state_bytes


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
