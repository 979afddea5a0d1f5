"""Which implementation of the inner AdamW is chosen, and why."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_wsd.config import parse_config
from megatron_wsd.errors import CheckpointError, ConfigError
from megatron_wsd.inner import Choice, Found, apex_trouble, build, choose, deepspeed_trouble

NOTHING = Found(apex="not installed", deepspeed="not compiled")


def config(inner: str = "auto", kind: str = "AdamW", offload: bool = False, **params: Any) -> Any:
    zero: dict[str, Any] = {"stage": 3}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return parse_config(
        {
            "train_batch_size": 1,
            "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}},
            "zero_optimization": zero,
            "megatron_wsd": {"inner": inner},
        }
    )


@pytest.mark.parametrize(
    ("found", "cuda", "offload", "kind"),
    [
        (Found(), True, False, "apex"),
        (Found(apex="not installed"), True, False, "deepspeed"),
        (Found(deepspeed="not compiled"), True, False, "apex"),
        (NOTHING, True, False, "torch_fused"),
        (Found(), True, True, "deepspeed_cpu"),  # offloaded, it steps on the CPU
        (Found(deepspeed="not compiled"), True, True, "torch_fused"),
        (Found(apex="it needs a GPU"), False, False, "deepspeed_cpu"),
        (NOTHING, False, False, "torch_fused"),
    ],
)
def test_auto_takes_the_first_that_is_there(found: Found, cuda: bool, offload: bool, kind: str) -> None:
    choice = choose(config(offload=offload), found, cuda=cuda)
    assert choice.kind == kind and not choice.builds


def test_the_choice_says_why() -> None:
    text = str(choose(config(), NOTHING, cuda=True))
    assert text == "torch fused AdamW (apex: not installed; DeepSpeed FusedAdam: not compiled)"
    assert str(choose(config(torch_adam=True), Found(), cuda=True)) == "torch AdamW (torch_adam is true)"


def test_what_the_config_names_is_taken() -> None:
    assert choose(config("torch"), Found(), cuda=True).kind == "torch_fused"
    assert choose(config("apex"), Found(), cuda=True).kind == "apex"
    assert choose(config("deepspeed"), Found(), cuda=False) == Choice("deepspeed_cpu", 'inner is "deepspeed"')
    assert choose(config("deepspeed"), NOTHING, cuda=True).builds, "and it is said that this compiles"
    with pytest.raises(ConfigError, match="not installed"):
        choose(config("apex"), NOTHING, cuda=True)
    assert choose(config(kind="Lion"), Found(), cuda=True).kind == "json"


def test_all_ranks_take_the_same() -> None:
    assert Found.together([Found(), Found(deepspeed="not compiled"), Found()]) == Found(
        deepspeed="not compiled"
    )
    assert Found.together([Found(), Found()]) == Found()


def test_two_names_for_one_thing_are_refused() -> None:
    with pytest.raises(ConfigError, match="torch_adam"):
        config("deepspeed", torch_adam=True)
    with pytest.raises(ConfigError, match="no Adam"):
        config("torch", kind="Lion")
    with pytest.raises(ConfigError, match="GPU alone"):
        config("apex", offload=True)
    with pytest.raises(ConfigError, match="Did you mean"):
        config("torhc")
    with pytest.raises(ConfigError, match=r"megatron_wsd\.inner"):
        parse_config({"train_batch_size": 1, "zero_optimization": {"stage": 3}, "inner": "auto"})


def test_whose_it_is_may_differ_between_islands() -> None:
    assert config("torch").digest() == config("auto").digest()
    assert config("torch").digest() != config("torch", eps=1e-6).digest()


def test_a_checkpoint_of_another_implementation_is_refused(tmp_path: Path) -> None:
    from megatron_wsd.checkpoint.run import MANIFEST, RunCheckpoints

    class Engine:
        """Has loaded nothing if there is nothing to load."""

        def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, None]:
            return None, None

    root = tmp_path / "island_0" / "checkpoints"
    folder = root / "step_1"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text('{"inner": "deepspeed_cpu", "schedule": {}}')
    with pytest.raises(CheckpointError, match=r"optimizer of this run, torch, got that of deepspeed_cpu"):
        RunCheckpoints(root, config(), choose(config("torch"), NOTHING, cuda=False).family).load_engine(
            Engine(), folder
        )
    for same in ("deepspeed_cpu", None):  # None: a script of the user's own
        with pytest.raises(CheckpointError, match="none that it can load"):
            RunCheckpoints(root, config(), same).load_engine(Engine(), folder)
    assert choose(config(torch_adam=True), NOTHING, cuda=False).family == "torch", "plain and fused are alike"


def groups() -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.ones(4))], "weight_decay": 0.0}]


def test_torchs_is_built_as_the_json_says() -> None:
    made = config("torch", betas=[0.8, 0.9], weight_decay=0.1)
    optimizer, changes = build(Choice("torch_fused", ""), groups(), made)
    assert type(optimizer) is torch.optim.AdamW and changes == {"zero_force_ds_cpu_optimizer": False}
    (group,) = optimizer.param_groups
    assert (group["fused"], group["betas"], group["lr"]) == (True, (0.8, 0.9), 1e-3)
    assert group["weight_decay"] == 0.0, "of the group, before that of the json"
    # DeepSpeed's "Adam" is AdamW unless it is told otherwise, and so is ours.
    assert type(build(Choice("torch_fused", ""), groups(), config(kind="Adam"))[0]) is torch.optim.AdamW
    coupled, _ = build(Choice("torch_fused", ""), groups(), config(kind="Adam", adam_w_mode=False))
    assert type(coupled) is torch.optim.Adam
    with pytest.raises(ConfigError, match="bias_correction"):
        build(Choice("torch_fused", ""), groups(), config(bias_correction=False))
    assert build(Choice("torch", ""), groups(), config(torch_adam=True)) == (None, {}), "DeepSpeed builds it"


APEX = "class FusedAdam:\n    def __init__(self, groups, adam_w_mode, lr): self.got = adam_w_mode, lr\n"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"__init__.py": ""}, "of unknown version: not NVIDIA's, but the unrelated package"),
        ({"__init__.py": "", "optimizers/__init__.py": ""}, "built without FusedAdam"),
        (
            {"__init__.py": "", "optimizers/__init__.py": "import no_such"},
            "does not load: ModuleNotFoundError",
        ),
        ({"__init__.py": "", "optimizers/__init__.py": APEX}, ""),
    ],
)
def test_apex_is_taken_by_its_symbol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], says: str
) -> None:
    for name in [n for n in sys.modules if n == "apex" or n.startswith("apex.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, text in files.items():
        (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = apex_trouble()
    assert says in found if says else not found
    if not found:
        optimizer, changes = build(Choice("apex", ""), groups(), config("apex"))
        assert (optimizer.got, changes) == ((True, 1e-3), {})
    for name in [n for n in sys.modules if n == "apex" or n.startswith("apex.")]:
        del sys.modules[name]


def test_an_op_of_deepspeed_is_never_compiled_in_passing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert deepspeed_trouble("cpu_adam") == "not compiled"
    library = tmp_path / "cpu_adam" / "cpu_adam.so"
    library.write_text("no library at all")
    assert "does not load" in deepspeed_trouble("cpu_adam")
    os.utime(library, (0, 0))
    assert deepspeed_trouble("cpu_adam") == "compiled before DeepSpeed or torch was installed"
    assert not OpBuilder._loaded_ops
