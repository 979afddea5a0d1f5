"""The folder of a run: what is in it, who may begin one, and who may go on with one.

A folder ``RUN`` holds ``run.json`` (which run this is), ``config.json`` (the complete config),
``lighthouse.log``, one ``island_<i>/`` for each island (``config.json``, which its ranks read, ``log.txt``,
``metrics.jsonl``, ``checkpoints/``, and ``stop`` once it was asked to stop on other machines) and at the end
``summary.json`` and ``run.png``. Every check comes before the first write, so a refused start leaves a folder
as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import megatron_wsd
from megatron_wsd.errors import ConfigError, IslandError
from megatron_wsd.files import write_json_atomic

if TYPE_CHECKING:
    from megatron_wsd.config import Config

STOP = "stop"
"""A file in an island's folder: while it is there, the island finishes its step, saves and leaves."""


@dataclass(frozen=True)
class RunDir:
    """A run folder that has been checked and may be written to. ``path`` is absolute."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def lighthouse_log(self) -> Path:
        return self.path / "lighthouse.log"

    def island(self, island: int) -> Path:
        return self.path / f"island_{island}"

    def log(self, island: int) -> Path:
        return self.island(island) / "log.txt"

    def island_config(self, island: int) -> Path:
        """The config that the ranks of an island read: islands may differ in folders, devices and pauses."""
        return self.island(island) / "config.json"

    def metrics(self, island: int) -> Path:
        return self.island(island) / "metrics.jsonl"

    def facts(self) -> dict[str, Any]:
        """What ``run.json`` says."""
        facts: dict[str, Any] = json.loads(self.run_json.read_text())
        return facts

    @property
    def asynchronous(self) -> bool:
        """Whether its islands count steps of their own; False also where no config says so."""
        try:
            block = json.loads(self.config_json.read_text())["megatron_wsd"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(block.get("sync", {}).get("mode") == "async")

    @property
    def id(self) -> str | None:
        """What tells this run from every other, also from one of the same config; None if it is no run.

        Islands with folders of their own have ids of their own.
        """
        try:
            facts = self.facts()
        except (OSError, ValueError):
            return None
        found = facts.get("id", facts.get("created"))  # runs begun by an older version have no id
        return None if found is None else str(found)

    def eras(self) -> list[dict[str, Any]]:
        """The numbers of islands that the run has had, oldest first; each change begins an era.

        Every one has ``islands`` and ``config_digest``; all but the first also where they began, see
        `megatron_wsd.resume.Change`. ``islands`` and ``config_digest`` of ``run.json`` are the newest.
        """
        facts = self.facts()
        now = {"islands": facts["islands"], "config_digest": facts["config_digest"]}
        return list(facts.get("eras", [now]))

    def set_lighthouse(self, address: str) -> None:
        """Note where the lighthouse of this run is, so that an island can be restarted by hand."""
        write_json_atomic(self.run_json, {**self.facts(), "lighthouse": address})


def open_run(
    path: str | Path, config: Config, *, resume: bool, eras: list[dict[str, Any]] | None = None
) -> RunDir:
    """Begin a run in ``path`` (new or empty), or with ``resume`` go on with the one that is there.

    Args:
        path: the run folder.
        config: that the run shall have.
        resume: go on with a run.
        eras: those of the run from now on, if the number of its islands changes; see `RunDir.eras`.

    Raises:
        FieldError: as `check_run`. Nothing is written then.
    """
    run = RunDir(Path(path).absolute())
    known = check_run(path, config, resume=resume, resized=eras is not None)
    _write(run, config, known)
    if eras is not None:
        now = {"islands": eras[-1]["islands"], "config_digest": eras[-1]["config_digest"], "eras": eras}
        write_json_atomic(run.run_json, {**run.facts(), **now})
    return run


def check_run(
    path: str | Path, config: Config, *, resume: bool, resized: bool = False
) -> dict[str, Any] | None:
    """Refuse what `open_run` would, and write nothing; returns the ``run.json`` of a run that is there.

    Raises:
        ConfigError: the folder holds something else, holds a run and ``resume`` is not set, or holds none or
            one of another config and it is.
        IslandError: some process is at it.
    """
    run = RunDir(Path(path).absolute())
    known = _check(run, config, resized=resized)
    _refuse_held(run.path / "launch.lock", "launch")
    for lock in sorted(run.path.glob("island_*/lock")):
        _refuse_held(lock, lock.parent.name.replace("_", " "))
    if resume and not known:
        there = "holds none" if run.path.exists() else "does not exist"
        raise ConfigError(
            "--resume",
            "a run to go on with",
            f"{run.path}, which {there}",
            "Check --run-dir, or leave --resume out to begin a new run there.",
        )
    if known and not resume:
        raise ConfigError(
            "--run-dir",
            "a new or empty folder",
            f"{run.path}, which holds a run begun {known['created']}",
            "Add --resume to go on with it, or name another --run-dir.",
        )
    return known


def open_island(path: str | Path, config: Config, *, island: int, resume: bool) -> RunDir:
    """Open ``path`` for one island: its own machine's folder, or one it shares with other islands.

    Raises:
        FieldError: as `check_island`. Nothing is written then.
    """
    run = RunDir(Path(path).absolute())
    _write(run, config, check_island(path, config, island=island, resume=resume))
    run.island(island).mkdir(exist_ok=True)
    return run


def check_island(path: str | Path, config: Config, *, island: int, resume: bool) -> dict[str, Any] | None:
    """Refuse what `open_island` would, and write nothing; returns the ``run.json`` of a run that is there.

    Raises:
        ConfigError: the folder belongs to something else or to a run of another config, or this island has
            been here before, or is to branch off, and ``resume`` is not set.
        IslandError: some process is at this island.
    """
    run = RunDir(Path(path).absolute())
    known = _check(run, config)
    _refuse_held(run.island(island) / "lock", f"island {island}")
    if resume:
        return known
    if run.metrics(island).exists():
        raise ConfigError(
            "--run-dir",
            f"a folder in which island {island} has not begun",
            f"{run.path}, which holds its metrics",
            "Add --resume to go on with it, or name another --run-dir.",
        )
    if known and "parent" in known:
        raise ConfigError(
            "--run-dir",
            "a folder of a run that begins from nothing",
            f"{run.path}, a branch, which begins from its parent's checkpoint",
            "Add --resume.",
        )
    return known


def begin_branch(path: Path, config: Config, parent: dict[str, Any]) -> RunDir:
    """Make the folder of a run that begins from a checkpoint of another.

    Raises:
        ConfigError: ``path`` is there already.
    """
    run = RunDir(path.absolute())
    if run.path.exists():
        raise ConfigError("--run-dir", "a new folder", f"{run.path}, which is there", "Name another one.")
    _write(run, config, None, parent)
    return run


def _check(run: RunDir, config: Config, *, resized: bool = False) -> dict[str, Any] | None:
    """The ``run.json`` of a run that may go on with ``config``; None where no run is yet.

    Args:
        run: where to look.
        config: compared with that of the run.
        resized: the number of islands is another one on purpose.
    """
    if not run.path.exists():
        return None
    if not run.path.is_dir():
        raise ConfigError("--run-dir", "a folder", f"the file {run.path}", "Name another --run-dir.")
    if not run.run_json.exists():
        # Files being written, and what a mounted disk brings along, are not those of a person.
        there = [p.name for p in run.path.iterdir() if p.name[0] != "." and p.name != "lost+found"]
        if there and not run.run_json.exists():  # looked for again: another island may just have begun
            raise ConfigError(
                "--run-dir",
                "a new or empty folder, or one that holds a run",
                f"{run.path}, which holds other files and no run.json",
                "Name another --run-dir.",
            )
        if not there:
            return None
    try:
        known = run.facts()
        digest, islands, ranks = known["config_digest"], known["islands"], known["ranks"]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            str(run.run_json), "the facts of a run", f"{type(e).__name__}: {e}", "Name another --run-dir."
        ) from None
    for name, flag, was, now in (
        ("islands", "--islands", islands, config.islands.count),
        ("ranks", "--ranks", ranks, config.islands.ranks),
    ):
        if was != now and not (resized and name == "islands"):
            remedy = f"Give {flag} {was}."
            if name == "islands":
                remedy += f" To go on with {now}: megatron-wsd resize {run.path} --islands {now}."
            raise ConfigError(flag, f"{was} {name}, as the run in {run.path} has", now, remedy)
    if digest != config.digest() and not (resized and not _differing(run, config, _OF_THE_COUNT)):
        raise ConfigError(
            "--config",
            f"the config of the run in {run.path}",
            f"another one:{difference(run, config)}",
            f"\nResume with {run.config_json}, or begin a new run in another --run-dir. Fields of the "
            "schedule can be changed one by one: --override schedule.FIELD=VALUE.",
        )
    return known


def difference(run: RunDir, config: Config) -> str:
    """The fields that matter and differ, a line each: saved against given."""
    rows = [
        f"\n  {key}: saved {saved}, given {given}" for key, (saved, given) in _differing(run, config).items()
    ]
    return "".join(rows) or " (no field of this version differs)"


# What follows from the number of islands.
_OF_THE_COUNT = ("megatron_wsd.islands.count", "megatron_wsd.islands.min_islands")


def _differing(run: RunDir, config: Config, but: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Field -> (saved, given) of those that matter and differ."""
    from megatron_wsd.config import load_config
    from megatron_wsd.config.compare import differing

    begun = run.config_json.exists()  # else killed before it was written
    return differing(load_config(run.config_json).identity() if begun else {}, config.identity(), but)


def _write(
    run: RunDir, config: Config, known: dict[str, Any] | None, parent: dict[str, Any] | None = None
) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    if known is None:
        facts: dict[str, Any] = {
            "version": megatron_wsd.__version__,
            "id": secrets.token_hex(8),
            "config_digest": config.digest(),
            "islands": config.islands.count,
            "ranks": config.islands.ranks,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        if parent is not None:
            facts["parent"] = parent
        # Islands that share a disk begin at the same instant: one of them makes the run, the others join it.
        if not write_json_atomic(run.run_json, facts, first=True):
            _check(run, config)
    resolved = config.resolved()
    # A run that is under way keeps the config it was started with, whatever an island brings along.
    live = run.config_json.exists() and is_held(run.path / "launch.lock")
    if not live and (not run.config_json.exists() or json.loads(run.config_json.read_text()) != resolved):
        write_json_atomic(run.config_json, resolved)


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs; it falls free when this process ends, however.

    Args:
        path: the lock file; its folder must exist.
        what: what the lock stands for, for the message.

    Raises:
        IslandError: another process holds it.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _in_use(path, what) from None
        file.truncate(0)
        file.write(" ".join([str(os.getpid()), *_here()]))
        file.flush()
        yield


def _in_use(path: Path, what: str) -> IslandError:
    who = " on ".join(path.read_text().split()[:2]) or "(unknown)"
    return IslandError(
        what, "no other process at it", f"process {who} in {path.parent}", "Wait for it to end, or end it."
    )


def _refuse_held(path: Path, what: str) -> None:
    if is_held(path):
        raise _in_use(path, what)


def holder(path: Path) -> int | None:
    """The process on this machine that has a lock file open, as its content says; None if there is none.

    The lock is not tried: to hold it for an instant could refuse an island that is just being started.
    """
    try:
        pid = int(path.read_text().split()[0])
        return pid if _has_open(pid, path) else None
    except (OSError, ValueError, IndexError, psutil.Error):
        return None


def holder_ended(path: Path) -> bool:
    """Whether the process that held a lock file was one of this machine, and is no more.

    False also where that cannot be told: of a process of another machine, container or user.
    """
    try:
        pid, *where = path.read_text().split()
        return where == _here() and not _has_open(int(pid), path)
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, psutil.Error):
        return False


def _has_open(pid: int, path: Path) -> bool:
    process = psutil.Process(pid)
    if process.status() == psutil.STATUS_ZOMBIE:  # its files are closed, and cannot be listed
        return False
    return any(Path(file.path) == path.resolve() for file in process.open_files())


def _here() -> list[str]:
    """Where the number of a process means what it means here: the machine, and the container on it."""
    try:
        return [socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return [socket.gethostname()]


def is_held(path: Path) -> bool:
    """Whether some process holds the lock file ``path``."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return False
