"""The flat layout: where shards lie, and which are quantised."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_wsd.errors import FieldError
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key, wants_8bit


def segments(*shards: tuple[int, bool]) -> list[Segment]:
    return [Segment(f"p{i}", parameter_key(f"p{i}"), n, 10 * i, q) for i, (n, q) in enumerate(shards)]


def test_quantised_first_and_block_aligned() -> None:
    layout = FlatLayout(segments((10, False), (257, True), (0, True), (256, False), (1, True)))
    assert layout.offsets == (768, 0, 512, 1024, 512)
    assert (layout.total, layout.quantised_total) == (1280, 768)
    assert layout.table8.offset.tolist() == [0, 512, 512]
    assert layout.table32.offset.tolist() == [0, 256]
    assert layout.table8.element0.tolist() == [10, 20, 40]
    assert layout.table32.key.tolist() == [parameter_key("p0"), parameter_key("p3")]
    assert (layout.table8.num_blocks, layout.table8.end, layout.table8.padded) == (3, 513, 768)


def test_views_are_live_disjoint_and_in_the_callers_order() -> None:
    layout = FlatLayout(segments((10, False), (300, True), (0, True), (64, False)), block_size=64)
    flat = torch.zeros(layout.total)
    for i, view in enumerate(layout.views(flat)):
        assert view.numel() == layout.segments[i].numel
        view += i + 1
    assert [int((flat == i + 1).sum()) for i in range(4)] == [10, 300, 0, 64]
    assert int((flat == 0).sum()) == layout.total - 374


def test_empty_layout() -> None:
    layout = FlatLayout([])
    assert (layout.total, layout.quantised_total, layout.views(torch.zeros(0))) == (0, 0, [])


@pytest.mark.parametrize("block_size", [0, 1, 100, 2048, True, 256.5])
def test_refuses_block_sizes(block_size: int) -> None:
    with pytest.raises(FieldError, match="block_size: expected one of 64, 128, 256, 512, 1024"):
        FlatLayout([], block_size)


def test_refuses_negative_sizes_and_wrong_flat() -> None:
    with pytest.raises(FieldError, match="segment 'w': expected numel and element0 >= 0"):
        FlatLayout([Segment("w", 1, -1, 0, True)])
    with pytest.raises(FieldError, match=r"flat: expected shape \[256\]"):
        FlatLayout(segments((10, True))).views(torch.zeros(255))


def test_key_is_stable_across_processes() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    code = f"from megatron_wsd.optim.layout import parameter_key; print(parameter_key({name!r}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == parameter_key(name) == 13960879060469846969
    assert parameter_key("a") != parameter_key("b")


@pytest.mark.parametrize(
    "name,shape,expected",
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", (768, 256), True),
        ("decoder.layers.0.mlp.linear_fc1.weight", (64, 64), True),
        ("decoder.layers.0.mlp.linear_fc1.weight", (64, 63), False),
        ("decoder.layers.0.mlp.linear_fc1.bias", (4096,), False),
        ("embedding.word_embeddings.weight", (50000, 256), False),
        ("model.embed_tokens.weight", (50000, 256), False),
        ("transformer.wte.weight", (50000, 256), False),
        ("output_layer.weight", (50000, 256), False),
        ("lm_head.weight", (50000, 256), False),
        ("decoder.layers.0.input_layernorm.weight", (8192,), False),
        ("transformer.h.0.ln_1.weight", (128, 128), False),
        ("blocks.0.RMSNorm.weight", (128, 128), False),
        ("blocks.0.linear.weight", (128, 128), True),
        ("blocks.0.ln2.weight", (128, 128), False),
    ],
)
def test_what_is_quantised(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert wants_8bit(name, torch.Size(shape).numel(), shape) is expected
