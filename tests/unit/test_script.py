"""A script of a user's own: the records that the loop writes for it, and updates that it forgets to count."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_wsd import report
from megatron_wsd.diloco.script import Script
from megatron_wsd.errors import ConfigError
from megatron_wsd.metrics import Metrics
from megatron_wsd.records import read_metrics
from megatron_wsd.reporting.page import write_page
from megatron_wsd.reporting.status import RunStatus
from megatron_wsd.schedule.deepspeed import WSD


class Engine:
    """An engine whose every second micro-batch is an update, at the rate of a schedule or a constant one."""

    def __init__(self, schedule: dict[str, Any] | None) -> None:
        self.global_steps = self.micro_steps = 0
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self.lr_scheduler = None if schedule is None else WSD(self.optimizer, **schedule)

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % 2 == 0:
            self.global_steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        return 2.0 if self.global_steps % 2 else None

    def gradient_clipping(self) -> float:
        return 1.0


class Loop:
    """What a `Script` asks of the outer loop, counting as it does.

    The other rank of the island has the losses ``other``, or none.
    """

    def __init__(self, run: Path, engine: Engine, interval: int, other: float | None) -> None:
        self.island, self.outer_step, self.parameters = 0, 0, 7
        self.inner_step, self.last = 0, 0
        self.config = SimpleNamespace(log=SimpleNamespace(interval_steps=interval))
        self.metrics = Metrics(run / "island_0" / "metrics.jsonl")
        self.stop_requested = lambda: False
        self.engine, self._other, self._asked = engine, other, 0
        self.group = SimpleNamespace(mean=self._mean)
        self.script = Script(engine, self)  # type: ignore[arg-type]

    def _mean(self, value: float) -> float:
        """The sum of losses, and then how many they are, over two ranks."""
        self._asked += 1
        if self._other is None:
            return value / 2
        count = self.config.log.interval_steps * 2
        return (value + (self._other * count if self._asked % 2 else count)) / 2

    @property
    def position(self) -> int:
        return self.inner_step

    @property
    def tokens(self) -> int:
        return 100 * self.inner_step

    @property
    def uncounted(self) -> int:
        return self.engine.global_steps - self.inner_step

    def step(self, loss: Any = None) -> None:
        if self.inner_step == 0 and not self.last:
            self.last = 1
            self.script.begin()
        if loss is not None:
            self.script.add(loss)
        if self.uncounted:
            self.inner_step += 1
            self.script.stepped(self.inner_step, 100)


WARM = {"warmup_steps": 3, "decay_start": 7, "decay_steps": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"islands": 1, "ranks": 2, "created": "2026"}))
    (tmp_path / "config.json").write_text(json.dumps({"megatron_wsd": {"sync": {"inner_steps": 5}}}))
    return tmp_path


def train(loop: Loop, updates: int, losses: Any = lambda n: None) -> None:
    for micro in range(2 * updates):
        loop.engine.step()
        loop.step(losses(micro))


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run / "island_0" / "metrics.jsonl") if r["kind"] == kind]


def test_losses_are_means_over_batches_and_ranks_with_the_rate_of_their_update(run: Path) -> None:
    loop = Loop(run, Engine(WARM), interval=5, other=1.0)
    train(loop, 10, lambda micro: torch.tensor([float(micro)], requires_grad=True))
    (start,) = records(run, "start")
    assert (start["step"], start["parameters"], start["resumed"]) == (0, 7, False)
    steps = records(run, "step")
    # every 5, and the last step of each phase: warm-up 3, stable 7, decay 10
    assert [(r["step"], r["phase"]) for r in steps] == [
        (3, "warmup"),
        (5, "stable"),
        (7, "stable"),
        (10, "decay"),
    ]
    schedule = loop.engine.lr_scheduler.schedule  # type: ignore[union-attr]
    assert [r["lr"] for r in steps] == [schedule.rate(r["step"] - 1, 0.1) for r in steps]
    # micro-batches 0 to 5 on this rank, and 10 of 1.0 on the other
    assert steps[0]["loss"] == pytest.approx((0 + 1 + 2 + 3 + 4 + 5 + 10) / 16)
    assert all(r["tokens"] == 100 * r["step"] and r["tokens_per_s"] > 0 for r in steps)
    assert [r.get("grad_norm") for r in steps] == [2.0, 2.0, 2.0, None] and steps[0]["clipped"] is True


def test_a_script_that_tells_nothing_is_reported_all_the_same(run: Path) -> None:
    loop = Loop(run, Engine(WARM), interval=5, other=None)
    train(loop, 10)
    loop.script.finished(None)
    loop.script.close()
    loop.metrics.close()
    assert ["loss" in r for r in records(run, "step")] == [False] * 4
    summary = report.summarise(run)
    assert summary["phases"][0] == {"phase": "warmup", "first_step": 1, "last_step": 3}
    assert (summary["islands"][0]["last_step"], summary["islands"][0]["end"]) == (10, "finish")
    report.draw(run, run / "run.png")
    write_page(run, run / "report.html", [])
    found = RunStatus(run).look()
    assert (found["state"], found["position"], found["phase"]) == ("finished", 10, "decay")


def test_a_rank_that_has_no_loss_does_not_count(run: Path) -> None:
    loop = Loop(run, Engine(WARM), interval=5, other=None)
    train(loop, 3, lambda micro: 4.0 if micro % 2 else None)
    assert records(run, "step")[0]["loss"] == 4.0


def test_another_scheduler_has_a_rate_and_no_phase(run: Path) -> None:
    loop = Loop(run, Engine(None), interval=2, other=None)
    train(loop, 5, lambda micro: 1.5)
    loop.script.finished(None)
    steps = records(run, "step")
    assert [r["step"] for r in steps] == [2, 4] and "phase" not in steps[0] and steps[0]["lr"] == 0.1
    assert report.summarise(run)["phases"] == []
    report.draw(run, run / "run.png")
    write_page(run, run / "report.html", [])
    assert RunStatus(run).look()["phase"] is None


def test_what_is_no_loss_is_refused(run: Path) -> None:
    loop = Loop(run, Engine(WARM), interval=5, other=None)
    with pytest.raises(ConfigError, match=r"loss: expected one number, .* got shape \(8,\)"):
        loop.script.add(torch.zeros(8))


def test_an_update_that_is_not_counted_is_refused_at_the_next_one(run: Path) -> None:
    engine = Engine(WARM)
    loop = Loop(run, engine, interval=5, other=None)
    train(loop, 2)
    engine.step()
    engine.step()  # of one update, accumulated: nothing is forgotten yet
    with pytest.raises(ConfigError, match=r"outer.step\(\): expected a call after every engine.step\(\)"):
        engine.step()
    assert engine.global_steps == 3, "it was not made"
    with pytest.raises(ConfigError, match="got 1 update of the engine without one"):
        loop.script.check()  # as `finish` does
    loop.step()
    engine.step()
    loop.script.close()
    for _ in range(5):
        engine.step()  # the loop is closed, and the engine the script's alone
    assert "step" not in vars(engine)


def test_how_a_script_ended(run: Path) -> None:
    """By its own end; closed without a last round; by an exception; never begun."""

    def ended(finish: bool) -> list[str]:
        loop = Loop(run, Engine(WARM), interval=5, other=None)
        train(loop, 3)
        if finish:
            loop.script.finished(None)
        loop.script.close()
        loop.script.close()
        found = [r["event"] for r in records(run, "event")]
        (run / "island_0" / "metrics.jsonl").unlink()
        return found

    assert ended(True) == ["finish"]
    assert ended(False) == ["stop"]
    try:
        raise RuntimeError
    except RuntimeError:
        assert ended(False) == []
        assert ended(True) == ["finish"]
    loop = Loop(run, Engine(WARM), interval=5, other=None)
    loop.script.close()
    assert records(run, "event") == []


def test_a_last_round_that_was_given_up_is_no_end(run: Path) -> None:
    loop = Loop(run, Engine(WARM), interval=5, other=None)
    train(loop, 3)
    loop.script.finished(SimpleNamespace(void=True))  # type: ignore[arg-type]
    loop.script.close()
    assert [r["event"] for r in records(run, "event")] == ["stop"]
