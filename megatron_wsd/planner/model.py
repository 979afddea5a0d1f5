"""The parameters of the model by name and shape, as megatron-core's GPTModel has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_wsd.config import BLOCK, Config, ModelConfig
from megatron_wsd.data.tokenizer import ByteTokenizer
from megatron_wsd.errors import ConfigError

_VOCAB_MULTIPLE = 64  # the trainer pads a vocabulary that the config does not name to this


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
        name: dotted, as in the model.
        shape: of the whole parameter.
        tensor_parallel: T, the ranks that hold one model among them; ZeRO-3 shards over the others.
        cut: whether each of them holds a piece of it; else each holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    tensor_parallel: int = 1
    cut: bool = False

    @property
    def global_numel(self) -> int:
        """Elements over all ranks."""
        return math.prod(self.shape)

    @property
    def piece_numel(self) -> int:
        """Elements that are gathered on a rank: of its piece, or of the whole."""
        return self.global_numel // self.tensor_parallel if self.cut else self.global_numel

    def shard(self, ranks: int) -> int:
        """Elements of its largest ZeRO-3 shard among the ``ranks`` of an island."""
        return -(-self.piece_numel // (ranks // self.tensor_parallel))


def _preset(layers: int, hidden: int, ffn: int, heads: int, groups: int, seq: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        seq_length=seq,
        vocab_size=vocab,
        recompute=True,
    )


PRESETS = {
    "25m": _preset(8, 512, 1536, 8, 4, 512, 320),
    "150m": _preset(12, 896, 2432, 14, 7, 2048, 32000),
    "1b": _preset(24, 2048, 5632, 16, 8, 4096, 32000),
    "7b": _preset(32, 4096, 14336, 32, 8, 4096, 32000),
    "13b": _preset(40, 5120, 13824, 40, 40, 4096, 32000),
    "70b": _preset(80, 8192, 28672, 64, 8, 4096, 32000),
    "405b": _preset(126, 16384, 53248, 128, 8, 8192, 128256),
    "1t": _preset(128, 24576, 81920, 192, 8, 8192, 128256),
}
"""Shapes by the name that ``--model`` takes: 7b is Mistral's, 13b and 70b are Llama 2's, 405b is Llama 3.1's;
the others are of the same kind. All with recomputation."""


def vocabulary(config: Config) -> int:
    """Rows of the embedding.

    Raises:
        ConfigError: the config leaves it to a tokenizer that would have to be loaded.
    """
    assert config.model is not None
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.data.tokenizer != "byte":
        raise ConfigError(
            f"{BLOCK}.model.vocab_size",
            "a number, for a plan without the tokenizer at hand",
            "nothing",
            "Set it to the tokenizer's size, rounded up to a multiple of 64.",
        )
    return -(-ByteTokenizer.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def parameters_of(model: ModelConfig, vocab: int) -> list[Parameter]:
    """All parameters, in the order of the model.

    Tensor parallelism cuts every matrix and the embeddings, and leaves the norms whole.

    Args:
        model: its shape.
        vocab: rows of the embedding.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    kv = model.num_query_groups * (h // model.num_attention_heads)
    layer = (
        ("input_layernorm.weight", (h,)),
        ("self_attention.linear_proj.weight", (h, h)),
        ("self_attention.linear_qkv.weight", (h + 2 * kv, h)),
        ("pre_mlp_layernorm.weight", (h,)),
        ("mlp.linear_fc1.weight", (2 * f, h)),
        ("mlp.linear_fc2.weight", (h, f)),
    )
    found: list[tuple[str, tuple[int, ...]]] = [("embedding.word_embeddings.weight", (vocab, h))]
    for i in range(model.num_layers):
        found += [(f"decoder.layers.{i}.{name}", shape) for name, shape in layer]
    found.append(("decoder.final_layernorm.weight", (h,)))
    if not model.tie_embeddings:
        found.append(("output_layer.weight", (vocab, h)))
    return [Parameter(name, shape, model.tensor_parallel, len(shape) > 1) for name, shape in found]


def flops_per_token(model: ModelConfig, vocab: int) -> float:
    """Floating-point operations of forward and backward for one token, recomputation not counted.

        6 N + 12 layers hidden seq_length

    with N the parameters that multiply (the input embedding is looked up, not multiplied) and the attention
    matrix counted in full.

    Reference:
        PaLM, arXiv 2204.02311, appendix B.
    """
    whole = sum(p.global_numel for p in parameters_of(model, vocab))
    looked_up = 0 if model.tie_embeddings else vocab * model.hidden_size
    return 6.0 * (whole - looked_up) + 12.0 * model.num_layers * model.hidden_size * model.seq_length
