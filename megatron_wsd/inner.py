"""Whose AdamW takes the inner steps: NVIDIA apex's, DeepSpeed's or torch's.

All of them compute the AdamW that the json's optimizer block describes, and differ in speed and in the last
bits. What is there is looked up first (`find`), then one is chosen (`choose`, pure), then it is built
(`build`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron_wsd.config import BLOCK, Config, parse_config
from megatron_wsd.errors import ConfigError

Kind = Literal["apex", "deepspeed", "deepspeed_cpu", "torch_fused", "torch", "json"]

NOT_NVIDIAS = "not NVIDIA's, but the unrelated package of that name on PyPI"


@dataclass(frozen=True)
class Found:
    """Why an implementation cannot be used at once; empty where it can.

    Attributes:
        apex: NVIDIA's FusedAdam.
        deepspeed: the one of DeepSpeed that fits: FusedAdam on a GPU, DeepSpeedCPUAdam on the CPU.
    """

    apex: str = ""
    deepspeed: str = ""

    @classmethod
    def together(cls, each: Sequence[Found]) -> Found:
        """What all ranks of an island can use: a reason of one of them counts for all."""
        reasons = {f.name: [getattr(e, f.name) for e in each] for f in fields(cls)}
        return cls(**{name: next(filter(None, those), "") for name, those in reasons.items()})


@dataclass(frozen=True)
class Choice:
    """Which implementation, and why.

    Attributes:
        kind: ``json`` leaves it to DeepSpeed, for an optimizer that is no Adam.
        why: for people.
        builds: DeepSpeed compiles it first, which takes minutes.
    """

    kind: Kind
    why: str
    builds: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return _NAMES[self.kind]

    @property
    def family(self) -> str:
        """Equal where one implementation can go on from what the other has written."""
        return self.kind.split("_fused")[0]

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


_NAMES: dict[Kind, str] = {
    "apex": "apex FusedAdam",
    "deepspeed": "DeepSpeed FusedAdam",
    "deepspeed_cpu": "DeepSpeedCPUAdam",
    "torch_fused": "torch fused AdamW",
    "torch": "torch AdamW",
    "json": "DeepSpeed's choice",
}


def choose(config: Config, found: Found, *, cuda: bool) -> Choice:
    """Pick the implementation.

    ``"torch_adam": true`` in the json is DeepSpeed's own way to say it, and counts. Else, as ``inner``
    says; ``auto`` takes the first that is there of apex's, DeepSpeed's and torch's fused one, and never one
    that would have to be compiled first.

    Args:
        config: of the run.
        found: what can be used at once.
        cuda: the model trains on a GPU.

    Raises:
        ConfigError: apex was asked for and cannot be used.
    """
    optimizer = config.deepspeed.get("optimizer", {})
    params = optimizer.get("params", {})
    if str(optimizer.get("type", "")).lower() not in ("adam", "adamw"):
        return Choice("json", f"optimizer.type is {optimizer.get('type')}")
    if params.get("torch_adam"):
        return Choice("torch", "torch_adam is true")
    own: Kind = "deepspeed" if cuda and not _offloads(config) else "deepspeed_cpu"
    if config.inner == "apex":
        if found.apex:
            raise ConfigError(f"{BLOCK}.inner", "an apex that can be used", found.apex, 'Or set "auto".')
        return Choice("apex", 'inner is "apex"')
    if config.inner == "deepspeed":
        return Choice(own, 'inner is "deepspeed"', builds=bool(found.deepspeed))
    if config.inner == "torch":
        return Choice("torch_fused", 'inner is "torch"')
    apex = "it does not step on the CPU" if _offloads(config) else found.apex
    if not apex:
        return Choice("apex", "it is there")
    if not found.deepspeed:
        return Choice(own, f"it is compiled; apex: {apex}")
    return Choice("torch_fused", f"apex: {apex}; {_NAMES[own]}: {found.deepspeed}")


def _offloads(config: Config) -> bool:
    offload = config.deepspeed.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")


def find(config: Config, *, cuda: bool) -> Found:
    """What this machine has; imports apex, if there is one, and DeepSpeed."""
    return Found(
        apex=apex_trouble() if cuda else "it needs a GPU",
        deepspeed=deepspeed_trouble("fused_adam" if cuda and not _offloads(config) else "cpu_adam"),
    )


def describe() -> str:
    """What ``auto`` takes on this machine for an AdamW without offloading, and why."""
    import torch

    raw = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    config, cuda = parse_config(raw), torch.cuda.is_available()
    return str(choose(config, find(config, cuda=cuda), cuda=cuda))


def apex_trouble() -> str:
    """Why apex's FusedAdam cannot be used; empty if it can."""
    if importlib.util.find_spec("apex") is None:
        return "not installed"
    if not apex_is_nvidias():
        return f"{apex_version()}: {NOT_NVIDIAS}"
    try:
        there = hasattr(importlib.import_module("apex.optimizers"), "FusedAdam")
    except Exception as e:  # a wrong build fails in many ways
        return f"{apex_version()}, does not load: {type(e).__name__}: {e}"
    return "" if there else f"{apex_version()}, built without FusedAdam"


def apex_is_nvidias() -> bool:
    """Whether the package `apex`, which there is, has optimizers at all."""
    spec = importlib.util.find_spec("apex")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    return any((Path(folder) / "optimizers").is_dir() for folder in folders)


def apex_version() -> str:
    """Of the package of that name."""
    try:
        return importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def deepspeed_trouble(op: Literal["fused_adam", "cpu_adam"]) -> str:
    """Why an op of DeepSpeed cannot be used at once; empty if it is compiled, and loaded now.

    Never compiles. DeepSpeed itself would, without a word and for minutes.
    """
    import deepspeed
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils import cpp_extension

    if installed_ops.get(op) or op in OpBuilder._loaded_ops:
        return ""
    try:
        folder = Path(cpp_extension._get_build_directory(op, False))  # where DeepSpeed's own build goes
        built = (folder / f"{op}.so").stat().st_mtime
    except OSError:
        return "not compiled"
    if any(Path(str(package.__file__)).stat().st_mtime > built for package in (torch, deepspeed)):
        return "compiled before DeepSpeed or torch was installed"
    try:
        module = cpp_extension._import_module_from_library(op, str(folder), True)
    except (ImportError, OSError) as e:
        return f"compiled, but does not load: {e}"
    OpBuilder._loaded_ops[op] = module
    return ""


def build(choice: Choice, groups: list[dict[str, Any]], config: Config) -> tuple[Any, dict[str, Any]]:
    """The optimizer for `deepspeed.initialize`, and what must change in the json for it.

    Args:
        choice: see `choose`.
        groups: the param groups.
        config: of the run.

    Returns:
        None if DeepSpeed builds it from the json; and keys to add to the json.

    Raises:
        ConfigError: the implementation does not know a parameter of the json's optimizer block.
    """
    if choice.kind in ("json", "torch"):
        return None, {}
    optimizer = config.deepspeed["optimizer"]
    params = {k: v for k, v in optimizer.get("params", {}).items() if k != "torch_adam"}
    # As DeepSpeed reads it: Adam means AdamW unless told otherwise.
    decoupled = params.pop("adam_w_mode", True) or optimizer["type"].lower() == "adamw"
    kind, extra = _class(choice.kind, decoupled)
    try:
        made = kind(groups, **params, **extra)
    except TypeError as e:
        raise ConfigError(
            "optimizer.params", f"what {choice.name} takes", str(e), f"Or change {BLOCK}.inner."
        ) from e
    # Else DeepSpeed refuses any but its own with offload_optimizer.
    return made, {"zero_force_ds_cpu_optimizer": False} if choice.kind == "torch_fused" else {}


def _class(kind: Kind, decoupled: bool) -> tuple[Any, dict[str, Any]]:
    if kind == "apex":
        return importlib.import_module("apex.optimizers").FusedAdam, {"adam_w_mode": decoupled}
    if kind == "deepspeed":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam, {"adam_w_mode": decoupled}
    if kind == "deepspeed_cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam, {"adamw_mode": decoupled}
    import torch

    return (torch.optim.AdamW if decoupled else torch.optim.Adam), {"fused": True}
