"""Lines of an island's log: which go to the console, and which tell why it failed."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_wsd.cli.process import describe_exit

HEADER = "=== megatron-wsd island"

# deepspeed's pdsh puts the host before each line of another machine
_OURS = re.compile(r"^(?:[\w.-]+: )?(?:megatron-wsd: (?:\[island \d+ rank \d+\] )?|\[island \d+\] )(.*)$")
_ERROR = re.compile(r"megatron-wsd: error: (?:island \d+ rank \d+: )?(.*)")
_LAUNCHER = re.compile(r"^(?:[\w.-]+: )?\[\d{4}-\d\d-\d\d [\d:,]+\] \[\w+\] \[(launch|runner)\.py")
_RANK = re.compile(r"^(?:[\w.-]+: )?\[rank\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last):"


def console_text(line: str) -> str | None:
    """What a trainer's log line shows on the console: the text after its mark, None for all other lines.

    The mark is ``megatron-wsd: `` (or ``[island I] ``) at the beginning of the line. Everything that
    frameworks and other ranks say stays in the log.
    """
    match = _OURS.match(line)
    return match[1] if match else None


def starts(log: Path) -> int:
    """How often an island has been started, as its log says."""
    try:
        return sum(line.startswith(HEADER) for line in log.read_text(errors="replace").splitlines())
    except OSError:
        return 0


def excerpt(log: Path, lines: int = 20) -> list[str]:
    """The lines of the newest start in ``log`` that best tell why it ended, at most ``lines``.

    Errors that the trainer names itself come first; else the end of the first traceback, since later ones
    are mostly other ranks that lost the first; else the last lines that are not deepspeed's launcher's.
    """
    try:
        text = log.read_text(errors="replace").splitlines()
    except OSError as e:
        return [f"({log}: {e.strerror})"]
    starts = [i for i, line in enumerate(text) if line.startswith(HEADER)]
    text = text[starts[-1] + 1 :] if starts else text
    named = list(dict.fromkeys(match[1] for line in text if (match := _ERROR.search(line))))
    if named:
        return named[-lines:]
    plain = [_RANK.sub("", line) for line in text if line.strip() and not _LAUNCHER.match(line)]
    for i, line in enumerate(plain):
        if line.strip() == _TRACEBACK:
            # indented lines are the frames; the first that is not is the exception
            end = next((j for j in range(i + 1, len(plain)) if not plain[j].startswith(" ")), len(plain) - 1)
            return plain[max(i, end + 1 - lines) : end + 1]
    return plain[-lines:]


def failure(island: int, status: int, log: Path) -> list[str]:
    """What to tell of an island that failed: its exit status, why by its log, and where to read on."""
    why = [f"  | {line}" for line in excerpt(log)]
    return [failed(island, status), *why, f"  All of it: {log}"]


def failed(island: int, status: int) -> str:
    """That an island failed, and with which exit status."""
    return f"megatron-wsd: error: island {island} failed ({describe_exit(status)})."
