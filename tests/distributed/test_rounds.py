"""The outer round between real processes through real torchft, on plain tensors in place of DeepSpeed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from outer_worker import Island, main, pseudo_gradient

HEARTBEAT_S = 2.0
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "megatron_wsd": {
        "islands": {"heartbeat_timeout_s": HEARTBEAT_S, "join_timeout_s": 30.0},
        "outer": {"optimizer": "cgad", "lr": 0.01, "state_bits": 32},
        # Buckets smaller than the largest parameter and not a divisor of anything.
        "sync": {"timeout_s": 5.0, "bucket_bytes": 1028},
    },
}


# ---- scenarios, run in the islands' processes ----


def summary(island: Island) -> dict[str, Any]:
    return {
        "anchor": island.anchor(),
        "outer_step": island.state.outer_step,
        "t": island.state.fragments[0].optimizer.t,
    }


def three_rounds(island: Island) -> dict[str, Any]:
    island.meet(2)
    results = [island.round(r) for r in range(3)]
    return {**summary(island), "digests": [r.digest for r in results], "bytes": results[0].bytes}


def nan_from_island_1(island: Island) -> dict[str, Any]:
    island.meet(2)
    contribution = island.contribution(0)
    if island.number == 1:
        contribution.pseudo_gradient[5] = float("nan")
        contribution.finite = False
    result = island.half.run_round({0: contribution}, 10)
    return {**summary(island), "dropped": result.decision.dropped, "committed": result.committed}  # type: ignore[union-attr]


def nan_from_all(island: Island) -> dict[str, Any]:
    island.meet(2)
    contribution = island.contribution(0)
    contribution.finite = False
    result = island.half.run_round({0: contribution}, 10)
    return {**summary(island), "committed": result.committed, "void": result.void}


def digest_goes_wrong_once(island: Island) -> dict[str, Any]:
    island.meet(2)
    island.round(0)
    if island.number == 1:
        island.state.fragments[0].anchor[3] += 1.0  # a flipped bit in memory
        island.half.refresh_digest()
    result = island.round(1)
    result2 = island.round(2)
    return {
        **summary(island),
        "healed": result.healed,
        "contributors": result.decision.contributors,  # type: ignore[union-attr]
        "then": result2.decision.contributors,
    }  # type: ignore[union-attr]


def digest_goes_wrong_twice(island: Island) -> dict[str, Any]:
    island.meet(2)
    for r in range(3):
        if island.number == 1 and r:
            island.state.fragments[0].anchor[3] += 1.0
            island.half.refresh_digest()
        if r == 2:
            island.half.run_round({0: island.contribution(r)}, 30)  # void on island 0, an error on island 1
        else:
            island.round(r)
    return summary(island)


def killed_and_back(island: Island) -> dict[str, Any]:
    """Eight rounds; island 1 is killed from outside before its third, and comes back before the sixth."""
    late = Path(os.environ["MARK"] + ".late")
    if os.environ.get("LATE"):
        late.write_text("here")
    first = island.meet(2)
    log = []
    start = island.state.outer_step
    for r in range(start, 8):
        if island.number == 1 and r == 2 and not os.environ.get("LATE"):
            Path(os.environ["MARK"]).write_text("here")
            time.sleep(60)
        if island.number == 0 and r == 5:
            # By now island 1 is back; wait for it so that the rest runs with both.
            while not late.exists():
                time.sleep(0.05)
            time.sleep(2.0)
        result = island.round(r)
        if island.number == 0 and r == 2:
            Path(os.environ["MARK"] + ".alone").write_text("here")
        log.append([r, list(result.decision.islands), list(result.decision.contributors), result.digest])  # type: ignore[union-attr]
        if island.state.outer_step >= 8:
            break
    met = {
        "healed": first.healed,
        "committed": first.committed,
        "digest": first.digest,
        "contributors": list(first.decision.contributors) if first.decision else [],
    }
    return {**summary(island), "log": log, "met": met}


SCENARIOS = {
    f.__name__: f
    for f in (
        three_rounds,
        nan_from_island_1,
        nan_from_all,
        digest_goes_wrong_once,
        digest_goes_wrong_twice,
        killed_and_back,
    )
}


# ---- the tests ----


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=30_000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * HEARTBEAT_S),
    )
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


class Runner:
    """Starts islands as processes and reads what they found."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self._folder, self._lighthouse = folder, lighthouse
        self._count = 0

    def start(
        self, scenario: str, island: int, env: dict[str, str] | None = None, **job: Any
    ) -> tuple[subprocess.Popen[bytes], Path]:
        self._count += 1
        out = self._folder / f"out{self._count}.json"
        full = {
            "scenario": scenario,
            "island": island,
            "islands": 2,
            "lighthouse": self._lighthouse,
            "config": CONFIG,
            "out": str(out),
            **job,
        }
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(full)],
            env={
                **os.environ,
                "MARK": str(self._folder / "mark"),
                "OMP_NUM_THREADS": "1",
                "RUST_LOG": "warn",
                **(env or {}),
            },
        )
        return process, out

    def both(
        self, scenario: str, jobs: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    ) -> list[dict[str, Any]]:
        started = [self.start(scenario, i, **job) for i, job in enumerate(jobs)]
        return [self.result(*s) for s in started]

    @staticmethod
    def result(process: subprocess.Popen[bytes], out: Path, timeout: float = 90) -> dict[str, Any]:
        try:
            process.wait(timeout)
        finally:
            process.kill()
        return dict(json.loads(out.read_text()))


@pytest.fixture
def runner(tmp_path: Path, lighthouse: str) -> Runner:
    return Runner(tmp_path, lighthouse)


def adam_reference(
    rounds: list[list[list[torch.Tensor]]], lr: float, betas: tuple[float, float], eps: float
) -> list[torch.Tensor]:
    """Adam in float64 on the mean of each round's contributions, from the worker's initial weights."""
    g = torch.Generator().manual_seed(0)
    anchor = [torch.randn(len(p), generator=g).double() for p in rounds[0][0]]
    m = [torch.zeros_like(a) for a in anchor]
    v = [torch.zeros_like(a) for a in anchor]
    for t, contributions in enumerate(rounds, start=1):
        for i, a in enumerate(anchor):
            mean = sum(c[i].double() for c in contributions) / len(contributions)
            m[i] = betas[0] * m[i] + (1 - betas[0]) * mean
            v[i] = betas[1] * v[i] + (1 - betas[1]) * mean**2
            a -= lr * (m[i] / (1 - betas[0] ** t)) / ((v[i] / (1 - betas[1] ** t)).sqrt() + eps)
    return anchor


def assert_close(got: list[list[float]], want: list[torch.Tensor], steps: int, lr: float) -> None:
    """fp32 against float64: each step rounds the anchor (|a| < 8: half an ulp is 2.4e-7) and its update
    (a few ulp of lr, negligible beside), so ``steps`` of them may differ by about 3e-7 each; doubled."""
    for a, b in zip(got, want, strict=True):
        assert (torch.tensor(a, dtype=torch.float64) - b).abs().max() < steps * (6e-7 + 1e-5 * lr)


def test_three_rounds_equal_the_reference_and_each_other(runner: Runner) -> None:
    results = runner.both("three_rounds")
    assert results[0]["anchor"] == results[1]["anchor"]
    assert results[0]["digests"] == results[1]["digests"]
    assert len(set(results[0]["digests"])) == 3
    rounds = [[pseudo_gradient(i, r) for i in range(2)] for r in range(3)]
    want = adam_reference(rounds, 0.01, (0.9, 0.95), 1e-8)
    assert_close(results[0]["anchor"], want, 3, 0.01)
    # 1,000, 1, 257 and 512 elements, each padded to blocks of 256, fp32, once out and once in.
    assert results[0]["bytes"] == 2 * 4 * (1024 + 256 + 512 + 512)


def test_bf16_anchors_and_8_bit_moments_are_the_same_on_both(runner: Runner) -> None:
    low = json.loads(json.dumps(CONFIG))
    low["megatron_wsd"]["outer"] |= {"anchor_dtype": "bf16", "state_bits": 8}
    results = runner.both("three_rounds", ({"config": low}, {"config": low}))
    assert results[0]["anchor"] == results[1]["anchor"]
    assert results[0]["digests"] == results[1]["digests"] and len(set(results[0]["digests"])) == 3
    rounds = [[pseudo_gradient(i, r) for i in range(2)] for r in range(3)]
    want = adam_reference(rounds, 0.01, (0.9, 0.95), 1e-8)
    for a, b in zip(results[0]["anchor"], want, strict=True):
        # |anchor| < 4: an ulp of bf16 is at most 2^-6, and each of three steps and the start may be off by
        # one; 8-bit moments change an update of 0.01 by less than as much again.
        assert (torch.tensor(a, dtype=torch.float64) - b).abs().max() < 4 * 2**-6 + 3 * 0.01


def test_non_finite_contribution_is_dropped_and_the_rest_committed(runner: Runner) -> None:
    results = runner.both("nan_from_island_1")
    assert results[0]["anchor"] == results[1]["anchor"]
    for result in results:
        assert result["committed"] and result["dropped"] == [1]
    # One of two islands contributed: participation halves the outer rate.
    want = adam_reference([[pseudo_gradient(0, 0)]], 0.005, (0.9, 0.95), 1e-8)
    assert_close(results[0]["anchor"], want, 1, 0.01)


def test_nothing_valid_nothing_happens(runner: Runner) -> None:
    for result in runner.both("nan_from_all"):
        assert not result["committed"] and not result["void"]
        assert result["outer_step"] == 0 and result["t"] == 0


def test_different_configs_are_refused_on_both(runner: Runner) -> None:
    other = json.loads(json.dumps(CONFIG))
    other["megatron_wsd"]["outer"]["lr"] = 0.02
    results = runner.both("three_rounds", ({}, {"config": other}))
    for result in results:
        assert result["error"] == "IslandError" and "the same config" in result["text"]
        assert "got megatron_wsd.outer.lr 0.01 and 0.02." in result["text"]


def test_different_initial_weights_are_refused_on_both(runner: Runner) -> None:
    results = runner.both("three_rounds", ({}, {"weight_seed": 1}))
    for result in results:
        assert result["error"] == "IslandError" and "the same initial weights" in result["text"]


def test_state_that_goes_wrong_is_healed_once(runner: Runner) -> None:
    results = runner.both("digest_goes_wrong_once")
    assert results[0]["anchor"] == results[1]["anchor"]
    assert [r["healed"] for r in results] == [False, True]
    for result in results:
        assert result["contributors"] == [0] and result["then"] == [0, 1]


def test_state_that_goes_wrong_twice_stops_that_island(runner: Runner) -> None:
    good, bad = runner.both("digest_goes_wrong_twice")
    assert good["outer_step"] == 2
    assert bad["error"] == "IslandError" and "second time" in bad["text"]


def test_killed_island_is_survived_and_comes_back_healed(runner: Runner, tmp_path: Path) -> None:
    survivor, out0 = runner.start("killed_and_back", 0)
    victim, _ = runner.start("killed_and_back", 1)
    mark = tmp_path / "mark"
    for _ in range(600):
        if mark.exists():
            break
        time.sleep(0.1)
    assert mark.exists()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    while not (tmp_path / "mark.alone").exists():  # else it is back before it was missed
        assert survivor.poll() is None
        time.sleep(0.05)
    back, out1 = runner.start("killed_and_back", 1, env={"LATE": "1"})
    stays, comes = runner.result(survivor, out0), runner.result(back, out1)
    by_round = {r: (islands, contributors, digest) for r, islands, contributors, digest in stays["log"]}
    assert by_round[0][:2] == by_round[1][:2] == ([0, 1], [0, 1])
    assert by_round[2][:2] == ([0], [0])  # alone, and committed
    assert comes["met"]["healed"] and comes["met"]["committed"]
    assert comes["met"]["contributors"] == [0]  # its first round is without a contribution of its own
    assert by_round[7][:2] == ([0, 1], [0, 1])
    assert stays["anchor"] == comes["anchor"] and stays["t"] == comes["t"] == 8


if __name__ == "__main__":
    main(SCENARIOS)
