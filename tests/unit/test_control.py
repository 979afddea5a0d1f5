"""Orders dropped as files, branches, and the mixes that follow from them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import run_folders as folders
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.config import load_config
from megatron_wsd.control import ControlFolder, Order, override_order
from megatron_wsd.data.phases import planned_mixes
from megatron_wsd.errors import CheckpointError, ConfigError, ScheduleError
from megatron_wsd.lineage import Child, Parent, children, decay_of_branch, pinned_steps, root_of
from megatron_wsd.rundir import RunDir, open_run
from megatron_wsd.schedule import Schedule

CONFIG = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"


def run_folder(tmp_path: Path, schedule: Schedule | None = None) -> RunDir:
    """A run with checkpoints of steps 10 and 20 on both islands."""
    run = open_run(tmp_path / "base", load_config(CONFIG, islands=2, ranks=2), resume=False)
    for island in range(2):
        for step in (10, 20):
            folders.checkpoint(run, island, step, schedule or Schedule(5), taken={0: step, 1: step})
    return run


def cli(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(w) for w in words])
    return done.exit_code, done.output


def test_an_order_waits_once_and_is_removed_when_it_is_settled(tmp_path: Path) -> None:
    folder = ControlFolder(tmp_path)
    assert folder.pending() is None and folder.accepted() == []
    order = Order(length=10, nonce="a")
    folder.propose(order)
    assert folder.pending() == order
    with pytest.raises(ConfigError, match="waits already"):
        folder.propose(Order(length=20, nonce="b"))
    folder.settle([{**order.model_dump(mode="json"), "number": order.number, "step": 30}])
    assert folder.pending() is None and folder.accepted()[0]["step"] == 30
    assert order.number != Order(length=10, nonce="b").number and order.number > 0


def test_islands_of_one_folder_settle_at_once(tmp_path: Path) -> None:
    folder, order = ControlFolder(tmp_path), Order(length=10, nonce="a")
    folder.propose(order)
    entries = [{**order.model_dump(mode="json"), "number": order.number, "step": 30}]
    failed: list[BaseException] = []

    def settle() -> None:
        try:
            for _ in range(50):
                ControlFolder(tmp_path).settle(entries)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=settle) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and folder.accepted() == entries


@pytest.mark.parametrize("text", ["{", '{"length": -1}', '{"lenght": 3}'])
def test_a_file_that_is_no_order_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "order.json").write_text(text)
    with pytest.raises(ConfigError, match=r"order\.json"):
        ControlFolder(tmp_path).pending()


def test_overrides_are_parsed_and_unknown_fields_refused() -> None:
    order = override_order(["schedule.min_lr_ratio=0.01", "schedule.decay_shape=linear"], "n")
    assert order.fields == {"min_lr_ratio": 0.01, "decay_shape": "linear"}
    for bad in ("schedule.min_lr_ration=1", "min_lr_ratio=1", "schedule.min_lr_ratio", "outer.lr=1"):
        with pytest.raises(ConfigError, match="--override"):
            override_order([bad], "n")


def test_decay_now_checks_what_it_can_before_it_drops_the_file(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    for flags, word in (
        ((), "--steps"),
        (("--steps", 0), "error: --steps: expected a whole number"),
        (("--steps", 5, "--shape", "lineer"), "linear"),
        (("--steps", 5, "--data-mix", "code"), "--data-mix"),
        (("--steps", 5, "--min-lr-ratio", 2), "error: --min-lr-ratio: "),
        (("--steps", 5, "--cancel"), "--cancel"),
    ):
        code, text = cli("decay-now", run.path, *flags)
        assert code == 2 and word in text, text
        assert not (run.path / "control").exists()
    assert cli("decay-now", tmp_path / "none", "--steps", 5)[0] == 2
    assert cli("decay-now", run.path, "--steps", 5, "--data-mix", "decay")[0] == 0
    code, text = cli("decay-now", run.path, "--steps", 5)
    assert code == 2 and "waits already" in text
    assert "Withdrawn" in cli("decay-now", run.path, "--cancel")[1]
    assert ControlFolder(run.path).pending() is None
    done = Order(length=5, nonce="x")
    ControlFolder(run.path).settle([{**done.model_dump(mode="json"), "number": done.number, "step": 12}])
    code, text = cli("decay-now", run.path, "--steps", 5)
    assert code == 2 and "decays over 5 steps from step 12" in text


def test_mixes_follow_decays_and_orders() -> None:
    mixes = ("stable", "decay", "code")
    base = Schedule(5)
    assert planned_mixes(base, [], mixes) == []
    configured = base.with_decay(50, 10)
    assert planned_mixes(configured, [], mixes) == [(50, "decay")]
    assert planned_mixes(configured, [], ("stable",)) == []
    ordered = base.begin_decay(30, 10, then="stable")
    entry = {"kind": "decay", "data_mix": "code", "step": 30, "at": None}
    assert planned_mixes(ordered, [entry], mixes) == [(30, "code"), (40, "stable")]
    assert planned_mixes(ordered, [{**entry, "data_mix": "stable"}], mixes) == []
    assert planned_mixes(ordered, [{**entry, "refused": "no"}], mixes) == [(30, "decay"), (40, "stable")]


def test_a_branch_names_its_parent_and_changes_nothing_in_it(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    code, text = cli("branch", f"{run.path}@10", "--name", "code", "--decay-steps", 5, "--data-mix", "decay")
    assert code == 0, text
    assert "launch" in text and "--resume" in text
    assert all(p.read_bytes() == content for p, content in before.items())
    child = RunDir(tmp_path / "base-code")
    parent = Parent.of(child)
    assert parent is not None and parent.position == 10 and parent.path == run.path
    assert parent.order.data_mix == "decay" and parent.order.length == 5
    assert parent.checkpoint(1) == run.island(1) / "checkpoints" / "step_00000010"
    steps = {"0": 10, "1": 10}
    assert children(run) == [Child("code", 10, steps, child.path)] and pinned_steps(run, 1) == {10}
    assert root_of(child).path == run.path
    code, text = cli("lineage", child.path)
    assert code == 0 and "base" in text and "code @10: not trained yet" in text

    manifest = run.island(1) / "checkpoints" / "step_00000010" / "outer" / "manifest.json"
    manifest.write_text(json.dumps({"digests": ["x", "y"]}))
    with pytest.raises(CheckpointError, match="as it was when the branch was made"):
        parent.checkpoint(1)
    (run.island(0) / "checkpoints" / "step_00000010" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="that this branch began from"):
        parent.checkpoint(0)


def test_branches_that_cannot_be_are_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path, Schedule(5).with_decay(15, 20))
    base = ("--name", "code", "--decay-steps", 5)
    for words, word in (
        ((f"{run.path}@15", *base), "[10, 20]"),
        ((f"{run.path}@x", *base), "after @"),
        ((f"{run.path}@20", *base), "decay began at step 15"),
        ((f"{run.path}@20", *base, "--force"), "running"),
        ((f"{run.path}@10", *base, "--data-mix", "code"), "--config"),
        ((f"{run.path}@10", "--name", "a/b", "--decay-steps", 5), "--name"),
        ((tmp_path / "none", *base), "PARENT"),
    ):
        code, text = cli("branch", *words)
        assert code == 2 and word in text, text
    assert not (tmp_path / "base-code").exists() and not (run.path / "branches").exists()
    assert cli("branch", f"{run.path}@10", *base)[0] == 0
    code, text = cli("branch", f"{run.path}@10", *base, "--run-dir", tmp_path / "other")
    assert code == 2 and "--name" in text


def test_a_branch_may_add_corpora_and_mixes_and_nothing_else(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    raw = json.loads(run.config_json.read_text())
    raw["megatron_wsd"]["data"]["corpora"]["code"] = "builtin:pydoc"
    raw["megatron_wsd"]["data"]["mixes"]["code"] = {"code": 1.0}
    more = tmp_path / "more.json"
    more.write_text(json.dumps(raw))
    flags = ("--name", "code", "--decay-steps", 5, "--data-mix", "code", "--config", more)
    assert cli("branch", run.path, *flags)[0] == 0
    for count in ("count", "ranks"):  # the parent may have them from its command line
        del raw["megatron_wsd"]["islands"][count]
    more.write_text(json.dumps(raw))
    code, text = cli("branch", run.path, *flags[:1], "same", *flags[2:])
    assert code == 0, text
    raw["megatron_wsd"]["data"]["mixes"]["stable"] = {"high_quality": 1.0}
    more.write_text(json.dumps(raw))
    code, text = cli("branch", run.path, *flags[:1], "two", *flags[2:])
    assert code == 2 and "data.mixes.stable" in text
    raw["optimizer"]["params"]["lr"] = 1e-5
    raw["megatron_wsd"]["data"]["mixes"]["stable"] = {"broad": 1.0}
    more.write_text(json.dumps(raw))
    code, text = cli("branch", run.path, *flags[:1], "two", *flags[2:])
    assert code == 2 and "more corpora and mixes at most" in text and "optimizer.params.lr: saved" in text


def test_a_branch_replaces_a_planned_decay_and_no_running_one() -> None:
    planned = Schedule(5).with_decay(50, 10)
    child = decay_of_branch(planned, 20, Order(length=4, shape="linear"))
    assert [(d.start, d.length) for d in child.decays] == [(20, 4)]
    with pytest.raises(ScheduleError):
        decay_of_branch(planned, 55, Order(length=4))
