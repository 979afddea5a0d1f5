"""What three islands that failed and came back must have left behind: one history, and nothing lost of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check(
    traces: Sequence[Sequence[dict[str, Any]]],
    records: Sequence[Sequence[dict[str, Any]]],
    results: Sequence[dict[str, Any]],
) -> None:
    """Replay what was committed, by whomever, in whichever of its lives.

    Every outer step was one and the same commit on all islands that made it, with one digest, and no process
    went back; no contribution was counted twice; nothing committed was lost; rounding errors were fed back
    exactly for what was committed; and what the islands hold at the end is what was committed.

    Args:
        traces: of every island, over all its lives.
        records: of its metrics.
        results: of its last process.

    Raises:
        AssertionError: one of these does not hold.
    """
    errors = [r for r in results if "error" in r]
    assert not errors, errors
    commits = _one_history(traces)
    digests: dict[int, str] = {}
    for i, told in enumerate(records):
        for r in told:
            if r["kind"] == "round" and r["committed"]:
                digest = digests.setdefault(r["outer_step"], r["digest"])
                assert digest == r["digest"], f"digests differ at outer step {r['outer_step']} on island {i}"
                by_then = commits[r["outer_step"]]["fragment_tokens"]
                assert r["tokens"] == sum(by_then) // len(by_then), f"island {i}: {r}, while {by_then}"
    last = max(commits)
    assert sorted(commits) == list(range(1, last + 1)), "outer steps are missing"
    count = len(commits[last]["versions"])
    versions, tokens, steps = [0] * count, [0] * count, [0] * count
    taken: list[dict[str, int]] = [{} for _ in range(count)]
    told_by: dict[str, list[tuple[int, int, int]]] = {}  # island -> outer step, fragment, cursor
    for n in range(1, last + 1):
        c = commits[n]
        f = c["fragment"]
        for island, (base, cursor, own_steps, own_tokens) in c["offers"].items():
            assert base <= versions[f], "a contribution from the future"
            # It holds the steps (cursor - steps, cursor] of its island, and none of them twice.
            assert cursor - own_steps >= taken[f].get(island, 0), f"outer step {n}: steps counted twice: {c}"
            taken[f][island] = cursor
            tokens[f] += own_tokens
            steps[f] += own_steps
            told_by.setdefault(island, []).append((n, f, cursor))
        versions[f] += 1
        assert c["versions"] == versions and c["fragment_tokens"] == tokens and c["fragment_steps"] == steps
        assert c["taken"] == taken, f"outer step {n}: {c['taken']}, while {taken} was committed"
    for i, r in enumerate(results):
        if not r["stopped"]:
            assert r["outer_step"] == last and r["versions"] == versions
            assert r["fragment_tokens"] == tokens and r["taken"] == taken
            assert r["digest"] == results[0]["digest"] and r["holds_anchor"]
        mine = [[f, cursor] for n, f, cursor in told_by[str(i)] if r["met_at"] < n <= r["outer_step"]]
        assert sorted(map(list, r["fed_back"])) == sorted(mine), (
            f"island {i}: error feedback is not of its commits"
        )


def _one_history(traces: Sequence[Sequence[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Outer step -> its commit, the same on all islands; every process goes forward alone."""
    commits: dict[int, dict[str, Any]] = {}
    for i, trace in enumerate(traces):
        newest: dict[Any, int] = {}  # of each process
        for line in trace:
            if line["kind"] == "life":
                assert not any(m and e for m, e in zip(line["moved"], line["errors"], strict=True)), (
                    f"island {i} came back with rounding errors that it has told already: {line}"
                )
                continue
            step, before = line["outer_step"], newest.get(line["pid"], 0)
            assert step > before, f"island {i} went back from {before} to {step}"
            newest[line["pid"]] = step
            kept = {k: v for k, v in line.items() if k not in ("time", "pid", "island")}
            first = commits.setdefault(step, kept)
            assert first == kept, f"outer step {step}: island {i} committed {kept}, another {first}"
    return commits
