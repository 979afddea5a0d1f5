"""Layers, attention and utilisation of the model, as far as they need no process group."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_wsd.models.attention import CausalAttention, Spec, choose_spec, find_spec, layer_spec
from megatron_wsd.models.gpt import CausalInputs
from megatron_wsd.models.utilisation import peak_tflops, utilisation, was_clipped


@pytest.mark.parametrize(
    ("cuda", "te", "spec"),
    [
        (True, True, "transformer_engine"),
        (True, False, "sdpa"),
        (False, False, "local"),
        (False, True, "local"),
    ],
)
def test_the_layers_that_suit_a_machine(cuda: bool, te: bool, spec: Spec) -> None:
    assert choose_spec(cuda, te) == spec


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU gets")
def test_a_cpu_gets_what_it_always_had() -> None:
    assert find_spec() == "local"
    positions, mask = CausalInputs(torch.device("cpu"))(torch.zeros(2, 3, dtype=torch.int64))
    assert positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert mask is not None and mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]


@pytest.mark.parametrize("spec", ["sdpa", "transformer_engine"])
def test_causal_layers_get_no_mask(spec: Spec) -> None:
    assert CausalInputs(torch.device("cpu"), spec)(torch.zeros(2, 3, dtype=torch.int64))[1] is None


def test_only_sdpa_replaces_the_attention() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    cores = [layer_spec(s).submodules.self_attention.submodules.core_attention for s in ("sdpa", "local")]
    assert cores == [CausalAttention, DotProductAttention]


class _Config:
    attention_dropout = 0.0


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
def test_causal_attention_is_its_definition(heads: int, groups: int) -> None:
    g = torch.Generator().manual_seed(heads + groups)
    length, batch, size = 9, 2, 8
    query = torch.randn(length, batch, heads, size, generator=g)
    key, value = (torch.randn(length, batch, groups, size, generator=g) for _ in range(2))
    found = CausalAttention(_Config(), layer_number=1)(query, key, value, None)
    assert found.shape == (length, batch, heads * size)
    for h in range(heads):
        q, k, v = (
            t.double()[:, :, i]
            for t, i in ((query, h), (key, h * groups // heads), (value, h * groups // heads))
        )
        for t in range(length):
            scores = torch.einsum("bd,sbd->bs", q[t], k[: t + 1]) / math.sqrt(size)
            expected = torch.einsum("bs,sbd->bd", scores.softmax(-1), v[: t + 1])
            # sums of up to 9 terms below 4 in fp32: 9 x 4 x 2^-24
            assert (found[t, :, h * size : (h + 1) * size] - expected).abs().max() < 3e-6
    with pytest.raises(ValueError, match="no mask"):
        CausalAttention(_Config())(query, key, value, torch.zeros(1, dtype=torch.bool))


def test_peaks_by_name() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", bf16=True) == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", bf16=True) == 756.0
    assert peak_tflops("NVIDIA H200", bf16=True) == 989.4
    assert peak_tflops("NVIDIA H20", bf16=True) == 148.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB", bf16=True) == 312.0
    assert peak_tflops("NVIDIA A10G", bf16=True) == 70.0
    assert peak_tflops("NVIDIA GB200", bf16=True) == 2500.0
    assert peak_tflops("NVIDIA H100 80GB HBM3", bf16=False) is None
    assert peak_tflops("cpu", bf16=True) is None


def test_utilisation_is_the_share_of_the_peak() -> None:
    # 1000 tokens/s of 5e9 FLOPs each on 2 devices of 10 TFLOP/s
    assert utilisation(1000.0, 5e9, 2, 10.0) == pytest.approx(0.25)
    assert utilisation(1000.0, 5e9, 2, None) is None


def test_clipped_means_above_the_limit() -> None:
    assert was_clipped(1.5, 1.0) and not was_clipped(0.5, 1.0)
    assert not was_clipped(1.5, 0.0), "0: gradients are not clipped"
