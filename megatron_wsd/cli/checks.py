"""What stands against a start: one list, for the start itself and for ``--dry-run``. Touches nothing.

What is wrong with the run is refused by both. What is wrong with this machine alone is refused by a start; a
dry run may be meant for another machine, and warns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from megatron_wsd.addresses import address_for, is_loopback, lighthouse_host_port
from megatron_wsd.cli.command import Island
from megatron_wsd.cli.machine import cores, visible_cuda_devices
from megatron_wsd.cli.process import say
from megatron_wsd.config import Config
from megatron_wsd.control import ControlFolder, Order
from megatron_wsd.data.epochs import Amount, passages
from megatron_wsd.errors import MegatronWSDError, Refused
from megatron_wsd.lineage import Parent
from megatron_wsd.preflight import check_packages, look_at_files
from megatron_wsd.resume import Change, Start, fit_override, plan_change, stands_at, starting_point
from megatron_wsd.rundir import RunDir, check_island, check_run


@dataclass
class Checks:
    """What a look at a run that is to be started has found.

    Attributes:
        problems: of the run: whoever starts it is refused.
        here: of this machine.
        warnings: what does not stand in the way, and is hardly meant.
        notes: what else is good to know.
        change: of the number of islands, if that is what the start makes.
        order: to change fields of the schedule, held against where the run stands.
        done: that there is nothing to do, since the run is there already; mostly empty.
    """

    problems: list[MegatronWSDError] = field(default_factory=list)
    here: list[MegatronWSDError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    change: Change | None = None
    order: Order | None = None
    done: str = ""

    @contextmanager
    def noting(self, *, here: bool = False) -> Iterator[None]:
        """Keep an error for later."""
        try:
            yield
        except MegatronWSDError as e:
            (self.here if here else self.problems).append(e)

    def insist(self, who: str, *, quiet: bool = False) -> None:
        """Refuse to start if anything stands in the way, else say the rest: that it is done already, if so.

        Args:
            who: says it.
            quiet: the rest was said already.

        Raises:
            MegatronWSDError: everything that is wrong.
        """
        Refused.raise_all([*self.here, *self.problems])
        rest = [] if quiet else [*(f"warning: {w}" for w in self.warnings), *self.notes]
        for line in [self.done] if self.done else rest:
            say(who, line)

    def dry_lines(self) -> list[str]:
        """What a dry run tells at its end, for `Refused.raise_all` to add what is wrong with the run."""
        lines = [f"on this machine a start would be refused: {e}" for e in self.here]
        lines = [f"warning: {line}" for line in [*lines, *self.warnings]]
        return [f"# {line}" for line in [*lines, *self.notes, *([self.done] if self.done else [])]]


def before_launch(config: Config, plans: Sequence[Island], *, resize: bool, order: Order | None) -> Checks:
    """Look at a run whose islands all start on this machine.

    Args:
        config: of the run.
        plans: all its islands.
        resize: the number of islands was given, and may be another one than a run that is resumed has.
        order: to change fields of the schedule of a run that is resumed.
    """
    found, plan = Checks(), plans[0]
    trains = plan.script is None
    _look_at_machine(found, config, plan, plan.islands * plan.ranks)
    starts: list[Start] = []
    with found.noting():
        if plan.resume and trains and resize:
            found.change = plan_change(plan.run_dir, config)
        check_run(plan.run_dir, config, resume=plan.resume, resized=found.change is not None)
        if plan.resume and trains:
            eras = None if found.change is None else found.change.eras
            starts = [starting_point(plan.run_dir, p.island, config, eras) for p in plans]
            found.notes += _anew(plan, starts)
            dropped = "; nothing is overridden" if order is not None else ""
            found.done = _nothing_to_do(stands_at(starts, config), plan.steps, dropped)
            if order is not None and not found.done:
                found.order = fit_override(order, starts, config)
    if trains:
        _look_at_data(found, config, plan, starts)
    return found


def before_island(config: Config, plan: Island) -> Checks:
    """Look at one island, which starts on this machine or, with a hostfile, from it."""
    found = Checks()
    trains = plan.script is None
    _look_at_machine(found, config, plan, plan.ranks)
    starts: list[Start] = []
    with found.noting():
        check_island(plan.run_dir, config, island=plan.island, resume=plan.resume)
        if plan.resume and trains:
            starts = [starting_point(plan.run_dir, plan.island, config)]
            found.notes += _anew(plan, starts)
            own = starts[0].position(config)
            if plan.steps is not None and own >= plan.steps and _all_at(plan.steps, plan, config):
                found.done = _nothing_to_do(own, plan.steps)
    if trains:
        _look_at_data(found, config, plan, starts)
    return found


def _all_at(steps: int, plan: Island, config: Config) -> bool:
    """Whether no island has still to come there, as far as their folders are here.

    One that lies behind needs the others in its first meeting.
    """
    try:
        starts = [starting_point(plan.run_dir, i, config) for i in range(plan.islands)]
    except MegatronWSDError:
        return False  # of an island on another cluster
    return stands_at(starts, config) >= steps


def _nothing_to_do(stands: int, steps: int | None, dropped: str = "") -> str:
    if steps is None or stands < steps:
        return ""
    return f"nothing to do: the run stands at step {stands}, and --steps asks for {steps} in all{dropped}"


def _anew(plan: Island, starts: Sequence[Start]) -> list[str]:
    """Who is resumed and has nothing to go on from."""
    without = [start.folder is None for start in starts]
    if len(starts) > 1 and all(without):
        return [f"--resume: no checkpoint yet, begins anew in {plan.run_dir}"]
    if len(starts) == 1 and all(without):
        where = RunDir(plan.run_dir).island(plan.island)
        return [f"--resume: no checkpoint yet, begins anew in {where}; others that are further will heal it"]
    return [
        f"--resume: island {i} has no checkpoint yet: it begins anew, and the others heal it"
        for i, missing in enumerate(without)
        if missing
    ]


# ---- this machine ----


def _look_at_machine(found: Checks, config: Config, plan: Island, ranks: int) -> None:
    """Devices, cores and networks, for so many ranks here."""
    with found.noting(here=True):
        plan.check_machine()
    if plan.script is None:
        with found.noting(here=True):
            check_packages(config)
    with found.noting():
        plan.check_reachable()
    with found.noting(here=True):
        address = address_for(plan.lighthouse, plan.interface)
        host, _ = lighthouse_host_port(plan.lighthouse)
        if plan.islands > 1 and is_loopback(address) and not is_loopback(host) and not found.problems:
            found.warnings.append(
                f"other islands reach this one at {address} from this machine alone: name with --interface "
                "the network towards them"
            )
    inside = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if inside.isalnum() and inside not in psutil.net_if_addrs():  # else it may be a pattern
        found.warnings.append(f"NCCL_SOCKET_IFNAME is {inside}, which this machine has not")
    if plan.hostfile is None and not visible_cuda_devices() and ranks > cores():
        found.warnings.append(
            f"{ranks} ranks share the {cores()} cores of this machine, which has no GPU: a step takes about "
            f"{ranks / cores():.3g} times as long as with a core each"
        )


# ---- data ----


def _look_at_data(found: Checks, config: Config, plan: Island, starts: Sequence[Start]) -> None:
    files = look_at_files(config)
    found.problems += files.problems
    found.notes += told_skipped(files.amounts)
    if config.model is None:
        return
    schedule, orders = config.schedule, []
    with found.noting():  # a checkpoint that cannot be read
        if starts:
            schedule = max(starts, key=lambda start: start.position(config)).plan(config).schedule
            run = RunDir(plan.run_dir)
            orders = ControlFolder(run.path).accepted()
            parent = Parent.of(run) if run.run_json.is_file() else None
            if parent is not None:
                orders = [{**parent.order.model_dump(), "step": parent.position}, *orders]
        passes = passages(config, files.amounts, schedule=schedule, orders=orders, steps=plan.steps)
        found.warnings += [p.warning for p in passes if p.warning]
        if passes:
            head = "no end" if passes[0].end is None else f"data to step {passes[0].end:,}"
            found.notes.append(f"{head}: {', '.join(f'{p.corpus} {p}' for p in passes)}")


def told_skipped(amounts: Mapping[str, Amount]) -> list[str]:
    """Which files of the folders of text are not read."""
    lines = {name: a.source.told_skipped() for name, a in amounts.items() if a.source is not None}
    return [f"corpus {name}: {line}" for name, line in lines.items() if line]
