"""Who may begin a run in a folder, and who may go on with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_wsd.config import Config, parse_config
from megatron_wsd.errors import ConfigError, IslandError
from megatron_wsd.rundir import STOP, held, is_held, open_island, open_run, write_json_atomic


def config(batch: int = 1, **islands: Any) -> Config:
    raw = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": 3},
        "megatron_wsd": {"islands": {"count": 2, "ranks": 2, **islands}},
    }
    return parse_config(raw)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_new_run_is_written_and_its_config_loads_again(tmp_path: Path) -> None:
    run = open_run(tmp_path / "a" / "b", config(), resume=False)
    facts = run.facts()
    assert (facts["islands"], facts["ranks"], facts["config_digest"]) == (2, 2, config().digest())
    again = parse_config(json.loads(run.config_json.read_text()))
    assert again.digest() == config().digest()
    run.set_lighthouse("http://127.0.0.1:1")
    assert run.facts() == {**facts, "lighthouse": "http://127.0.0.1:1"}
    assert not list(run.path.glob(".*.tmp"))


def test_islands_that_begin_in_one_folder_at_the_same_instant_begin_one_run(tmp_path: Path) -> None:
    islands, given = 6, config(count=6, ranks=2)
    for attempt in range(40):
        folder, together = tmp_path / str(attempt), threading.Barrier(islands)

        def begin(island: int, folder: Path = folder, together: threading.Barrier = together) -> str | None:
            together.wait()
            return open_island(folder, given, island=island, resume=False).id

        with ThreadPoolExecutor(islands) as pool:
            ids = set(pool.map(begin, range(islands)))
        assert len(ids) == 1 and None not in ids
        assert not list(folder.glob(".*.tmp"))
        assert parse_config(json.loads((folder / "config.json").read_text())).digest() == given.digest()


def test_of_two_configs_that_begin_at_the_same_instant_one_is_refused(tmp_path: Path) -> None:
    for attempt in range(20):
        folder, together = tmp_path / str(attempt), threading.Barrier(2)

        def begin(batch: int, folder: Path = folder, together: threading.Barrier = together) -> bool:
            together.wait()
            try:
                open_island(folder, config(batch), island=batch, resume=False)
            except ConfigError as e:
                assert "another one" in str(e)
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(begin, range(1, 3))) == [False, True]


def test_what_a_killed_start_left_behind_is_gone_on_with(tmp_path: Path) -> None:
    run = open_run(tmp_path / "r", config(), resume=False)
    run.config_json.unlink()  # killed between the two files
    (run.path / ".nfs0001").touch()
    assert open_run(run.path, config(), resume=True).config_json.exists()
    run.config_json.unlink()
    with pytest.raises(ConfigError, match="another one"):
        open_run(run.path, config(2), resume=True)


def test_an_empty_folder_will_do_and_resuming_nothing_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "typo"):
        with pytest.raises(ConfigError, match="--resume: expected a run to go on with"):
            open_run(folder, config(), resume=True)
    assert not (tmp_path / "typo").exists()
    assert open_run(tmp_path, config(), resume=False).run_json.exists()


def test_a_run_under_way_keeps_its_config(tmp_path: Path) -> None:
    run = open_run(tmp_path, config(), resume=False)
    before = run.config_json.read_bytes()
    with held(run.path / "launch.lock", "launch"):
        with pytest.raises(IslandError, match="no other process at it"):
            open_run(tmp_path, config(heartbeat_timeout_s=9.0), resume=True)
        open_island(tmp_path, config(heartbeat_timeout_s=9.0), island=0, resume=True)
        assert run.config_json.read_bytes() == before


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"--run-dir.*other files and no run\.json"):
            open_run(tmp_path, config(), resume=resume)
    assert everything(tmp_path) == {"thesis.tex": b"x"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(ConfigError, match="--run-dir: expected a folder"):
        open_run(tmp_path / "run", config(), resume=False)


def test_a_run_that_is_there_wants_resume(tmp_path: Path) -> None:
    open_run(tmp_path, config(), resume=False)
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match="Add --resume"):
        open_run(tmp_path, config(), resume=False)
    assert everything(tmp_path) == before
    assert open_run(tmp_path, config(), resume=True).facts() == json.loads(before["run.json"])


def test_resume_with_another_config_is_refused_but_timeouts_may_change(tmp_path: Path) -> None:
    open_run(tmp_path, config(), resume=False)
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=r"train_batch_size: saved 2, given 4"):
        open_run(tmp_path, config(batch=2), resume=True)
    with pytest.raises(ConfigError, match="--ranks: expected 2 ranks"):
        open_run(tmp_path, config(ranks=4), resume=True)
    assert everything(tmp_path) == before
    run = open_run(tmp_path, config(heartbeat_timeout_s=9.0), resume=True)
    written = json.loads(run.config_json.read_text())
    assert written["megatron_wsd"]["islands"]["heartbeat_timeout_s"] == 9.0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"islands": 2}'])
def test_a_torn_run_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=r"run\.json: expected the facts of a run"):
        open_run(tmp_path, config(), resume=True)
    assert everything(tmp_path) == {"run.json": content.encode()}


def test_islands_share_a_folder_and_each_begins_once(tmp_path: Path) -> None:
    run = open_run(tmp_path, config(), resume=False)
    for island in (0, 1):
        open_island(tmp_path, config(), island=island, resume=False)
    run.metrics(1).write_text("")
    with pytest.raises(ConfigError, match="island 1 has not begun"):
        open_island(tmp_path, config(), island=1, resume=False)
    open_island(tmp_path, config(), island=1, resume=True)
    open_island(tmp_path, config(), island=0, resume=False)
    with pytest.raises(ConfigError, match="--config"):
        open_island(tmp_path, config(batch=2), island=0, resume=False)


def test_an_island_alone_on_its_machine_makes_the_folder(tmp_path: Path) -> None:
    run = open_island(tmp_path / "run", config(), island=1, resume=False)
    assert run.island(1).is_dir() and run.facts()["islands"] == 2


def test_a_json_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json_atomic(file, {"x": 1})
    with pytest.raises(TypeError):
        write_json_atomic(file, {"x": object()})
    assert json.loads(file.read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_lock_is_held_by_one_process_and_falls_free_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with held(lock, "island 1"):
        assert is_held(lock)
        with pytest.raises(IslandError, match=f"island 1: .*process {os.getpid()} "), held(lock, "island 1"):
            pass
    assert not is_held(lock)
    program = (
        "import os, sys; from pathlib import Path; from megatron_wsd.rundir import held\n"
        "with held(Path(sys.argv[1]), 'x'): os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program, str(lock)], cwd=root, check=False)
    with held(lock, "island 1"):
        assert is_held(lock)


def test_a_file_system_without_hard_links_can_hold_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run = open_run(tmp_path / "r", config(), resume=False)
    assert not write_json_atomic(run.run_json, {}, first=True) and run.id is not None
    assert not list(run.path.glob(".*.tmp"))


def test_a_refused_island_leaves_a_stop_of_the_running_one(tmp_path: Path) -> None:
    run = open_island(tmp_path, config(), island=0, resume=False)
    (run.island(0) / STOP).touch()
    open_island(tmp_path, config(), island=0, resume=True)
    assert (run.island(0) / STOP).exists()
