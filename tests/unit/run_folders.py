"""Run folders for tests: what islands might have recorded and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Schedule
from megatron_wsd.schedule.plan import Plan

T0 = 1_700_000_000.0


def start(n: int, time: float, resumed: bool = False) -> dict[str, Any]:
    entropy = {"broad": 3.0, "high_quality": 2.9}
    told = {"parameters": 820_352, "unigram_entropy": entropy, "resumed": resumed}
    return {"kind": "start", "time": T0 + time, "step": n, "outer_step": 0, **told}


def step(n: int, loss: float | None, phase: str = "stable", lr: float = 1e-3, **more: Any) -> dict[str, Any]:
    told = {"loss": loss, "lr": lr, "phase": phase, "tokens": 1000 * n, "tokens_per_s": 500.0}
    return {"kind": "step", "time": T0 + 2.0 * n, "step": n, **told, **more}


def outer(n: int, k: int, islands: tuple[int, ...] = (0, 1), **more: Any) -> dict[str, Any]:
    each = {"staleness": {str(i): 0 for i in islands}, "gates": {str(i): 1.0 for i in islands}}
    told = {"outer_step": k, "committed": True, "islands": list(islands), "contributors": list(islands)}
    cost = {"island_bytes": 2_000_000, "seconds": 4.0}
    return {"kind": "round", "time": T0 + 2.0 * n - 0.5, "step": n, **told, **each, **cost, **more}


def void(n: int, k: int, reason: str) -> dict[str, Any]:
    none: dict[str, Any] = {"contributors": [], "staleness": {}, "gates": {}}
    return outer(n, k, committed=False, reason=reason, **none)


def event(name: str, n: int, message: str = "") -> dict[str, Any]:
    return {"kind": "event", "time": T0 + 2.0 * n, "step": n, "event": name, "message": message}


def evaluated(n: int, corpus: str, loss: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "time": T0 + 2.0 * n,
        "step": n,
        "target": "anchor",
        "corpus": corpus,
        "loss": loss,
    }


def write(folder: Path, islands: dict[int, list[dict[str, Any]]], **config: Any) -> Path:
    """A run folder with these records; ``config`` goes into its block sync."""
    for island, records in islands.items():
        file = folder / f"island_{island}" / "metrics.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(r) + "\n" for r in records))
    facts = {
        "version": "0.1.0",
        "islands": len(islands),
        "ranks": 2,
        "created": "2026",
        "config_digest": "ab12",
    }
    (folder / "run.json").write_text(json.dumps(facts))
    sync = {"mode": "sync", "inner_steps": 10, **config}
    (folder / "config.json").write_text(json.dumps({"megatron_wsd": {"sync": sync}}))
    return folder


def checkpoint(
    run: RunDir,
    island: int,
    step: int,
    schedule: Schedule,
    *,
    position: int | None = None,
    outer_step: int = 0,
    committed: int | None = None,
    taken: dict[int, int] | None = None,
    spans: dict[str, int] | None = None,
    digests: list[str] | None = None,
    orders: tuple[list[dict[str, Any]], int] = ([], 0),
    peak: float = 3e-3,
    **more: Any,
) -> Path:
    """A checkpoint that holds no tensors, with the manifests that an island of two ranks would write.

    Args:
        run: whose.
        island: that saved it.
        step: inner steps of the island.
        schedule: that it obeyed.
        position: of the schedule; the step by default.
        outer_step: committed rounds.
        committed: position of what rounds have committed; ``position`` by default.
        taken: by island, up to where its data are committed.
        spans: committed steps; those of two islands and one fragment by default.
        digests: of the outer state; some that follow from the step by default.
        orders: those that all islands had committed, and how many of them the island had obeyed.
        peak: of both param groups.
        more: of the manifest.
    """
    position = step if position is None else position
    committed = position if committed is None else committed
    fragment = {"tokens": 1000 * committed, "taken": {str(i): n for i, n in (taken or {}).items()}}
    counters = {
        "outer_step": outer_step,
        "inner_step": position,
        "orders": orders[0],
        "spans": spans or {"2": 2 * committed},
        "fragments": [fragment],
    }
    outer = {
        "digests": digests or [f"{step}a", f"{step}b"],
        "counters": counters,
        "extra": {"position": position, "orders": orders[1]},
    }
    plan = Plan((schedule, schedule), (peak, peak)).state_dict(position)
    own = {"step": step, "files": {}, "outer_step": outer_step, "schedule": plan, "config": "c", **more}
    folder = run.island(island) / "checkpoints" / f"step_{step:08d}"
    (folder / "outer").mkdir(parents=True)
    (folder / "outer" / "manifest.json").write_text(json.dumps(outer))
    (folder / "checkpoint.json").write_text(json.dumps(own))
    return folder


def faulty(folder: Path) -> Path:
    """Two islands, 10 rounds of 10 steps; 1 is killed after step 30, and back and healed at step 60.

    The decay was ordered at step 70, and round 9 was void twice.
    """
    both: list[dict[str, Any]] = [start(0, 0.0)]
    for n in range(2, 101, 2):
        phase = "warmup" if n <= 10 else "stable" if n <= 70 else "decay"
        both.append(step(n, 5.5 - 0.9 * (n**0.28), phase, min(n, 10) / 1e4 * min(1.0, (102 - n) / 32)))
    early = [r for r in both if r["step"] <= 30]
    late = [r for r in both if r["step"] > 60]
    rounds = {k: outer(10 * k, k, (0,) if k in (4, 5) else (0, 1)) for k in range(1, 11)}
    order = [event("order", 70, "step 70: decay of 30 steps (one_minus_sqrt) from step 70")]
    order += [event("mix", 70, "step 70: data mix is now 'decay'")]
    voids = [void(90, 8, "no answer of island 1 in 60 s")] * 2
    evals = [evaluated(10 * k, c, 4.0 - 0.1 * k + d) for k in range(2, 11, 2) for c, d in _CORPORA.items()]
    gone = [event("alone", 40, "step 40: island 1 is gone; going on with [0]")]
    gone += [event("back", 60, "step 60: island 1 is back")]
    back = [start(0, 118.0), event("heal", 60, "step 60: healed by island 0 to round 5")]
    end = [event("checkpoint", 100), event("finish", 100)]
    zero = sorted([*both[1:], *rounds.values(), *order, *voids, *evals, *gone, *end], key=lambda r: r["time"])
    some = [rounds[k] for k in (6, 7, 8, 9, 10)]
    one = sorted([*late, *some, *order, *voids, *end], key=lambda r: r["time"])
    first = sorted([*early[1:], rounds[1], rounds[2], rounds[3]], key=lambda r: r["time"])
    return write(folder, {0: [both[0], *zero], 1: [both[0], *first, *back, *one]})


def validated(
    folder: Path, first: int, last: int, corpora: dict[str, float], branch_of: Path | None = None
) -> Path:
    """One island logs every second step and validates every tenth.

    Args:
        folder: of the run.
        first: step at which it begins.
        last: step at which it ends.
        corpora: what is added to the loss on each.
        branch_of: folder of its parent, beside its own.
    """
    records: list[dict[str, Any]] = [start(first, 0.0)]
    for n in range(first + 1, last + 1):
        records += [step(n, 5.0 - 0.01 * n)] if n % 2 == 0 else []
        if n % 10 == 0:
            records += [evaluated(n, corpus, 4.0 - 0.01 * n + d) for corpus, d in corpora.items()]
    write(folder, {0: records})
    if branch_of is not None:
        facts = json.loads((folder / "run.json").read_text())
        facts["parent"] = {"path": f"../{branch_of.name}", "position": first, "tokens": 1000 * first}
        (folder / "run.json").write_text(json.dumps(facts))
    return folder


_CORPORA = {"broad": 0.0, "high_quality": 0.1}


def asynchronous(folder: Path) -> Path:
    """Three islands, two fragments, ages up to 4, adoptions behind."""
    islands: dict[int, list[dict[str, Any]]] = {}
    for island in range(3):
        records: list[dict[str, Any]] = [start(0, 0.0)]
        for k in range(1, 31):
            n = 2 * k
            ages = {str(i): (k * (i + 1)) % 5 for i in range(3)}
            gates = {i: 0.82**age for i, age in ages.items()}
            more = {"fragment": k % 2, "version": (k + 1) // 2, "staleness": ages, "gates": gates}
            records += [step(n, 4.0 - 0.03 * k + 0.02 * island), outer(n, k, (0, 1, 2), **more)]
            told = {"fragment": k % 2, "version": (k + 1) // 2, "lag": k % 3, "waited_steps": 2}
            records.append({"kind": "adopt", "time": T0 + 2.0 * n, "step": n, "seconds": 0.05, **told})
        islands[island] = records
    return write(folder, islands, mode="async", fragments=2)
