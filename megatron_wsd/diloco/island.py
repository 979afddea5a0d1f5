"""Who this process is, and how the ranks of one island agree among themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_wsd.errors import IslandError

ENV_ISLAND = "MEGATRON_WSD_ISLAND"
ENV_ISLANDS = "MEGATRON_WSD_ISLANDS"
ENV_LIGHTHOUSE = "MEGATRON_WSD_LIGHTHOUSE"
ENV_STORE = "MEGATRON_WSD_STORE"
ENV_RUN_DIR = "MEGATRON_WSD_RUN_DIR"
ENV_INTERFACE = "MEGATRON_WSD_INTERFACE"


@dataclass(frozen=True)
class IslandAddress:
    """Where this process stands, as the launcher told it through the environment.

    Attributes:
        island: number of this island, from 0.
        islands: number of islands of the run.
        lighthouse: http address of torchft's lighthouse.
        store: host and port of this island's TCPStore, held by its launcher; the host is the address
            under which the other islands reach this machine.
        run_dir: the run folder, None outside the launcher's.
        interface: the network towards the other islands; None: the one towards the lighthouse.
    """

    island: int
    islands: int
    lighthouse: str
    store: tuple[str, int]
    run_dir: Path | None
    interface: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> IslandAddress:
        """Read it.

        Raises:
            IslandError: the process was not started by `megatron-wsd launch` or `launch/island.sh`.
        """
        missing = [k for k in (ENV_ISLAND, ENV_ISLANDS, ENV_LIGHTHOUSE, ENV_STORE) if not environ.get(k)]
        if missing:
            raise IslandError(
                missing[0],
                "this environment variable, which the launcher sets",
                "nothing",
                "Start the script with `megatron-wsd launch --script ...` or `launch/island.sh`.",
            )
        try:
            island, islands = int(environ[ENV_ISLAND]), int(environ[ENV_ISLANDS])
            host, _, port = environ[ENV_STORE].rpartition(":")
            store = (host.strip("[]"), int(port))
        except ValueError as e:
            raise IslandError(f"{ENV_ISLAND}, {ENV_ISLANDS}, {ENV_STORE}", "numbers", str(e)) from None
        if not 0 <= island < islands:
            raise IslandError(ENV_ISLAND, f"0 to {islands - 1}", island)
        run_dir = Path(environ[ENV_RUN_DIR]) if environ.get(ENV_RUN_DIR) else None
        interface = environ.get(ENV_INTERFACE) or None
        return cls(island, islands, environ[ENV_LIGHTHOUSE], store, run_dir, interface)


class IslandGroup:
    """A gloo group over the ranks of this island, for the outer half alone.

    DeepSpeed's own groups are never used, so that nothing of the outer half can be reordered against
    what DeepSpeed does. To be made on the main thread, by all ranks.

    Args:
        timeout_s: of one agreement; must exceed what one rank may spend alone in an exchange.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_agree(self, ok: bool) -> bool:
        """True if every rank said True. All ranks must call it."""
        flag = torch.tensor([int(ok)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def gather(self, values: list[int]) -> list[list[int]]:
        """The int64 ``values`` of every rank, by rank; equally many on each. All ranks must call it."""
        mine = torch.tensor(values, dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self._group)
        return [t.tolist() for t in everyone]

    def mean(self, value: float) -> float:
        """The mean of a float64 over the ranks. All ranks must call it."""
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return float(total.item()) / self.size

    def broadcast(self, values: list[int]) -> list[int]:
        """Rank 0's int64 ``values`` on every rank. All ranks must call it."""
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self._group)
        return [int(v) for v in tensor]

    def share(self, value: Any) -> Any:
        """Rank 0's json value on every rank. All ranks must call it."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        (length,) = self.broadcast([text.numel()])
        payload = text if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        return json.loads(bytes(payload.tolist()))

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_agree(True)
