"""Where the outer half of a rank lives, and its ways from there to the shards and to the network.

With ``outer.device`` ``cuda`` anchors, outer optimizers, what is fed back, captures, payloads and the sum of
a round are on the rank's GPU; gloo reads and writes the memory of the host, so every message crosses there
and back. With ``cpu`` all of it is on the host, and what is copied from and to the shards is pinned where
these are on a GPU. Nothing else in `diloco` knows which it is.

On a GPU two streams work on the same memory in asynchronous mode: the training thread's, which is
DeepSpeed's, and the outer half's own. Neither waits for the other by itself, so there is one rule: *whoever
hands memory over to the other thread has finished it before* (`Residence.finish`). What is handed over:

- a contribution, by `Local.encode`, before it is offered;
- the base, by `Local.publish`, before its version is told;
- the outer state, whenever `OuterState.still` is given back by who has written it or read it;
- everything there is, once, before the outer thread starts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_wsd.config import BLOCK, Config
from megatron_wsd.errors import ConfigError
from megatron_wsd.optim.extension import cuda_extension


class Residence:
    """Where the outer half of a rank lives.

    Args:
        device: ``cpu``, or a CUDA device with its index.
        staged: messages go over a buffer of their own on the host; by default where the device is no CPU.

    Attributes:
        device: as given.
        staged: likewise.
    """

    def __init__(self, device: torch.device, *, staged: bool | None = None) -> None:
        self.device = device
        self.staged = device.type != "cpu" if staged is None else staged

    def zeros(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros [numel] that shards are copied to or from: on the host pinned, if there is CUDA."""
        pinned = self.device.type == "cpu" and torch.cuda.is_available()
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=pinned)

    def finish(self) -> None:
        """Wait until the device has done all that this thread has asked for."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def beside_training(self) -> AbstractContextManager[object]:
        """For a thread that works while training does: a stream of its own, which is not behind training's.

        On one stream with training every number that the thread wants to know would come after all steps that
        are queued by then.
        """
        if self.device.type == "cuda":
            return torch.cuda.stream(torch.cuda.Stream(self.device))
        return nullcontext()


HOST = Residence(torch.device("cpu"))


def check_residence(config: Config) -> None:
    """That the outer half can live where ``outer.device`` wants it; touches no device.

    Raises:
        ConfigError: it asks for a GPU, and torch finds none.
        NativeError: the CUDA extension is not built.
    """
    if config.outer.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{BLOCK}.outer.device",
            '"cpu" on a machine where torch finds no GPU',
            config.outer.device,
            "`megatron-wsd doctor` says what there is; islands may differ in this key.",
        )
    cuda_extension()


def residence_of(config: Config) -> Residence:
    """The one that ``outer.device`` asks for; on a GPU, the current device of this process.

    Raises:
        FieldError: see `check_residence`.
    """
    check_residence(config)
    if config.outer.device == "cpu":
        return HOST
    return Residence(torch.device("cuda", torch.cuda.current_device()))


class Dock:
    """The way of one message at a time between the outer half and the network.

    Args:
        residence: of the outer half.
        nbytes: of the largest message.
    """

    def __init__(self, residence: Residence, nbytes: int) -> None:
        self._residence = residence
        self._inside = torch.empty(nbytes, dtype=torch.uint8, device=residence.device)
        self._host = self._inside
        if residence.staged:
            self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory of the host, uint8 [nbytes], to receive a message in."""
        return self._host[:nbytes]

    def outbound(self, message: torch.Tensor) -> torch.Tensor:
        """``message``, uint8, in memory of the host, to be sent before the next one comes."""
        if not self._residence.staged:
            return message
        sent = self.room(message.numel()).copy_(message, non_blocking=True)
        self._residence.finish()  # gloo reads it at once
        return sent

    def landed(self, nbytes: int) -> torch.Tensor:
        """What was received in `room`, where the outer half can add it up, until the next message comes."""
        if not self._residence.staged:
            return self._inside[:nbytes]
        found = self._inside[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
        self._residence.finish()  # the next message is received in the same memory
        return found
