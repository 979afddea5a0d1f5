"""``megatron-wsd prepare-data``: text into Megatron's indexed format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from megatron_wsd.data.corpus import BUILTIN_CORPORA
from megatron_wsd.data.prepare import plan_corpus, told_foreign, write_corpus
from megatron_wsd.data.tokenizer import load_tokenizer
from megatron_wsd.errors import DataError


def prepare_data(
    out: Annotated[Path, typer.Option(help="Folder for the files; made if missing.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own text: a file or a folder (*.txt, *.py, *.md, *.jsonl), as PATH or NAME=PATH. "
            "Repeatable. Without it: this interpreter's standard library (broad) and help topics "
            "(high_quality)."
        ),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="byte, or hf:PATH with PATH a folder on disk.")] = "byte",
    force: Annotated[bool, typer.Option("--force", help="Replace files made from something else.")] = False,
) -> None:
    """Turn text into Megatron's .bin/.idx.

    Run again with the same text it does nothing; with other text it refuses to replace the files, unless
    --force. Everything is checked before anything is written.
    """
    with _as_typed("--tokenizer", "megatron_wsd.data.tokenizer"):
        encoder = load_tokenizer(tokenizer)
    plans = {}
    for name, spec in (_named_texts(text) if text else dict(BUILTIN_CORPORA)).items():
        with _as_typed("--text", spec):
            plans[name] = plan_corpus(spec, encoder, out / name, force)
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("corpus", "documents", "tokens", "files", "")
    for column in table.columns[1:3]:
        column.justify = "right"
    table.columns[3].overflow = "fold"  # a path that is cut short is no path
    foreign: dict[str, str] = {}
    for name, plan in plans.items():
        manifest, written = write_corpus(plan)
        foreign[name] = told_foreign(manifest)
        files = escape(f"{plan.prefix}.bin .idx .json")
        state = "written" if written else "up to date"
        table.add_row(name, f"{manifest['documents']:,}", f"{manifest['tokens']:,}", files, state)
    console = Console()
    console.print(table)
    for name, line in foreign.items():
        if line:
            console.print(f"{name}: {line}", soft_wrap=True, markup=False, highlight=False)
    for name, plan in plans.items():
        if skipped := plan.source.told_skipped():
            console.print(f"{name}: {skipped}", soft_wrap=True, markup=False, highlight=False)
    corpora = {name: str(plan.prefix) for name, plan in plans.items()}
    console.print(f'In a config: "corpora": {json.dumps(corpora)}', soft_wrap=True, markup=False)


@contextmanager
def _as_typed(option: str, field: str) -> Iterator[None]:
    """An error about ``field`` is one about the option here."""
    try:
        yield
    except DataError as e:
        raise e.under(option) if e.field == field else e from None


def _named_texts(texts: list[str]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for text in texts:
        named = re.fullmatch(r"([\w.-]+)=(.+)", text)
        # A path may have an equals sign of its own.
        if named and not Path(text).expanduser().exists():
            name, path = named.groups()
        else:
            name, path = Path(text).expanduser().resolve().stem, text
        if name in sources:
            raise DataError(
                "--text", "names that differ", f"{name!r} twice", "Write NAME=PATH with a name for each."
            )
        sources[name] = f"text:{path}"
    return sources
