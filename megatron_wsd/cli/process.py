"""Child processes that cannot outlive their parent, and what is needed around them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from types import FrameType
from typing import IO

# A guard in the child's process group waits for the end of a pipe that only the parent holds. However the
# parent ends, SIGKILL included, the pipe closes and the guard kills the group. PR_SET_PDEATHSIG would not
# do: it reaches a child but not its children, and the deepspeed launcher has children of its own.
_GUARD = 'exec 3<&0; (read -r _ <&3; kill -9 0) >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'


def say(who: str, text: str) -> None:
    """Print one console line; a console that is gone must not end a run."""
    try:
        print(f"[{who}] {text}", flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


class Guarded:
    """A command in a session and process group of its own that ends with this process.

    Args:
        command: the command and its arguments.
        env: its whole environment; this process's own by default.
        output: where stdout and stderr go (a file, or ``subprocess.PIPE``); inherited by default.
    """

    def __init__(
        self, command: list[str], env: dict[str, str] | None = None, output: IO[bytes] | int | None = None
    ) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", *command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid  # of the command itself: the shell execs it
        self.stdout = self._process.stdout
        self._swept = False

    def poll(self) -> int | None:
        """The exit status as of `subprocess.Popen`, None while the command runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM to the command alone, not to its children."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the whole group, also what the command left behind; nothing when called again."""
        if self._swept:
            return
        self._swept = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class StopRequest:
    """Counts SIGINT, SIGTERM and SIGHUP instead of dying of them: the first asks, the second insists."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = signal.SIGINT
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(signal.SIGHUP, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.signal = signal.Signals(number)


def exit_status(code: int) -> int:
    """One number for a shell: a death by signal s is 128 + s, also where deepspeed exits with -s mod 256."""
    if code < 0:
        return 128 - code
    return 128 + (256 - code) if code > 191 else code


def describe_exit(status: int) -> str:
    """``exit code 3`` or ``killed by SIGKILL``."""
    if 128 < status <= 191:
        try:
            return f"killed by {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return f"exit code {status}"


def free_port(taken: Collection[int] = ()) -> int:
    """A TCP port that is free now, not in ``taken`` and below those that systems give out by themselves."""
    for port in random.SystemRandom().sample(range(20000, 32768), 200):
        if port in taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free TCP port between 20000 and 32767")
