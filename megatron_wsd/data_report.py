"""What a run has consumed of its corpora, as numbers and as a table; of a branch also what it inherited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_wsd.data.consumption import Drawn, amounts, committed, total
from megatron_wsd.lineage import inherited
from megatron_wsd.records import Record
from megatron_wsd.rundir import RunDir


def consumption(run_dir: Path, islands: Mapping[int, Sequence[Record]]) -> dict[str, Any]:
    """What a run committed of each corpus: samples, tokens, epochs.

    Args:
        run_dir: the run folder.
        islands: the records of each island.

    Returns:
        ``own`` and, for a branch, ``inherited`` from its parent: each with ``all`` islands together and
        ``islands`` by number, both as `amounts` gives them. Empty if no start has told the sizes of corpora.
    """
    starts = [r for records in islands.values() for r in records if "epoch_samples" in r]
    if not starts:
        return {}
    sizes, seq_length = starts[-1]["epoch_samples"], starts[-1]["seq_length"]

    def part(drawn: dict[str, Drawn]) -> dict[str, Any]:
        each = {island: amounts(own, sizes, seq_length) for island, own in drawn.items()}
        return {"all": amounts(total(drawn.values()), sizes, seq_length), "islands": each}

    found = {"own": part({str(island): committed(records) for island, records in islands.items()})}
    before = inherited(RunDir(run_dir))
    return {**found, "inherited": part(before)} if before else found


def print_consumption(data: Mapping[str, Any], console: Console) -> None:
    """Print what `consumption` returns as a table; nothing if it is empty."""
    table = Table(title="Data committed", title_justify="left")
    for name in ("mix", "corpus"):
        table.add_column(name)
    for name in ("samples", "tokens", "epochs", "samples of each island"):
        table.add_column(name, justify="right")
    for origin in ("inherited", "own"):
        if origin not in data:
            continue
        label = f"{origin}: " if "inherited" in data else ""
        part = data[origin]
        for mix, corpora in [*part["all"]["mixes"].items(), (None, part["all"]["corpora"])]:
            for corpus, n in corpora.items():
                each = [_samples(island, mix, corpus) for island in part["islands"].values()]
                table.add_row(
                    label + ("all mixes" if mix is None else mix),
                    corpus,
                    f"{n['samples']:,}",
                    f"{n['tokens']:,}",
                    f"{n['epochs']:.3f}",
                    " + ".join(f"{count:,}" for count in each),
                )
    if table.row_count:
        console.print(table)


def _samples(island: Mapping[str, Any], mix: str | None, corpus: str) -> int:
    corpora = island["corpora"] if mix is None else island["mixes"].get(mix, {})
    return int(corpora.get(corpus, {}).get("samples", 0))
