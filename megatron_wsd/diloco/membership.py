"""Which islands are alive, through torchft: quorum, the group between equal ranks, the vote.

Each rank of an island holds a `torchft.Manager`. The managers of one island ask the lighthouse together;
it answers with the islands that take part, and torchft reconfigures a process group between the equal
ranks of those islands. Healing is not left to the Manager: it would heal rank by rank, and cannot see
two islands that stand at the same step with different contents (see `round`).
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from megatron_wsd.addresses import address_for
from megatron_wsd.config import Config
from megatron_wsd.diloco.island import IslandAddress, IslandGroup
from megatron_wsd.diloco.lighthouse import LighthouseWatch, check_lighthouse
from megatron_wsd.diloco.roll_call import RollCall
from megatron_wsd.diloco.watch import HangWatch
from megatron_wsd.errors import ExchangeError, GaveUp, IslandError, TooFewIslands

log = logging.getLogger(__name__)
_WITHDRAWN = "withdrawn: the run is being stopped, and the lighthouse does not answer"
_LOOK_S = 2.0  # between two looks at whether it is still worth waiting for a quorum


def _no_transport() -> Any:
    """A checkpoint transport that serves nothing: torchft's default opens a port on every interface."""
    from torchft.checkpointing import CheckpointTransport

    class NoTransport(CheckpointTransport[Any]):
        def metadata(self) -> str:
            return ""

        def send_checkpoint(
            self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
        ) -> None:
            raise RuntimeError("healing does not go through torchft's transport")

        def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
            raise RuntimeError("healing does not go through torchft's transport")

        def disallow_checkpoint(self) -> None:
            pass

        def shutdown(self, wait: bool = True) -> None:
            pass

    return NoTransport()


@contextlib.contextmanager
def _listening_at(host: str) -> Iterator[None]:
    """While it is open, servers of torchft's managers are made to listen at ``host`` alone.

    Else they listen at every interface of the machine, and end their process for whoever asks them to.
    """
    from torchft import manager

    plain = manager.ManagerServer

    def server(*, bind: str, **rest: Any) -> Any:
        return plain(bind=f"{host}:{bind.rpartition(':')[2]}", **rest)

    manager.ManagerServer = server
    try:
        yield
    finally:
        manager.ManagerServer = plain


class _Remembered:
    """The client of torchft's manager, and its newest answer, of which the manager keeps the number alone."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.quorum: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *args: Any, **kwargs: Any) -> Any:
        self.quorum = self._client._quorum(*args, **kwargs)
        return self.quorum


class _StorePort(int):
    """The port of a store, which torchft writes down as ``PORT/NAME`` with a name that is used once.

    Under it the members of a quorum find each other by the quorum's number. A lighthouse that is restarted
    counts from 1 again: without the name, the addresses of an earlier quorum with that number would be found.
    """

    def __format__(self, spec: str) -> str:
        return f"{int(self)}/{uuid.uuid4().hex}"


class Membership:
    """This rank's seat among the equal ranks of all islands.

    All methods but `gather` and `broadcast` must be called by all ranks of the island together.

    Args:
        address: who this island is and where the lighthouse is.
        group: the ranks of this island.
        config: for the timeouts and the fewest islands.

    Attributes:
        bytes_moved: payload that this rank sent or received.
        host: address under which the other islands reach this machine.
        watch: ends this process if the outer half stands still.
        lighthouse: tells when it does not answer; to be started by whoever wants to be told.
        roll: which islands have to be there.
        stopping: asked whether the run is to be stopped, on every rank; if so nobody waits for a lighthouse
            that does not answer.

    Raises:
        IslandError: the lighthouse does not answer.
    """

    def __init__(self, address: IslandAddress, group: IslandGroup, config: Config) -> None:
        self._address, self._group, self._config = address, group, config
        self._exchange_timeout = timedelta(seconds=config.sync.timeout_s)
        self._quorum_timeout = timedelta(
            seconds=config.islands.join_timeout_s + config.islands.heartbeat_timeout_s
        )
        self._manager: Any = None
        self._pg: Any = None
        self._step = 0
        self.bytes_moved = 0
        islands = config.islands
        self.watch = HangWatch(
            islands.hang_timeout_s or 2 * (islands.join_timeout_s + islands.heartbeat_timeout_s)
        )
        self.stopping: Callable[[], bool] = lambda: False
        self.roll = RollCall(group, islands.min_islands or 1)
        check_lighthouse(address.lighthouse)
        # Not that of the store: an island may have other machines than the one that launches it.
        self.host = address_for(address.lighthouse, address.interface)
        self.lighthouse = LighthouseWatch(address.lighthouse)
        self._build()

    def _build(self) -> None:
        """Make the Manager; rank 0 first, since the others find it through the island's store."""
        os.environ.setdefault("RUST_LOG", "warn")  # else torchft logs every heartbeat's state
        from torchft import Manager, ProcessGroupGloo

        watch, timeout_s, host = self.watch, self._config.sync.timeout_s, self.host

        class Group(ProcessGroupGloo):
            def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
                # As torchft makes it, but gloo would listen where GLOO_SOCKET_IFNAME says, which is for the
                # inside of the island, or where the name of this machine leads, often 127.0.1.1.
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                # Gloo calls a peer that has gone five times, and waits so long each time; so all must be here
                # before the first call.
                store.set(f"here/{rank}", "")
                store.wait([f"here/{r}" for r in range(world_size)], timedelta(seconds=timeout_s))
                options._timeout = timedelta(seconds=timeout_s / 5)
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                backend = dist.ProcessGroupGloo(store, rank, world_size, options)
                backend._set_default_timeout(timedelta(seconds=timeout_s))  # of a message
                backend._set_sequence_number_for_group()
                group = dist.ProcessGroup(store, rank, world_size)
                group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
                group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
                return group

            def configure(
                self, store_addr: str, replica_id: str, rank: int, world_size: int, *args: Any, **kwargs: Any
            ) -> None:
                # Each of the peers has its time to be found and to answer; nobody beats meanwhile.
                watch.beat(2 * world_size * timeout_s)
                super().configure(store_addr, replica_id, rank, world_size, *args, **kwargs)

        def make() -> None:
            self._pg = Group(timeout=self._exchange_timeout)
            self._manager = Manager(
                pg=self._pg,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=self._config.islands.min_islands or 1,
                use_async_quorum=False,
                timeout=self._exchange_timeout,
                quorum_timeout=self._quorum_timeout,
                connect_timeout=timedelta(seconds=10),
                rank=self._group.rank,
                world_size=self._group.size,
                store_addr=self._address.store[0],
                store_port=_StorePort(self._address.store[1]),
                lighthouse_addr=self._address.lighthouse,
                # torchft orders replicas by this string.
                replica_id=f"island_{self._address.island:06d}",
                hostname=host,
                checkpoint_transport=_no_transport(),
                init_sync=False,
            )

        with _listening_at(host):
            if self._group.rank == 0:
                make()
            self._group.barrier()
            if self._group.rank != 0:
                make()
        self._group.barrier()
        self._answer = _Remembered(self._manager._client)
        self._manager._client = self._answer
        self._manager.wait_quorum = self._wait_quorum

    def start_round(self, step: int) -> None:
        """Take part in the next quorum; waits for every live island, up to ``join_timeout_s``.

        Args:
            step: this island's outer step.

        Raises:
            ExchangeError: no quorum; the seat has been rebuilt and the next call may succeed.
        """
        self.beat()
        self._step = max(0, step)
        self._manager.load_state_dict({"step": self._step, "batches_committed": 0})
        problem = ""
        try:
            self._manager.start_quorum(allow_heal=False, timeout=self._quorum_timeout)
        except Exception as e:  # torchft raises RuntimeError, TimeoutError and its own
            problem = f"{type(e).__name__}: {e}"
        newborn = not problem and self._newborn()
        rows = self._group.gather([int(not problem), int(newborn), int(self.usable)])
        if any(row[1] for row in rows):
            self.roll.doubt_lighthouse()
        if not all(row[0] for row in rows):
            self._rebuild()
            raise ExchangeError(f"no quorum: {problem or 'another rank of this island got none'}")
        if self.roll.in_doubt and not all(row[2] for row in rows):
            self._rebuild()
            raise ExchangeError("the lighthouse was restarted, and the islands have not found each other yet")

    def _wait_quorum(self) -> None:
        """As torchft does, but not for a lighthouse that is gone when the run is to be stopped."""
        future = self._manager._quorum_future
        while not futures.wait([future], timeout=_LOOK_S).done:
            if self.stopping() and self._lighthouse_is_gone():
                raise TooFewIslands(_WITHDRAWN)
        future.result()

    def _lighthouse_is_gone(self) -> bool:
        try:
            check_lighthouse(self._address.lighthouse, _LOOK_S)
        except IslandError:
            return True
        return False

    def _newborn(self) -> bool:
        """Whether another lighthouse than before has answered."""
        quorum = self._answer.quorum
        # torchft calls a replica island_000001:UUID, as it was named and something that is used once.
        here = tuple(sorted(int(name.split(":")[0].rpartition("_")[2]) for name in quorum.replica_ids))
        return self.roll.call(int(quorum.quorum_id), here)

    def beat(self, more_s: float = 0.0) -> None:
        """The outer half makes progress; the next step may take ``more_s`` longer than usual."""
        self.watch.beat(more_s)

    def abort(self) -> None:
        """Let peers that wait for this rank fail at once instead of at a timeout."""
        if self.usable:
            self._manager.report_error(ExchangeError("aborted"))
        with contextlib.suppress(Exception):
            self._pg.abort()

    def _rebuild(self) -> None:
        """After a quorum that raised, the Manager would raise for ever: make a new one."""
        log.warning("rebuilding the torchft manager after a failed quorum")
        with contextlib.suppress(Exception):
            self._manager.shutdown(wait=False)
        self._group.barrier()
        self.beat()  # the quorum may have waited as long as it may, and so may what follows
        why = ""
        try:
            check_lighthouse(self._address.lighthouse, self._config.islands.join_timeout_s, self.stopping)
        except IslandError as e:
            why = str(e.got)
        there = self._group.all_agree(not why)
        if not there and not self._group.all_agree(not self.stopping()):
            raise TooFewIslands(_WITHDRAWN)
        if not there:
            raise GaveUp(
                "megatron_wsd.islands.join_timeout_s",
                f"a lighthouse that answers within {self._config.islands.join_timeout_s:g} s",
                why or "none that answers another rank of this island",
                "Start it, or mend the link to it; then go on with --resume.",
            )
        self.beat()
        self._build()

    @property
    def usable(self) -> bool:
        """Whether the group between the islands was configured and has not failed since."""
        return self._manager.errored() is None and self._pg._pg is not None

    @property
    def size(self) -> int:
        """Islands in the current quorum."""
        return int(self._pg.size())

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        if not self.usable:
            raise ExchangeError(f"{what}: the group was not made or has failed: {self._manager.errored()}")
        self.beat()
        try:
            start().wait()
        except Exception as e:  # gloo raises RuntimeError; a torchft group its own kinds
            self._manager.report_error(e)
            # Peers that wait for this rank get an error at once instead of a timeout.
            with contextlib.suppress(Exception):
                self._pg.abort()
            raise ExchangeError(f"{what}: {str(e).splitlines()[0]}") from e

    def gather(self, values: list[int]) -> list[list[int]]:
        """The int64 ``values`` of this rank's equals, in the order of the quorum.

        Raises:
            ExchangeError: a peer is gone or too late.
        """
        mine = torch.tensor(values, dtype=torch.int64)
        if self.usable and self.size == 1:
            return [values]
        everyone = [torch.empty_like(mine) for _ in range(self.size if self.usable else 1)]
        self._run("agree", lambda: self._pg.allgather([everyone], [mine], AllgatherOptions()))
        return [t.tolist() for t in everyone]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Send ``tensor`` from the equal rank at place ``source`` of the quorum; in place elsewhere.

        Args:
            tensor: contiguous, on the CPU, equal in dtype and size on every island.
            source: place in the quorum.

        Raises:
            ExchangeError: a peer is gone or too late.
        """
        if self.usable and self.size == 1:
            return
        self._run("exchange", lambda: self._pg.broadcast_one(tensor, source))
        self.bytes_moved += tensor.numel() * tensor.element_size()

    def vote(self, ok: bool) -> bool:
        """torchft's vote: true if every rank of the island is well and enough islands take part."""
        if not ok and self.usable:
            self._manager.report_error(ExchangeError("voted against"))
        try:
            committed = bool(self._manager.should_commit(timeout=self._exchange_timeout))
        except Exception as e:  # the island's own manager server is gone or hangs
            log.warning("vote failed: %s", e)
            committed = False
        return self._group.all_agree(committed)

    def shutdown(self) -> None:
        """Leave. The other islands notice after ``heartbeat_timeout_s``."""
        self.watch.stop()
        self.lighthouse.stop()
        with contextlib.suppress(Exception):
            self._pg.abort()
        with contextlib.suppress(Exception):  # after a failed quorum it was shut down before
            self._manager.shutdown(wait=False)
