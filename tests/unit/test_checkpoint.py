"""Checkpoints are whole or ignored, and refuse what does not belong to them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_wsd.checkpoint.outer import load_outer, save_outer
from megatron_wsd.checkpoint.store import CheckpointStore, resume_step
from megatron_wsd.config import parse_config
from megatron_wsd.diloco.round import OuterState
from megatron_wsd.errors import CheckpointError
from megatron_wsd.optim.layout import FlatLayout, Segment, parameter_key
from megatron_wsd.optim.outer import OuterHyper, make_outer


class OneRank:
    """The group of an island with a single rank."""

    rank, size = 0, 1

    def all_agree(self, ok: bool) -> bool:
        return ok

    def gather(self, values: list[int]) -> list[list[int]]:
        return [values]


class TwoRanks(OneRank):
    size = 2

    def gather(self, values: list[int]) -> list[list[int]]:
        return [values, values]


def config(**outer: Any) -> Any:
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "megatron_wsd": {"outer": {"optimizer": "cgad", **outer}},
    }
    return parse_config(raw)


def state(names: tuple[str, ...] = ("a.weight", "b.weight"), numel: int = 5000, steps: int = 3) -> OuterState:
    """Some steps in, with 8-bit and fp32 moments."""
    layout = FlatLayout([Segment(n, parameter_key(n), numel, 0, i == 0) for i, n in enumerate(names)])
    g = torch.Generator().manual_seed(5)
    made = OuterState(layout, torch.zeros(layout.total), make_outer("cgad", layout, OuterHyper(lr=1e-2)))
    for step in range(steps):
        merged = torch.zeros(layout.total)
        for view in layout.views(merged):
            view.copy_(torch.randn(view.numel(), generator=g))
        made.optimizer.step(made.anchor, merged)
        made.outer_step, made.tokens, made.inner_step = step + 1, 100 * (step + 1), 10 * (step + 1)
    return made


def saved(folder: Path) -> OuterState:
    made = state()
    save_outer(folder, made, config(), OneRank(), {"steps_since_base": 4})  # type: ignore[arg-type]
    return made


def test_outer_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    made = saved(tmp_path / "outer")
    again = state(steps=0)
    assert again.digest() != made.digest()
    extra = load_outer(tmp_path / "outer", again, config(), OneRank())  # type: ignore[arg-type]
    assert extra == {"steps_since_base": 4}
    assert again.digest() == made.digest() and again.counters() == made.counters()
    for name, tensor in made.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]) and tensor.dtype == again.tensors()[name].dtype
    once = again.digest()
    load_outer(tmp_path / "outer", again, config(), OneRank())  # type: ignore[arg-type]
    assert again.digest() == once
    assert not list((tmp_path / "outer").glob("*.part"))


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"names": ("a.weight", "c.weight")}, "another model"),
        ({"names": ("a.weight",)}, "another model"),
        ({"numel": 4999}, "another model"),
    ],
)
def test_state_of_another_model_is_refused_and_changes_nothing(
    tmp_path: Path, other: dict[str, Any], word: str
) -> None:
    saved(tmp_path / "outer")
    mine = state(steps=0, **other)
    before = mine.digest()
    with pytest.raises(CheckpointError, match=word):
        load_outer(tmp_path / "outer", mine, config(), OneRank())  # type: ignore[arg-type]
    assert mine.digest() == before


def test_other_ranks_optimizer_or_bits_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "outer")
    for conf, group, word in (
        (config(), TwoRanks(), "ranks"),
        (config(optimizer="nesterov"), OneRank(), "optimizer"),
        (config(state_bits=32), OneRank(), "state_bits"),
    ):
        with pytest.raises(CheckpointError, match=word):
            load_outer(tmp_path / "outer", state(steps=0), conf, group)  # type: ignore[arg-type]


def test_damage_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path / "outer")
    file = tmp_path / "outer" / "outer_rank00000.safetensors"
    tensors = load_file(file)
    tensors["anchor"][7] += 1.0
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as f:
        metadata = f.metadata()
    save_file(tensors, str(file), metadata=metadata)
    with pytest.raises(CheckpointError, match="damaged"):
        load_outer(tmp_path / "outer", state(steps=0), config(), OneRank())  # type: ignore[arg-type]


def test_without_its_manifest_it_is_torn(tmp_path: Path) -> None:
    saved(tmp_path / "outer")
    (tmp_path / "outer" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not written to its end"):
        load_outer(tmp_path / "outer", state(steps=0), config(), OneRank())  # type: ignore[arg-type]


def put(store: CheckpointStore, step: int, outer_step: int = 0) -> None:
    store.begin(step, 1)
    (store.staging(step) / "part").mkdir()
    (store.staging(step) / "part" / "x").write_bytes(b"12345")
    store.complete(step, {"config": "c", "outer_step": outer_step})


def test_store_keeps_the_newest_and_ignores_the_torn(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.steps() == []
    for step in (10, 20, 30):
        put(store, step)
    assert store.steps() == [20, 30]
    store.begin(40, 1)  # never completed
    shutil.copytree(store.folder(30), store.folder(50))
    (store.folder(50) / "part" / "x").write_bytes(b"1234")  # a byte short
    shutil.copytree(store.folder(30), store.folder(60))
    (store.folder(60) / "checkpoint.json").write_text("{")
    shutil.copytree(store.folder(30), store.folder(70))
    (store.folder(70) / "part" / "x").unlink()
    assert store.steps() == [20, 30]
    put(store, 30)  # a resumed run writes a step anew
    assert store.steps() == [20, 30]
    manifest = store.manifest(30)
    assert manifest is not None and manifest["files"] == {"part/x": 5} and manifest["step"] == 30


def test_full_disk_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    put(store, 10)
    need = shutil.disk_usage(tmp_path).total + 1
    with pytest.raises(CheckpointError, match="GB free"):
        store.begin(20, need)
    assert store.steps() == [10] and not store.staging(20).exists()


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.begin(10, 1)
    put(store, 20)
    assert [p.name for p in store.root.iterdir()] == ["step_00000020"]


def test_resume_takes_the_newest_that_all_islands_have(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path / f"island_{i}" / "checkpoints", keep=9) for i in range(2)]
    assert resume_step(tmp_path, 0, 2) is None
    for step in (10, 20, 30):
        put(stores[0], step, step // 10)
    assert resume_step(tmp_path, 0, 2) == 30, "the other island's folder is elsewhere"
    for step in (10, 20):
        put(stores[1], step, step // 10)
    assert [resume_step(tmp_path, i, 2) for i in range(2)] == [20, 20]
    put(stores[1], 25, 2)
    shutil.rmtree(stores[1].folder(10))
    shutil.rmtree(stores[1].folder(20))
    assert resume_step(tmp_path, 0, 2) == 30, "nothing in common: its own newest, then one is healed"


def test_islands_stopped_some_steps_apart_go_on_where_they_stood(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path / f"island_{i}" / "checkpoints", keep=9) for i in range(2)]
    for i, step in enumerate((33, 34)):
        put(stores[i], 20, 2)
        put(stores[i], step, 3)
    assert [resume_step(tmp_path, i, 2) for i in range(2)] == [33, 34]
