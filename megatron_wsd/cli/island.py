"""``megatron-wsd island``: one `deepspeed` launch, and the store through which it meets other islands."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Annotated

import psutil
import typer

from megatron_wsd.addresses import address_for, lighthouse_host_port
from megatron_wsd.cli.checks import before_island
from megatron_wsd.cli.command import Island, deepspeed_env_lines
from megatron_wsd.cli.dry_run import end_dry_run, preamble
from megatron_wsd.cli.logs import HEADER, console_text, failure
from megatron_wsd.cli.process import Guarded, StopRequest, exit_status, free_port, say
from megatron_wsd.config import load_config
from megatron_wsd.diloco.faults import Fault
from megatron_wsd.errors import ConfigError, IslandError, MegatronWSDError
from megatron_wsd.files import write_json_atomic
from megatron_wsd.preflight import check_trainer
from megatron_wsd.reporting.island import IslandRecords
from megatron_wsd.rundir import STOP, RunDir, held, holder, open_island

_LIGHTHOUSE_WAIT_S = 5.0  # an island may be started just before its lighthouse


def island(
    island: Annotated[int, typer.Option(help="Number of this island, from 0.")],
    islands: Annotated[int, typer.Option(help="Number of all islands.")],
    ranks: Annotated[int, typer.Option(help="Ranks of this island, over all its machines.")],
    lighthouse: Annotated[str, typer.Option(help="Address of the torchft lighthouse, http://HOST:PORT.")],
    config: Annotated[Path, typer.Option(help="The json config.")],
    run_dir: Annotated[Path, typer.Option(help="Run folder; shared by the machines of one island.")],
    steps: Annotated[int | None, typer.Option(help="Stop after this many inner steps in all.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    hostfile: Annotated[Path | None, typer.Option(help="Its machines: lines 'host slots=N'.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port where its ranks meet.")] = None,
    script: Annotated[Path | None, typer.Option(help="Training script instead of launch/train.py.")] = None,
    interface: Annotated[str | None, typer.Option(help="Network towards the other islands.")] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(help="A fault, as 'island=1 at=exchange round=3 how=kill'; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and stop.")] = False,
) -> None:
    """Start one island of a run, here or on the machines of a hostfile, and wait for it."""
    loaded = load_config(config, islands=islands, ranks=ranks, named="--config")
    plan = Island(
        island=island,
        islands=islands,
        ranks=ranks,
        lighthouse=lighthouse,
        run_dir=run_dir.absolute(),
        steps=steps,
        resume=resume,
        hostfile=hostfile and hostfile.absolute(),
        script=script and script.absolute(),
        interface=interface,
        inject=tuple(map(Fault.parse, inject or ())),
    )
    if master_port is not None and not 1 <= master_port <= 65535:
        raise ConfigError("--master-port", "a port, 1 to 65535", master_port)
    if script is None:
        check_trainer(loaded)
    port = master_port or free_port()
    found = before_island(loaded, plan)
    if dry_run:
        typer.echo("\n".join([*preamble(loaded, [plan], local=False), *dry_lines(plan, port)]))
        end_dry_run(found)
        return
    # what is started by `launch` is told there
    found.insist(f"island {island}", quiet=holder(plan.run_dir / "launch.lock") == os.getppid())
    if found.done:
        return
    command = plan.command(port)
    # One that goes on may have lost the link to it, and is started again until the link is back.
    _await_lighthouse(
        f"island {island}", lighthouse, loaded.islands.start_timeout_s if resume else _LIGHTHOUSE_WAIT_S
    )
    run = open_island(run_dir, loaded, island=island, resume=resume)
    with held(run.island(island) / "lock", f"island {island}"):
        (run.island(island) / STOP).unlink(missing_ok=True)  # of an earlier process
        write_json_atomic(run.island_config(island), loaded.resolved())
        raise typer.Exit(_supervise(plan, run, command))


def dry_lines(plan: Island, master_port: int) -> list[str]:
    """The command of an island with the variables set for it, as lines for a shell."""
    try:
        host = address_for(plan.lighthouse, plan.interface)
    except MegatronWSDError:
        host = "THIS_HOST"
    added = plan.environment(f"{host}:STORE_PORT")
    return [f"{name}={shlex.quote(value)} \\" for name, value in added.items()] + [
        shlex.join(plan.command(master_port))
    ]


def _await_lighthouse(who: str, address: str, patience_s: float) -> None:
    began = time.monotonic()
    deadline, told = began + patience_s, False
    while True:
        try:
            socket.create_connection(lighthouse_host_port(address), timeout=_LIGHTHOUSE_WAIT_S).close()
            if told:
                say(who, f"the lighthouse answers after {time.monotonic() - began:.0f} s")
            return
        except OSError as e:
            if time.monotonic() > deadline:
                raise IslandError(
                    "--lighthouse",
                    f"a torchft lighthouse that answers at {address}",
                    str(e),
                    "Start it first (`megatron-wsd launch --dry-run` prints how), or mend the address.",
                ) from None
        if not told and time.monotonic() - began > 2.0:
            say(who, f"waits up to {patience_s:.0f} s for the lighthouse, which does not answer at {address}")
            told = True
        time.sleep(0.2)


def _supervise(plan: Island, run: RunDir, command: list[str]) -> int:
    """Run the ranks to their end; the exit status for the shell.

    The store is served from here since it must outlive every rank: torchft's Managers meet through it.
    """
    stop = StopRequest()
    listener = socket.socket()
    host = address_for(plan.lighthouse, plan.interface)
    listener.bind((host, 0))
    listener.listen(128)
    added = plan.environment(f"{host}:{listener.getsockname()[1]}")
    env = {**os.environ, **added}
    if plan.hostfile is not None:
        exports = run.island(plan.island) / "deepspeed_env"
        exports.write_text("\n".join(deepspeed_env_lines(added)) + "\n")
        env["DS_ENV_FILE"] = str(exports)
    who = f"island {plan.island}"
    with run.log(plan.island).open("ab") as log:
        log.write(f"{HEADER} {plan.island}: {time.strftime('%F %T %z')}: {shlex.join(command)}\n".encode())
        log.flush()
        child = Guarded(command, env, subprocess.PIPE)
        reader = _Reader(child.stdout, log, who)
        try:
            reader.start()
            store = _serve_store(host, listener)
            # a script of the user's own knows no stop file
            several = plan.hostfile is not None
            stop_file = run.island(plan.island) / STOP if several and plan.script is None else None
            _wait(child, stop, stop_file, remote=several)
        finally:
            child.kill()  # sweeps up what the launcher may have left
            reader.join(timeout=5.0)
        del store
    status = exit_status(child.poll() or 0)
    if status == 0 and reader.clean_exits < plan.ranks:
        # deepspeed's runner exits 0 when its own child, the launcher of the ranks, is killed
        status = 128 + signal.SIGKILL
    if status == 0 and plan.script is not None and not _told_its_end(run, plan.island):
        say(who, "the script ended without outer.close(): `status` takes the island for lost")
    # What is started by `launch` is told there, when all has ended.
    if status and not stop.count and holder(run.path / "launch.lock") != os.getppid():
        typer.echo("\n".join(failure(plan.island, status, run.log(plan.island))), err=True)
    return status


def _told_its_end(run: RunDir, island: int) -> bool:
    records = IslandRecords(island, run.island(island))
    records.read()
    return bool(records.end)


def _serve_store(host: str, listener: socket.socket) -> object:
    from torch.distributed import TCPStore  # slow, and the ranks are on their way meanwhile

    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _wait(child: Guarded, stop: StopRequest, stop_file: Path | None, *, remote: bool) -> None:
    """Wait for the launcher to end, passing on requests to stop.

    Args:
        child: deepspeed's runner.
        stop: what was requested.
        stop_file: how to ask the trainer's ranks where some are on other machines.
        remote: some are.
    """
    seen = 0
    while child.poll() is None:
        if stop.count > seen:
            # To signal deepspeed's launcher would end the ranks within 30 s and count as a failure, so
            # the ranks themselves are asked. pdsh passes no signal on, and would drop what they say.
            seen = stop.count
            if seen == 1 and stop_file is not None:
                stop_file.touch()
            elif seen == 1 and remote:
                child.terminate()
            elif seen > 1 or not _ask_ranks(child.pid):  # the user insists, or no rank is there yet
                child.kill()
        time.sleep(0.1)


def _ask_ranks(runner: int) -> bool:
    """Send SIGTERM to the ranks, children of the children of deepspeed's runner; False if there are none."""
    asked = False
    try:
        for launcher in psutil.Process(runner).children():
            for rank in launcher.children():
                rank.terminate()
                asked = True
    except psutil.NoSuchProcess:
        pass
    return asked


class _Reader(threading.Thread):
    """Copies the output of an island to its log, and the trainer's own lines to the console."""

    def __init__(self, source: IO[bytes] | None, log: IO[bytes], who: str) -> None:
        super().__init__(daemon=True)
        assert source is not None
        self._source, self._log, self._who = source, log, who
        self.clean_exits = 0
        self._told: set[str] = set()  # an error is mostly that of every rank

    def run(self) -> None:
        writable = True
        for raw in self._source:
            line = raw.decode(errors="replace").rstrip("\r\n")
            self.clean_exits += line.endswith("exits successfully.")
            text = console_text(line)
            if text is not None and (text not in self._told or "error: " not in text):
                say(self._who, text)
                self._told.add(text)
            try:
                if writable:
                    self._log.write(raw)
                    self._log.flush()
            except OSError as e:  # a full disk: the ranks will tell; they must not block on a full pipe
                writable = False
                say(self._who, f"log.txt: {e.strerror}")
