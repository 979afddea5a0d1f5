"""One island with real DeepSpeed and megatron-core, a process a rank, without the `deepspeed` launcher.

The processes are forked from one that has imported everything, so that an island costs little.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _context() -> Any:
    if HERE not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *sys.path, os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine_worker"])
    return context


def island(work: Callable[..., Any], ranks: int, *args: Any, **env: str) -> list[Any]:
    """``work(*args)`` in each rank of an island of as many; what each returned.

    Args:
        work: a function of the module `engine_worker`.
        ranks: of the island.
        args: picklable.
        env: environment variables beside those of torch.distributed.
    """
    context, port = _context(), _free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **env,
        }
        process = context.Process(target=_rank, args=(work, args, variables, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        found = [pipe.recv() for pipe in pipes]
    except EOFError:
        raise AssertionError("a rank ended without a result") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [text for ok, text in found if not ok]
    assert not failed, "\n----\n".join(failed)
    return [result for _, result in found]


def _rank(work: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], pipe: Any) -> None:
    signal.alarm(300)  # nobody is left behind if the test itself is killed
    os.environ.update(env)
    try:
        answer = (True, work(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pause()  # the others may still need this one; the test ends it
