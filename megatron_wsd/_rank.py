"""How a rank that the launcher started ends on an error that its user can mend."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def tell_errors() -> None:
    """In a rank, have errors of this package that nobody catches told in one line, with exit code 2.

    The trainer does so itself; this is for scripts. Other errors, and other processes, are left alone.
    """
    if "MEGATRON_WSD_ISLAND" not in os.environ:
        return
    others = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from megatron_wsd.errors import MegatronWSDError
        from megatron_wsd.metrics import say

        if not isinstance(error, MegatronWSDError):
            others(kind, error, trace)
            return
        say(f"error: island {os.environ['MEGATRON_WSD_ISLAND']} rank {os.environ.get('RANK', '0')}: {error}")
        if os.environ.get("MEGATRON_WSD_DEBUG"):
            sys.__excepthook__(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        # Native threads of torchft and gloo outlive a normal exit.
        os._exit(2)

    sys.excepthook = hook
