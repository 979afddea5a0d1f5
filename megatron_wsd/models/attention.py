"""How the model attends: which layers of megatron-core, and causal attention without a matrix of scores."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Spec = Literal["transformer_engine", "sdpa", "local"]


def choose_spec(cuda: bool, te: bool) -> Spec:
    """Which layers the model is made of.

    Args:
        cuda: it trains on a GPU.
        te: TransformerEngine can be imported.

    Returns:
        ``transformer_engine``: its fused layers and attention; ``sdpa``: megatron-core's own layers, with
        `CausalAttention`; ``local``: these with megatron-core's attention and an explicit mask, which is what
        CPUs run (there the matrix of scores is small, and the bits of earlier runs are kept).
    """
    if not cuda:
        return "local"
    return "transformer_engine" if te else "sdpa"


def find_spec() -> Spec:
    """`choose_spec` for this machine."""
    cuda = torch.cuda.is_available()
    return choose_spec(cuda, cuda and _transformer_engine())


def _transformer_engine() -> bool:
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:  # megatron-core's own answer: it needs more of it than its name
        from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
    except ImportError:
        return False
    return bool(HAVE_TE)


def layer_spec(spec: Spec) -> Any:
    """megatron-core's `ModuleSpec` of one layer, with RMSNorm and causal attention."""
    from megatron.core.models.gpt import gpt_layer_specs

    if spec == "transformer_engine":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    if spec == "sdpa":
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return layer


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d) + causal mask) v, by torch's fused kernels, in the place of megatron-core's.

    megatron-core's own attention writes the matrix of scores [B, heads, T, T]; these kernels (flash attention
    where it is to be had) do not. Takes the arguments that megatron-core gives to its own; a mask must not be
    among them.
    """

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self._dropout = float(config.attention_dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Context of each position.

        Args:
            query: [T, B, heads, d].
            key: [T, B, groups, d]; groups divide heads.
            value: the same.
            attention_mask: None.

        Returns:
            [T, B, heads * d].
        """
        if attention_mask is not None:
            raise ValueError("causal attention takes no mask")
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        context = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return context.permute(2, 0, 1, 3).flatten(2)
