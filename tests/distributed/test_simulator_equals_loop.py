"""The simulator beside the real loop, real torchft and processes between: the same bits after every round."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_runner import Islands, config, lighthouse
from loop_worker import PlainEngine, PlainShards

from megatron_wsd.config import parse_config
from megatron_wsd.records import Record, of_kind
from megatron_wsd.simulator import simulate
from megatron_wsd.simulator.world import Pending, World

UNTIL = 45  # seven periods of 6 steps, and some that only the end commits


class Plain:
    """The island of `loop_worker`, without the loop."""

    def __init__(self, island: int) -> None:
        self.shards = PlainShards(0)
        self._engine = PlainEngine(self.shards, island)

    def train_step(self, n: int) -> int:
        assert self._engine.global_steps == n
        self._engine.train()
        return 100


def real(folder: Path, raw: dict[str, Any], *jobs: dict[str, Any]) -> tuple[Islands, list[dict[str, Any]]]:
    with lighthouse() as address:
        islands = Islands(folder, address, len(jobs), raw, UNTIL)
        return islands, islands.together(list(jobs))


SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed, in fragments, int8": {"fragments": 2, "wire": "int8", "controlled_delay": [0, 2]},
    "delayed at random, radial, int4, Nesterov": {
        "merge": "radial",
        "wire": "int4",
        "controlled_delay": {"kind": "uniform", "low": 0, "high": 3, "seed": 4},
        "outer": {"optimizer": "nesterov", "lr": 0.4},
    },
}


@pytest.mark.parametrize("sync", SYNCHRONOUS.values(), ids=SYNCHRONOUS.keys())
def test_synchronous_rounds_have_the_same_bits(tmp_path: Path, sync: dict[str, Any]) -> None:
    raw = config("sync", **sync)
    islands, results = real(tmp_path, raw, {}, {})
    records = simulate(parse_config(raw, islands=2, ranks=1), [Plain(0), Plain(1)], UNTIL)
    simulated = {r["outer_step"]: r["digest"] for r in of_kind(records, "round")}
    assert len(simulated) >= 6  # of 8; in the first turns nothing may be due yet
    assert islands.digests(0) == simulated and islands.digests(1) == simulated
    same = ("step", "fragment", "version", "fragment_age", "contributors", "staleness", "gates")
    for mine, theirs in zip(of_kind(records, "round"), islands.rounds(0), strict=True):
        assert {k: mine[k] for k in same} == {k: theirs[k] for k in same}
    assert results[0]["tokens"] == records[-1]["tokens"]


def test_a_controlled_delay_of_zero_is_none_in_the_real_loop_too(tmp_path: Path) -> None:
    how: dict[str, Any] = {"fragments": 2, "wire": "int8"}
    raws = [config("sync", **how, **more) for more in ({}, {"controlled_delay": 0})]
    without, zero = (parse_config(raw, islands=2, ranks=1).digest() for raw in raws)
    assert without == zero  # the very same run; with a list contributions go through the line
    found = []
    for number, more in enumerate(({}, {"controlled_delay": [0, 0]})):
        islands, _ = real(tmp_path / str(number), config("sync", **how, **more), {}, {})
        found.append(islands.digests(0))
    assert len(found[0]) > 14 and found[1] == found[0]


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "rebase": {},
    "both needed": {"quorum": 2, "fragments": 2, "merge": "tokens"},
    "mix, fragments, int8": {"adopt": "mix", "overlap_steps": 2, "fragments": 2, "wire": "int8"},
}


@pytest.mark.parametrize("sync", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS.keys())
def test_asynchronous_rounds_replayed_have_the_same_bits(tmp_path: Path, sync: dict[str, Any]) -> None:
    """When things happened is taken from the real run; everything else is computed anew."""
    raw = config("async", **sync)
    islands, results = real(tmp_path, raw, {"step_s": 0.02}, {"step_s": 0.07})
    replay = Replay(raw, [of_kind(islands.records(i), "adopt") for i in (0, 1)], results)
    rounds = islands.rounds(0)
    for record in rounds:
        replay.round(record)
    assert len(rounds) > 5
    if sync.get("quorum") == 2:  # until the end, where one of them may have nothing left
        assert all(len(r["contributors"]) == 2 for r in rounds if r["step"] < UNTIL - 12)
    else:
        assert any(r["staleness"].get("1", 0) > 0 for r in rounds)
    assert [f.version for f in replay.world.state.fragments] == results[0]["versions"]
    assert replay.world.state.digest() == results[0]["digest"] == results[1]["digest"]


class Replay:
    """A world in which rounds and adoptions come in the order in which they came in a real run."""

    def __init__(
        self, raw: dict[str, Any], adopted: list[list[Record]], results: list[dict[str, Any]]
    ) -> None:
        self.world = World(parse_config(raw, islands=2, ranks=1), [Plain(0), Plain(1)])
        for island in self.world.islands:
            island.ending = True  # who contributes is known; no quorum is waited for
        self._adopted, self._last = adopted, [r["trained"] for r in results]

    def round(self, record: Record) -> None:
        number = record["fragment"]
        pending: list[Pending] = [{}, {}]
        for i in record["contributors"]:
            while number not in self.world.islands[i].pending:
                self._advance(i)
            pending[i] = {number: self.world.islands[i].pending[number]}
        decision = replace(self.world.decide(pending, now_s=1e6), fragment_age=record["fragment_age"])
        made = self.world.run(decision, pending)
        same = ("outer_step", "version", "contributors", "staleness", "gates")
        assert {k: made[k] for k in same} == {k: record[k] for k in same}
        self.world.publish(decision, committed=True)

    def _advance(self, number: int) -> None:
        """To the next inner step of an island; or, after the last one, to what it does to end."""
        island = self.world.islands[number]
        if island.inner_step < self._last[number]:
            island.train()
            for i in self.world.points.due(island.inner_step):
                island.capture(i, 0.0)
            self._adopt(number)
            return
        before = self._adopt(number)
        for i in range(len(island.local.fragments)):
            captured = not island.pending.get(i)
            island.capture(i, 0.0)
            before += captured and i in island.pending
        assert before, "the real island did something here that the replay cannot"

    def _adopt(self, number: int) -> int:
        """Adopt what the real island adopted at this step; how much that was."""
        island, script = self.world.islands[number], self._adopted[number]
        count = 0
        while script and script[0]["step"] == island.inner_step:
            f = island.local.fragments[script[0]["fragment"]]
            if f.published is None and island.inner_step == self._last[number]:
                break  # the end goes on at one step, while rounds go on
            assert f.published == script[0]["version"]
            island.local.merge_in(script.pop(0)["fragment"])
            count += 1
        return count
