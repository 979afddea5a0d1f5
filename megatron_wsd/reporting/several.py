"""What several run folders have to do with each other: one run, one lineage, and what differs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron_wsd.config.compare import flat
from megatron_wsd.histories import Apart, apart
from megatron_wsd.reporting.facts import RunFacts, read_json


def of_one_run(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """The first of them, and those that hold other islands of that same run, as clusters do.

    They have its config, none of its islands, and at least one of its rounds, to the digest.
    """
    first, *others = runs
    known = first.about.get("config_digest")
    return [
        first,
        *(
            run
            for run in others
            if known is not None
            and run.about.get("config_digest") == known
            and not run.islands.keys() & first.islands.keys()
            and any(a.items() & b.items() for a in run.digests.values() for b in first.digests.values())
        ),
    ]


def gone_apart(runs: Sequence[RunFacts]) -> Apart | None:
    """Whether islands of the first run, wherever among the folders they are, have histories of their own."""
    return apart({i: found for run in of_one_run(runs) for i, found in run.digests.items()})


@dataclass(frozen=True)
class Family:
    """Runs of one lineage, from where they part.

    Attributes:
        members: their places among the compared runs.
        step: of the run, up to which they are one.
        until: where those of them stand that branched off there or later.
    """

    members: tuple[int, ...]
    step: int
    until: int


def families(runs: Sequence[RunFacts]) -> list[Family]:
    """Those of the runs that descend from one another, or from one that need not be among them."""
    paths = [origin(run.folder) for run in runs]
    found = []
    for root in dict.fromkeys(path[0] for path in paths):
        members = tuple(i for i, path in enumerate(paths) if path[0] == root)
        each = [paths[i] for i in members]
        same = 0
        while all(len(path) > same for path in each) and len({path[same] for path in each}) == 1:
            same += 1
        parted = {i: path[same][1] for i, path in zip(members, each, strict=True) if len(path) > same}
        if parted:  # else one run, or one and the same
            found.append(
                Family(members, min(parted.values()), max(runs[i].summary["position"] for i in parted))
            )
    return found


def shared_until(run: RunFacts, other: RunFacts) -> int | None:
    """Up to which step a run is one with an ancestor; None if ``other`` is none."""
    path = origin(run.folder)
    after = {above: step for (above, _), (_, step) in pairwise(path)}
    return after.get(other.folder)


def origin(folder: Path) -> list[tuple[Path, int]]:
    """The folders from the oldest known ancestor of a run to the run itself, each with where it branched off.

    The oldest began at 0; its folder may be gone.
    """
    folder = Path(os.path.normpath(folder.absolute()))
    parent = read_json(folder / "run.json").get("parent")
    if parent is None:
        return [(folder, 0)]
    above = Path(os.path.normpath(folder / parent["path"]))
    return [*origin(above), (folder, int(parent["position"]))]


def differences(runs: list[RunFacts]) -> list[tuple[str, list[str]]]:
    """The fields of the configs that are not the same in all runs: dotted name, and the value in each."""
    each = [{name: json.dumps(value) for name, value in flat(run.config).items()} for run in runs]
    return _differing(each, sorted({name for config in each for name in config}))


def decided_differently(runs: list[RunFacts]) -> list[tuple[str, list[str]]]:
    """What of schedule, mixes and orders is not the same in all runs: its name, and what it is in each."""
    each = [run.decided for run in runs]
    return _differing(each, list(dict.fromkeys(name for run in each for name in run)))


def _differing(each: list[dict[str, str]], names: list[str]) -> list[tuple[str, list[str]]]:
    rows = [(name, [one.get(name, "(absent)") for one in each]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
