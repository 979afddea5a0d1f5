"""The page of a run: one html file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import megatron_wsd
from megatron_wsd.errors import ConfigError
from megatron_wsd.histories import OUT_OF_IT
from megatron_wsd.report import has_steps, human_bytes, why_other_tokens
from megatron_wsd.reporting import charts, checkpoints, compare
from megatron_wsd.reporting.facts import RunFacts
from megatron_wsd.reporting.pieces import Html, duration, figure, folded, number, percent, table, when
from megatron_wsd.reporting.several import gone_apart, of_one_run
from megatron_wsd.reporting.style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_page(run_dir: Path, out: Path, others: Sequence[Path] = ()) -> None:
    """Write the page of a run, perhaps beside others.

    Args:
        run_dir: the run folder.
        out: the html file; its folder must be there.
        others: folders of runs to compare it with, or of other islands of the same run.

    Raises:
        ConfigError: in one of the folders no step is logged.
    """
    for folder in (run_dir, *others):
        if not has_steps(folder):
            raise ConfigError("RUN", "a run folder in which steps are logged", f"{folder}, which has none")
    text = page([RunFacts(Path(folder)) for folder in (run_dir, *others)])
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(out)


def page(runs: Sequence[RunFacts]) -> str:
    """The page of the first run; the others are compared with it."""
    run = runs[0]
    parts = [
        ("loss", "Loss and rate", _loss(run)),
        ("islands", "Islands", _islands(run)),
        ("staleness", "Staleness and gates", _staleness(run)),
        ("exchange", "Bytes and utilisation", _exchange(run)),
        ("faults", "Faults survived", _faults(run)),
        ("data", "Data committed", _consumed(run)),
        ("checkpoints", "Checkpoints and lineage", checkpoints.section(run)),
        ("compare", "Compared runs", compare.section(runs) if len(runs) > 1 else ""),
        ("config", "Config", _config(run)),
    ]
    parts = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in parts)
    sections = "".join(f'<section id="{n}"><h2>{title}</h2>{body}</section>' for n, title, body in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The browser itself refuses to fetch anything.
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(run.name)} - megatron_wsd</title><style>{STYLE}</style></head><body><main>"
        f"{_head(run)}{_apart(runs)}<nav>{links}</nav>{sections}"
        f'<p class="note">Written by megatron_wsd {megatron_wsd.__version__} on {when(None)}.</p>'
        "</main></body></html>\n"
    )


# ---- sections ----


def _head(run: RunFacts) -> str:
    summary, about = run.summary, run.about
    islands = len(summary["islands"]) + len(summary["elsewhere"])
    parts = [f"{summary['parameters']:,} parameters"] if summary["parameters"] else []
    ranks = f" of {about['ranks']} rank{'s' * (about['ranks'] != 1)}" if about.get("ranks") else ""
    parts.append(f"{islands} island{'s' * (islands != 1)}{ranks}")
    if away := [str(other["island"]) for other in summary["elsewhere"]]:
        which = f"island{'s' * (len(away) > 1)} {', '.join(away)}"
        parts.append(f"no records here of {which}")
    parts.append("asynchronous rounds" if run.asynchronous else "synchronous rounds")
    parts += [f"begun {when(run.begun)}"] if run.begun else []
    void = max((i["rounds_void"] for i in summary["islands"]), default=0)
    went = sum(f.count for f in run.faults if f.what == "island gone")
    heals = sum(i["heals"] for i in summary["islands"])
    ends = ", ".join(dict.fromkeys(_END.get(i["end"], i["end"]) for i in summary["islands"]))
    each = [f"{corpus} {number(a['loss'])}" for corpus, a in summary["anchor"].items()]
    kind = f"of the anchor on {each[0].rpartition(' ')[0]}" if len(each) == 1 else "of training"
    kind = f"of the anchor, mean of {' and '.join(each)}" if len(each) > 1 else kind
    inherited, up, wall = (summary[k] for k in ("tokens_inherited", "running_seconds", "wall_seconds"))
    own = f"; {summary['tokens'] - inherited:,} its own" if inherited else ""
    local = "" if summary["tokens_are"] == "committed" else ", with local progress"
    over = f"over {duration(wall)} of wall time; " if wall - up >= 1 else ""
    tiles = [
        ("Final loss", number(run.loss), f"nats a token, {kind}"),
        ("Tokens", f"{summary['tokens']:,}", f"{summary['tokens_are']} over all islands{local}{own}"),
        ("Time running", duration(up), over + ends),
        ("Outer rounds", f"{summary['rounds_committed']:,}", f"committed; {void:,} void"),
        (
            "Exchanged",
            human_bytes(summary["bytes_exchanged"]),
            f"all ranks{' with records here' if away else ''}, sent and received",
        ),
        (
            "Utilisation",
            percent(run.utilisation),
            "of the time training went on",
        ),
        ("Islands lost", f"{went:,}", f"and {heals:,} times healed"),
    ]
    cells = "".join(
        f"<div><dt>{escape(n)}</dt><dd>{escape(v)}<small>{escape(s)}</small></dd></div>" for n, v, s in tiles
    )
    lead = escape(", ".join(parts))
    return f'<h1>{escape(run.name)}</h1><p class="lead">{lead}</p><dl class="tiles">{cells}</dl>'


def _apart(runs: Sequence[RunFacts]) -> str:
    """A warning if islands of the run have histories of their own."""
    split = gone_apart(runs)
    if split is None:
        return ""
    ends = [
        f"island {i['island']} to round {max(run.digests[i['island']])}, {_END.get(i['end'], i['end'])}"
        for run in of_one_run(runs)
        for i in run.summary["islands"]
        if any(i["island"] in side for side in split.sides)
    ]
    text = f"{str(split)[0].upper()}{str(split)[1:]} ({'; '.join(ends)})"
    return f'<p class="warning" role="alert"><strong>{escape(text)}.</strong> {escape(OUT_OF_IT)}</p>'


_END = {"finish": "finished", "stop": "stopped and saved"}


def _loss(run: RunFacts) -> str:
    spans = ", ".join(f"{p['phase']} {p['first_step']}-{p['last_step']}" for p in run.summary["phases"])
    caption = f"Phases by step of the run: {spans}. Thin lines are logged values, thick ones running means."
    if run.decisions:
        caption += " Numbers mark decisions, listed below."
    rows = [
        [k, decision.step, f"{run.tokens(decision.step):,.0f}", "; ".join(decision.texts)]
        for k, decision in enumerate(run.decisions, 1)
    ]
    decided = table(["", "step", "tokens", "decision"], rows, "Decisions", (1, 2)) if rows else ""
    anchor = [
        [corpus, number(a["loss"]), a["step"], number(a["unigram_entropy"])]
        for corpus, a in run.summary["anchor"].items()
    ]
    head = ["corpus", "loss, nats a token", "at step", "unigram entropy"]
    last = table(head, anchor, "Last validation of the anchor", (1, 2, 3)) if anchor else ""
    return figure(charts.loss_and_rate(run), caption) + decided + last


def _islands(run: RunFacts) -> str:
    rows = []
    for island in run.summary["islands"]:
        start, end = island["loss_start"], island["loss_end"]
        rows.append(
            [
                island["island"],
                f"{island['last_step']:,}",
                f"{number(start)} to {number(end)}",
                island["rounds_committed"],
                island["rounds_void"],
                island["rounds_alone"],
                island["heals"],
                island["starts"],
                _END.get(island["end"], island["end"]),
            ]
        )
    for other in run.summary["elsewhere"]:
        took_part = other["rounds_committed"]
        rows.append([other["island"], "-", "-", took_part, *["-"] * 4, "no records here"])
    steps = "steps of its own" if run.asynchronous else "steps"
    head = ["island", steps, "training loss", "rounds", "void", "alone", "healed", "starts", "end"]
    note = (
        "The rounds of an island without records here are those in which the others name it. Its losses, "
        "bytes, time and faults are not on this page."
    )
    return table(head, rows, "", range(8)) + (
        f'<p class="note">{note}</p>' if run.summary["elsewhere"] else ""
    )


def _staleness(run: RunFacts) -> str:
    if not run.staleness:
        return "<p>No round has committed a contribution.</p>"
    caption = (
        "Age of contributions when they were merged, in outer rounds, and the staleness gate that each was "
        "multiplied by."
    )
    if max(max(counts) for counts in run.staleness.values()) == 0:
        caption += " All were of age 0, where the gate is 1 and CGAD is plain Adam."
    rows = []
    for island, counts in run.staleness.items():
        count = sum(counts.values())
        mean = sum(age * n for age, n in counts.items()) / count
        gates = [gate for _, gate in run.gates.get(island, [])]
        mean_gate = sum(gates) / len(gates) if gates else None
        rows.append(
            [island, count, f"{mean:.2f}", max(counts), number(mean_gate), number(min(gates, default=None))]
        )
    head = ["island", "contributions", "mean age", "oldest", "mean gate", "least gate"]
    lags = [[i, len(v), f"{sum(v) / len(v):.2f}", max(v)] for i, v in run.lags.items()]
    adopted = table(
        ["island", "adoptions", "mean lag", "largest"], lags, "Versions behind at adoption", range(4)
    )
    return (
        figure(charts.staleness(run), caption) + table(head, rows, "", range(6)) + (adopted if lags else "")
    )


def _exchange(run: RunFacts) -> str:
    rows = []
    moved = {i["island"]: i["bytes_exchanged"] for i in run.summary["islands"]}
    for island, time in run.times.items():
        share = time.utilisation
        bar = (
            ""
            if share is None
            else f'<span class="bar"><span style="width:{100 * share:.1f}%"></span></span>'
        )
        told = percent(share)
        rows.append(
            [
                island,
                human_bytes(moved[island]),
                duration(time.up),
                duration(time.exchange),
                Html(bar + told),
            ]
        )
    head = ["island", "exchanged", "time up", "in rounds", "utilisation"]
    caption = (
        "Time in rounds is exchange, merge, and waiting for slower islands; void rounds are part of it. "
        + (
            "Training goes on meanwhile; utilisation is the share of the time up in which it was not stopped "
            "to capture or to adopt."
            if run.asynchronous
            else "Utilisation is the share of the time up that was not spent in rounds."
        )
    )
    return figure(charts.exchange(run), caption) + table(head, rows, "", (0, 1, 2, 3))


def _faults(run: RunFacts) -> str:
    caption = "A bar while the island trained; gaps where it was away."
    drawn = figure(charts.presence(run), caption)
    if not run.faults:
        return drawn + "<p>None: no round was void, and no island was away.</p>"
    rows = [
        [
            f"+{duration(f.seconds)}",
            f.island,
            f.step,
            f.what + (f" ({f.count} x)" if f.count > 1 else ""),
            f.text,
        ]
        for f in run.faults
    ]
    return drawn + table(["when", "recorded by island", "step", "what", "told"], rows, "", (0, 1, 2))


def _consumed(run: RunFacts) -> str:
    """What was committed of each corpus, by mix; nothing where the run has not recorded it."""
    rows = []
    data = run.summary.get("data") or {}
    for origin in ("inherited", "own"):
        if origin not in data:
            continue
        all_mixes = {"all mixes": data[origin]["all"]["corpora"]}
        for mix, corpora in (data[origin]["all"]["mixes"] | all_mixes).items():
            for corpus, n in corpora.items():
                counts = [f"{n['samples']:,}", f"{n['tokens']:,}", f"{n['epochs']:.3f}"]
                rows.append([*[origin] * ("inherited" in data), mix, corpus, *counts])
    if not rows:
        return ""
    head = [*["from"] * ("inherited" in data), "mix", "corpus", "samples", "tokens", "epochs"]
    note = why_other_tokens(run.summary)
    drawn = table(head, rows, "", range(len(head) - 3, len(head)))
    return drawn + (f'<p class="note">{note}</p>' if note else "")


def _config(run: RunFacts) -> str:
    if not run.config:
        return ""
    text = escape(json.dumps(run.config, indent=2))
    digest = run.about.get("config_digest", "-")
    return folded(f"config.json, digest {digest}", f"<pre>{text}</pre>")
