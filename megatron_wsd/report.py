"""The report of a run: its summary as numbers, as a table for people, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_wsd.curves import passed
from megatron_wsd.data_report import consumption, print_consumption
from megatron_wsd.files import write_json_atomic
from megatron_wsd.histories import OUT_OF_IT, apart, committed_digests
from megatron_wsd.picture import draw
from megatron_wsd.records import (
    Record,
    anchors,
    is_void,
    of_kind,
    position,
    read_islands,
    read_metrics,
    running,
)
from megatron_wsd.rundir import RunDir

__all__ = ["draw", "has_steps", "print_summary", "read_metrics", "summarise", "write"]

_LAST = 5  # logged steps, or a quarter of them if fewer, averaged for the loss at the end: one is noisy


def has_steps(run_dir: str | Path) -> bool:
    """Whether any island of the run has logged a step, without which there is nothing to report."""
    return any(of_kind(records, "step") for records in read_islands(run_dir).values())


def write(run_dir: str | Path, console: Console | None = None) -> dict[str, Any]:
    """Write ``summary.json`` and ``run.png`` into the run folder and print the summary.

    Without matplotlib there is no picture, and the summary says so.
    """
    folder = Path(run_dir)
    summary = summarise(folder)
    try:
        draw(folder, folder / "run.png")
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "matplotlib":
            raise
        summary["files"]["picture"] = None
    write_json_atomic(folder / "summary.json", summary)
    print_summary(summary, console)
    return summary


def summarise(run_dir: str | Path) -> dict[str, Any]:
    """The run in numbers: losses in nats a token, times in seconds, bytes summed over ranks and islands.

    ``tokens`` are those that rounds have committed, over all islands, of a branch with what it inherited; of
    fragments the mean, by which the schedule goes. Before the first round, and where rounds do not tell it,
    they are those that were logged, local progress included; ``tokens_are`` says which. Phases are in steps
    of the run. What is counted is what the islands tell whose records are here; ``elsewhere`` has the others.
    ``apart`` says which islands have histories of their own, and from which round on; empty if all have one.
    """
    folder = Path(run_dir)
    islands = read_islands(folder)
    rounds = {i: of_kind(records, "round") for i, records in islands.items()}
    everything = [r for records in islands.values() for r in records]
    steps = of_kind(everything, "step")
    up = running(folder)
    committed = {r["outer_step"] for island in rounds.values() for r in island if r["committed"]}
    starts = [r for r in everything if r["kind"] == "start"]
    run = RunDir(folder)
    told = [r["tokens"] for island in rounds.values() for r in island if r["committed"] and "tokens" in r]
    tokens = max(told or [r["tokens"] for r in steps], default=0)
    split = apart({i: committed_digests(records) for i, records in islands.items()})
    return {
        "run_dir": str(folder.absolute()),
        "asynchronous": run.asynchronous,
        "parameters": starts[-1].get("parameters") if starts else None,
        "position": max(map(position, steps), default=0),
        "tokens": tokens,
        "tokens_are": "committed" if told else "logged",
        "tokens_inherited": (run.facts().get("parent") or {}).get("tokens", 0)
        if run.run_json.is_file()
        else 0,
        "wall_seconds": up[-1][1] - up[0][0] if up else 0.0,
        "running_seconds": sum(end - begin for begin, end in up),
        "phases": [{"phase": n, "first_step": a, "last_step": b} for n, a, b in passed(run, islands)],
        "rounds_committed": len(committed),
        "bytes_exchanged": sum(r.get("island_bytes", 0) for island in rounds.values() for r in island),
        "anchor": _anchor(everything),
        "data": consumption(folder, islands),
        "islands": [_island(i, records, len(islands) > 1) for i, records in islands.items()],
        "elsewhere": _elsewhere(run, islands),
        "apart": "" if split is None else str(split),
        "files": {
            "picture": str(folder.absolute() / "run.png"),
            "islands": [str(folder.absolute() / f"island_{i}") for i in islands],
        },
    }


def _island(number: int, records: list[Record], others: bool) -> dict[str, Any]:
    steps, rounds = of_kind(records, "step"), of_kind(records, "round")
    losses = [r["loss"] for r in steps if "loss" in r]  # a script may have told none
    last = losses[-max(1, min(_LAST, len(losses) // 4)) :]
    began = max((i for i, r in enumerate(records) if r["kind"] == "start"), default=0)
    ends = [r["event"] for r in records[began:] if r["kind"] == "event" and r["event"] in ("finish", "stop")]
    return {
        "island": number,
        "last_step": steps[-1]["step"] if steps else 0,
        "position": max(map(position, steps), default=0),
        "losses": len(losses),
        "loss_start": next((loss for loss in losses if loss is not None), None),
        "loss_end": sum(last) / len(last) if last and None not in last else None,
        "rounds_committed": sum(r["committed"] for r in rounds),
        "rounds_void": sum(is_void(r) for r in rounds),
        "rounds_alone": sum(r["committed"] and r["islands"] == [number] for r in rounds) if others else 0,
        "bytes_exchanged": sum(r.get("island_bytes", 0) for r in rounds),
        "dropped": sum(r.get("event") == "void" and r.get("island") == number for r in records),
        "heals": sum(r["kind"] == "event" and r["event"] == "heal" for r in records),
        "starts": sum(r["kind"] == "start" for r in records),
        "end": ends[-1] if ends else "cut short",
    }


def _elsewhere(run: RunDir, islands: dict[int, list[Record]]) -> list[dict[str, int]]:
    """The islands without records here, with the committed rounds in which those of the others name them."""
    told = {
        r["outer_step"]: r["islands"] for i in islands for r in of_kind(islands[i], "round") if r["committed"]
    }
    count = int(run.facts().get("islands", 0)) if run.run_json.is_file() else 0
    there = {*range(count), *(i for members in told.values() for i in members)}
    return [
        {"island": i, "rounds_committed": sum(i in members for members in told.values())}
        for i in sorted(there - islands.keys())
    ]


def _anchor(records: list[Record]) -> dict[str, dict[str, Any]]:
    """The newest validation of the anchor for each corpus, beside what a unigram model would reach."""
    entropy: dict[str, float] = {}
    for record in records:
        if record["kind"] == "start":
            entropy |= record.get("unigram_entropy") or {}
    return {
        corpus: {"loss": r["loss"], "step": position(r), "unigram_entropy": entropy.get(corpus)}
        for corpus, validated in sorted(anchors(records).items())
        for r in validated[-1:]
    }


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """Print what `summarise` returns as a table."""
    table = Table(title="Summary of the run", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if summary["parameters"]:
        table.add_row("model", f"{summary['parameters']:,} parameters")
    table.add_row("trained", _trained(summary))
    for island in summary["islands"]:
        table.add_row(f"island {island['island']}", _island_line(island, own=summary["asynchronous"]))
    for other in summary["elsewhere"]:
        took_part = f"no records here; in {other['rounds_committed']} of {summary['rounds_committed']} rounds"
        table.add_row(f"island {other['island']}", took_part)
    spans = [f"{p['phase']} {p['first_step']}-{p['last_step']}" for p in summary["phases"]]
    table.add_row("phases (steps)", ", ".join(spans) or "none")
    table.add_row("outer rounds", f"{summary['rounds_committed']} committed{_void(summary['islands'])}")
    whose = "all ranks here" if summary["elsewhere"] else "all ranks"
    moved = human_bytes(summary["bytes_exchanged"])
    table.add_row("exchanged", f"{moved} over {whose}, sent and received")
    for corpus, anchor in summary["anchor"].items():
        line = f"loss {_loss(anchor['loss'])} at step {anchor['step']}"
        if (entropy := anchor["unigram_entropy"]) is not None:
            side = "below" if (anchor["loss"] or entropy) < entropy else "NOT below"
            line += f", {side} the unigram entropy {entropy:.3f}"
        table.add_row(f"anchor on {corpus}", line)
    (console or Console()).print(table)
    print_consumption(summary["data"], console or Console())
    if note := why_other_tokens(summary):
        (console or Console()).print(note)
    if summary["apart"]:
        (console or Console()).print(f"[red]WARNING[/red]: {summary['apart']}. {OUT_OF_IT}")
    # paths outside the table, whole on one line, so that they can be copied
    picture = summary["files"]["picture"] or "none without matplotlib: pip install 'megatron_wsd[report]'"
    for name, where in (("picture", picture), ("run folder", summary["run_dir"])):
        (console or Console()).print(f"{name}: {where}", soft_wrap=True, highlight=False, markup=False)


def _trained(summary: dict[str, Any]) -> str:
    """Tokens, and the time in which any island was up: between an end and the next start nothing trained."""
    inherited, up, wall = (summary[k] for k in ("tokens_inherited", "running_seconds", "wall_seconds"))
    text = f"{summary['tokens']:,} tokens {summary['tokens_are']}"
    text += f" ({summary['tokens'] - inherited:,} of them its own)" if inherited else ""
    text += f", in {_minutes(up)}"
    return text if wall - up < 1 else f"{text} of running, over {_minutes(wall)} of wall time"


def why_other_tokens(summary: dict[str, Any]) -> str:
    """Why the samples of ``data`` are not as many tokens as were committed; empty where they are."""
    parts = summary["data"].values()
    drawn = sum(n["tokens"] for part in parts for n in part["all"]["corpora"].values())
    if summary["tokens_are"] != "committed" or drawn in (0, summary["tokens"]):
        return ""
    return (
        "The table counts a sample once any fragment has taken it in, on the islands whose folders are here: "
        f"{drawn:,} tokens. The {summary['tokens']:,} committed are the mean of the fragments over all "
        "islands, by which the schedule goes."
    )


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s"


def _island_line(island: dict[str, Any], *, own: bool) -> str:
    if not island["last_step"]:
        return "no step logged"
    start, end = island["loss_start"], island["loss_end"]
    parts = [
        "no loss logged" if not island["losses"] else f"training loss {_loss(start)} -> {_loss(end)}",
        f"{island['last_step']} steps{' of its own' if own else ''}",
        {"finish": "finished", "stop": "stopped and saved"}.get(island["end"], island["end"]),
    ]
    parts += [f"{island['starts']} starts"] * (island["starts"] > 1)
    parts += [f"healed {island['heals']} x"] * (island["heals"] > 0)
    parts += [f"{island['rounds_alone']} rounds alone"] * (island["rounds_alone"] > 0)
    parts += [f"{island['dropped']} contributions dropped for NaN or Inf"] * (island["dropped"] > 0)
    return ", ".join(parts)


def _void(islands: list[dict[str, Any]]) -> str:
    void = max((island["rounds_void"] for island in islands), default=0)
    return f", {void} void" if void else ", none void"


def _loss(value: float | None) -> str:
    return "nan" if value is None else f"{value:.3f}"  # json has no NaN


def human_bytes(count: float) -> str:
    """``1.5 GB`` and the like, with powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
