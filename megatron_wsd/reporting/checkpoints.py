"""The section of a page on what a run has saved, and on the family it belongs to."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.lineage import children, root_of
from megatron_wsd.records import island_folders
from megatron_wsd.report import has_steps, human_bytes, summarise
from megatron_wsd.reporting.facts import RunFacts
from megatron_wsd.reporting.pieces import Html, folded, number, table, when
from megatron_wsd.rundir import RunDir

_SHOWN = 3  # newest checkpoints of an island that are shown at once, besides those of branches


def section(run: RunFacts) -> str:
    """Checkpoints on disk, the older ones folded away, and the tree of branches."""
    shown: list[list[Any]] = []
    older: list[list[Any]] = []
    needed = _branches(run)
    for island, folder in island_folders(run.folder).items():
        store = CheckpointStore(folder / "checkpoints", 2)
        steps = sorted(int(p.name.removeprefix("step_")) for p in store.root.glob("step_" + "[0-9]" * 8))
        for i, step in enumerate(steps, 1):
            names = needed.get((island, step), [])
            row = [*_row(run, store, island, step), *[", ".join(names)] * bool(needed)]
            (shown if names or i > len(steps) - _SHOWN else older).append(row)
    if not shown:
        return "<p>No checkpoint on disk.</p>" + _lineage(run)
    head = ["island", *(["own step", "step of the run"] if run.asynchronous else ["step"])]
    head += ["round", "tokens", "size", "complete since", *["branches"] * bool(needed)]
    numbers = range(len(head) - 1 - bool(needed))
    kept = table(head, shown, "Checkpoints on disk", numbers)
    if older:
        kept += folded(f"{len(older):,} older ones that no branch needs", table(head, older, "", numbers))
    return kept + _lineage(run)


def _branches(run: RunFacts) -> dict[tuple[int, int], list[str]]:
    """By island and step of a checkpoint, the branches that begin from it."""
    found: dict[tuple[int, int], list[str]] = {}
    for child in children(RunDir(run.folder)):
        for island, step in child.steps.items():
            found.setdefault((int(island), step), []).append(child.name)
    return found


def _row(run: RunFacts, store: CheckpointStore, island: int, step: int) -> list[Any]:
    content = store.manifest(step)
    if content is None:
        torn = Html('<span class="bad">torn, ignored</span>')
        return [island, step, *["-"] * (3 + run.asynchronous), torn]
    at = [content.get("schedule", {}).get("position", "-")] * run.asynchronous
    tokens = f"{content['tokens']:,}" if "tokens" in content else "-"
    size = human_bytes(sum(content["files"].values()))
    written = when((store.folder(step) / "checkpoint.json").stat().st_mtime)
    return [island, step, *at, content.get("outer_step", "-"), tokens, size, written]


def _lineage(run: RunFacts) -> str:
    own = RunDir(run.folder)
    if not own.run_json.is_file():
        return ""

    def label(path: Path, name: str, origin: str) -> str:
        text = escape(f"{name}{origin}")
        if path == run.folder:
            text = f'<span class="here">{text}</span> (this run)'
        if not (path / "run.json").is_file():
            return f'{text}: <span class="bad">its folder is gone</span>'
        if not has_steps(path):
            return f"{text}: not trained yet"
        found = summarise(path)
        losses = ", ".join(f"{c} {number(a['loss'])}" for c, a in sorted(found["anchor"].items()))
        return f"{text}: step {found['position']:,}, {found['tokens']:,} tokens" + (
            escape(f"; anchor {losses}") if losses else ""
        )

    def grow(path: Path, name: str, origin: str) -> str:
        run_dir = RunDir(path)
        below = "".join(grow(c.path, c.name, f", from step {c.position}") for c in children(run_dir))
        return f"<li>{label(path, name, origin)}{f'<ul>{below}</ul>' if below else ''}</li>"

    root = root_of(own)
    return f'<h3>Lineage</h3><ul class="tree">{grow(root.path, root.path.name, "")}</ul>'
