"""Tables in markdown, for the terminal and for README.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

from islands_bench.figures import spread

_NAMES = {
    "bare": "fast island, no outer loop",
    "alone": "fast island alone, async",
    "fast": "fast island beside the slow one, async",
    "slow": "slow island beside the fast one, async",
    "lockstep_fast": "fast island, sync",
    "lockstep_slow": "slow island, sync",
}


def markdown(document: dict[str, Any]) -> str:
    """Every section that was run, then what must be reached and whether it is."""
    lines = [
        f"{document['date']}, {document['seconds']:g} s; other processes kept {document['others_cpus']:g} "
        f"processors busy (load before the run {document['load_before']:g}).",
        "",
        f"`{document['command']}`",
        "",
    ]
    hardware = {k: document["machine"][k] for k in ("cpu", "threads", "memory_gib", "system")}
    lines += [f"- {key}: {value}" for key, value in hardware.items()]
    lines += [f"- versions: {', '.join(f'{k} {v}' for k, v in document['versions'].items())}", ""]
    for name, section in (("pace", _pace), ("bytes", _bytes), ("pause", _pause), ("link", _link)):
        if name in document:
            lines += [*section(document[name]), ""]
    lines += ["| figure | measured | needed | verdict |", "| --- | ---: | ---: | --- |"]
    for v in document["verdicts"]:
        word = {None: "not measured", True: "pass", False: "FAIL"}[v["passed"]]
        value = "-" if v["value"] is None else f"{v['value']:.3g}"
        lines.append(f"| {v['what']} | {value} | {v['need']} | {word} |")
    return "\n".join(lines) + "\n"


def _pace(found: dict[str, Any]) -> list[str]:
    lines = ["| | inner steps per second, mean (least - most) |", "| --- | ---: |"]
    lines += [f"| {_NAMES[name]} | {spread(values)} |" for name, values in found["steps_per_s"].items()]
    work = found["work"]
    ages = sorted(Counter(work["staleness"]).items())
    gates = f", gates {min(work['gates']):.3f} to {max(work['gates']):.3f}" if work["gates"] else ""
    told = ", ".join(f"{count} of age {age}" for age, count in ages) or "none"
    lines += [
        "",
        f"The slow island's contributions in {work['rounds']} committed rounds: {told}{gates}. The fast one "
        f"kept {spread(found['kept'])} of its speed alone, {spread(found['kept_of_bare'])} of its speed "
        "without any outer loop.",
    ]
    return lines


def _bytes(found: dict[str, Any]) -> list[str]:
    rows = found["traffic"]
    lines = [
        f"Bytes that one of two islands sends (and receives) a token of its own; {found['parameters']:,} "
        f"parameters, {found['tokens_per_step']:,} tokens a step, H = {rows[0]['inner_steps']}:",
        "",
        "| wire | bytes a parameter and round | bytes a token | data parallel moves |",
        "| --- | ---: | ---: | ---: |",
    ]
    for r in rows:
        each = f"{r['bytes_per_parameter']:.3f} | {r['bytes_per_token']:.2f} | {r['ratio']:.1f} times"
        lines.append(f"| `{r['wire']}` | {each} |")
    return [*lines, f"| data parallel, bf16 gradients | | {rows[0]['data_parallel']:.2f} | 1 |"]


def _pause(found: dict[str, Any]) -> list[str]:
    lines = [
        f"Pauses of training, {found['parameters']:,} parameters, steps of {found['step_s']:g} s, "
        f"H = {found['inner_steps']}:",
        "",
        "| wire | a capture | an adoption | any other step | share of the time | at H = 30 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for wire, p in found["pause"].items():
        rare = (p["capture_ms"] + p["adopt_ms"] + 28 * p["other_ms"]) / 1000
        lines.append(
            f"| `{wire}` | {p['capture_ms']:.1f} ms | {p['adopt_ms']:.1f} ms | {p['other_ms']:.2f} ms "
            f"| {p['share']:.1%} | {rare / (30 * found['step_s'] + rare):.1%} |"
        )
    return lines


def _link(found: dict[str, Any]) -> list[str]:
    lines = [
        f"Two equal islands, {found['parameters']:,} parameters in fp32, steps of {found['step_s']:g} s, "
        f"H = {found['inner_steps']}:",
        "",
        "| | link | steps per second, each island | rounds | seconds a round |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, r in found["runs"].items():
        speeds = " and ".join(f"{s:.2f}" for s in r["steps_per_s"])
        lines.append(f"| {name} | {r['link']} | {speeds} | {r['rounds']} | {r['round_s']:.2f} |")
    return [
        *lines,
        "",
        f"Over the thin link the islands keep {found['async']:.3f} of their speed in async mode, "
        f"{found['sync']:.3f} in sync mode.",
    ]
