"""How an island takes over a new anchor.

Numbers are multiples of a power of two wherever sums must be exact, so "nothing is lost" means to the bit.
"""

from __future__ import annotations

import pytest
import torch
from local_islands import MODES, LocalIsland, U, same


def settled(island: LocalIsland, *, more: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Capture, train on, let a round commit; what is held at the capture, before the adoption, the anchor."""
    island.train(5)
    at_capture = island.flat(0)
    island.capture()
    island.train(more)
    anchor = island.move(island=0)
    island.local.publish(0, committed=True, reset=False)
    return at_capture, island.flat(0), anchor


@pytest.mark.parametrize("adopt", ["mix", "rebase"])
def test_what_is_published_waits_for_the_training_thread(adopt: str) -> None:
    island = LocalIsland(adopt=adopt)
    before, held, anchor = settled(island)
    assert same(island.flat(0), held) and not same(held, before)
    f = island[0]
    assert (f.published, f.version, f.flight is None) == (1, 0, False)
    # Versions that come later are adopted with the next contribution.
    assert not same(island.move(), anchor)
    assert same(f.base, anchor)
    assert island.local.merge_in(0) == 1
    assert (f.published, f.version, f.flight) == (None, 1, None)
    assert same(island.flat(0), (anchor + held) / 2 if adopt == "mix" else anchor + (held - before))
    assert (f.steps, f.tokens) == (3, 300), "what was trained since the capture is still to be offered"


@pytest.mark.parametrize("anchor_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.75, 1.0])
def test_mix_blends_anchor_and_local(alpha: float, anchor_dtype: torch.dtype) -> None:
    island = LocalIsland(adopt="mix", merge_alpha=alpha, anchor_dtype=anchor_dtype)
    _, held, anchor = settled(island)
    assert island[0].base.dtype == anchor_dtype
    island.local.merge_in(0)
    expected = (1 - alpha) * anchor.double() + alpha * held.double()
    # Roundings: of alpha or 1 - alpha, of the difference, of its product, of the sum.
    off = U * (3 * (anchor - held).abs() + torch.maximum(anchor.abs(), held.abs())).double()
    assert bool(((island.flat(0).double() - expected).abs() <= 1.001 * off).all())
    if alpha in (0.0, 1.0):
        assert same(island.flat(0), held if alpha else anchor)


def test_mix_offers_next_what_is_left_of_its_own() -> None:
    island = LocalIsland(adopt="mix", merge_alpha=0.5)  # a power of two: exact
    _, held, anchor = settled(island)
    island.local.merge_in(0)
    assert same(island.local.capture(0, 8).pseudo_gradient, (anchor - held) / 2)


@pytest.mark.parametrize("more", [0, 3])
def test_rebase_keeps_what_was_trained_since_the_capture(more: int) -> None:
    island = LocalIsland(adopt="rebase")
    at_capture, held, anchor = settled(island, more=more)
    island.local.merge_in(0)
    assert same(island.flat(0), anchor + (held - at_capture))
    assert same(island.flat(0), anchor) == (more == 0)


def test_rebase_offers_nothing_twice() -> None:
    island = LocalIsland(adopt="rebase")
    at_capture, held, _ = settled(island)
    island.local.merge_in(0)
    before = island.flat(0)
    g = island.local.capture(0, 8)
    assert same(g.pseudo_gradient, at_capture - held)  # the three steps since the first capture, alone
    assert (g.base, g.steps, g.tokens) == (1, 3, 300)
    assert same(island.flat(0), before)


def test_rebase_loses_nothing_over_many_rounds() -> None:
    """Whatever others commit, all that an island trains is in its contributions, once."""
    island = LocalIsland(adopt="rebase")
    trained = torch.zeros_like(island.flat(0))
    offered = torch.zeros_like(trained)
    steps = 0
    for n in range(20):
        for _ in range(n % 3 + 1):
            before = island.flat(0)
            island.train()
            trained += island.flat(0) - before
        g = island.capture()
        offered -= g.pseudo_gradient
        steps += g.steps
        for _ in range(n % 4):  # rounds without this island, one with it, and one after it
            before = island.flat(0)
            island.train()
            trained += island.flat(0) - before
            island.move()
        island.move(island=0)
        island.local.publish(0, committed=True, reset=False)
        island.move()
        island.local.merge_in(0)
        assert not bool((island.flat(0).abs() > 64).any())  # 2^16 units of 1/1024/64: sums stay exact
    offered -= island.local.capture(0, island.step).pseudo_gradient
    assert same(offered, trained) and steps + 19 % 4 == island.step


def test_an_island_alone_that_is_committed_as_it_is_notices_nothing() -> None:
    # Outer SGD at a rate of 1 moves the anchor to where the island was; rebased, it stays where it is.
    island = LocalIsland(adopt="rebase")
    for _ in range(5):
        island.train(2)
        g = island.capture()
        island.train(1)
        held, f = island.flat(0), island.state.fragments[0]
        f.optimizer.step(f.anchor, g.payload.view(torch.float32))
        f.version += 1
        island.local.publish(0, committed=True, reset=False)
        island.local.merge_in(0)
        assert same(island.flat(0), held)


def test_rebase_of_numbers_that_do_not_fit() -> None:
    """Where sums round, they round once each, and are as near as that."""
    island = LocalIsland(adopt="rebase")
    for value in island.shards.values:
        value.copy_(torch.randn(value.numel(), generator=island.draw) * 3)
    base = island[0].base.double()
    at_capture, held, anchor = (t.double() for t in settled(island))
    island.local.merge_in(0)
    expected = anchor + (held - at_capture)
    # base - local, local again, the progress since then, and the sum.
    parts = (base - at_capture, at_capture, held - at_capture, expected)
    off = 1.001 * U * sum(part.abs() for part in parts)
    assert bool(((island.flat(0).double() - expected).abs() <= off).all())


def test_contributions_that_are_used_up_without_a_commit_are_gone() -> None:
    # Every gate was 0: nothing moved, and what was captured is not offered again.
    island = LocalIsland(adopt="rebase", wire="int8")
    island.train(5)
    at_capture = island.flat(0)
    island.capture()
    island.train(2)
    held, anchor = island.flat(0), island.state.fragments[0].anchor.clone()
    island.local.publish(0, committed=False, reset=False)
    assert island.local.merge_in(0) == 0
    assert same(island.flat(0), anchor + (held - at_capture))
    assert island[0].error is not None and not island[0].error.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("anchor_dtype", [torch.float32, torch.bfloat16])
def test_adopt_holds_the_anchor_and_drops_all_that_is_local(mode: str, anchor_dtype: torch.dtype) -> None:
    island = LocalIsland(fragments=2, mode=mode, anchor_dtype=anchor_dtype)
    island.train(3)
    island.capture(0)
    island.move(0)
    anchor = island.move(0)
    f, outside = island[0], island.flat(2)
    f.published, f.reset = 1, True
    island.local.adopt(0)
    assert same(island.flat(0), anchor) and same(f.base.float(), anchor)
    assert (f.version, f.steps, f.tokens, f.flight, f.published, f.reset) == (2, 0, 0, None, None, False)
    assert same(island.flat(2), outside) and island[2].steps == 3
    assert not island.local.capture(0, 3).pseudo_gradient.any()
    island.move(0)
    assert same(f.base.float(), anchor) == (mode == "async"), "only in synchronous mode the base is live"


def test_weights_come_back_after_a_look_at_others() -> None:
    island = LocalIsland(fragments=2)
    held = island.local.hold()
    before = [value.clone() for value in island.shards.values]
    island.train(2)
    trained = island.local.hold()
    island.local.restore([f.anchor for f in island.state.fragments])
    assert all(same(a, b) for a, b in zip(before, island.shards.values, strict=True))
    assert all(same(a, b) for a, b in zip(held, island.local.hold(), strict=True))
    island.local.restore(trained)
    assert all(same(a, b) for a, b in zip(trained, island.local.hold(), strict=True))
    assert not all(same(a, b) for a, b in zip(before, island.shards.values, strict=True))
    assert [f.steps for f in island.local.fragments] == [2, 2, 2]
