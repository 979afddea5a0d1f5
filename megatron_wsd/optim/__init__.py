"""Outer optimizers: the staleness gate, CGAD and its comparison optimizers, 8-bit block state.

Names that need torch are imported when first used, so that the command line can read a gate without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_wsd.optim.gate import staleness_gate

_LAZY = {
    "CGAD": "megatron_wsd.optim.cgad",
    "OuterHyper": "megatron_wsd.optim.outer",
    "OuterOptimizer": "megatron_wsd.optim.outer",
    "make_outer": "megatron_wsd.optim.outer",
    "State8": "megatron_wsd.optim.steps",
    "DynamicState8": "megatron_wsd.optim.steps",
    "import_bitsandbytes_state": "megatron_wsd.optim.bitsandbytes",
    "FlatLayout": "megatron_wsd.optim.layout",
    "Segment": "megatron_wsd.optim.layout",
    "parameter_key": "megatron_wsd.optim.layout",
    "wants_8bit": "megatron_wsd.optim.layout",
}

__all__ = ["staleness_gate", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
