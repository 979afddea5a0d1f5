"""What an island trained since when, and what it tells the others of it."""

from __future__ import annotations

import math

import pytest
import torch
from local_islands import MODES, SIZES, LocalIsland, U, same

from megatron_wsd.diloco.faults import Faults, fail

LOSSY = ("bf16", "int8", "int4")


# ---- capture ----


@pytest.mark.parametrize("mode", MODES)
def test_a_pseudo_gradient_is_base_minus_local(mode: str) -> None:
    island = LocalIsland(mode=mode)
    before = island.flat(0)
    island.train(7)
    g = island.local.capture(0, 7)
    assert same(g.pseudo_gradient, before - island.flat(0)) and g.pseudo_gradient.any()
    assert (g.fragment, g.finite, g.base, g.steps, g.tokens, g.cursor) == (0, True, 0, 7, 700, 7)
    # An anchor that descends it meets the island.
    assert same(before - g.pseudo_gradient, island.flat(0))
    assert island[0].captured_at == 7


def test_what_others_commit_is_not_taken_for_own_progress() -> None:
    island = LocalIsland()
    before = island.flat(0)
    island.train()
    moved = island.move()
    assert not same(moved, before)
    g = island.local.capture(0, 1)
    assert same(g.pseudo_gradient, before - island.flat(0))
    assert (g.base, island.state.fragments[0].version) == (0, 1)


def test_in_synchronous_mode_the_base_is_the_anchor() -> None:
    island = LocalIsland(mode="sync")
    assert island[0].base is island.state.fragments[0].anchor
    assert LocalIsland()[0].base is not island.state.fragments[0].anchor


def test_counts_begin_anew_at_a_capture_or_in_synchronous_mode_at_an_adoption() -> None:
    decoupled, lockstep = LocalIsland(), LocalIsland(mode="sync")
    for island in (decoupled, lockstep):
        island.train(5)
        assert (island.local.capture(0, 5).steps, island[0].tokens) == (5, 500 * (island is lockstep))
    assert (lockstep[0].steps, decoupled[0].steps) == (5, 0)
    for island in (decoupled, lockstep):
        island.train(2)
    assert (lockstep.local.capture(0, 7).steps, decoupled.local.capture(0, 7).steps) == (7, 2)
    lockstep.local.adopt(0)
    assert (lockstep[0].steps, lockstep[0].tokens) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_held_back_is_not_overwritten(mode: str) -> None:
    island = LocalIsland(mode=mode)
    island.train()
    held = island.local.capture(0, 1, keep=True)
    kept = held.pseudo_gradient.clone()
    island.train()
    newer = island.local.capture(0, 2)
    assert same(held.pseudo_gradient, kept) and not same(newer.pseudo_gradient, kept)


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_zero_whatever_was_captured_before(mode: str) -> None:
    island = LocalIsland(fragments=4, mode=mode)
    for _ in range(2):
        island.train()
        for i in range(len(island.plan)):
            g = island.local.capture(i, island.step).pseudo_gradient.clone()
            layout = island.state.fragments[i].layout
            assert g.any() == any(s.numel for s in layout.segments)
            for view in layout.views(g):
                view.zero_()
            assert not g.any()


@pytest.mark.parametrize("mode", MODES)
def test_fragments_cover_every_parameter_once(mode: str) -> None:
    island = LocalIsland(fragments=2, mode=mode)
    assert len(island.plan) == 3
    start = [value.clone() for value in island.shards.values]
    island.train(3)
    found: dict[int, torch.Tensor] = {}
    for i, part in enumerate(island.plan):
        g = island.local.capture(i, 3)
        views = island.state.fragments[i].layout.views(g.pseudo_gradient)
        for member, view in zip(part.members, views, strict=True):
            assert member not in found
            found[member] = view.clone()
    assert sorted(found) == list(range(len(SIZES)))
    for member, view in found.items():
        assert same(view, start[member] - island.shards.values[member])


def test_one_fragment_leaves_the_others_alone() -> None:
    island = LocalIsland(fragments=2)
    island.train(2)
    island.capture(1)
    island.move(1)
    island.local.publish(1, committed=True, reset=False)
    others = [value.clone() for value in island.shards.values]
    island.local.merge_in(1)
    assert island.shards.written == [list(island.plan[1].members)]
    for member, value in enumerate(others):
        moved = member in island.plan[1].members and value.numel() > 0
        assert same(value, island.shards.values[member]) != moved
    assert [f.steps for f in island.local.fragments] == [2, 0, 2]
    assert [f.version for f in island.local.fragments] == [0, 1, 0]


def test_uncommitted_work_is_counted_in_flight_and_on_the_ground() -> None:
    island = LocalIsland(fragments=2)
    island.train(4)
    assert island.local.uncommitted(0) == (12, 1200)  # of three fragments
    island.capture(0)
    island.train(1)
    assert island.local.uncommitted(0) == (15, 1500)
    island.move(0, island=1)
    assert island.local.uncommitted(0) == (15, 1500), "what was committed was another island's"
    island.move(0, island=0)
    assert island.local.uncommitted(0) == (11, 1100)
    island.local.publish(0, committed=True, reset=False)
    island.local.merge_in(0)
    assert island.local.uncommitted(0) == (11, 1100)
    for i in range(3):
        island.local.adopt(i)
    assert island.local.uncommitted(0) == (0, 0)


def test_the_first_contribution_counts_though_it_was_captured_at_step_0() -> None:
    island = LocalIsland()
    island.local.count(100)
    island.capture(0)  # its cursor is 0, and nothing has been taken of this island
    assert island.local.uncommitted(0) == (1, 100)


# ---- encoding and error feedback ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wire", LOSSY)
def test_nothing_is_lost_on_the_way(wire: str, mode: str) -> None:
    """Decoded payloads and the error that is left add up to the pseudo-gradients."""
    island = LocalIsland(mode=mode, wire=wire, bucket_bytes=1024)
    assert len(island.chunks(0)) > 1
    f, layout = island[0], island.state.fragments[0].layout
    offered = torch.zeros(layout.total, dtype=torch.float64)
    told, off = offered.clone(), offered.clone()
    sent = torch.zeros(layout.total)
    assert f.error is not None
    for _ in range(12):
        island.train()
        g = island.capture()
        offered += g.pseudo_gradient.double()
        sent = g.pseudo_gradient + f.error
        told += island.decoded(g).double()
        island.local.committed(g)
        # Each round rounds twice: g + e, and what is left of it.
        off += U * (sent.abs() + f.error.abs()).double()
        island.local.adopt(0)
    left = (told + f.error.double() - offered).abs()
    assert bool((left <= 1.001 * off).all())
    # That is no small thing to ask: without the error something is missing.
    assert bool(((told - offered).abs() > 1.001 * off).any())
    # And the error does not pile up: it is what one payload leaves out.
    share = {"bf16": 2.0**-8, "int8": 1 / 254, "int4": 1 / 14}[wire]
    for error, whole in zip(layout.views(f.error), layout.views(sent), strict=True):
        assert not error.numel() or error.abs().max() <= 1.001 * share * whole.abs().max()


@pytest.mark.parametrize("wire", LOSSY)
def test_the_error_changes_at_a_commit_and_then_once(wire: str) -> None:
    island = LocalIsland(fragments=2, wire=wire)
    for n in range(3):
        island.train()
        errors = [f.error.clone() for f in island.local.fragments if f.error is not None]
        first = island.capture(1)
        payload = first.payload.clone()
        island.move(1)
        # Void rounds: the same bytes are offered again, and so they are encoded once.
        assert same(first.payload, payload)
        assert all(same(e, f.error) for e, f in zip(errors, island.local.fragments, strict=True))  # type: ignore[arg-type]
        expected = first.pseudo_gradient + errors[1] - island.decoded(first)
        committed = n != 1
        island.local.publish(1, committed=committed, reset=False)
        errors[1] = expected if committed else errors[1]
        assert all(same(e, f.error) for e, f in zip(errors, island.local.fragments, strict=True))  # type: ignore[arg-type]
        island.local.merge_in(1)
        assert all(same(e, f.error) for e, f in zip(errors, island.local.fragments, strict=True))  # type: ignore[arg-type]
    assert errors[1].any() and not errors[0].any()


def test_the_error_is_fed_back_once_however_often_it_is_told() -> None:
    island = LocalIsland(wire="int8")
    island.train()
    g = island.capture()
    island.local.committed(g)
    assert island[0].error is not None and island[0].error.any()
    error = island[0].error.clone()
    island.local.committed(g)
    island.move()
    island.local.publish(0, committed=True, reset=False)
    assert same(island[0].error, error)


def test_fp32_leaves_nothing_out_and_copies_nothing() -> None:
    island = LocalIsland()
    island.train()
    g = island.capture()
    assert island[0].error is None
    assert g.payload.data_ptr() == g.pseudo_gradient.data_ptr()
    assert same(island.decoded(g), g.pseudo_gradient)
    before = g.pseudo_gradient.clone()
    island.local.committed(g)
    assert same(g.pseudo_gradient, before)


def test_encoding_leaves_the_pseudo_gradient_as_it_is() -> None:
    island = LocalIsland(wire="int4")
    for _ in range(2):
        island.train()
        before = island.flat(0)
        g = island.local.capture(0, island.step)
        captured = g.pseudo_gradient.clone()
        island.local.encode(g)
        assert same(g.pseudo_gradient, captured) and same(island.flat(0), before)
        island.local.committed(g)


# ---- not finite ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**64])
@pytest.mark.parametrize("wire", ["fp32", *LOSSY])
def test_a_contribution_that_cannot_be_stepped_is_told_and_nothing_of_it_stays(
    value: float, wire: str
) -> None:
    island = LocalIsland(wire=wire)
    island.train(2)
    island.local.committed(island.capture())
    island.local.adopt(0)
    error = None if island[0].error is None else island[0].error.clone()
    island.train(3)
    island.shards.values[1][999] = value
    g = island.capture()
    assert not g.finite and (g.steps, g.cursor) == (3, 5)
    if wire != "fp32":
        assert not g.payload.any() and same(island[0].error, error)  # type: ignore[arg-type]
    island.train(1)
    anchor = island.move()
    island.local.publish(0, committed=False, reset=True)
    assert island.local.merge_in(0) == 1
    assert same(island.flat(0), anchor) and (island[0].steps, island[0].tokens) == (0, 0)
    assert error is None or same(island[0].error, error)  # type: ignore[arg-type]
    assert not island[0].reset and island[0].flight is None
    # From here it goes on as if nothing had been.
    island.train(1)
    g = island.capture()
    assert g.finite and same(g.pseudo_gradient, anchor - island.flat(0)) and (g.base, g.steps) == (1, 1)
    island.move()
    island.local.publish(0, committed=True, reset=False)
    island.local.merge_in(0)
    assert bool(torch.isfinite(island.flat(0)).all())


def test_largest_number_that_can_be_stepped() -> None:
    island = LocalIsland()
    island.shards.values[0][0] = -(2.0**63)
    assert island.local.capture(0, 1).finite
    island.shards.values[0][0] = -torch.nextafter(torch.tensor(2.0**63), torch.tensor(math.inf))
    assert not island.local.capture(0, 1).finite


def test_too_large_with_the_error_is_not_finite_either() -> None:
    island = LocalIsland(wire="bf16")
    assert island[0].error is not None
    island.shards.values[0][0] = -(2.0**63)
    island[0].error[0] = 2.0**63
    g = island.local.capture(0, 1)
    assert g.finite
    island.local.encode(g)
    assert not g.finite and not g.payload.any()
    assert island[0].error[0] == 2.0**63


def test_a_nan_can_be_injected_where_it_is_captured() -> None:
    island = LocalIsland(faults=Faults([fail(island=0, at="capture", round=0, how="nan")]))
    island.train()
    assert not island.capture().finite
    assert bool(torch.isfinite(island.flat(0)).all()), "the parameters themselves are whole"
    assert island.capture().finite, "it happens once"
