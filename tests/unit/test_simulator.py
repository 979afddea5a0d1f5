"""The simulator against arithmetic done by hand in float64, and its clock."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from megatron_wsd.config import Config, parse_config
from megatron_wsd.errors import ConfigError, FieldError, IslandError
from megatron_wsd.records import Record, of_kind
from megatron_wsd.simulator import ModuleIsland, ModuleShards, Timing, simulate

PULL, H = 0.05, 4
ONE = Timing()


class Toy(nn.Module):
    """Layers to cut fragments from, and something outside of them; uneven sizes, one of one element."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(n, 70, bias=n == 65) for n in (65, 64))
        self.scale = nn.Parameter(torch.zeros(1))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g)


class Pulled:
    """An island whose every step draws its weights to a target, by a share of the way."""

    def __init__(self, target: float, spoilt_at: int | None = None) -> None:
        self.module, self._target, self._spoilt_at = Toy(), target, spoilt_at
        self.shards = ModuleShards(self.module)

    @torch.no_grad()
    def train_step(self, n: int) -> int:
        for p in self.module.parameters():
            p.add_(PULL * (self._target - p))
        if n == self._spoilt_at:
            self.module.scale.fill_(float("nan"))
        return 10

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])


def config(count: int, mode: str = "sync", outer: dict[str, Any] | None = None, **sync: Any) -> Config:
    block = {
        "outer": {"optimizer": "sgd", "lr": 0.7, **(outer or {})},
        "sync": {"mode": mode, "inner_steps": H, "bucket_bytes": 4096, **sync},
    }
    raw = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "megatron_wsd": block}
    return parse_config(raw, islands=count, ranks=1)


def run(
    made: Config, until: int, timing: Timing | Sequence[Timing] = ONE, spoilt_at: int | None = None
) -> tuple[list[Record], list[Pulled]]:
    """Records; and the islands, whose last one may be spoilt."""
    count = made.islands.count
    assert count is not None
    islands = [Pulled(float(k), spoilt_at if k == count - 1 else None) for k in range(count)]
    return simulate(made, islands, until, timing), islands


def digests(records: list[Record]) -> list[str]:
    return [r["digest"] for r in of_kind(records, "round")]


def by_hand(delays: Sequence[int], rounds: int, lr: float) -> torch.Tensor:
    """The anchor of such islands under SGD, in float64: what is due is offered one round later each."""
    start = Pulled(0.0).values.double()
    anchor, sent = start.clone(), [[] for _ in delays]  # type: ignore[var-annotated]
    for r in range(rounds):
        for k in range(len(delays)):
            sent[k].append((1 - (1 - PULL) ** H) * (anchor - k))
        due = [sent[k][r - tau] for k, tau in enumerate(delays) if r >= tau]
        if due:
            participation = len(due) / len(delays)
            anchor = anchor - lr * participation * torch.stack(due).mean(0)
    return anchor


@pytest.mark.parametrize("delays", [[0, 0], [0, 2], [3, 3], [1, 0, 2]])
def test_delayed_contributions_move_the_anchor_as_arithmetic_says(delays: list[int]) -> None:
    rounds = 12
    made = config(len(delays), outer={"momentum": 0.0}, controlled_delay=delays)
    _, islands = run(made, rounds * H)
    # Values below 4 that go through some 12 * (4 * 3 + 6) roundings to fp32, which are damped, not amplified.
    bound = 12 * (4 * 3 + 6) * 4 * 2.0**-24
    for island in islands:
        error = (island.values.double() - by_hand(delays, rounds, 0.7)).abs().max()
        assert error < bound


@pytest.mark.parametrize("how", [{"fragments": 2, "wire": "int8"}, {"merge": "radial", "wire": "int4"}, {}])
@pytest.mark.parametrize("optimizer", ["cgad", "delayed_nesterov"])
def test_a_controlled_delay_of_zero_is_none_bit_for_bit(how: dict[str, Any], optimizer: str) -> None:
    outer = {"optimizer": optimizer}
    plain, _ = run(config(2, outer=outer, **how), 30)
    none = [0, [0, 0], {"kind": "uniform"}]
    delayed = [run(config(2, outer=outer, controlled_delay=zero, **how), 30)[0] for zero in none]
    assert len(digests(plain)) == (25 if "fragments" in how else 8)  # the last of them after the end
    assert all(digests(d) == digests(plain) for d in delayed)
    other, _ = run(config(2, outer=outer, controlled_delay=[0, 1], **how), 30)
    assert digests(other) != digests(plain)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("controlled", [3, [0, 2]])
def test_staleness_is_the_delay_once_the_line_is_full(controlled: int | list[int], fragments: int) -> None:
    records, _ = run(config(2, controlled_delay=controlled, fragments=fragments, wire="int8"), 16 * H)
    delays = controlled if isinstance(controlled, list) else [controlled] * 2
    rounds = [r for r in of_kind(records, "round") if r["fragment"] == 0]
    full = [r["staleness"] for r in rounds if r["version"] > 2 * max(delays)]
    assert len(full) > 5
    assert all(staleness == {str(k): tau for k, tau in enumerate(delays)} for staleness in full)


def test_a_random_delay_is_drawn_anew_and_every_island_gives_one_contribution_a_turn() -> None:
    controlled = {"kind": "uniform", "low": 0, "high": 6, "seed": 5}
    records, _ = run(config(2, controlled_delay=controlled), 60 * H)
    rounds = of_kind(records, "round")
    assert len({r["staleness"]["0"] for r in rounds if "0" in r["staleness"]}) > 3
    assert max(max(r["staleness"].values()) for r in rounds) <= 2 * 6
    assert len(rounds) >= 58


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_island_with_an_outer_rate_of_one_is_plain_training(mode: str) -> None:
    """In asynchronous mode with `rebase`, however long its contributions travel."""
    timing = Timing(step_s=[1.0, 2.0], latency_s=2.7)
    records, (island,) = run(config(1, mode, {"lr": 1.0, "momentum": 0.0}, fragments=2), 41, timing)
    alone = Pulled(0.0)
    for n in range(41):
        alone.train_step(n)
    # Values below 4; some 30 adoptions of three roundings each, and 41 steps of two.
    assert (island.values - alone.values).abs().max() < (30 * 3 + 41 * 2) * 4 * 2.0**-24
    assert records[-1]["committed_steps"] == 41 and records[-1]["tokens"] == 410


def test_a_slow_island_holds_nobody_up_and_its_work_is_used() -> None:
    pair = [Timing(step_s=0.2), Timing(step_s=0.8)]
    records, _ = run(config(2, "async", {"optimizer": "cgad"}, grace_s=0.1), 400, pair)
    end = records[-1]
    fast, slow = end["inner_steps"]
    assert end["trained_s"][0] == pytest.approx(0.2 * fast)  # as fast as alone
    assert slow == pytest.approx(fast / 4, abs=1)
    late = [r["staleness"]["1"] for r in of_kind(records, "round") if "1" in r["staleness"]]
    assert 2 <= median(late) <= 4
    assert len(late) >= slow // H and end["committed_steps"] == fast + slow

    records, _ = run(config(2, outer={"optimizer": "cgad"}), 40, pair)
    assert records[-1]["time_s"] == pytest.approx(0.8 * 40)
    assert records[-1]["trained_s"] == pytest.approx([0.8 * 36 + 0.2 * 4, 0.8 * 40])


def test_an_exchange_takes_latency_and_the_bytes_of_the_slowest_link() -> None:
    links = [Timing(latency_s=0.5, bytes_per_s=1000), Timing(latency_s=0.25, bytes_per_s=500)]
    records, _ = run(config(2), 2 * H, links)
    first, second = of_kind(records, "round")
    exchange_s = 0.5 + first["bytes"] / 500
    assert first["bytes"] > 2 * 4 * (65 * 70 + 70 + 64 * 70 + 1)
    assert [first["time_s"], second["time_s"]] == pytest.approx([4 + exchange_s, 8 + 2 * exchange_s])
    narrow, _ = run(config(2, wire="int8"), 2 * H, links)
    assert of_kind(narrow, "round")[0]["bytes"] < first["bytes"] / 3.9


def test_islands_that_offer_at_the_same_moment_are_in_the_same_round() -> None:
    records, _ = run(config(3, "async", grace_s=0.0), 40)
    assert {tuple(r["contributors"]) for r in of_kind(records, "round")} == {(0, 1, 2)}


@pytest.mark.parametrize(("overlap", "latency_s", "waited"), [(0, 0.5, 1), (2, 0.5, 2), (2, 2.5, 3)])
@pytest.mark.parametrize("adopt", ["mix", "rebase"])
def test_adoption_waits_for_the_exchange_and_for_the_overlap(
    overlap: int, latency_s: float, waited: int, adopt: str
) -> None:
    made = config(2, "async", overlap_steps=overlap, adopt=adopt)
    records, islands = run(made, 40, Timing(latency_s=latency_s))
    adopted = [r for r in of_kind(records, "adopt") if r["step"] < 40]
    assert {r["waited_steps"] for r in adopted} == {waited} and {r["lag"] for r in adopted} == {0}
    assert {r["steps_discarded"] for r in adopted} == {waited if adopt == "mix" else 0}
    assert {tau for r in of_kind(records, "round") for tau in r["staleness"].values()} == {0}
    assert torch.equal(islands[0].values, islands[1].values)


@pytest.mark.parametrize("quorum", [1, 2, 3])
@pytest.mark.parametrize("fragments", [1, 2])
def test_whatever_the_quorum_everything_that_was_trained_is_committed(quorum: int, fragments: int) -> None:
    pace = [Timing(step_s=s, latency_s=0.3) for s in (1.0, 1.3, 2.9)]
    made = config(3, "async", quorum=quorum, fragments=fragments, grace_s=0.25, overlap_steps=1)
    records, islands = run(made, 50, pace)
    end = records[-1]
    assert end["committed_steps"] == sum(end["inner_steps"])
    assert end["tokens"] == 10 * sum(end["inner_steps"])
    used = [len(r["contributors"]) for r in of_kind(records, "round") if r["time_s"] < min(end["trained_s"])]
    assert min(used) >= quorum
    assert all(torch.equal(i.values, islands[0].values) for i in islands)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_contribution_of_nan_is_dropped_and_its_island_goes_on(mode: str) -> None:
    made = config(2, mode, wire="int8", **({"grace_s": 0.1} if mode == "async" else {}))
    records, islands = run(made, 8 * H, spoilt_at=2 * H + 1)
    rounds = of_kind(records, "round")
    assert [(r["island"], r["step"]) for r in of_kind(records, "event")] == [(1, 3 * H)]
    assert rounds[-1]["contributors"] == [0, 1]
    assert all(bool(torch.isfinite(i.values).all()) for i in islands)
    assert len([r for r in rounds if 1 in r["contributors"]]) >= 6


def test_the_same_again_gives_the_same() -> None:
    made = config(2, "async", {"optimizer": "cgad"}, fragments=2, wire="int4", adopt="mix", overlap_steps=1)
    pace = [Timing(step_s=1.0), Timing(step_s=[1.0, 1.7], latency_s=0.4)]
    assert run(made, 40, pace)[0] == run(made, 40, pace)[0]


def test_a_torch_model_trains() -> None:
    def island(seed: int) -> ModuleIsland:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
        model[0].bias.requires_grad_(False)
        g = torch.Generator().manual_seed(seed)

        def loss(n: int) -> tuple[torch.Tensor, int]:
            x = torch.randn(64, 6, generator=g)
            return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)), 64

        return ModuleIsland(model, torch.optim.AdamW(model.parameters(), 1e-2), loss)

    islands = [island(1), island(2)]
    assert [s.name for s in islands[0].shards.shards] == ["0.weight", "2.weight", "2.bias"]
    records = simulate(config(2, outer={"optimizer": "cgad", "lr": 0.02}), islands, 120)
    assert records[-1]["tokens"] == 2 * 120 * 64
    x = torch.randn(512, 6, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        # The variance of the target is 6: the loss of a model that has learnt nothing.
        assert nn.functional.mse_loss(islands[1].module(x), x.sum(1, keepdim=True)) < 2.0


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match=r"islands\.count: expected 2"):
        simulate(config(3), [Pulled(0.0), Pulled(1.0)], 4)
    other = Pulled(1.0)
    other.module.scale.data += 1
    with pytest.raises(IslandError, match="islands 0 and 1: expected the same initial weights"):
        simulate(config(2), [Pulled(0.0), other], 4)
    with pytest.raises(FieldError, match="timing: expected one for each of 2 islands"):
        run(config(2), 4, [Timing()])
    with pytest.raises(FieldError, match="until_steps"):
        run(config(2), 0)
    with pytest.raises(ConfigError, match=r"sync\.fragments: expected at most 2"):
        run(config(2, fragments=3), 4)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("step_s", 0.0), ("step_s", []), ("step_s", [1.0, -1.0]), ("latency_s", -1.0), ("bytes_per_s", 0.0)],
)
def test_a_timing_that_is_none_is_refused(field: str, wrong: Any) -> None:
    with pytest.raises(FieldError, match=f"timing.{field}"):
        Timing(**{field: wrong})
