"""A pretrain_gpt.py: Megatron's own training loop, its mock data and a tiny GPT, on CPUs with gloo.

Run by test_megatron_training.py, with Megatron's flags. What is not Megatron's here are the functions that
Megatron leaves to such a script (model, data, loss), and what stands in for CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import megatron.core.datasets.utils
import megatron.training.training
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from torch.overrides import TorchFunctionMode

from megatron_wsd.models.cpu import prepare_for_cpu
from megatron_wsd.schedule.megatron import install

# ---- what stands in for CUDA: where tensors are, streams that are always done, one generator ----


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, (str, torch.device)) and str(value).split(":")[0] == "cuda"
    return torch.device("cpu") if named else value


class CudaIsTheCpu(TorchFunctionMode):
    """device="cuda" gives tensors of the CPU, which stay where they are and say that they are CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*(_on_cpu(value) for value in args), **kwargs)


class Stream:
    def wait_stream(self, other: Stream) -> None: ...


def without_cuda() -> contextlib.AbstractContextManager[Any]:
    prepare_for_cpu()
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1
    cuda.Stream = Stream
    cuda.current_stream = lambda *device: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_device = lambda device: None  # each its own: torch.compile keeps a table of these functions
    cuda.synchronize = lambda *device: None
    cuda.empty_cache = lambda: None
    cuda.get_rng_state = lambda *device: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *device: torch.set_rng_state(state)
    training: Any = megatron.training.training
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    # it runs make, whose Makefile the wheel lacks; what would be built is in the wheel
    datasets: Any = megatron.core.datasets.utils
    datasets.compile_helpers = lambda: None
    return CudaIsTheCpu()


# ---- what pretrain_gpt.py has of its own ----


def model(pre_process: bool, post_process: bool, **unused: Any) -> GPTModel:
    args = get_args()
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    sizes = args.padded_vocab_size, args.max_position_embeddings
    return GPTModel(core_transformer_config_from_args(args), spec, *sizes, pre_process, post_process)


def datasets(sizes: tuple[int, int, int]) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="90,5,5",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    mask = mask.view(-1).float()
    loss, tokens = torch.sum(output.view(-1) * mask), mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward(batches: Iterator[dict[str, torch.Tensor]], gpt: GPTModel) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = gpt(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    install()
    with without_cuda():
        container = pretrain_cfg_container_from_args(parse_and_validate_args())
        pretrain(container, datasets, ModelType.encoder_or_decoder, forward, model)
