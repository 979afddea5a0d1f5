"""What a page is put together from: tables, figures, and numbers in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

_SHORT = 30  # characters of a cell that stays on one line, in a window of any width
_MOST_ROWS = 200  # of a table: a run that was void for a night makes no page of a night


def table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", numbers: Sequence[int] = ()
) -> str:
    """A table; cells are escaped unless they are `Html`, those of the columns ``numbers`` stand right."""

    def cell(tag: str, i: int, value: Any) -> str:
        text = value if isinstance(value, Html) else escape(str(value))
        scope = ' scope="col"' if tag == "th" else ""
        shown = len(re.sub(r"<[^>]*>", "", text))
        kind = "n" if i in numbers else "short" if shown <= _SHORT else "long"
        return f'<{tag}{scope} class="{kind}">{text}</{tag}>'

    top = "".join(cell("th", i, name) for i, name in enumerate(head))
    body = "".join(
        f"<tr>{''.join(cell('td', i, value) for i, value in enumerate(row))}</tr>"
        for row in rows[:_MOST_ROWS]
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    more = f'<p class="note">and {len(rows) - _MOST_ROWS:,} more</p>' if len(rows) > _MOST_ROWS else ""
    inner = f"<table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{inner}</div>{more}'


class Html(str):
    """Text that is html already."""


def figure(svg: str, caption: str) -> str:
    """A chart with its caption."""
    return f'<figure><div class="wide">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'


def folded(summary: str, inner: str) -> str:
    """What is shown when its line is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash for none."""
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """``42 s``, ``5.1 min``, ``3.1 h`` or ``2.0 days``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def when(stamp: float | None) -> str:
    """A Unix time as date and time of day; None is now."""
    moment = datetime.now(timezone.utc) if stamp is None else datetime.fromtimestamp(stamp, timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def percent(share: float | None) -> str:
    """A share of 1 in percent, or a dash for none."""
    return "-" if share is None else f"{100 * share:.1f} %"
