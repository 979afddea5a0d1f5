"""The folder of a run: what is in it, who may begin one, and who may go on with one.

A folder ``RUN`` holds ``run.json`` (which run this is), ``config.json`` (the complete config the ranks
read), ``lighthouse.log``, one ``island_<i>/`` for each island (``log.txt``, ``metrics.jsonl``,
``checkpoints/``) and at the end ``summary.json`` and ``run.png``. Every check comes before the first
write, so a refused start leaves a folder as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_wsd
from megatron_wsd.errors import ConfigError, IslandError
from megatron_wsd.files import write_json_atomic

if TYPE_CHECKING:
    from megatron_wsd.config import Config


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

    def metrics(self, island: int) -> Path:
        return self.island(island) / "metrics.jsonl"

    def facts(self) -> dict[str, Any]:
        """What ``run.json`` says."""
        facts: dict[str, Any] = json.loads(self.run_json.read_text())
        return facts

    def set_lighthouse(self, address: str) -> None:
        """Note where the lighthouse of this run is, so that an island can be restarted by hand."""
        write_json_atomic(self.run_json, {**self.facts(), "lighthouse": address})


def open_run(path: str | Path, config: Config, *, resume: bool) -> RunDir:
    """Begin a run in ``path`` (new or empty), or with ``resume`` go on with the one that is there.

    Raises:
        ConfigError: the folder holds something else, holds a run and ``resume`` is not set, or holds a
            run of another config. Nothing is written then.
    """
    run = RunDir(Path(path).absolute())
    known = _check(run, config)
    if is_held(run.path / "launch.lock"):
        raise IslandError(
            "launch", "no other process at it", f"one at {run.path}", "Wait for it to end, or end it."
        )
    if resume and not known:
        raise ConfigError(
            "--resume",
            "a run to go on with",
            f"{run.path}, which holds none",
            "Check --run-dir, or leave --resume out to begin a new run there.",
        )
    if known and not resume:
        raise ConfigError(
            "--run-dir",
            "a new or empty folder",
            f"{run.path}, which holds a run begun {known['created']}",
            "Add --resume to go on with it, or name another --run-dir.",
        )
    _write(run, config, known)
    return run


def open_island(path: str | Path, config: Config, *, island: int, resume: bool) -> RunDir:
    """Open ``path`` for one island: its own machine's folder, or one it shares with other islands.

    Raises:
        ConfigError: the folder belongs to something else or to a run of another config, or this island
            has been here before and ``resume`` is not set. Nothing is written then.
    """
    run = RunDir(Path(path).absolute())
    known = _check(run, config)
    if run.metrics(island).exists() and not resume:
        raise ConfigError(
            "--run-dir",
            f"a folder in which island {island} has not begun",
            f"{run.path}, which holds its metrics",
            "Add --resume to go on with it, or name another --run-dir.",
        )
    _write(run, config, known)
    run.island(island).mkdir(exist_ok=True)
    return run


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


def _check(run: RunDir, config: Config) -> dict[str, Any] | None:
    """The ``run.json`` of a run that may go on with ``config``; None where no run is yet."""
    if not run.path.exists():
        return None
    if not run.path.is_dir():
        raise ConfigError("--run-dir", "a folder", f"the file {run.path}", "Name another --run-dir.")
    if not run.run_json.exists():
        if any(run.path.iterdir()):
            raise ConfigError(
                "--run-dir",
                "a new or empty folder, or one that holds a run",
                f"{run.path}, which holds other files and no run.json",
                "Name another --run-dir.",
            )
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
        if was != now:
            raise ConfigError(flag, f"{was} {name}, as the run in {run.path} has", now, f"Give {flag} {was}.")
    if digest != config.digest():
        raise ConfigError(
            "--config",
            f"the config of the run in {run.path}",
            f"another one:{_difference(run, config)}",
            f"\nResume with {run.config_json}, or begin a new run in another --run-dir. Fields of the "
            "schedule can be changed one by one: --override schedule.FIELD=VALUE.",
        )
    return known


def _difference(run: RunDir, config: Config) -> str:
    """The fields that matter and differ, a line each: saved against given."""
    from megatron_wsd.config import load_config

    saved, given = _flat(load_config(run.config_json).identity()), _flat(config.identity())
    missing = "(absent)"
    rows = [
        f"\n  {key}: saved {saved.get(key, missing)}, given {given.get(key, missing)}"
        for key in sorted(saved.keys() | given.keys())
        if saved.get(key, missing) != given.get(key, missing)
    ]
    return "".join(rows) or " (no field of this version differs)"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{name}.{key}" if name else key)
    return found


def _write(
    run: RunDir, config: Config, known: dict[str, Any] | None, parent: dict[str, Any] | None = None
) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    resolved = config.resolved()
    # A run that is under way keeps the config it was started with, whatever an island brings along.
    live = run.config_json.exists() and is_held(run.path / "launch.lock")
    if not live and (not run.config_json.exists() or json.loads(run.config_json.read_text()) != resolved):
        write_json_atomic(run.config_json, resolved)
    if known is None:
        facts: dict[str, Any] = {
            "version": megatron_wsd.__version__,
            "config_digest": config.digest(),
            "islands": config.islands.count,
            "ranks": config.islands.ranks,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        if parent is not None:
            facts["parent"] = parent
        write_json_atomic(run.run_json, facts)


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
            file.seek(0)
            raise IslandError(
                what,
                "no other process at it",
                f"process {file.read().strip() or '(unknown)'} in {path.parent}",
                "Wait for it to end, or end it.",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_held(path: Path) -> bool:
    """Whether some process holds the lock file ``path``."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
