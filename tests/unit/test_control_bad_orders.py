"""Files in ``RUN/control`` that are no order of this run, or one that it cannot follow: told, harmless."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_wsd import control
from megatron_wsd.cli import app
from megatron_wsd.config import load_config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.diloco.orders import Orders
from megatron_wsd.errors import ConfigError
from megatron_wsd.rundir import RunDir, open_run
from megatron_wsd.schedule import WSD

CONFIG = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"


def begin(folder: Path) -> RunDir:
    run = open_run(folder, load_config(CONFIG, islands=2, ranks=2), resume=False)
    (run.path / "control").mkdir()
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return begin(tmp_path / "run")


def drop(run: RunDir, content: object) -> Path:
    file = run.path / "control" / "order.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def refusal(run: RunDir) -> dict[str, str]:
    found: dict[str, str] = json.loads((run.path / "control" / "order.refused.json").read_text())
    return found


# ---- refused where it lies ----


@pytest.mark.parametrize(
    "content,word",
    [
        ({"length": -1}, "length: expected at least 0, got -1."),
        ({"length": "20"}, "length"),
        ({"length": "auto"}, "length"),
        ({"length": 20.0}, "length"),
        ({"length": True}, "length"),
        ({"length": None}, "length"),
        ({"lenght": 20}, "lenght: expected a known key"),
        ({"length": 20, "at": -3}, "at"),
        ({"length": 20, "at": "now"}, "at"),
        ({"length": 20, "min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"length": 20, "shape": 3}, "shape"),
        ({"length": 20, "then": "again"}, "then"),
        ({"length": 20, "data_mix": "poems"}, "data_mix: expected one of ['decay', 'stable']"),
        ({"length": 20, "run": "0123456789abcdef"}, "It was dropped for another run"),
        ({"kind": "stop"}, "kind"),
        ({"kind": "override", "fields": 3}, "fields"),
        ("null", "order.json: expected a json object, got None."),
        ("[]", "order.json: expected a json object, got []"),
        ("3", "order.json: expected a json object, got 3."),
    ],
    ids=str,
)
def test_what_is_no_order_is_set_aside_with_the_reason(run: RunDir, content: Any, word: str) -> None:
    file, folder = drop(run, content), ControlFolder(run.path)
    with pytest.raises(ConfigError) as caught:
        folder.pending()
    assert word in str(caught.value)
    text = content if isinstance(content, str) else json.dumps(content)
    assert refusal(run) == {"reason": str(caught.value), "order": text}
    assert not file.exists() and folder.pending() is None and folder.accepted() == []
    folder.propose(Order(length=20))  # and nothing is in the way of a right one
    assert folder.pending() is not None


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"length": 2', b'{"length": 20}}', b"\xff\xfe{}", b"[" * 10**5]
)
def test_what_is_not_whole_is_left_alone_until_it_is(run: RunDir, content: bytes) -> None:
    file, folder = drop(run, content), ControlFolder(run.path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"order\.json: expected a whole json object"):
            folder.pending()
        assert file.read_bytes() == content
    assert sorted(path.name for path in file.parent.iterdir()) == ["order.json"]
    drop(run, b'{"length": 20}')
    assert folder.pending() == Order(length=20)


def test_an_unwhole_file_is_withdrawn_by_cancel(run: RunDir) -> None:
    file = drop(run, "{")
    words = ["decay-now", str(run.path), "--steps", "5"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 2 and "decay-now --cancel" in told.stderr
    assert CliRunner().invoke(app, [*words[:2], "--cancel"]).exit_code == 0
    assert not file.exists()


def test_an_order_of_another_run_of_the_same_config_is_refused(run: RunDir, tmp_path: Path) -> None:
    other = begin(tmp_path / "other")
    assert run.facts()["config_digest"] == other.facts()["config_digest"] and run.id != other.id
    assert CliRunner().invoke(app, ["decay-now", str(other.path), "--steps", "5"]).exit_code == 0
    (other.path / "control" / "order.json").rename(run.path / "control" / "order.json")
    with pytest.raises(ConfigError, match=rf"run: expected {run.id}, the id of this run .* got {other.id}"):
        ControlFolder(run.path).pending()
    assert "ask that one" in refusal(run)["reason"]


def test_runs_without_an_id_are_told_apart_by_when_they_began(run: RunDir) -> None:
    facts = {key: value for key, value in run.facts().items() if key != "id"}
    run.run_json.write_text(json.dumps(facts))
    assert run.id == facts["created"]
    folder = ControlFolder(run.path)
    folder.propose(Order(length=20))
    assert folder.pending() is not None


def test_a_repeated_order_is_refused_and_a_new_one_like_it_is_not(run: RunDir) -> None:
    folder = ControlFolder(run.path)
    folder.propose(Order(length=20, nonce="a"))
    text = (run.path / "control" / "order.json").read_text()
    order = folder.pending()
    assert order is not None
    folder.settle([{**order.model_dump(mode="json"), "number": order.number, "step": 30}])
    drop(run, text)
    with pytest.raises(ConfigError, match="expected a new order, got that of step 30 again"):
        folder.pending()
    assert folder.pending() is None
    folder.propose(Order(length=20, nonce="b"))
    assert folder.pending() is not None


@pytest.mark.parametrize("failing", ["rename", "write"])
def test_a_disk_that_refuses_ends_nothing(run: RunDir, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    drop(run, {"length": -1})
    if failing == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(control, "write_json_atomic", fail)
    with pytest.raises(ConfigError, match="length"):
        ControlFolder(run.path).pending()


def test_a_file_that_another_island_has_dealt_with_is_no_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise FileNotFoundError

    drop(run, {"length": -1})
    monkeypatch.setattr(Path, "rename", gone)
    assert ControlFolder(run.path).pending() is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ORDERS = st.dictionaries(st.sampled_from([*Order.model_fields, "unit"]), JSON, max_size=5)


@settings(deadline=None)
@given(content=JSON | ORDERS | st.binary(max_size=30))
def test_nothing_else_is_ever_raised(content: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    run = RunDir(folder) if folder.exists() else begin(folder)
    drop(run, content if isinstance(content, bytes) else json.dumps(content))
    try:
        ControlFolder(run.path).pending()
    except ConfigError as e:
        assert "order.json" in str(e)


# ---- agreed on by all islands, and refused by the schedule of all ----


def carry_out(run: RunDir, at: int, *orders: Order) -> tuple[WSD, list[dict[str, Any]]]:
    """What an island at step ``at`` makes of orders that a round has committed there."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = WSD(optimizer, warmup_steps=10)
    scheduler.set_position(at)
    entries = [{**o.model_dump(mode="json"), "number": o.number, "step": at} for o in orders]
    group: Any = SimpleNamespace(rank=0, size=1, share=lambda value: value)
    state: Any = SimpleNamespace(orders=entries)
    journal: Any = SimpleNamespace(note_order=lambda entry, step: None)
    Orders(ControlFolder(run.path), group, state, journal, scheduler).carry_out(at)
    return scheduler, entries


def override(**fields: Any) -> Order:
    return Order(kind="override", fields=fields)


@pytest.mark.parametrize(
    "order,reason",
    [
        (Order(length=20, at=49), "That has passed"),
        (Order(), "--steps: expected a whole number of at least 1, got 0"),
        (Order(length=20, shape="linnear"), "Did you mean 'linear'"),
        (Order(length=20, shape="geometric"), "--min-lr-ratio: expected more than 0 for --shape"),
        (Order(kind="cancel"), "none is planned"),
        (override(decay_steps=30), "a schedule that has a decay"),
        (override(decay_start=60, decay_steps=-1), "decay_steps"),
        (override(decay_start=49, decay_steps=10), "That has passed"),
        (override(decay_start=60, decay_steps=10, warmup_steps=70), "where warmup_steps ends"),
        (override(decay_start=60, total_steps=60), "0 steps of decay"),
        (override(decay_start=60, decay_steps="auto"), "decay_steps"),
        (override(decay_start=60, decay_steps="10 tokens"), "a length in steps"),
        (override(max_lr="auto"), "max_lr"),
        (override(min_lr=2.0, decay_start=60, decay_steps=5), "the peak of param group 0"),
        (override(warmup=3), "Did you mean 'warmup_steps'"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else value.model_dump_json(exclude_defaults=True),
)
def test_what_the_schedule_cannot_follow_is_recorded_and_changes_nothing(
    run: RunDir, order: Order, reason: str
) -> None:
    scheduler, (entry,) = carry_out(run, 50, order)
    untouched, _ = carry_out(run, 50)
    assert reason in entry["refused"]
    assert ControlFolder(run.path).accepted() == [entry]
    assert scheduler.state_dict() == untouched.state_dict()
    assert scheduler.optimizer.param_groups[0]["lr"] == 1.0


def test_a_second_decay_is_refused_and_the_first_goes_on(run: RunDir) -> None:
    scheduler, entries = carry_out(run, 50, Order(length=20, nonce="a"), Order(length=5, nonce="b"))
    assert "refused" not in entries[0] and "planned" in entries[1]["refused"]
    assert scheduler.schedule.end == 70


@settings(deadline=None)
@given(
    fields=st.dictionaries(
        st.sampled_from(control.OVERRIDABLE), JSON | st.just("5 steps"), min_size=1, max_size=3
    )
)
def test_no_override_can_end_a_run(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "fields"
    run = RunDir(folder) if folder.exists() else begin(folder)
    scheduler, (entry,) = carry_out(run, 50, override(**fields))
    if "refused" in entry:
        assert scheduler.state_dict() == carry_out(run, 50)[0].state_dict()
    assert all(0.0 <= rate < float("inf") for rate in scheduler.get_lr())
