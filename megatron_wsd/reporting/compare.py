"""The section of a page that holds runs against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from megatron_wsd.report import human_bytes
from megatron_wsd.reporting import comparison
from megatron_wsd.reporting.facts import RunFacts
from megatron_wsd.reporting.pieces import Html, duration, figure, number, percent, table
from megatron_wsd.reporting.several import decided_differently, differences, families, of_one_run


def section(runs: Sequence[RunFacts]) -> str:
    """Charts, a table of results, losses by corpus, and what differs in configs and decisions."""
    names = names_of(runs)
    caption = (
        "Training is the mean over the islands of a run, on its own mix, smoothed. Marks are validations of "
        "the anchor on one corpus."
    )
    drawn = figure(comparison.whole(runs, names), caption)
    for place, family in enumerate(families(runs)):
        some, called = [runs[i] for i in family.members], [names[i] for i in family.members]
        told = f"The same from step {family.step:,} on, where {_listed(called)} part."
        none = [n for n, run in zip(called, some, strict=True) if run.summary["position"] <= family.step]
        told += f" {_listed(none)} did not train on from there." if none else ""
        drawn += figure(comparison.since(some, called, family.step, family.until, place), told)
    same = of_one_run(runs)[1:]
    holds = [f"{names[runs.index(run)]} holds island {' and '.join(map(str, run.islands))}" for run in same]
    note = f'<p class="note">{escape("; ".join(holds))} of the run of this page.</p>' if same else ""
    return note + drawn + _results(runs, names) + _by_corpus(runs, names) + _differ(runs, names)


def names_of(runs: Sequence[RunFacts]) -> list[str]:
    """Names of the folders, with their parents where two are equal."""
    plain = [run.name for run in runs]
    return [
        name if plain.count(name) == 1 else f"{run.folder.parent.name}/{name}"
        for name, run in zip(plain, runs, strict=True)
    ]


def _results(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    rows = [
        [
            name,
            f"{run.summary['position']:,}",
            f"{run.summary['tokens']:,}",
            f"{run.summary['rounds_committed']:,}",
            human_bytes(run.summary["bytes_exchanged"]),
            duration(run.summary["running_seconds"]),
            percent(run.utilisation),
        ]
        for name, run in zip(names, runs, strict=True)
    ]
    head = ["run", "step", "tokens", "rounds", "exchanged", "time running", "utilisation"]
    return table(head, rows, "", range(1, 7))


def _by_corpus(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    """Losses of the anchor on each corpus: the last ones, and those at the newest step that all have."""
    last = [{c: anchor["loss"] for c, anchor in run.summary["anchor"].items()} for run in runs]
    if not any(last):
        return "<p>No anchor was validated.</p>"
    at = [max((a["step"] for a in run.summary["anchor"].values()), default=None) for run in runs]
    drawn = _losses(names, last, "Last validation of the anchor, nats a token", at)
    steps = [{n for each in run.validations.values() for n in each} for run in runs]
    common = max(set.intersection(*steps), default=None)
    if common is None or set(at) == {common}:
        return drawn
    then = [{c: each[common] for c, each in run.validations.items() if common in each} for run in runs]
    return drawn + _losses(names, then, f"At step {common:,}, the newest at which all were validated")


def _losses(
    names: Sequence[str],
    each: Sequence[Mapping[str, float | None]],
    title: str,
    steps: Sequence[int | None] | None = None,
) -> str:
    """A row for each corpus: only what two runs both have is subtracted.

    Args:
        names: of the runs.
        each: losses by corpus, of each run.
        title: of the table.
        steps: where they were found, if not all at one.
    """
    rows = []
    for corpus in sorted({corpus for losses in each for corpus in losses}):
        first, *others = (losses.get(corpus) for losses in each)
        having = [name for name, losses in zip(names, each, strict=True) if corpus in losses]
        row = [corpus, number(first)]
        for loss in others:
            both = None if first is None or loss is None else loss - first
            row += [number(loss), number(both, "+.3f")]
        rows.append([*row, "" if len(having) == len(names) else f"only in {_listed(having)}"])
    head = ["corpus", names[0], *(cell for name in names[1:] for cell in (name, "difference"))]
    if steps is not None:
        own = [number(step, ",") for step in steps]
        rows.append(["at step", own[0], *(cell for step in own[1:] for cell in (step, "")), ""])
    if any(row[-1] for row in rows):
        head = [*head, ""]
    else:
        rows = [row[:-1] for row in rows]
    return table(head, rows, f"{title}; differences from {names[0]}", range(1, 2 * len(names)))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)


def _differ(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    changed = [[Html(f"<code>{escape(field)}</code>"), *values] for field, values in differences(list(runs))]
    diff = (
        table(["field", *names], changed, "Fields of the configs that differ")
        if changed
        else "<p>The configs are equal, field by field.</p>"
    )
    decided = [[field, *values] for field, values in decided_differently(list(runs))]
    if decided:
        diff += table(["", *names], decided, "Schedule, mixes and orders that differ, in steps of the run")
    elif any(run.decided for run in runs):
        diff += "<p>Schedule, mixes and orders are equal.</p>"
    return diff
