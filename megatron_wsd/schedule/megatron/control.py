"""A folder through which a running Megatron job is told to begin its decay; no open port, no signal."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.fields import nearest

if TYPE_CHECKING:
    from megatron_wsd.schedule.megatron.scheduler import OptimizerParamScheduler

logger = logging.getLogger(__name__)

COMMAND_FILE = "decay_now.json"
_KEYS = ("length", "start", "shape", "min_lr_ratio", "power", "then", "rewarmup", "cancel", "run")


class ControlDir:
    """Looks for ``decay_now.json`` and has the scheduler do what it says, at the same update on all ranks.

    The file holds one json object: the arguments of ``OptimizerParamScheduler.begin_decay``, or
    ``{"cancel": true}``; ``"run"``, if present, must be the name of the folder, so that a file meant for
    another run is refused. Write it under another name and rename it: a file that is no whole json yet is
    left alone. Rank 0 reads it and tells the others; it takes effect only if it is possible on all of them.
    Then, or when it is refused, it becomes ``decay_now.accepted.json`` or ``decay_now.refused.json``, with
    the answer.

    Args:
        folder: must exist where rank 0 runs; nobody else reads it.
        interval: optimizer updates between two looks. One look costs a ``stat`` on rank 0 and, where there
            are several ranks, a broadcast of a few bytes.
    """

    def __init__(self, folder: str | Path, interval: int = 10) -> None:
        self.folder = Path(folder)
        self.interval = interval
        self._updates = 0
        self._told: str | None = None
        if _rank() == 0 and not self.folder.is_dir():
            raise ScheduleError("wsd_control_dir", "a folder", f"{self.folder}, which is none", "Create it.")

    def poll(self, scheduler: OptimizerParamScheduler) -> None:
        """Count one update, and look if it is time to; every rank must call it."""
        self._updates += 1
        if self._updates % self.interval:
            return
        found = _from_rank_0(self._read() if _rank() == 0 else None)
        if found is None:
            return
        (request,) = found
        refusal, decisions = "", None
        try:
            self._check(request)
            decisions = scheduler.decided({key: request[key] for key in request if key != "run"})
        except ScheduleError as error:
            refusal = str(error)
        refusal = next((text for text in _from_all(refusal) if text), "")
        if not refusal and decisions is not None:
            scheduler.commit(decisions)
        if _rank() == 0:
            self._answer(request, refusal, scheduler.num_steps)

    def _read(self) -> list[Any] | None:
        """The command alone in a list; None if there is none, or none that is whole yet."""
        file = self.folder / COMMAND_FILE
        problem: Exception
        try:
            return [json.loads(file.read_text())]  # json's null is a command too, a wrong one
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            problem = error
        if self._told != str(problem):  # said once, not at every look
            self._told = str(problem)
            logger.warning("%s is not whole, or no json (%s); it is left alone", file, problem)
        return None

    def _check(self, request: Any) -> None:
        if not isinstance(request, Mapping):
            raise ScheduleError(COMMAND_FILE, "a json object", request)
        for key in request:
            if key not in _KEYS:
                raise ScheduleError(f"{COMMAND_FILE}: {key}", "a known key", "another", nearest(key, _KEYS))
        if request.get("run", self.folder.resolve().name) != self.folder.resolve().name:
            raise ScheduleError(f"{COMMAND_FILE}: run", f"{self.folder.resolve().name!r}", request["run"])
        if "cancel" in request and (request["cancel"] is not True or request.keys() - {"cancel", "run"}):
            raise ScheduleError(f"{COMMAND_FILE}: cancel", "true, and nothing beside it", dict(request))

    def _answer(self, request: Any, refusal: str, num_steps: int) -> None:
        word = "refused" if refusal else "accepted"
        logger.log(
            logging.ERROR if refusal else logging.INFO, "decay command %s: %s %s", word, request, refusal
        )
        answer = {"answer": word, "num_steps": num_steps, "reason": refusal, "command": request}
        file = self.folder / COMMAND_FILE
        try:
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(answer, indent=1))
            file.unlink()
            os.replace(temporary, file.with_suffix(f".{word}.json"))
        except OSError as error:
            logger.error("%s cannot be answered: %s", file, error)


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _several() else 0


def _from_rank_0(found: list[Any] | None) -> list[Any] | None:
    box: list[Any] = [found]
    if _several():
        torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _from_all(text: str) -> list[str]:
    if not _several():
        return [text]
    texts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return texts
