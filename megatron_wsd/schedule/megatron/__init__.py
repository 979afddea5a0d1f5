"""Megatron's front: a drop-in ``OptimizerParamScheduler``, and ``install`` for Megatron's training.

Importing this imports megatron-core.
"""

from __future__ import annotations

from megatron_wsd.schedule.megatron.install import install
from megatron_wsd.schedule.megatron.scheduler import OptimizerParamScheduler

__all__ = ["OptimizerParamScheduler", "install"]
