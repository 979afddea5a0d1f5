"""megatron-core's GPTModel as this package trains it.

RMSNorm, SwiGLU, rotary embeddings, grouped-query attention, no biases, no dropout: the shape of the
models the field pre-trains at 7B.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_wsd.config import ModelConfig
from megatron_wsd.errors import ConfigError
from megatron_wsd.models.attention import Spec, find_spec, layer_spec


def padded_vocab(vocab_size: int, multiple: int = 64) -> int:
    """The vocabulary rounded up, so that its matrices shard and tile evenly."""
    return -(-vocab_size // multiple) * multiple


def build_gpt(model: ModelConfig, vocab_size: int, spec: Spec | None = None) -> torch.nn.Module:
    """Build the model on the CPU or, inside `deepspeed.zero.Init`, sharded from the start.

    `megatron.core.parallel_state` must be initialised, with ``model.tensor_parallel``. Weights depend only on
    ``model.seed`` (and, on GPUs, on how many ranks cut them), so every island starts from the same ones.

    Args:
        model: its shape.
        vocab_size: rows of the embedding; at least that of the tokenizer.
        spec: of the layers; by default what suits this machine.
    """
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        init_method_std=model.init_std,
        layernorm_epsilon=model.layernorm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=model.tensor_parallel,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Fusions below are CUDA extensions that are not there on every machine.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="full" if model.recompute else None,
        recompute_method="uniform" if model.recompute else None,
        recompute_num_layers=1 if model.recompute else None,
    )
    torch.manual_seed(model.seed)
    if not torch.cuda.is_available():
        tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(model.seed)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(spec or find_spec()),
        vocab_size=vocab_size,
        max_sequence_length=model.seq_length,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        share_embeddings_and_output_weights=model.tie_embeddings,
    )


def resolve_vocab(model: ModelConfig, tokenizer_vocab: int) -> int:
    """Rows of the embedding: as configured, else the tokenizer's vocabulary padded.

    Raises:
        ConfigError: a configured vocabulary is smaller than the tokenizer's.
    """
    if model.vocab_size is None:
        return padded_vocab(tokenizer_vocab)
    if model.vocab_size < tokenizer_vocab:
        raise ConfigError(
            "megatron_wsd.model.vocab_size",
            f"at least the tokenizer's {tokenizer_vocab}",
            model.vocab_size,
            "Raise it or remove the key.",
        )
    return model.vocab_size


class CausalInputs:
    """Position ids and the causal mask, made once a shape.

    ``mask`` is bool [1, 1, T, T], true where attention is not allowed, as megatron-core's own attention
    wants it; None for layers whose attention is causal by itself.

    Args:
        device: of both.
        spec: of the layers; by default what suits this machine.
    """

    def __init__(self, device: torch.device, spec: Spec | None = None) -> None:
        self.device = device
        self._masked = (spec or find_spec()) == "local"
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions [B, T] int64 and mask for tokens [B, T]."""
        batch, length = tokens.shape
        if (batch, length) not in self._made:
            positions = torch.arange(length, device=self.device)[None].expand(batch, length)
            self._made[batch, length] = positions, self._mask(length) if self._masked else None
        return self._made[batch, length]

    def _mask(self, length: int) -> torch.Tensor:
        square = torch.ones(length, length, dtype=torch.bool, device=self.device)
        return torch.triu(square, 1)[None, None]
