"""What mkdocs is told beyond mkdocs.yml: pages from elsewhere in the repository, and the command reference.

README.md, CHANGELOG.md and others are written once, for readers of the repository, and are pages of the site
too. A link to a page leads to the page; a link to any other file of the repository becomes its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from megatron_wsd.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "launch/configs/README.md": "configs.md",
    "launch/examples/README.md": "examples.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
PICTURES = (".png", ".svg")
# a fence, left alone; or a link or picture
_LINK = re.compile(r"^```.*?^```$|(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages from elsewhere, with their pictures."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
        for _, _, target, _ in _LINK.findall(text):
            picture = _in_repository(source, target)
            if picture.suffix in PICTURES and picture.parts[0] != "docs":
                content = (ROOT / picture).read_bytes()
                files.append(File.generated(config, picture.name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where their targets are on the site, and write out what is generated."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = re.sub(r"^<!-- (run|dry-run|illustrative)\b[^\n]*-->\n", "", markdown, flags=re.MULTILINE)
    markdown = markdown.replace("<!-- generated: commands -->", commands())
    return _LINK.sub(lambda link: _moved(link, source), markdown)


def _in_repository(source: str, target: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(PurePosixPath(source).parent / target))


def _moved(link: re.Match[str], source: str) -> str:
    mark, text, target, anchor = link.groups()
    if not target or ":" in target:
        return link[0]
    there = _in_repository(source, target)
    if str(there) in PAGES:
        return f"{mark}[{text}]({PAGES[str(there)]}{anchor or ''})"
    if there.parts[0] == "docs":
        return f"{mark}[{text}]({there.relative_to('docs')}{anchor or ''})"
    if there.suffix in PICTURES:
        return f"{mark}[{text}]({there.name})"
    if not (ROOT / there).exists():
        return link[0]  # mkdocs says that it leads nowhere
    return (
        f"`{there}`" if text.strip("`") in (str(there), there.name, there.suffix) else f"{text} (`{there}`)"
    )


def commands() -> str:
    """Every subcommand with its arguments and options, in markdown."""
    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        text, _, example = (command.help or "").partition("Example: ")
        example = example or (command.epilog or "").removeprefix("Example: ")
        rows = [_row(param) for param in command.get_params(context) if param.name != "help"]
        table = "\n".join(("| | default | meaning |", "| --- | --- | --- |", *rows)) if rows else ""
        parts.append(f"### {name}\n\n{text.strip()}\n\n{table}\n\n```bash\n{example.strip()}\n```\n")
    return "\n".join(parts)


def _row(param: Any) -> str:
    option = param.opts[0].startswith("-")
    name = (
        ", ".join(f"`{opt}`" for opt in param.opts) if option else f"`{param.metavar or param.name.upper()}`"
    )
    shown = param.default not in (None, False, "", ()) and not callable(param.default)
    default = f"`{getattr(param.default, 'value', param.default)}`" if shown else ""
    default = "required" if param.required and option else default
    return f"| {name} | {default} | {(param.help or '').replace('|', chr(92) + '|')} |"
