"""What can be an island of a simulation; and a torch model as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_wsd.shards.zero3 import Shard, Shards


class TrainableIsland(Protocol):
    """An island of a simulation.

    Attributes:
        shards: whole parameters, as one rank of a ZeRO-3 island with one rank would hold them.
    """

    shards: Shards

    def train_step(self, n: int) -> int:
        """Take one inner step, from ``n`` completed ones to n + 1.

        Returns:
            Its tokens.
        """


class ModuleShards:
    """The trainable parameters of a torch model on the CPU, each whole; any floating dtype.

    Args:
        module: of which they are; read and written in place.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._params = [p for _, p in named]
        self.shards = [Shard(name, tuple(p.shape), 0, p.numel()) for name, p in named]

    def _which(self, members: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._params)) if members is None else members

    @torch.no_grad()
    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Copy parameters into ``out``, each flat."""
        for i, target in zip(self._which(members), out, strict=True):
            target.copy_(self._params[i].reshape(-1))

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        """Make the model hold ``values``, each flat."""
        for i, value in zip(self._which(members), values, strict=True):
            self._params[i].copy_(value.view(self._params[i].shape))


class ModuleIsland:
    """A torch model with its inner optimizer.

    Args:
        module: to be trained. All islands must begin with the same weights.
        optimizer: of its parameters.
        loss: number of the inner step -> a scalar to go down, and the tokens in it. It draws the data, which
            should differ between islands, and may set the rate of ``optimizer``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[int], tuple[torch.Tensor, int]],
    ) -> None:
        self.module, self._optimizer, self._loss = module, optimizer, loss
        self.shards: Shards = ModuleShards(module)

    def train_step(self, n: int) -> int:
        """Forward, backward and one step of the inner optimizer."""
        self._optimizer.zero_grad(set_to_none=True)
        loss, tokens = self._loss(n)
        loss.backward()
        self._optimizer.step()
        return tokens
