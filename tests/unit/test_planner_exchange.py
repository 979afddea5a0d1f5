"""Traffic, seconds and advice: against hand arithmetic, and the bounds of what a plan may say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import config

from megatron_wsd.planner import (
    GPUS,
    PRESETS,
    WIRE_BYTES,
    Fleet,
    Link,
    Parameter,
    Traffic,
    advise,
    parameters_of,
)
from megatron_wsd.planner.exchange import (
    OUTER_NS,
    OUTER_NS_EACH,
    PAUSE_NS,
    QUORUM_TICK_S,
    asynchronous,
    period_steps,
    streaming,
    synchronous,
)
from megatron_wsd.planner.speed import speed_of


def traffic(
    wire: str = "fp32", islands: int = 2, fragments: tuple[int, ...] = (10**9,), bucket: int = 2**40
) -> Traffic:
    return Traffic(islands, 8, fragments, wire, bucket)


def test_bytes_by_hand() -> None:
    assert {w: traffic(w).sent() for w in WIRE_BYTES} == {
        "fp32": 4_000_000_000,
        "bf16": 2_000_000_000,
        "int8": 1_015_625_000,  # a scale of 4 bytes for 256 codes
        "int4": 562_500_000,  # a scale of 4 bytes for 64 codes of half a byte
    }
    three = traffic("bf16", islands=3)
    assert (three.sent(), three.received()) == (2_000_000_000, 4_000_000_000)
    alone = traffic(islands=1)
    assert alone.sent() == alone.received() == alone.wire_seconds(Link(1e9, 0.03), 10**9) == 0


def test_seconds_by_hand() -> None:
    # two contributors in turn, 8 ranks x 4e9 bytes over 10 Gbit/s: 2 x 25.6 s
    assert traffic().wire_seconds(Link(10e9, 0.0), 10**9) == pytest.approx(51.2)
    # four islands: 4 contributors, each sends two copies
    assert traffic(islands=4).wire_seconds(Link(10e9, 0.0), 10**9) == pytest.approx(4 * 2 * 25.6)
    # ten buckets of 4e8 bytes, each a round trip, for each contributor
    slow = traffic(bucket=4 * 10**8)
    assert slow.wire_seconds(Link(math.inf, 0.1), 10**9) == pytest.approx(2 * 10 * 0.1)
    whole = traffic().round_seconds(Link(10e9, 0.03), 10**9)
    own = (OUTER_NS + 2 * OUTER_NS_EACH) * 1.0  # 1e9 parameters, in seconds
    assert whole == pytest.approx(51.2 + 2 * 0.03 + QUORUM_TICK_S + 4 * 0.03 + own)


def test_utilisation_by_hand() -> None:
    link = Link(10e9, 0.0)
    rounds = traffic().sync_seconds(link)
    assert synchronous(traffic(), link, 50, 2.0) == pytest.approx(100 / (100 + rounds))
    pause = PAUSE_NS * 1.0
    assert asynchronous(traffic(), 50, 2.0) == pytest.approx(100 / (100 + pause))
    cut = traffic(fragments=(10**8,) * 10)
    each = cut.round_seconds(link, 10**8)
    # a fragment every 10 s, and a step hides 2 s: training waits for the rest
    assert each > 5.0
    waits = 10 * max(0.0, each - 2.0)
    assert streaming(cut, link, 50, 2.0, 1) == pytest.approx(100 / (100 + waits + pause))
    assert streaming(cut, link, 50, 2.0, 40) == pytest.approx(
        100 / (100 + 10 * max(0.0, each - 10.0) + pause)
    )
    assert period_steps(traffic(), link, 50, 2.0) == 50
    assert period_steps(traffic(), link, 5, 2.0) == pytest.approx(rounds / 2.0)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.floats(1e7, 1e13),
    step_s=st.floats(0.05, 100),
    target=st.floats(0.5, 0.99),
    islands=st.integers(2, 64),
    ranks=st.sampled_from([1, 8, 64]),
)
def test_advice_meets_the_target_and_the_config_checks(
    bits: float, step_s: float, target: float, islands: int, ranks: int
) -> None:
    layers = 12
    fleet = Fleet(parameters_of(PRESETS["150m"], 32000), islands, ranks, 2**26)
    advice = advise(fleet, layers, Link(bits, 0.03), step_s, target)
    assert advice.utilisation >= target - 1e-9
    assert advice.link_busy <= 1.0 and advice.inner_steps >= 16
    assert advice.fragments <= layers and advice.overlap_steps < advice.inner_steps
    sync = {
        "mode": advice.mode,
        "wire": advice.wire,
        "inner_steps": advice.inner_steps,
        "fragments": advice.fragments,
        "overlap_steps": advice.overlap_steps,
    }
    model = PRESETS["150m"].model_dump(mode="json")
    assert config(sync=sync, model=model).sync.wire == advice.wire


def test_more_bandwidth_and_fewer_bytes_never_make_it_worse() -> None:
    links = [Link(10 ** (7 + k / 4), 0.03) for k in range(24)]
    for wire in WIRE_BYTES:
        shares = [synchronous(traffic(wire), link, 30, 1.0) for link in links]
        assert shares == sorted(shares)
    for link in links:
        shares = [synchronous(traffic(wire), link, 30, 1.0) for wire in ("fp32", "bf16", "int8", "int4")]
        assert shares == sorted(shares)


def test_fragments_of_a_fleet_are_those_that_a_run_cuts() -> None:
    parameters = [
        Parameter("embedding.weight", (10, 8)),
        *(Parameter(f"layers.{i}.w", (8, 8)) for i in range(4)),
    ]
    fleet = Fleet(parameters, 2, 3, 2**20)
    assert fleet.traffic("fp32", 1).fragments == (27 + 4 * 22,)  # 80 / 3 and 64 / 3, rounded up
    assert fleet.traffic("fp32", 2).fragments == (44, 44, 27)


def test_speed_is_what_is_given_or_follows_from_flops() -> None:
    guess = speed_of(8 * 989e12 * 0.5, 8, mfu=0.5)
    assert guess.step_s == pytest.approx(1.0) and guess.guessed
    assert speed_of(1e15, 1, gpu="A100", mfu=1.0).step_s == pytest.approx(1e3 / GPUS["a100"][0])
    assert speed_of(1e15, 1, tflops=500, mfu=1.0).step_s == pytest.approx(2.0)
    measured = speed_of(1e15, 1, step_s=3.5, gpu="h200")
    assert (measured.step_s, measured.guessed, measured.memory_bytes) == (3.5, False, 141 * 10**9)


def test_seconds_and_utilisation_are_those_of_the_islands_benchmark() -> None:
    """As benchmarks/README.md has them: 4.24 s a round, and 0.95 of 5 steps a second.

    Two islands of one rank, 999,680 parameters in fp32 over 16 Mbit/s, H = 5 steps of 0.2 s. A plan has no
    overhead of protocols: it may be below, by less than a tenth.
    """
    parameters = [Parameter(f"layers.{i}.weight", (250, 1000)) for i in range(3)]
    parameters += [Parameter("layers.3.weight", (249, 1000)), Parameter("norm.weight", (680,))]
    traffic = Fleet(parameters, 2, 1, 64 << 20).traffic("fp32", 1)
    link = Link(16e6, 1e-4)
    assert 0.9 * 4.24 < traffic.sync_seconds(link) < 4.24
    assert synchronous(traffic, link, 5, 0.2) == pytest.approx(0.95 / 5.0, rel=0.1)
