"""Makes ``"scheduler": {"type": "WSD"}`` known to DeepSpeed, whichever of the two is imported first.

DeepSpeed looks the type up as an attribute of `deepspeed.runtime.lr_schedules`. Importing DeepSpeed here
would cost every `megatron-wsd --help` ten seconds, so the name is added when that module is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_MODULE = "deepspeed.runtime.lr_schedules"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `lr_schedules` as Python would, and has WSD added after it has run."""

    _asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from megatron_wsd.schedule.deepspeed import WSD

        module.WSD = WSD  # type: ignore[attr-defined]


def register_with_deepspeed() -> None:
    """Do it now if DeepSpeed is there already, else when it comes. Safe to repeat."""
    if _MODULE in sys.modules:
        from megatron_wsd.schedule.deepspeed import register

        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
