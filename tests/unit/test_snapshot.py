"""Healing by snapshot: what is served arrives, to those who may have it, of the version they were told."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch
from outer_states import advance as advance_fragment
from outer_states import state_of

from megatron_wsd.diloco.faults import Faults, fail
from megatron_wsd.diloco.snapshot import SnapshotServer, fetch
from megatron_wsd.diloco.state import OuterState
from megatron_wsd.errors import ExchangeError


def advance(state: OuterState) -> None:
    """One more commit."""
    advance_fragment(state.fragments[0], 7)
    state.outer_step += 1


def stale() -> OuterState:
    """The same model some commits ago."""
    return state_of(("a.weight", "b.weight"), ("c.weight",), steps=1)


@pytest.fixture
def source() -> OuterState:
    return state_of(("a.weight", "b.weight"), ("c.weight",))


@pytest.fixture
def server(source: OuterState) -> Iterator[SnapshotServer]:
    made = SnapshotServer(source, "127.0.0.1", 5.0)
    yield made
    made.close()


def quiet() -> None:
    pass


def test_the_state_arrives_to_the_bit(source: OuterState, server: SnapshotServer) -> None:
    behind = stale()
    assert behind.digest() != source.digest()
    beats: list[int] = []
    fetch(server.offer(), behind, 5.0, 1000.0, lambda: beats.append(1))
    assert behind.digest() == source.digest() and behind.counter_digest() == source.counter_digest()
    for name, tensor in source.tensors().items():
        assert torch.equal(tensor, behind.tensors()[name]), name
    assert len(beats) >= len(source.tensors())


def test_it_is_served_to_whoever_has_the_token_alone(server: SnapshotServer, source: OuterState) -> None:
    offer = server.offer()
    where = urlsplit(offer["url"])
    for header in ({}, {"Authorization": "Bearer wrong"}):
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5)
        connection.request("GET", f"/{offer['version']}/counters", headers=header)
        assert connection.getresponse().status == 403
    behind = stale()
    with pytest.raises(ExchangeError, match="403"):
        fetch({**offer, "token": "wrong"}, behind, 5.0, 1000.0, quiet)
    assert behind.outer_step == -1, "torn: it must be healed before it takes part"


def test_another_version_is_refused(server: SnapshotServer, source: OuterState) -> None:
    offer = server.offer()
    advance(source)  # the others did not wait
    behind = stale()
    with pytest.raises(ExchangeError, match="409"):
        fetch(offer, behind, 5.0, 1000.0, quiet)
    assert behind.outer_step == -1
    fetch(server.offer(), behind, 5.0, 1000.0, quiet)
    assert behind.digest() == source.digest() and behind.outer_step == source.outer_step


def test_what_is_not_what_was_offered_is_refused(server: SnapshotServer) -> None:
    behind = stale()
    with pytest.raises(ExchangeError, match="digest"):
        fetch({**server.offer(), "digest": "0" * 16}, behind, 5.0, 1000.0, quiet)
    assert behind.outer_step == -1


def test_a_server_that_is_gone_or_in_trouble_is_told(source: OuterState) -> None:
    broken = Faults([fail(island=0, at="healing", round=0, how="exception")])
    server = SnapshotServer(source, "127.0.0.1", 5.0, broken)
    behind = stale()
    with pytest.raises(ExchangeError, match="InjectedFault"):
        fetch(server.offer(), behind, 5.0, 1000.0, quiet)
    offer = server.offer()
    server.close()
    with pytest.raises(ExchangeError, match="Error"):
        fetch(offer, behind, 5.0, 1000.0, quiet)


def test_a_step_waits_for_the_tensor_that_is_being_read(source: OuterState, server: SnapshotServer) -> None:
    """Whoever holds ``still`` keeps the server from reading half a state."""
    behind = stale()
    fetched = threading.Event()

    def work() -> None:
        fetch(server.offer(), behind, 5.0, 1000.0, quiet)
        fetched.set()

    with source.still:
        thread = threading.Thread(target=work)
        thread.start()
        assert not fetched.wait(0.3)
    assert fetched.wait(10)
    thread.join()
    assert behind.digest() == source.digest()
