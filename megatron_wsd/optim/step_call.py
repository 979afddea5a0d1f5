"""What every step has in common on its way to a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_wsd.optim.backend import Backend, backend_of
from megatron_wsd.optim.digests import DigestSum, columns_of
from megatron_wsd.optim.layout import SegmentTable


class Step:
    """What every step has in common: checked buffers, the look at the gradient, the digest."""

    def __init__(
        self,
        anchor: torch.Tensor,
        grad: torch.Tensor,
        table: SegmentTable,
        threads: int | None,
        copy: torch.Tensor | None,
        digest: DigestSum | None,
        state: dict[str, torch.Tensor],
    ) -> None:
        self.backend = backend_of(anchor, table, threads)
        self.check = self.backend.check()
        self._anchor = self.check.anchor(anchor)
        self._grad = self.check.flat("grad", grad, torch.float32)
        self._copy = 0 if copy is None else self.check.flat("copy", copy, torch.bfloat16, written=True)
        self._bf16 = anchor.dtype == torch.bfloat16
        self._digest = digest
        self._written = {"anchor": anchor, **state}

    def run(
        self, checked: bool, launch: Callable[[Backend, Any], Any], *, digested_on_gpu: bool = True
    ) -> bool:
        """Launch if the gradient is usable; all buffers of the step must have passed `check` by now.

        Args:
            checked: it is known to be usable.
            launch: calls the kernel.
            digested_on_gpu: the kernel of CUDA, too, digests what it writes; else that is read once more.
        """
        self.check.aliasing()
        if not checked and not self.backend.gradient_ok(self._grad):
            return False
        columns = [] if self._digest is None else columns_of(self._digest.part, self._written)
        fused = digested_on_gpu or not self.backend.on_gpu
        call = self.backend.step_call(
            self._anchor, self._bf16, self._grad, self._copy, columns if fused else []
        )
        total = launch(self.backend, call)
        if self._digest is not None:
            self._digest.add(self.backend.digest_of(total) if fused else self.backend.digest_flat(columns))
        return True
