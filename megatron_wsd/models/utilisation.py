"""How much of the hardware the model's arithmetic uses. Pure."""

from __future__ import annotations

import time
from typing import Any

# Dense bf16 TFLOP/s with fp32 accumulation, from the makers' data sheets. The first name found counts.
_PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


def peak_tflops(device: str, *, bf16: bool) -> float | None:
    """What one device could compute at most, in TFLOP/s; None if that is not known.

    Args:
        device: as `torch.cuda.get_device_name` gives it.
        bf16: the model multiplies in bf16. For fp32 there is no number: it depends on whether TF32 is on.
    """
    if not bf16:
        return None
    return next((peak for name, peak in _PEAK_TFLOPS if name in device), None)


def utilisation(tokens_per_s: float, flops_per_token: float, ranks: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation (MFU): of what the hardware could compute, the share that the model needs.

        tokens/s * FLOPs per token / (ranks * peak)

    What is computed twice to save memory does not count.

    Args:
        tokens_per_s: of the island.
        flops_per_token: forward and backward, see `megatron_wsd.planner.model.flops_per_token`.
        ranks: devices of the island.
        peak: TFLOP/s of one; None if not known, and then so is the result.

    Reference:
        PaLM, arXiv 2204.02311, section 4.1 and appendix B.
    """
    return None if peak is None else tokens_per_s * flops_per_token / (ranks * peak * 1e12)


def was_clipped(grad_norm: float, limit: float) -> bool:
    """Whether gradients of this norm were scaled down to ``gradient_clipping``; 0 there means never."""
    return limit > 0 and grad_norm > limit


class Window:
    """Loss and speed since the last line."""

    def __init__(self) -> None:
        self._losses: list[Any] = []
        self._tokens = 0
        self._since = time.perf_counter()

    def add(self, loss: Any, tokens: int) -> None:
        self._losses.append(loss)
        self._tokens += tokens

    def close(self) -> tuple[float, float]:
        """Mean loss over steps and ranks, and the island's tokens a second."""
        import torch

        mean = torch.stack(self._losses).mean().double()
        torch.distributed.all_reduce(mean)
        loss = float(mean) / torch.distributed.get_world_size()
        now = time.perf_counter()
        speed = self._tokens / max(now - self._since, 1e-9)
        self._losses, self._tokens, self._since = [], 0, now
        return loss, speed
