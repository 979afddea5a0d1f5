"""``megatron-wsd launch``: a lighthouse and all islands of a run on this machine."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_wsd.cli.checks import before_launch
from megatron_wsd.cli.command import Island
from megatron_wsd.cli.dry_run import end_dry_run, preamble
from megatron_wsd.cli.island import dry_lines
from megatron_wsd.cli.lighthouse import Lighthouse, lighthouse_command
from megatron_wsd.cli.logs import excerpt, failed, failure, starts
from megatron_wsd.cli.machine import island_devices, visible_cuda_devices
from megatron_wsd.cli.process import Guarded, StopRequest, describe_exit, exit_status, free_port, say
from megatron_wsd.config import BLOCK, Config, load_config
from megatron_wsd.config.read import read_json
from megatron_wsd.control import ControlFolder, override_order
from megatron_wsd.diloco.faults import Fault
from megatron_wsd.errors import ConfigError
from megatron_wsd.preflight import check_trainer
from megatron_wsd.rundir import RunDir, held, holder, is_held, open_run

_GRACE_S = 30.0  # for islands that end because another failed; the user's Ctrl-C has no such limit
_DRY_ADDRESS = "127.0.0.1:29510"


def launch(
    config: Annotated[Path, typer.Option(help="The json config.")],
    run_dir: Annotated[Path, typer.Option(help="Run folder: new, or with --resume that of the run.")],
    islands: Annotated[
        int | None,
        typer.Option(help="Number of islands, with --resume also a new one; default: the config's, else 1."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of an island; default: the config's, else 1.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many inner steps in all.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    script: Annotated[Path | None, typer.Option(help="Training script instead of launch/train.py.")] = None,
    override: Annotated[
        list[str] | None, typer.Option(help="With --resume: schedule.FIELD=VALUE; may be repeated.")
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(help="A fault, as 'island=1 at=exchange round=3 how=kill'; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and stop.")] = False,
) -> None:
    """Run all islands on this machine: a torchft lighthouse, and one deepspeed launch for each island."""
    loaded = load_config(config, islands=islands, ranks=ranks, resize=resume, named="--config")
    count, each = loaded.islands.count, loaded.islands.ranks
    assert count is not None and each is not None  # load_config has filled them in
    faults = tuple(map(Fault.parse, inject or ()))
    plans = [
        Island(
            island=i,
            islands=count,
            ranks=each,
            lighthouse=f"http://{_DRY_ADDRESS}",
            run_dir=run_dir.absolute(),
            steps=steps,
            resume=resume,
            script=script and script.absolute(),
            inject=faults,
        )
        for i in range(count)
    ]
    given = read_json(config, "--config")
    written = given.get(BLOCK, {}).get("islands", {})
    asked = {"--islands": islands or written.get("count"), "--ranks": ranks or written.get("ranks")}
    essentials = _essentials(loaded, plans[0], [flag for flag, value in asked.items() if value is None])
    if BLOCK not in given:
        essentials += f'; {config.name} has no block "{BLOCK}": all its defaults are taken'
    if script is None:
        check_trainer(loaded)
    order = override_order(override, secrets.token_hex(8)) if override else None
    if order is not None and not resume:
        raise ConfigError("--override", "--resume with it", "a new run", "Write the value into the config.")
    found = before_launch(loaded, plans, resize=islands is not None, order=order)
    if dry_run:
        change = [] if found.change is None else [f"# {found.change.told(loaded)}"]
        typer.echo("\n".join([f"# {essentials}", *change, *preamble(loaded, plans, local=True)]))
        typer.echo(f"# lighthouse\n{shlex.join(lighthouse_command(loaded.islands, _DRY_ADDRESS))}")
        for plan in plans:
            typer.echo("\n".join([f"# island {plan.island}", *dry_lines(plan, free_port())]))
        end_dry_run(found)
        return
    found.insist("launch")
    if found.done:
        return
    if script is not None and compiles_adam(loaded):
        say("launch", "on a CPU DeepSpeed compiles its Adam first, for minutes and without a word;")
        say("launch", '"torch_adam": true in optimizer.params takes torch\'s, which needs no compiler')
    stop, order, eras = StopRequest(), found.order, None
    if found.change is not None:
        eras = found.change.eras
        say("launch", found.change.told(loaded))
    run = open_run(run_dir, loaded, resume=resume, eras=eras)
    with held(run.path / "launch.lock", "launch"):
        if order is not None:
            ControlFolder(run.path).propose(order)
        raise typer.Exit(_run(loaded, run, plans, stop, essentials))


def compiles_adam(config: Config) -> bool:
    """Whether DeepSpeed makes an Adam of its own on a machine without a GPU."""
    optimizer = config.deepspeed.get("optimizer", {})
    adam = str(optimizer.get("type", "")).lower() in ("adam", "adamw")
    return adam and not optimizer.get("params", {}).get("torch_adam") and not visible_cuda_devices()


def _essentials(config: Config, plan: Island, silent: list[str]) -> str:
    """How much is started and for how long; ``silent`` are the flags for which 1 was taken."""
    text = f"{_count(plan.islands, 'island')} x {_count(plan.ranks, 'rank')}"
    if silent:
        text += f" (1 where {' and '.join(silent)} {'are' if len(silent) > 1 else 'is'} not given)"
    if plan.resume or plan.script is not None:
        return text  # a checkpoint or the script knows where the end is; the ranks tell
    ends = [plan.steps, config.schedule.end if config.schedule is not None else None]
    end = min((n for n in ends if n is not None), default=None)
    return f"{text}, " + ("no end: until decay-now or Ctrl-C" if end is None else f"to step {end}")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _run(config: Config, run: RunDir, plans: list[Island], stop: StopRequest, essentials: str) -> int:
    from megatron_wsd import report

    watch = _Watch(config, run, stop)
    lighthouse = Lighthouse(config.islands, run.lighthouse_log)
    address = lighthouse.address
    try:
        run.set_lighthouse(address)
        say("launch", f"run folder {run.path}")
        say("launch", f"{essentials}, lighthouse {address}")
        watch.begin([replace(plan, lighthouse=address) for plan in plans])
        watch.until_the_end(lighthouse)
    finally:
        watch.kill()
        lighthouse.kill()
    if report.has_steps(run.path):
        report.write(run.path)
    for line in watch.failures():
        typer.echo(line, err=True)
    if watch.failed or watch.lighthouse_lost:
        return 1
    if plans[0].script is None and report.has_steps(run.path):
        typer.echo("\n".join(["next, for example:", *next_commands(config, run)]))
    return 128 + stop.signal if watch.cut_short else 0


def next_commands(config: Config, run: RunDir) -> list[str]:
    """What to do with a run that has ended well, as lines for a shell."""
    from megatron_wsd.lineage import newest_stable
    from megatron_wsd.reporting.status import RunStatus

    lines: list[list[object]] = [["report", run.path, "--out", run.path / "report.html"]]
    if RunStatus(run.path).look()["state"] != "finished":
        lines.append(["launch", "--config", run.config_json, "--run-dir", run.path, "--resume"])
    step = newest_stable(run, config)
    if step is not None:
        length = max(1, step // 5)  # 10 to 20% of a run are a good decay
        lines.append(["branch", f"{run.path}@{step}", "--name", "decayed", "--decay-steps", length])
    program = [sys.executable, "-m", "megatron_wsd"]
    return ["  " + shlex.join([*program, *map(str, line)]) for line in lines]


class _Watch:
    """The islands of one launch: starts them, and decides what the end of one means for the others."""

    def __init__(self, config: Config, run: RunDir, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._min_islands = config.islands.min_islands or 1
        self._plans: list[Island] = []
        self._children: dict[int, Guarded] = {}
        self._settled: set[int] = set()  # islands whose end has been dealt with
        self._old_bytes: dict[int, int] = {}  # of metrics.jsonl before this launch
        self._starts: dict[int, int] = {}  # of each island, when this launch's own ended
        self._deadline: float | None = None
        self._insisted = False  # whoever was asked to end is to end at once
        self._left: set[int] = set()  # islands started by hand that cannot be reached from here
        self.failed: dict[int, int] = {}  # exit status of each island that failed by itself
        self.cut_short = False  # the user's stop came before an island could save
        self.lighthouse_lost = False

    def begin(self, plans: list[Island]) -> None:
        """Start all islands, each with devices and a port of its own."""
        self._plans = plans
        devices = visible_cuda_devices()
        ports: set[int] = set()
        for plan in plans:
            metrics = self._run.metrics(plan.island)
            self._old_bytes[plan.island] = metrics.stat().st_size if metrics.exists() else 0
            ports.add(port := free_port(ports))
            env = dict(os.environ)
            if devices:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(island_devices(plan.island, plan.ranks, devices))
            command = [*plan.own_command(), "--master-port", str(port)]
            self._children[plan.island] = Guarded(command, env)

    def until_the_end(self, lighthouse: Lighthouse) -> None:
        """Wait until no island of this run is left, also none that was started again by hand."""
        asked = waiting = False
        while True:
            running = self._running()
            by_hand = self._locked() - running - self._left
            for island in self._children.keys() - running - self._settled:
                self._note_end(island)
            if not running and (not by_hand or self._insisted):
                return
            if not (running or waiting or self._stop.count):
                waiting = True
                say("launch", f"waiting for {_names(by_hand)}, started by hand")
            if self._stop.count and not asked:
                asked = True
                what = "the islands finish their step and save"
                if self._plans[0].script is not None:
                    what = "the script is asked to end"
                say("launch", f"stopping: {what} (again: end at once)")
                self._end(running | by_hand)
            late = self._deadline is not None and time.monotonic() > self._deadline
            if (self._stop.count > 1 or late) and not self._insisted:
                self._insisted = True
                self._end(by_hand)  # asked twice, an island ends at once
            if self._insisted:
                self.kill()
            if not (lighthouse.alive() or self.lighthouse_lost or self._stop.count):
                say("launch", "the lighthouse has ended: starting it again")
                if not lighthouse.restart():
                    self.lighthouse_lost = True
                    say("launch", "the lighthouse does not stay: stopping all islands")
                    self._end_others(running | by_hand)
            time.sleep(0.1)

    def kill(self) -> None:
        """End everything at once."""
        for child in self._children.values():
            child.kill()

    def failures(self) -> list[str]:
        """What to tell about islands that failed: number, exit code, last lines, where to read on."""
        lines: list[str] = []
        told: dict[tuple[str, ...], int] = {}
        for island, status in self.failed.items():
            log = self._run.log(island)
            why = tuple(excerpt(log))
            if starts(log) > self._starts.get(island, 0):
                lines += [failed(island, status), f"  It has been started again since: {log}"]
            elif why in told:
                lines += [failed(island, status), f"  Its last lines are those of island {told[why]}."]
            else:
                lines += failure(island, status, log)
            told.setdefault(why, island)
        if self.lighthouse_lost:
            lines.append(
                f"megatron-wsd: error: the lighthouse ended; {self._run.lighthouse_log} tells why. "
                "Go on with --resume."
            )
        return lines

    def _running(self) -> set[int]:
        return {i for i, child in self._children.items() if child.poll() is None}

    def _locked(self) -> set[int]:
        """Islands of this run that some process is at, ours or one started by hand."""
        return {plan.island for plan in self._plans if is_held(self._run.island(plan.island) / "lock")}

    def _note_end(self, island: int) -> None:
        status = exit_status(self._children[island].poll() or 0)
        self._children[island].kill()  # what a killed island may have left in its group
        self._settled.add(island)
        self._starts[island] = starts(self._run.log(island))
        if status > 128 and (self._stop.count or self._deadline is not None):
            self.cut_short = True  # it was told to end, and had nothing to save or no time to
            return
        if status == 0:
            return
        self.failed[island] = status
        say("launch", f"island {island} failed ({describe_exit(status)})")
        alive = self._running() | self._locked()
        if not alive or self._stop.count or self._deadline is not None:
            return
        if len(alive) >= self._min_islands and self._has_begun():
            again = shlex.join(replace(self._plans[island], resume=True, inject=()).own_command())
            say("launch", f"going on with {_names(alive)}; to bring island {island} back:")
            say("launch", f"  {again}")
        else:
            why = f"fewer than {self._min_islands} left" if self._has_begun() else "no round was reached yet"
            say("launch", f"stopping {_names(alive)}: {why}")
            self._end_others(alive)

    def _end_others(self, islands: set[int]) -> None:
        self._deadline = time.monotonic() + _GRACE_S
        self._end(islands)

    def _end(self, islands: set[int]) -> None:
        """Ask islands to end, also those that were started by hand, as far as they are on this machine."""
        for island in sorted(islands):
            child, lock = self._children[island], self._run.island(island) / "lock"
            if child.poll() is None:
                child.terminate()
                continue
            pid = holder(lock)
            try:
                if pid is not None:
                    os.kill(pid, signal.SIGTERM)
                    continue
                where = "on another machine"
            except ProcessLookupError:
                continue  # it has just ended
            except PermissionError:
                where = f"process {pid} of another user"
            self._left.add(island)
            say("launch", f"island {island} was started by hand and is left running ({where}); to stop it:")
            say("launch", "  Ctrl-C there, or kill -TERM of its `megatron-wsd island` or island.sh")

    def _has_begun(self) -> bool:
        """Whether an outer round was tried since this launch started."""
        for island, old in self._old_bytes.items():
            metrics = self._run.metrics(island)
            if metrics.exists():
                with metrics.open("rb") as file:
                    file.seek(old)
                    if any(b'"kind": "round"' in line or b'"kind":"round"' in line for line in file):
                        return True
        return False


def _names(islands: set[int]) -> str:
    return ("island " if len(islands) == 1 else "islands ") + ", ".join(map(str, sorted(islands)))
