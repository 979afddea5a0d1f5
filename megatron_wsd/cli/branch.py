"""``megatron-wsd branch`` and ``lineage``: decays of their own off a stable checkpoint, and their tree."""

from __future__ import annotations

import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_wsd.checkpoint.store import CheckpointStore
from megatron_wsd.cli.command import island_program
from megatron_wsd.cli.decay_now import Then
from megatron_wsd.config import load_config
from megatron_wsd.control import Order, as_typed, told
from megatron_wsd.errors import ConfigError
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Schedule

if TYPE_CHECKING:
    from megatron_wsd.checkpoint.branch_point import BranchPoint


def branch(
    parent: Annotated[
        str, typer.Argument(metavar="PARENT[@STEP]", help="Run folder, and where in the schedule.")
    ],
    name: Annotated[str, typer.Option(help="Name of the branch.")],
    decay_steps: Annotated[int, typer.Option(help="Length of its decay in inner steps of the run.")],
    shape: Annotated[str, typer.Option(help="Shape of its decay.")] = "one_minus_sqrt",
    min_lr_ratio: Annotated[float, typer.Option(help="Rate at its end, of the peak.")] = 0.0,
    data_mix: Annotated[str | None, typer.Option(help="Mix of data.mixes.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Its folder; default: beside the parent's.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="The parent's json with more corpora and mixes.")
    ] = None,
    then: Annotated[Then, typer.Option(help="After it: stop, or go back to the stable phase.")] = Then.stop,
    force: Annotated[bool, typer.Option("--force", help="Also off a checkpoint that has decayed.")] = False,
) -> None:
    """Make a run that begins from a stable checkpoint of another, with a decay and data of its own."""
    from megatron_wsd.lineage import make_branch, same_but_for_data

    path, _, at = parent.rpartition("@") if "@" in parent else (parent, "", "")
    if at and not at.isdigit():
        raise ConfigError("PARENT[@STEP]", "a number of inner steps after @", at)
    run = RunDir(Path(path).absolute())
    if not run.run_json.is_file():
        raise ConfigError("PARENT", "a run folder", f"{path}, which is none", "Check the path.")
    if not name or "/" in name or name.startswith("."):
        raise ConfigError("--name", "a name that can be a file's", name)
    own = same_but_for_data(run, config) if config else load_config(run.config_json)
    if data_mix is not None and data_mix not in own.data.mixes:
        raise ConfigError(
            "--data-mix",
            f"one of {sorted(own.data.mixes)}, as in data.mixes",
            data_mix,
            "Give a --config that adds the mix, and its corpora, to the parent's config.json.",
        )
    with as_typed("branch"):  # refuses a length, shape or minimum that no schedule takes
        Schedule(0).begin_decay(0, decay_steps, shape=shape, min_lr_ratio=min_lr_ratio, then=then.value)
    order = Order(
        length=decay_steps,
        shape=shape,
        min_lr_ratio=min_lr_ratio,
        data_mix=data_mix,
        then=then.value,
        nonce=secrets.token_hex(8),
    )
    child = run_dir or run.path.with_name(f"{run.path.name}-{name}")
    with as_typed("branch"):
        made, point = make_branch(run, int(at) if at else None, name, order, child, own, force=force)
    typer.echo(f"{made.path} branches off {run.path} at step {point.position}{_own_steps(point)}.")
    typer.echo("\n".join(_how_to_train(run, made, point)))


def _own_steps(point: BranchPoint) -> str:
    """Where the islands stand themselves, if each has saved at a step of its own."""
    if all(saved.step == point.position for saved in point.saved.values()):
        return ""
    lead = point.leader.outer_step
    steps = ", ".join(
        f"island {i} at its step {saved.step}"
        + (f" and to be healed from round {saved.outer_step} on" if saved.outer_step < lead else "")
        for i, saved in sorted(point.saved.items())
    )
    return f", which is what was committed in {lead} rounds ({steps})"


def _how_to_train(parent: RunDir, made: RunDir, point: BranchPoint) -> list[str]:
    """The commands that start a branch: one for this machine, or one an island as the parent was started."""
    facts = made.facts()
    common = ["--config", str(made.config_json), "--run-dir", str(made.path), "--resume"]
    launch = ["Train it:", "  " + shlex.join([sys.executable, "-m", "megatron_wsd", "launch", *common])]
    if "lighthouse" in parent.facts():  # which `launch` alone writes down
        return launch
    away = [i for i in range(facts["islands"]) if not _is_here(parent, point, i)]
    if away:
        lines = [
            f"{'Islands' if len(away) > 1 else 'Island'} {', '.join(map(str, away))} saved on another disk. "
        ]
        lines[0] += "Copy to the same places there:"
        lines += [f"  {made.path}", f"  {parent.path / 'branches' / facts['parent']['name']}.json"]
        lines += [
            "Then start each island where it was, with its lighthouse and other flags as they were, and a"
        ]
        lines += ["--config with the paths of its cluster:"]
    else:
        lines = [*launch, "Or one island at a time, with its lighthouse and other flags as they were:"]
    for island in range(facts["islands"]):
        count = ["--islands", str(facts["islands"]), "--ranks", str(facts["ranks"])]
        flags = ["--island", str(island), *count, "--lighthouse", "http://HOST:PORT", *common]
        lines.append("  " + shlex.join([*island_program(), *flags]))
    return lines


def _is_here(parent: RunDir, point: BranchPoint, island: int) -> bool:
    """Whether an island can read its checkpoint on this disk: its manifests alone may be here."""
    saved = point.saved.get(island)
    store = CheckpointStore(parent.island(island) / "checkpoints", 2)
    return saved is not None and store.manifest(saved.step) is not None


def lineage(run_dir: Annotated[Path, typer.Argument(help="Any run of the family.")]) -> None:
    """Draw the tree of a run and its branches, with tokens, losses, and phases in steps of the run."""
    from rich.console import Console
    from rich.tree import Tree

    from megatron_wsd.lineage import children, own_orders, root_of
    from megatron_wsd.report import has_steps, summarise

    def label(run: RunDir, name: str, origin: str) -> str:
        mark = " [bold]<- this run[/bold]" if run.path == run_dir.absolute() else ""
        if not run.run_json.is_file():
            return f"{name}{origin}: [red]{run.path} is gone[/red]"
        if not has_steps(run.path):
            return f"{name}{origin}: not trained yet{mark}"
        found = summarise(run.path)
        phases = ", ".join(f"{p['phase']} {p['first_step']}-{p['last_step']}" for p in found["phases"])
        losses = ", ".join(f"{corpus} {a['loss']:.3f}" for corpus, a in sorted(found["anchor"].items()))
        own = ""
        if found["asynchronous"]:
            own = f", own steps {' + '.join(str(i['last_step']) for i in found['islands'])}"
        lines = [f"{name}{origin}: step {found['position']}{own}, {found['tokens']:,} tokens{mark}", phases]
        lines += [f"loss of the anchor: {losses}"] if losses else []
        lines += [
            f"step {order['step']}: {told(order)}" for order in own_orders(run) if "refused" not in order
        ]
        return "\n".join(lines)

    def grow(tree: Tree, run: RunDir) -> None:
        for child in children(run):
            below = RunDir(child.path)
            grow(tree.add(label(below, child.name, f" @{child.position}")), below)

    run = RunDir(run_dir.absolute())
    if not run.run_json.is_file():
        raise ConfigError("RUN_DIR", "a run folder", f"{run_dir}, which is none", "Check the path.")
    root = root_of(run)
    tree = Tree(label(root, root.path.name, ""))
    grow(tree, root)
    Console().print(tree)
