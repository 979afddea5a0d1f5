"""Islands of unequal speed count steps of their own; what people are told goes by the steps of the run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
from rich.console import Console
from typer.testing import CliRunner

from megatron_wsd import report
from megatron_wsd.checkpoint.standing import Standing
from megatron_wsd.cli import app
from megatron_wsd.cli.status import render
from megatron_wsd.config import load_config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.curves import of_run
from megatron_wsd.data.sampler import MixSampler
from megatron_wsd.errors import CheckpointError
from megatron_wsd.lineage import Parent, began, children, own_orders
from megatron_wsd.reporting.facts import RunFacts
from megatron_wsd.reporting.page import page
from megatron_wsd.reporting.several import decided_differently
from megatron_wsd.reporting.status import RunStatus
from megatron_wsd.rundir import RunDir, open_run
from megatron_wsd.schedule import Schedule

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny_cpu.json"
END, FAST, SLOW = 70, 120, 20  # steps of the run, and of each island its own
DECAY = Order(length=30, at=40, data_mix="decay", nonce="now")


def agreed(step: int, order: Order, **more: Any) -> dict[str, Any]:
    """An order that the islands have committed."""
    return {**order.model_dump(mode="json"), "number": order.number, "step": step, **more}


def cli(*words: object) -> str:
    done = CliRunner().invoke(app, [str(w) for w in words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def steps_of(own: int, every: int) -> list[dict[str, Any]]:
    """The steps that an island logs: it stands at 70 of the run when it has made ``own`` of its own."""
    found = []
    for n in range(every, own + 1, every):
        at = n * END // own
        phase = "warmup" if at <= 24 else "stable" if at <= 45 else "decay"  # passed by what others commit
        found.append(folders.step(n, 5.0 - 0.02 * at, phase, position=at, tokens=1000 * at))
    return found


def contribution(island: int, k: int, age: int, own: int, position: int) -> dict[str, Any]:
    """A round to which one island contributed."""
    each = {"staleness": {str(island): age}, "gates": {str(island): 0.8**age}, "contributors": [island]}
    return folders.outer(own, k, position=position, fragment=k % 2, tokens=1000 * position, **each)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Island 0 is six times as fast as island 1. The decay of steps 41 to 70 was ordered at step 25."""
    raw = json.loads(TINY.read_text())
    raw["scheduler"]["params"] = {"warmup_steps": 20}
    raw["megatron_wsd"]["sync"].update(mode="async", fragments=2)
    config = tmp_path / "open.json"
    config.write_text(json.dumps(raw))
    made = open_run(tmp_path / "base", load_config(config, islands=2, ranks=2), resume=False)
    ControlFolder(made.path).settle([agreed(25, DECAY)])
    for island, own in enumerate((FAST, SLOW)):
        records = [folders.start(0, 0), *steps_of(own, own // 10)]
        for k, (who, age, at) in enumerate([(0, 0, 20), (1, 1, 30), (0, 1, 50), (0, 0, 69)], 1):
            records.append(contribution(who, k, age, at * own // END, at))
        for k, at in ((2, 30), (4, 69)):  # each validates when it hears of the round
            loss = {"outer_step": k, "position": at, "tokens": 1000 * at - 500}
            records.append(folders.evaluated(at * own // END + island, "broad", 4.0 - at / 100) | loss)
        obeyed = folders.event("order", 26 * own // END, "step 25: decay of 30 steps from step 40")
        mix = folders.event("mix", 44 * own // END, "step 40: data mix is now 'decay'")
        records += [obeyed | {"position": 26 + island}, mix | {"position": 43 + island}]
        file = made.metrics(island)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return made


def save(run: RunDir, orders: tuple[list[dict[str, Any]], int] = ([], 0)) -> None:
    """Checkpoints of step 10 of each island, which the slow one reached eight rounds after the other."""
    config = load_config(run.config_json)
    sampler = MixSampler({"broad": 9000, "high_quality": 9000}, config.data.mixes, seed=7, islands=2)
    fast: dict[str, Any] = {"position": 6, "outer_step": 1, "committed": 5}
    slow: dict[str, Any] = {"position": 37, "outer_step": 9, "committed": 33, "taken": {0: 58, 1: 8}}
    for island, more in enumerate((fast, {**slow, "orders": orders})):
        until = (8, 4)[island] * config.island_batch  # of each the other knows of more
        told = {"drawn": {"stable": {"broad": until}}, "until": until}
        folders.checkpoint(run, island, 10, Schedule(20), sampler=sampler.state_dict(), consumed=told, **more)


def test_the_summary_has_phases_of_the_run_and_steps_of_each_island(run: RunDir) -> None:
    summary = report.summarise(run.path)
    phases = [(p["phase"], p["first_step"], p["last_step"]) for p in summary["phases"]]
    assert phases == [("warmup", 1, 20), ("stable", 21, 40), ("decay", 41, 70)]
    assert summary["position"] == END and [i["last_step"] for i in summary["islands"]] == [FAST, SLOW]
    assert summary["anchor"]["broad"]["step"] == 69
    report.print_summary(summary, Console(file=(out := io.StringIO()), width=200))
    for said in ("120 steps of its own", "20 steps of its own", "warmup 1-20, stable 21-40, decay 41-70"):
        assert said in out.getvalue()


def test_lineage_and_schedule_say_where_the_run_stands(run: RunDir) -> None:
    tree = cli("lineage", run.path)
    assert "base: step 70, own steps 120 + 20, 69,000 tokens" in tree
    assert "warmup 1-20, stable 21-40, decay 41-70" in tree
    assert "step 25: decay of 30 steps (one_minus_sqrt) from step 40, data mix 'decay'" in tree
    (told,) = json.loads(cli("schedule", run.path, "--json"))
    assert (told["position"], told["end"]) == (70, 70)


def test_the_status_has_steps_of_the_run_own_steps_and_the_age_of_the_slow_one(run: RunDir) -> None:
    found = RunStatus(run.path).look(folders.T0 + 300)
    assert [(i["position"], i["step"]) for i in found["islands"]] == [(70, 120), (70, 20)]
    # of its own newest contribution, two rounds ago; each has committed others since
    assert [(i["staleness"], i["gate"]) for i in found["islands"]] == [(0, 1.0), (1, 0.8)]
    assert found["anchor"]["broad"]["step"] == 69
    Console(file=(out := io.StringIO()), width=80).print(render(found))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["island", "state", "seen", "step", "own", "round", "stale", "gate"] in [x[:8] for x in lines]
    assert next(x for x in lines if x[:1] == ["1"])[-9:-4] == ["70", "20", "4", "1", "0.80"]
    assert "step 70, round 4 (64 s ago), async, decay" in out.getvalue()
    assert all(len(line) <= 80 for line in out.getvalue().splitlines() if "base" not in line)


def test_one_validation_of_one_round_is_one_point(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    facts = RunFacts(run.path)
    assert facts.anchors == {"broad": [(29_500.0, 3.7), (68_500.0, pytest.approx(3.31))]}
    figures: list[Figure] = []
    keep = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), keep(f, *a, **k))[1])
    report.draw(run.path, run.path / "run.png")
    loss, rate, _, _ = figures[0].axes
    dotted = next(line for line in loss.get_lines() if str(line.get_label()).startswith("anchor"))
    assert [list(dotted.get_xdata()), len(dotted.get_ydata())] == [[30, 69], 2]
    assert max(max(line.get_xdata()) for line in rate.get_lines()) == END


def test_the_page_counts_in_steps_of_the_run(run: RunDir) -> None:
    facts = RunFacts(run.path)
    assert facts.tokens(30) == 30_000 and facts.extent == (0.0, 70_000.0)
    assert facts.phases == [("warmup", 0, 20_000), ("stable", 20_000, 40_000), ("decay", 40_000, 70_000)]
    # both islands obeyed, at steps of their own: it was decided once
    assert [(d.step, len(d.texts)) for d in facts.decisions] == [(25, 1), (40, 1)]
    assert [len(parts) for parts in facts.stretches.values()] == [1, 1], "a slow island is not away"
    text = page([facts])
    for said in ("Phases by step of the run: warmup 1-20", "steps of its own", "committed over all islands"):
        assert said in text


def test_a_branch_begins_where_the_newest_state_of_its_parent_stands(run: RunDir) -> None:
    save(run)
    ControlFolder(run.path).settle([])
    said = cli("branch", f"{run.path}@37", "--name", "late", "--decay-steps", 12)
    assert "at step 33, which is what was committed in 9 rounds" in said
    assert "(island 0 at its step 10 and to be healed from round 1 on, island 1 at its step 10)" in said
    child = RunDir(run.path.with_name("base-late"))
    parent = Parent.of(child)
    assert parent is not None and (parent.position, began(child)) == (33, 33)
    assert [(c.position, c.steps) for c in children(run)] == [(33, {"0": 10, "1": 10})]
    assert "late @33: not trained yet" in cli("lineage", run.path)
    curves, _ = of_run(run)
    assert [(d.start, d.end) for d in curves[1].schedule.decays] == [(33, 45)] and curves[1].begin == 33


def test_the_decay_of_a_branch_that_is_starting_is_there_once(run: RunDir) -> None:
    """Its islands have agreed on it, at a step beyond that of the parent's checkpoints, and saved nothing."""
    save(run)
    ControlFolder(run.path).settle([])
    cli("branch", f"{run.path}@37", "--name", "late", "--decay-steps", 12)
    child = RunDir(run.path.with_name("base-late"))
    parent = Parent.of(child)
    assert parent is not None
    before = agreed(8, Order(kind="override", fields={"max_lr": 1e-3}, nonce="of the parent"))
    ControlFolder(child.path).settle([before, agreed(35, parent.order)])
    assert "decay of 12 steps from 35" in cli("schedule", child.path)
    curves, _ = of_run(run)
    assert [(d.start, d.end) for d in curves[1].schedule.decays] == [(35, 47)] and curves[1].begin == 35

    # what the parent ordered is not the branch's own
    assert [order["step"] for order in own_orders(child)] == [35]
    found = RunStatus(child.path).look()
    assert [o["step"] for o in found["orders"]["accepted"]] == [35]
    assert [o["step"] for o in found["orders"]["inherited"]] == [8]
    ControlFolder(child.path).settle([before])
    assert own_orders(child) == [] and began(child) == 33


def test_a_branch_is_refused_where_the_decay_has_begun_by_the_steps_of_the_run(run: RunDir) -> None:
    decay = agreed(20, Order(length=30, nonce="early"))
    save(run, ([decay], 0))  # the slow island had not obeyed when it saved
    standing = Standing.read(run.island(1) / "checkpoints" / "step_00000010", load_config(run.config_json))
    assert [(d.start, d.end) for d in standing.plan.schedule.decays] == [(20, 50)]
    words = ["branch", f"{run.path}@37", "--name", "late", "--decay-steps", "12"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "decay began at step 20" in done.output
    (run.island(1) / "checkpoints" / "step_00000010" / "outer" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifests"):
        Standing.read(run.island(1) / "checkpoints" / "step_00000010", load_config(run.config_json))


def test_a_branch_inherits_the_data_that_its_state_has_committed(run: RunDir) -> None:
    save(run)
    ControlFolder(run.path).settle([])
    batch = load_config(run.config_json).island_batch
    cli("branch", f"{run.path}@37", "--name", "late", "--decay-steps", 12)
    facts = RunDir(run.path.with_name("base-late")).facts()["parent"]
    assert facts["tokens"] == 33_000
    assert facts["consumed"] == {
        "0": {"stable": {"broad": 58 * batch}},
        "1": {"stable": {"broad": 8 * batch}},
    }


def test_a_branch_is_compared_by_what_was_decided(run: RunDir) -> None:
    save(run)
    cli("branch", f"{run.path}@37", "--name", "late", "--decay-steps", 12, "--shape", "linear")
    child = RunDir(run.path.with_name("base-late"))
    parent = Parent.of(child)
    assert parent is not None
    ControlFolder(child.path).settle([agreed(33, parent.order)])
    child.island(0).mkdir()
    records = [folders.start(66, 0), folders.step(70, 2.0, "decay", position=40, tokens=40_000)]
    child.metrics(0).write_text("".join(json.dumps(r) + "\n" for r in records))
    found = dict(decided_differently([RunFacts(run.path), RunFacts(child.path)]))
    assert found == {
        "decay: start": ["40", "33"],
        "decay: length": ["30", "12"],
        "decay: shape": ["one_minus_sqrt", "linear"],
        "data mix": ["stable, decay from 40", "stable, decay from 33"],
        "orders": [
            "step 25: decay of 30 steps (one_minus_sqrt) from step 40, data mix 'decay'",
            "step 33: decay of 12 steps (linear) from step 33",
        ],
    }
    text = page([RunFacts(child.path), RunFacts(run.path)])
    assert "Schedule, mixes and orders that differ" in text and "phases" not in found
    assert RunFacts(child.path).begun_step == 33
    assert "Schedule, mixes and orders are equal" in page([RunFacts(run.path), RunFacts(run.path)])


def test_tokens_that_two_tables_count_differently_are_explained(run: RunDir) -> None:
    sizes = {"epoch_samples": {"broad": 1000}, "seq_length": 1000}
    lines = run.metrics(0).read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), **sizes})
    data = {
        "kind": "data",
        "step": 1,
        "outer_step": 4,
        "first": 0,
        "end": 70,
        "drawn": {"stable": {"broad": 70}},
    }
    run.metrics(0).write_text("\n".join([*lines, json.dumps(data)]) + "\n")
    summary = report.summarise(run.path)
    assert (summary["tokens"], summary["tokens_are"]) == (69_000, "committed")
    report.print_summary(summary, Console(file=(out := io.StringIO()), width=200))
    text = " ".join(out.getvalue().split())
    assert "69,000 tokens committed" in text and "70,000 tokens. The 69,000 committed are the mean" in text
    assert "The 69,000 committed" in page([RunFacts(run.path)])
    run.metrics(0).write_text(run.metrics(0).read_text().replace("70}}", "69}}"))
    assert report.why_other_tokens(report.summarise(run.path)) == ""
