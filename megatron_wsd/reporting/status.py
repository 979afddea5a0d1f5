"""The state of a run as its folder shows it: only files are read, over a shared disk or afterwards too."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megatron_wsd.control import ControlFolder
from megatron_wsd.errors import ConfigError
from megatron_wsd.lineage import own_orders
from megatron_wsd.records import Record, anchors, island_folders, position
from megatron_wsd.reporting.island import QUIET_S, IslandRecords
from megatron_wsd.reporting.waiting import sentences
from megatron_wsd.rundir import RunDir, holder

# What the status says of every island; None is what is not known.
_OF_AN_ISLAND = (
    *("island", "state", "process", "log", "age_s", "step", "position", "outer_step", "loss", "lr", "phase"),
    *("tokens", "tokens_per_s", "grad_norm", "staleness", "gate", "lag", "bytes"),
    *("rounds_committed", "rounds_void", "round_s", "checkpoint"),
)


class RunStatus:
    """Looks at a run folder again and again; every look reads only what is new in the metrics.

    Args:
        run_dir: the run folder.

    Raises:
        ConfigError: it is no run folder.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir).absolute()
        if not (self.path / "run.json").is_file() and not island_folders(self.path):
            raise ConfigError("RUN", "a run folder", f"{run_dir}, which is none", "Check the path.")
        self._islands: dict[int, IslandRecords] = {}

    def look(self, now: float | None = None) -> dict[str, Any]:
        """The status as a json-able dict.

        ``step`` of an island counts inner steps of its own, ``position`` those of the run, which the schedule
        follows; in synchronous mode they are one. ``end`` is where the schedule of a finished run ended.
        Ages and times are in seconds, losses in nats a token, bytes over all ranks of an island, sent and
        received. ``waiting_for`` has what must happen before the run goes on, ``notes`` what is only to be
        known, a sentence each.

        Args:
            now: Unix time; the clock by default.
        """
        now = time.time() if now is None else now
        for number, folder in island_folders(self.path).items():
            self._islands.setdefault(number, IslandRecords(number, folder)).read()
        facts, block = _json(self.path / "run.json"), _block(self.path)
        seen = dict(sorted(self._islands.items()))
        newest = _newest_round(seen)
        launch = self.path / "launch.lock"
        launched = launch.stat().st_mtime if holder(launch) is not None else None
        count = max([facts.get("islands") or 0, *(i + 1 for i in seen)])
        offered = _contributions(seen)
        islands = [
            seen[i].status(now, newest, launched) if i in seen else _elsewhere(i, newest, now)
            for i in range(count)
        ]
        for island in islands:
            record = offered.get(island["island"], {})
            for key, each in (("staleness", "staleness"), ("gate", "gates")):
                island[key] = record.get(each, {}).get(str(island["island"]))
        control, own = ControlFolder(self.path), own_orders(RunDir(self.path))
        inherited = len(control.accepted()) - len(own)
        orders = {"pending": _pending(control), "accepted": own, "inherited": control.accepted()[:inherited]}
        running = [i for i in islands if i["state"] == "running"]
        waiting_for, notes = sentences(islands, seen, newest, block, now)
        ahead = max(islands, key=lambda i: i["tokens"] or 0, default={})
        return {
            "run": self.path.name,
            "path": str(self.path),
            "time": now,
            "state": _state(islands),
            "version": facts.get("version"),
            "created": facts.get("created"),
            "ranks": facts.get("ranks"),
            "lighthouse": facts.get("lighthouse"),
            "parent": (facts.get("parent") or {}).get("path"),
            "mode": block.get("sync", {}).get("mode", "sync"),
            "outer_step": max((i["outer_step"] for i in islands if i["outer_step"] is not None), default=0),
            "last_commit_age_s": max(0.0, now - newest["time"]) if newest else None,
            "position": max((i["position"] for i in islands if i["position"] is not None), default=0),
            "end": max((r.end["end"] for r in seen.values() if "end" in r.end), default=None),
            "tokens": ahead.get("tokens"),
            "phase": ahead.get("phase"),
            "lr": ahead.get("lr"),
            "tokens_per_s": sum(i["tokens_per_s"] or 0.0 for i in running),
            "bytes": sum(i["bytes"] for i in islands),
            "anchor": _anchor(seen),
            "fragments": _fragments(seen),
            "islands": islands,
            "orders": orders,
            "waiting_for": waiting_for,
            "notes": notes,
        }


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _block(run: Path) -> dict[str, Any]:
    """Our block of the run's config, which holds all defaults."""
    return dict(_json(run / "config.json").get("megatron_wsd", {}))


def _newest_round(seen: dict[int, IslandRecords]) -> Record:
    """The last committed round that any island has recorded."""
    return max((i.commit for i in seen.values()), key=lambda r: r.get("time", 0.0), default={})


def _contributions(seen: dict[int, IslandRecords]) -> dict[int, Record]:
    """Of every island the newest committed round that it contributed to, whoever recorded it."""
    found: dict[int, Record] = {}
    for island in seen.values():
        for number, record in island.contributions.items():
            if record["outer_step"] >= found.get(number, record)["outer_step"]:
                found[number] = record
    return found


def _elsewhere(number: int, newest: Record, now: float) -> dict[str, Any]:
    """An island whose folder is not on this disk: what the rounds of the others tell of it."""
    here = number in newest.get("islands", ()) and now - newest["time"] <= 10 * QUIET_S
    return dict.fromkeys(_OF_AN_ISLAND) | {
        "island": number,
        "state": "elsewhere" if here else "absent",
        "bytes": 0,
        "rounds_committed": 0,
        "rounds_void": 0,
    }


def _pending(control: ControlFolder) -> dict[str, Any] | None:
    try:
        order = control.pending()
    except (ConfigError, OSError) as e:
        return {"kind": "unreadable", "message": str(e)}
    return None if order is None else order.model_dump(mode="json")


def _anchor(seen: dict[int, IslandRecords]) -> dict[str, dict[str, Any]]:
    found = anchors([record for island in seen.values() for record in island.evals.values()])
    return {c: {"loss": r[-1]["loss"], "step": position(r[-1])} for c, r in found.items()}


def _fragments(seen: dict[int, IslandRecords]) -> list[dict[str, Any]]:
    """The newest commit of every fragment; [] where rounds take the whole model."""
    newest: dict[int, Record] = {}
    for island in seen.values():
        for fragment, record in island.fragments.items():
            if record["time"] >= newest.get(fragment, record)["time"]:
                newest[fragment] = record
    keys = ("fragment", "version", "outer_step", "step", "staleness", "gates")
    return [{key: record.get(key) for key in keys} for _, record in sorted(newest.items())]


def _state(islands: list[dict[str, Any]]) -> str:
    states = {i["state"] for i in islands}
    if states & {"running", "silent"}:
        return "running"
    if "starting" in states and "finished" not in states:  # else it comes after all is over
        return "starting"
    ended = states - {"elsewhere", "absent", "lost", "starting"}
    if ended - {"failed"}:
        return "finished" if "finished" in ended else "stopped"
    return next((state for state in ("failed", "lost") if state in states), "not started")
