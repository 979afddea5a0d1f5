"""Checkpoints are whole or ignored, and refuse what does not belong to them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
import torch
from outer_states import advance, config_of, state_of
from safetensors.torch import load_file, save_file

from megatron_wsd.checkpoint.outer import load_outer, save_outer
from megatron_wsd.checkpoint.run import stable_steps
from megatron_wsd.checkpoint.store import CheckpointStore, resume_step
from megatron_wsd.config import Config
from megatron_wsd.control import Order
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.errors import CheckpointError
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Schedule

FRAGMENTS = (("a.weight", "b.weight"), ("d.weight",))


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


def config(**outer: Any) -> Config:
    return config_of(outer=outer, sync={"wire": "int8"})


def errors(numel: int = 300, value: float = 0.0) -> dict[str, torch.Tensor]:
    """What encoded contributions have left out."""
    return {"0.error": torch.full((numel,), value), "1.error": torch.full((2,), value)}


def save(folder: Path, state: OuterState, conf: Config, own: dict[str, torch.Tensor]) -> None:
    save_outer(folder, state, conf, OneRank(), {"steps_since_base": 4}, own)  # type: ignore[arg-type]


def load(
    folder: Path,
    state: OuterState,
    conf: Config | None = None,
    group: OneRank | None = None,
    own: dict[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    own = errors() if own is None else own
    return load_outer(folder, state, conf or config(), group or OneRank(), own)  # type: ignore[arg-type]


def saved(folder: Path) -> OuterState:
    """With two orders, and two fragments that stand at different versions."""
    made = state_of(*FRAGMENTS)
    advance(made.fragments[1], 77)
    made.outer_step += 1
    made.orders = [{"number": 3, "kind": "decay", "step": 20}, {"number": 4, "step": 30, "refused": "late"}]
    save(folder, made, config(), errors(value=0.125))
    return made


def test_outer_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    made = saved(tmp_path / "outer")
    again, left = state_of(*FRAGMENTS, steps=0), errors()
    assert again.digest() != made.digest()
    extra = load(tmp_path / "outer", again, own=left)
    assert extra == {"steps_since_base": 4}
    assert all(torch.equal(left[name], tensor) for name, tensor in errors(value=0.125).items())
    assert again.digest() == made.digest() and again.counters() == made.counters()
    for name, tensor in made.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]) and tensor.dtype == again.tensors()[name].dtype
    assert again.counter_digest() == made.counter_digest()
    once = again.digest()
    load(tmp_path / "outer", again)
    assert again.digest() == once
    assert not list((tmp_path / "outer").glob("*.part"))


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"fragments": (("a.weight", "c.weight"), ("d.weight",))}, "another model"),
        ({"fragments": (("a.weight", "b.weight"),)}, "another model"),
        ({"fragments": (("a.weight",), ("b.weight",), ("d.weight",))}, "another model"),
        ({"fragments": (("a.weight",), ("b.weight", "d.weight"))}, "another model"),  # other fragments
        ({"fragments": (("a.weight", "b.weight", "d.weight"),)}, "another model"),
        ({"numel": 4999}, "another model"),
    ],
)
def test_state_of_another_model_is_refused_and_changes_nothing(
    tmp_path: Path, other: dict[str, Any], word: str
) -> None:
    saved(tmp_path / "outer")
    mine, left = (
        state_of(*other.get("fragments", FRAGMENTS), numel=other.get("numel", 5000), steps=0),
        errors(),
    )
    before, counters = mine.digest(), mine.counters()
    with pytest.raises(CheckpointError, match=word):
        load(tmp_path / "outer", mine, own=left)
    mine.forget_digest()
    assert mine.digest() == before and mine.counters() == counters
    assert not any(tensor.any() for tensor in left.values())


def test_other_ranks_optimizer_or_bits_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "outer")
    for conf, group, word in (
        (config(), TwoRanks(), "ranks"),
        (config(optimizer="nesterov"), OneRank(), "optimizer"),
        (config(state_bits=32), OneRank(), "state_bits"),
        (config(anchor_dtype="bf16"), OneRank(), "anchor_dtype"),
        (config_of(sync={"wire": "bf16"}), OneRank(), "sync.wire"),
    ):
        with pytest.raises(CheckpointError, match=word):
            load(tmp_path / "outer", state_of(*FRAGMENTS, steps=0), conf, group)


def test_errors_that_were_fed_back_elsewhere_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "outer")
    for own, word in (
        ({}, "another run"),
        ({**errors(), "2.error": torch.zeros(2)}, "another run"),
        (errors(numel=299), "another config"),
        ({name: tensor.double() for name, tensor in errors().items()}, "another config"),
    ):
        mine = state_of(*FRAGMENTS, steps=0)
        before = mine.digest()
        with pytest.raises(CheckpointError, match=word):
            load(tmp_path / "outer", mine, own=own)
        mine.forget_digest()
        assert mine.digest() == before and not any(tensor.any() for tensor in own.values())


def test_without_errors_to_feed_back_there_are_none(tmp_path: Path) -> None:
    made, again = state_of(steps=2), state_of(steps=0)
    save(tmp_path / "outer", made, config_of(), {})
    load(tmp_path / "outer", again, config_of(), own={})
    assert again.digest() == made.digest() and again.counters() == made.counters()


@pytest.mark.parametrize("damaged", ["0.anchor", "1.anchor", "0.m", "1.r_codes", "1.s_scale"])
def test_damage_is_noticed(tmp_path: Path, damaged: str) -> None:
    saved(tmp_path / "outer")
    file = tmp_path / "outer" / "outer_rank00000.safetensors"
    tensors = load_file(file)
    tensors[damaged].view(-1)[7:8].view(torch.uint8)[0] ^= 1
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as f:
        metadata = f.metadata()
    save_file(tensors, str(file), metadata=metadata)
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "outer", state_of(*FRAGMENTS, steps=0))


def test_a_file_that_cannot_be_read_says_the_way_out(tmp_path: Path) -> None:
    saved(tmp_path / "outer")
    file = tmp_path / "outer" / "outer_rank00000.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"????"  # of the header
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank00000.*Move its step_\.\.\. folder out of checkpoints"):
        load(tmp_path / "outer", state_of(*FRAGMENTS, steps=0))


def test_without_its_manifest_it_is_torn(tmp_path: Path) -> None:
    saved(tmp_path / "outer")
    (tmp_path / "outer" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not written to its end"):
        load(tmp_path / "outer", state_of(*FRAGMENTS, steps=0))


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


def test_resume_does_not_go_back_to_a_step_that_is_only_pinned(tmp_path: Path) -> None:
    """Both still have step 360, for a branch; one was killed at 2850, and the other went on alone."""
    stores = [CheckpointStore(tmp_path / f"island_{i}" / "checkpoints", keep=9) for i in range(2)]
    for store, steps in zip(stores, ((360, 3200, 3240, 3244), (360, 2760, 2800, 2840)), strict=True):
        for step in steps:
            put(store, step, step // 10)
    assert [resume_step(tmp_path, i, 2, keep=3) for i in range(2)] == [3244, 2840], "one is healed"
    assert [resume_step(tmp_path, i, 2, keep=4) for i in range(2)] == [360, 360]


def test_islands_stopped_some_steps_apart_go_on_where_they_stood(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path / f"island_{i}" / "checkpoints", keep=9) for i in range(2)]
    for i, step in enumerate((33, 34)):
        put(stores[i], 20, 2)
        put(stores[i], step, 3)
    assert [resume_step(tmp_path, i, 2) for i in range(2)] == [33, 34]


def wsd_config() -> Config:
    return config_of({"type": "WSD", "params": {"warmup_steps": 5, "max_lr": 1e-3}})


def test_the_newest_stable_checkpoint_outlives_the_decay(tmp_path: Path) -> None:
    run, schedule, config = RunDir(tmp_path), Schedule(5).with_decay(60, 40), wsd_config()
    for step in (20, 40, 59, 60, 80, 100):
        folders.checkpoint(run, 0, step, schedule)
    assert stable_steps(run, 0, config) == {59} and stable_steps(run, 1, config) == set()
    for step in (40, 80):  # it was away at 59
        folders.checkpoint(run, 1, step, schedule)
    assert stable_steps(run, 0, config) == {40, 59} and stable_steps(run, 1, config) == {40}
    kept = CheckpointStore(run.island(0) / "checkpoints", 2, lambda: stable_steps(run, 0, config))
    kept.begin(110, 1)
    kept.complete(110, {})
    assert kept.steps() == [40, 59, 100, 110]


def test_a_checkpoint_saved_before_a_committed_decay_was_obeyed_is_no_stable_one(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), wsd_config()
    decay = {**Order(length=30, nonce="x").model_dump(mode="json"), "number": 1, "step": 58}
    folders.checkpoint(run, 0, 28, Schedule(5), position=55)
    folders.checkpoint(run, 0, 30, Schedule(5), position=60, orders=([decay], 0))
    assert stable_steps(run, 0, config) == {28}
