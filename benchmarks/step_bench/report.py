"""Tables for people: on the terminal, and in markdown for README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from step_bench.results import OURS, Floor, Result, Verdict


def size_name(n: int) -> str:
    """2^k where n is a power of two, else n."""
    return f"2^{n.bit_length() - 1}" if n & (n - 1) == 0 else f"{n:,}"


def configuration(results: Sequence[Result], floors: Sequence[Floor], absent: Mapping[str, str]) -> Table:
    """Everyone at one size and thread count, the fastest first; then the floors; then who is not there.

    Args:
        results: not empty, or else `floors` is not.
        floors: of the same size and thread count.
        absent: reasons, by label.
    """
    n, threads = floors[0].n, floors[0].threads
    table = Table(
        title=f"N = {size_name(n)} ({n:,}), {threads} thread{'s' * (threads > 1)}", title_justify="left"
    )
    table.add_column("contender")
    for heading in (
        "ns/param",
        "min - max",
        "bytes/param",
        "GB/s",
        "of floor",
        "state B/param",
        "time / ours",
    ):
        table.add_column(heading, justify="right")
    ours = next((r.ns for r in results if r.contender == OURS), None)
    for r in sorted(results, key=lambda r: r.ns):
        table.add_row(
            r.label,
            f"{r.ns:.3f}",
            f"{min(r.samples_ns):.3f} - {max(r.samples_ns):.3f}",
            f"{r.bytes_per_parameter:.2f}",
            f"{r.gb_per_s:.1f}",
            f"{r.fraction:.0%}",
            f"{r.state_bytes_per_parameter:.2f}",
            "-" if ours is None else f"{r.ns / ours:.2f}",
            style="bold" if r.ours else None,
        )
    table.add_section()
    for f in floors:
        samples = f.samples_ns[f.way]
        name = "plain copy, for reference" if f.traffic == "copy" else f"floor {f.traffic}, {f.way}"
        spread = f"{min(samples):.3f} - {max(samples):.3f}"
        cells = (f"{f.ns:.3f}", spread, f"{f.bytes_per_parameter:.2f}", f"{f.gb_per_s:.1f}", "", "", "")
        table.add_row(name, *cells, style="dim")
    for label, reason in absent.items():
        table.add_row(label, "-", reason, *[""] * 5, style="yellow")
    return table


def judgement(verdicts: Sequence[Verdict]) -> Table:
    """What must be reached, and whether it is."""
    table = Table(title="What it must reach", title_justify="left")
    table.add_column("figure")
    for heading in ("measured", "needed"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    table.add_column("note")
    for v in verdicts:
        word, style = _word(v)
        table.add_row(v.what, _value(v), v.need, f"[{style}]{word}[/{style}]", v.note)
    return table


def markdown(document: Mapping[str, Any]) -> str:
    """The figures of a run as README.md shows them.

    Args:
        document: as written to json.
    """
    machine, rows = document["machine"], document["results"]
    lines = [
        f"{document['date']}, seed {document['seed']}; while the clock ran, other processes kept "
        f"{document['others_cpus']} processors busy (load before the run {document['load_before']}).",
        "",
        f"`{document['command']}`",
        "",
        *(f"- {key}: {value}" for key, value in machine.items() if key != "isa_available"),
        f"- versions: {', '.join(f'{k} {v}' for k, v in document['versions'].items())}",
        f"- floor: {document['floor_method']}",
        f"- {document['repetitions']} repetitions, median",
    ]
    sizes = sorted({row["n"] for row in rows})
    for threads in sorted({row["threads"] for row in rows}):
        title = f"ns a parameter, {threads} thread{'s' * (threads > 1)} (share of the floor)"
        lines += ["", f"| {title} | bytes | state | {' | '.join(map(size_name, sizes))} |"]
        lines.append("| --- " + "| ---: " * (len(sizes) + 2) + "|")
        mine = [row for row in rows if row["threads"] == threads]
        for key in dict.fromkeys(row["contender"] for row in mine):
            by_size = {row["n"]: row for row in mine if row["contender"] == key}
            some = next(iter(by_size.values()))
            cells = [
                f"{by_size[n]['ns']:.3g} ({by_size[n]['fraction_of_floor']:.0%})" if n in by_size else "-"
                for n in sizes
            ]
            head = f"{some['bytes_per_parameter']:.2f} | {some['state_bytes_per_parameter']:.2f}"
            lines.append(f"| {some['label']} | {head} | {' | '.join(cells)} |")
        for mix in dict.fromkeys(f["traffic"] for f in document["floors"]):
            by_size = {
                f["n"]: f for f in document["floors"] if f["traffic"] == mix and f["threads"] == threads
            }
            cells = [f"{by_size[n]['ns']:.3g}" if n in by_size else "-" for n in sizes]
            bytes_ = next(f["bytes_per_parameter"] for f in document["floors"] if f["traffic"] == mix)
            name = "plain copy of fp32" if mix == "copy" else f"floor, {mix}"
            lines.append(f"| *{name}* | {bytes_:.2f} | | {' | '.join(cells)} |")
    lines += ["", *(f"Not measured: {a['label']}: {a['reason']}." for a in document["absent"]), ""]
    lines += ["| figure | measured | needed | verdict | note |", "| --- | ---: | ---: | --- | --- |"]
    for v in (Verdict(**fields) for fields in document["verdicts"]):
        lines.append(f"| {v.what} | {_value(v)} | {v.need} | {_word(v)[0]} | {v.note} |")
    return "\n".join(lines) + "\n"


def _word(verdict: Verdict) -> tuple[str, str]:
    if verdict.passed is None:
        return "not measured", "yellow"
    return ("pass", "green") if verdict.passed else ("FAIL", "bold red")


def _value(verdict: Verdict) -> str:
    return "-" if verdict.value is None else f"{verdict.value:.3g}"
