"""A json file, and what is wrong with one that is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron_wsd.errors import ConfigError


def read_json(path: str | Path, named: str | None = None) -> Any:
    """What a json file says; see `load_config` for ``named``.

    Raises:
        ConfigError: it is not there, no json, or has a key twice; with line and column.
    """
    file = Path(path)
    field = str(file) if named is None else named

    def told(what: str) -> str:
        return what if named is None else f"{file}, {what}"

    if file.is_dir():
        inside = file / "config.json"
        remedy = f"That of this run is {inside}." if inside.is_file() else "Name the file in it."
        raise ConfigError(field, "a json file", told("a folder"), remedy)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        missing = "nothing there" if named is None else told("which does not exist")
        raise ConfigError(field, "a json file", missing, "Check the path.") from None
    except UnicodeDecodeError:
        raise ConfigError(field, "a json file", told("a file that is no text"), "Check the path.") from None
    except (OSError, ValueError) as e:  # a name may hold a null byte
        why = (e.strerror if isinstance(e, OSError) else None) or str(e)
        raise ConfigError(field, "a json file that can be read", told(why), "Check the path.") from None
    if not text.strip():
        remedy = "launch/configs has some to begin from."
        raise ConfigError(field, "a json file", told("an empty file"), remedy)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                lines = [
                    n
                    for n, line in enumerate(text.splitlines(), 1)
                    if re.search(rf'"{re.escape(key)}"\s*:', line)
                ]
                where = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
                twice = told(f"{key!r} twice in one object, {where}")
                raise ConfigError(field, "each key once", twice, "Remove one of them.")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as e:
        line, column, what = _json_trouble(text, e)
        raise ConfigError(
            field, "valid json", told(f"{what} in line {line}, column {column}"), "Mend the json there."
        ) from None
    except RecursionError:
        raise ConfigError(
            field, "valid json", told("brackets in brackets without end"), "Mend the json."
        ) from None
    except ConfigError:
        raise
    except ValueError as e:  # Python reads no number of more than 4,300 digits
        raise ConfigError(field, "valid json", told(str(e)), "Mend the json.") from None


def _json_trouble(text: str, e: json.JSONDecodeError) -> tuple[int, int, str]:
    """Line, column, and what is wrong there."""
    before = text[: e.pos].rstrip()
    if before.endswith(",") and text[e.pos : e.pos + 1] in ("}", "]"):
        at = len(before) - 1
        return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at), f"a comma before {text[e.pos]!r}"
    if text[e.pos : e.pos + 2].startswith(("//", "/*", "#")):
        return e.lineno, e.colno, "a comment, which json has not,"
    if e.pos >= len(text.rstrip()):
        return e.lineno, e.colno, f"the end of the file too early ({e.msg[0].lower()}{e.msg[1:]})"
    return e.lineno, e.colno, f"{e.msg[0].lower()}{e.msg[1:]}"
