"""Activations of one micro-batch, in bytes: what backward keeps, and what it works on beside that.

The method is that of Korthikanti et al. (arXiv 2205.05198, section 4): add up what each operation saves.
Their formula, sbh (34 + 5 a s / h), is of a GPT with GELU and dropout; the terms here are of this package's
model (RMSNorm, SwiGLU, grouped queries, no dropout) in megatron-core's local layers, element by element as
autograd saves them. s is the sequence length, b the micro-batch, h and f the hidden sizes, a the heads, d
the size of a head, V the vocabulary, e the bytes of an element, T the ranks of tensor parallelism. They share
a, f and V; each has all of the residual stream, there being no sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_wsd.config import ModelConfig


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank.

    Attributes:
        saved: kept from forward to backward at the loss, where it is most.
        working: the rest of the peak: a recomputed layer, the gradients inside it, a second copy of the
            logits.
    """

    saved: int
    working: int


def activations(
    model: ModelConfig, vocab: int, micro_batch: int, element: int, *, flash: bool
) -> Activations:
    """Bytes of activations.

    Args:
        model: its shape.
        vocab: rows of the output layer.
        micro_batch: sequences of one forward pass.
        element: bytes of an element, 2 for bf16 and 4 for fp32.
        flash: attention never writes its scores to memory; else as megatron-core's local attention.
    """
    s, b, h, t = model.seq_length, micro_batch, model.hidden_size, model.tensor_parallel
    vocab //= t
    layer = _layer(model, b, element, flash)
    # norm before the output layer (in fp32, input and result, with its factors) and that layer's input; the
    # softmax of the loss in fp32; token ids, labels, masks, and which tokens another rank embeds
    outside = s * b * (8 * h + 4 + element * h + 4 * vocab + 17 + (t > 1)) + (0 if flash else s * s)
    logits = element * s * b * vocab if element != 4 else 0  # fp32 logits become the softmax in place
    scores = 0 if flash else element * model.num_attention_heads // t * s * s * b
    inside = max(2 * scores, 4 * element * s * b * model.ffn_hidden_size // t)  # gradients within a layer
    if model.recompute:
        kept = model.num_layers * element * s * b * h + 4 * s * (h // model.num_attention_heads)
        at_loss, in_layer = outside + logits, layer + inside
        # the softmax of the loss is gone when the first layer is recomputed
        return Activations(kept + outside, max(at_loss, in_layer) - outside + scores)
    return Activations(model.num_layers * layer + outside, max(logits, inside - outside, 0) + scores)


def _layer(model: ModelConfig, b: int, e: int, flash: bool) -> int:
    """Saved by one layer that is not recomputed."""
    s, h, t = model.seq_length, model.hidden_size, model.tensor_parallel
    f, a = model.ffn_hidden_size // t, model.num_attention_heads // t
    d = h // model.num_attention_heads
    norms = 2 * (2 * 4 * s * b * h + 4 * s * b)  # in fp32: input and result, and one factor a token
    # inputs of qkv and fc1; input of proj, queries, and keys and values for every head
    tensors = 2 * e * s * b * h + 4 * e * s * b * (h // t)
    if model.num_query_groups == model.num_attention_heads:
        tensors += 2 * e * s * b * (h // t)  # values are then a view that keeps all of the qkv output
    swiglu = 5 * e * s * b * f  # gate and up, twice the gated product's factors, input of fc2
    rotary = 4 * e * s * d
    softmax = 4 * a * s * b if flash else e * a * s * s * b
    return norms + tensors + swiglu + rotary + softmax
