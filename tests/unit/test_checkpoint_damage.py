"""Damaged checkpoints: what is noticed, by which rank, what becomes of them, and what is taken instead."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outer_states import config_of, state_of
from test_checkpoint import OneRank

from megatron_wsd.checkpoint.outer import agreed, save_outer
from megatron_wsd.checkpoint.run import RunCheckpoints
from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.checkpoint.whole import check_zip
from megatron_wsd.errors import CheckpointError, DamagedError, MegatronWSDError
from megatron_wsd.fallback import refuse_unhealed, whole_start
from megatron_wsd.lineage import Parent
from megatron_wsd.resume import Start

STATE = "engine/state"


def engine_files(part: int, piece: int) -> tuple[str, str]:
    """As DeepSpeed names those of a rank."""
    name = f"zero_pp_rank_{part}_mp_rank_{piece:02d}"
    return f"{STATE}/{name}_model_states.pt", f"{STATE}/bf16_{name}_optim_states.pt"


class Engine:
    """Writes what DeepSpeed writes for two data parallel ranks of two pieces."""

    lr_scheduler = SimpleNamespace(state_dict=lambda: {"position": 0})

    def save_checkpoint(self, folder: str, tag: str) -> None:
        target = Path(folder) / tag
        target.mkdir(parents=True)
        (target.parent / "latest").write_text(tag)
        for part in range(2):
            for piece in range(2):
                for name in engine_files(part, piece):
                    state = {"a": torch.randn(300), "b": [torch.randn(7).to(torch.bfloat16)], "t": 3}
                    torch.save(state, target / Path(name).name)


class Outer:
    """An outer loop that has only a state."""

    def __init__(self) -> None:
        self.group, self.state, self.inner_step = OneRank(), state_of(steps=1), 0

    def save(self, folder: Path) -> None:
        save_outer(folder, self.state, config_of(), self.group, {"tokens": 0}, {})  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> RunCheckpoints:
    """An island with the checkpoints of steps 10, 20 and 30."""
    made = RunCheckpoints(tmp_path / "island_0" / "checkpoints", config_of(), "torch")
    told = SimpleNamespace(state_dict=dict)
    for step in (10, 20, 30):
        made.save(Engine(), Outer(), told, told, step)  # type: ignore[arg-type]
    return made


def flip(path: Path, at: int, bit: int = 4) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def everyone(own: Any) -> list[Any]:
    """What the ranks of an island of one rank say."""
    return [own]


def begin(made: RunCheckpoints, rank: int = 0, part: int = 0, piece: int = 0) -> tuple[Start, list[str]]:
    """As an island begins that takes its newest checkpoint, or fresh weights."""

    def choose() -> Start:
        steps = made.store.steps()
        return Start(made.store.folder(steps[-1])) if steps else Start()

    return whole_start(made.store, choose, lambda f: made.damage(f, rank, part, piece), everyone, first=True)


def names(made: RunCheckpoints) -> list[str]:
    return sorted(entry.name for entry in made.store.root.iterdir())


def test_what_is_whole_is_taken(saved: RunCheckpoints) -> None:
    assert begin(saved) == (Start(saved.store.folder(30)), [])
    assert names(saved) == ["step_00000010", "step_00000020", "step_00000030"]


OWN = [*engine_files(0, 0), "outer/outer_rank00000.safetensors", "random_rank00000.safetensors"]


@pytest.mark.parametrize("name", OWN)
def test_one_bit_in_any_file_is_noticed_and_the_checkpoint_before_is_taken(
    saved: RunCheckpoints, name: str
) -> None:
    path = saved.store.folder(30) / name
    # In the middle of a file of torch.save are tensors.
    flip(path, len(path.read_bytes()) // 2)
    start, told = begin(saved)
    assert start.folder == saved.store.folder(20)
    assert names(saved) == ["damaged_step_00000030", "step_00000010", "step_00000020"]
    (text,) = told
    assert text.startswith(f"step_00000030 is damaged ({name}: expected ")
    assert text.endswith(" and is now damaged_step_00000030; taken instead: step_00000020")
    assert begin(saved) == (start, []), "and not once more"


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])  # checkpoint.json ends with a line feed


def not_json(path: Path) -> None:
    path.write_text("{")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("checkpoint.json", Path.unlink),
        ("checkpoint.json", not_json),
        ("checkpoint.json", shorten),
        ("outer/manifest.json", Path.unlink),
        ("outer/manifest.json", lambda path: flip(path, 20)),
        *((name, harm) for name in OWN for harm in (Path.unlink, shorten)),
    ],
)
def test_what_is_missing_or_short_is_set_aside_too(
    saved: RunCheckpoints, name: str, harm: Callable[[Path], None]
) -> None:
    harm(saved.store.folder(20) / name)
    assert saved.store.steps() == [10, 30]
    start, told = begin(saved)
    assert start.folder == saved.store.folder(30), "the damaged one is not the newest"
    assert names(saved) == ["damaged_step_00000020", "step_00000010", "step_00000030"]
    assert len(told) == 1 and told[0].startswith(f"step_00000020 is damaged ({name}: expected ")


def test_several_are_passed_over_and_with_none_left_the_others_heal(saved: RunCheckpoints) -> None:
    for step in (30, 20):
        path = saved.store.folder(step) / OWN[1]
        flip(path, len(path.read_bytes()) // 2)
    start, told = begin(saved)
    assert start.folder == saved.store.folder(10) and len(told) == 2
    path = saved.store.folder(10) / OWN[2]
    flip(path, len(path.read_bytes()) - 1)
    start, told = begin(saved)
    assert start.folder is None
    assert told[0].endswith("; taken instead: fresh weights, which the others heal")
    lost = ["damaged_step_00000010", "damaged_step_00000020", "damaged_step_00000030"]
    assert saved.store.lost() == names(saved) == lost
    refuse_unhealed(saved.store.root, lost, 4)
    refuse_unhealed(saved.store.root, [], 0)
    with pytest.raises(CheckpointError, match=r"damaged_step_00000020.*Restore the files"):
        refuse_unhealed(saved.store.root, lost, 0)


def test_a_step_that_is_damaged_twice_keeps_both(saved: RunCheckpoints) -> None:
    told = SimpleNamespace(state_dict=dict)
    for _ in range(2):
        (saved.store.folder(30) / "checkpoint.json").unlink()
        begin(saved)
        saved.save(Engine(), Outer(), told, told, 30)  # type: ignore[arg-type]
    assert names(saved)[:2] == ["damaged_step_00000030", "damaged_step_00000030.2"]
    for step in (40, 50, 60):
        saved.save(Engine(), Outer(), told, told, step)  # type: ignore[arg-type]
    assert names(saved)[:2] == ["damaged_step_00000030", "damaged_step_00000030.2"], "pruning leaves them"
    assert saved.store.steps() == [40, 50, 60]


RANKS = [(rank, rank // 2, rank % 2) for rank in range(4)]  # as tensor parallelism of 2 numbers them


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("piece", [0, 1])
@pytest.mark.parametrize("kind", [0, 1], ids=["model_states", "optim_states"])
def test_each_rank_checks_what_it_loads(saved: RunCheckpoints, part: int, piece: int, kind: int) -> None:
    """DeepSpeed looks at the model states of piece 0 on all ranks of a tensor parallel group."""
    folder = saved.store.folder(30)
    path = folder / engine_files(part, piece)[kind]
    flip(path, len(path.read_bytes()) // 2)
    noticed = [rank for rank, *where in RANKS if saved.damage(folder, rank, *where) is not None]
    own = 2 * part + piece
    assert noticed == ([own, own + 1] if piece == 0 and kind == 0 else [own])


def test_one_rank_that_finds_damage_is_enough(saved: RunCheckpoints) -> None:
    found = DamagedError("x.pt", "a whole zip archive", "none")
    told_by_rank_1 = iter([None, found, None, None])
    start, told = whole_start(
        saved.store,
        lambda: Start(saved.store.folder(saved.store.steps()[-1])),
        lambda folder: None,
        lambda own: [own, next(told_by_rank_1)],
        first=True,
    )
    assert start.folder == saved.store.folder(20) and "(x.pt: expected a whole zip archive" in told[0]


def test_only_the_first_rank_renames(saved: RunCheckpoints) -> None:
    folder = saved.store.folder(30)
    path = folder / OWN[1]
    flip(path, len(path.read_bytes()) // 2)
    starts = iter([Start(folder), Start(saved.store.folder(20))])

    def said(own: Any) -> list[Any]:
        return [next(starts) if own is None else own, own]

    answers = iter([True, False, True, False])
    begins = whole_start(
        saved.store,
        lambda: pytest.fail("another rank chooses"),
        lambda f: saved.damage(f, 0, 0, 0),
        lambda own: said(None) if next(answers) else [own],
        first=False,
    )
    assert begins[0].folder == saved.store.folder(20) and folder.is_dir()


def test_what_belongs_to_something_else_is_not_set_aside(saved: RunCheckpoints) -> None:
    path = saved.store.folder(30) / OWN[1]
    flip(path, len(path.read_bytes()) // 2)
    other = RunCheckpoints(saved.store.root, config_of(), "deepspeed_cpu")
    with pytest.raises(CheckpointError, match="got that of torch") as caught:
        begin(other)
    assert not isinstance(caught.value, DamagedError)
    assert names(saved)[-1] == "step_00000030"


def test_a_file_that_this_rank_cannot_see_is_no_damage(saved: RunCheckpoints) -> None:
    """Rank 0 sees it: then the disk is not shared, or away."""
    (saved.store.folder(30) / OWN[0]).unlink()
    with pytest.raises(FileNotFoundError):
        saved.damage(saved.store.folder(30), 0, 0, 0)


def test_the_parent_of_a_branch_is_left_as_it_is(saved: RunCheckpoints) -> None:
    folder = saved.store.folder(30)
    path = folder / OWN[1]
    flip(path, len(path.read_bytes()) // 2)
    own = CheckpointStore(saved.store.root.parents[1] / "branch" / "island_0" / "checkpoints", 2)
    parent: Parent = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(DamagedError, match=r"the parent's checkpoint.*It is left as it is"):
        whole_start(
            own,
            lambda: Start(folder, None, parent),
            lambda f: saved.damage(f, 0, 0, 0),
            everyone,
            first=True,
        )
    assert names(saved)[-1] == "step_00000030" and not own.root.exists()


def test_no_flipped_bit_of_a_manifest_goes_unnoticed(saved: RunCheckpoints) -> None:
    path = saved.store.folder(30) / "checkpoint.json"
    whole, content = path.read_bytes(), saved.store.read(30)
    draw = random.Random(1)
    noticed = 0
    for at in range(len(whole)):
        flip(path, at, draw.randrange(8))
        try:
            found = saved.store.read(30)
            assert {key: found.get(key) for key in content} == content, at
        except DamagedError:
            noticed += 1
        path.write_bytes(whole)
    assert noticed > len(whole) // 2, "the others are white space"


def test_manifests_from_before_there_were_checksums_are_taken(saved: RunCheckpoints) -> None:
    path = saved.store.folder(30) / "checkpoint.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in content.items() if k not in ("seal", "crc32")}))
    assert begin(saved) == (Start(saved.store.folder(30)), [])


def test_a_flipped_bit_of_a_file_of_torch_is_noticed_or_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    state = {"m": torch.arange(900.0), "v": [torch.ones(5, dtype=torch.bfloat16)], "step": 3, "text": "abc"}
    torch.save(state, path)
    check_zip(path)
    whole, draw, noticed = path.read_bytes(), random.Random(2), 0
    directory = whole.index(b"PK\x01\x02")
    places = [(at, draw.randrange(8)) for at in range(directory, len(whole))]
    places += [(draw.randrange(directory), draw.randrange(8)) for _ in range(500)]
    # Two that all checksums bear: a record that is said to be a folder, and one by the name of another.
    places += [(directory + 38, 4), (whole.index(b"data/0", directory) + 5, 0)]
    for at, bit in places:
        flip(path, at, bit)
        try:
            check_zip(path)
            found = torch.load(path, weights_only=False)
            assert torch.equal(found["m"], state["m"]) and torch.equal(found["v"][0], state["v"][0]), at
            assert found["step"] == 3 and found["text"] == "abc"
        except DamagedError:
            noticed += 1
        path.write_bytes(whole)
    assert noticed > len(places) // 2


@pytest.mark.parametrize("content", [b"", bytes(5000), b"PK\x03\x04 and no more"])
def test_what_is_no_archive_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(DamagedError, match="a whole zip archive"):
        check_zip(tmp_path / "x.pt")


def test_torchs_old_format_has_no_checksums(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    check_zip(tmp_path / "x.pt")


def test_a_removal_that_is_killed_is_no_damage(
    saved: RunCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removes_some_files(folder: Path, **_: Any) -> None:
        (folder / "checkpoint.json").unlink(missing_ok=True)

    told = SimpleNamespace(state_dict=dict)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", removes_some_files)
        saved.save(Engine(), Outer(), told, told, 40)  # type: ignore[arg-type]
    assert saved.store.steps() == [20, 30, 40] and saved.store.torn() == {} and saved.store.lost() == []
    assert "step_00000010.old" in names(saved)
    saved.save(Engine(), Outer(), told, told, 50)  # type: ignore[arg-type]
    assert names(saved) == ["step_00000030", "step_00000040", "step_00000050"]


class Two(OneRank):
    """The group of an island whose other rank has found this."""

    def __init__(self, other: int) -> None:
        self.other = other

    def gather(self, values: list[int]) -> list[list[int]]:
        return [values, [self.other]]


WELL, DAMAGED, WRONG = None, DamagedError("f", "a", "b"), CheckpointError("f", "a", "b")


@pytest.mark.parametrize(
    ("own", "other", "kind"),
    [
        (WELL, 0, None),
        (WELL, 1, DamagedError),
        (WELL, 2, CheckpointError),
        (DAMAGED, 0, DamagedError),
        (DAMAGED, 1, DamagedError),
        (DAMAGED, 2, CheckpointError),
        (WRONG, 0, CheckpointError),
        (WRONG, 1, CheckpointError),
        (OSError("gone"), 1, CheckpointError),
    ],
)
def test_all_ranks_raise_one_kind_of_error(
    own: Exception | None, other: int, kind: type[MegatronWSDError] | None
) -> None:
    def action() -> None:
        if own is not None:
            raise own

    if kind is None:
        agreed(Two(other), Path("f"), action)  # type: ignore[arg-type]
        return
    with pytest.raises(CheckpointError) as caught:
        agreed(Two(other), Path("f"), action)  # type: ignore[arg-type]
    assert type(caught.value) is kind
