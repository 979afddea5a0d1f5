"""Where the outer half lives: what is refused, how messages cross, and when memory may change hands."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from local_islands import LocalIsland
from outer_states import config_of

from megatron_wsd.diloco import residence
from megatron_wsd.diloco.residence import HOST, Dock, Residence, check_residence, residence_of
from megatron_wsd.errors import ConfigError, NativeError

CPU = torch.device("cpu")


def test_a_gpu_that_is_not_there_is_refused_when_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config_of(outer={"device": "cuda"})  # reading the config alone refuses nothing
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"megatron_wsd\.outer\.device: expected \"cpu\" on a machine"):
        check_residence(wanted)
    with pytest.raises(ConfigError):
        residence_of(wanted)
    assert residence_of(config_of()) is HOST


def test_so_is_an_extension_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeError("megatron_wsd._CUDA", "the compiled CUDA extension", "nothing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(residence, "cuda_extension", missing)
    with pytest.raises(NativeError, match="the compiled CUDA extension"):
        check_residence(config_of(outer={"device": "cuda"}))


def test_staged_messages_cross_in_memory_of_their_own() -> None:
    dock = Dock(Residence(CPU, staged=True), 1000)
    own = torch.arange(200, dtype=torch.uint8)
    sent = dock.outbound(own)
    assert torch.equal(sent, own) and sent.data_ptr() != own.data_ptr()
    room = dock.room(100)
    room.fill_(7)  # as gloo does
    landed = dock.landed(100)
    dock.room(1000).fill_(9)
    assert landed.tolist() == [7] * 100


def test_on_the_host_nothing_is_copied() -> None:
    dock = Dock(HOST, 1000)
    own = torch.arange(200, dtype=torch.uint8)
    assert dock.outbound(own) is own
    dock.room(100).fill_(7)
    assert dock.landed(100).data_ptr() == dock.room(100).data_ptr()


class Watched(Residence):
    """Notes what is true whenever a thread finishes its stream."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.seen: list[Any] = []
        self.look: Any = lambda: None

    def finish(self) -> None:
        self.seen.append(self.look())


def test_a_contribution_is_finished_before_it_is_offered_and_a_base_before_it_is_told() -> None:
    island, watched = LocalIsland(wire="int8"), Watched()
    island.state.residence = island.local._residence = watched
    island.train()
    captured = island.local.capture(0, 1)
    watched.look = lambda: captured.payload.numel()
    assert island.local.encode(captured) is captured
    assert watched.seen == [captured.payload.numel()] and watched.seen[0] > 0
    fragment = island.local.fragments[0]
    fragment.flight = captured
    island.state.fragments[0].anchor.add_(1.0)
    watched.seen.clear()
    watched.look = lambda: (fragment.published, torch.equal(fragment.base, island.state.fragments[0].anchor))
    island.local.publish(0, committed=True, reset=False)
    assert watched.seen == [(None, True)] and fragment.published is not None


def test_threads_of_one_process_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here with streams that are names."""
    current = threading.local()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.waited_for = 0

        def synchronize(self) -> None:
            self.waited_for += 1

        def __enter__(self) -> None:
            current.stream = self

        def __exit__(self, *_: object) -> None:
            del current.stream

    default = Stream(CPU)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(current, "stream", default))
    there = Residence(torch.device("cuda", 1))
    assert there.staged
    with there.beside_training():
        mine = current.stream
        there.finish()
    there.finish()
    there.finish()
    assert (mine.waited_for, default.waited_for) == (1, 2)
    with HOST.beside_training():
        HOST.finish()
    assert (mine.waited_for, default.waited_for) == (1, 2)
