"""WSD schedules, DiLoCo across islands and CGAD for DeepSpeed ZeRO-3 and Megatron.

Importing this package lets DeepSpeed's json name ``"scheduler": {"type": "WSD"}``. Everything that needs
torch is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_wsd._rank import tell_errors
from megatron_wsd._register import register_with_deepspeed

if TYPE_CHECKING:
    from megatron_wsd.diloco.loop import OuterLoop, attach

__version__ = "0.1.0"
__all__ = ["OuterLoop", "__version__", "attach"]

register_with_deepspeed()
tell_errors()


def __getattr__(name: str) -> Any:
    if name in ("OuterLoop", "attach"):
        from megatron_wsd.diloco import loop

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
