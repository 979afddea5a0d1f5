"""``megatron-wsd decay-now``: have a running job begin its decay, or withdraw a decay that has not begun."""

from __future__ import annotations

import secrets
import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_wsd.config import Config, load_config
from megatron_wsd.control import ControlFolder, Order, as_typed, told
from megatron_wsd.errors import ConfigError, MegatronWSDError
from megatron_wsd.reporting.status import RunStatus
from megatron_wsd.rundir import RunDir, holder
from megatron_wsd.schedule import Schedule


class Then(str, Enum):
    """What follows a decay."""

    stop = "stop"
    stable = "stable"


def decay_now(
    run_dir: Annotated[Path, typer.Argument(help="The run folder, as any island sees it.")],
    steps: Annotated[int | None, typer.Option(help="Length of the decay in inner steps of the run.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the decay.")] = "one_minus_sqrt",
    min_lr_ratio: Annotated[float, typer.Option(help="Rate at its end, of the peak.")] = 0.0,
    data_mix: Annotated[str | None, typer.Option(help="Mix of data.mixes from its first step on.")] = None,
    at: Annotated[
        int | None, typer.Option(help="Begin at this step of the run; default: as soon as all agree.")
    ] = None,
    then: Annotated[Then, typer.Option(help="After it: stop, or go back to the stable phase.")] = Then.stop,
    cancel: Annotated[bool, typer.Option("--cancel", help="Withdraw a decay that has not begun.")] = False,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the islands to agree.")] = 0.0,
) -> None:
    """Make a running job begin its decay at a step that all its islands agree on."""
    run = RunDir(run_dir)
    if not run.run_json.is_file():
        raise ConfigError("RUN_DIR", "a run folder", f"{run_dir}, which is none", "Check the path.")
    config = load_config(run.config_json)
    folder = ControlFolder(run_dir)
    if cancel:
        if steps is not None or at is not None:
            raise ConfigError("--cancel", "no other option with it", "--steps or --at")
        if folder.withdraw():
            typer.echo(_withdrawn(run, folder))
            return
        look = RunStatus(run.path).look()
        state = _state(run, look)
        order = Order(kind="cancel", nonce=secrets.token_hex(8))
    else:
        order = _decay(config, folder, steps, shape, min_lr_ratio, data_mix, at, then)
        look = RunStatus(run.path).look()
        state = _state(run, look)
        if at is not None and at < look["position"]:
            expected = f"a step of the run from {look['position']} on"
            raise ConfigError("--at", expected, at, "Leave it out for as soon as all agree.")
    folder.propose(order)
    if state == "running":
        answer = "" if wait else " `megatron-wsd status` tells what they said, or --wait here."
        typer.echo(f"Proposed; the islands agree on it in their next outer round.{answer}")
        _await(folder, order, wait)
        return
    kept = (
        "The order is kept, and taken in the first outer round after the next start; --cancel withdraws it."
    )
    if wait:
        raise ConfigError("--wait", "a run that is running", f"one that is {state}", kept)
    typer.echo(f"No island of this run is running (status: {state}). {kept}")


def _state(run: RunDir, look: dict[str, Any]) -> str:
    """``running``, or how the run stands of which no island takes orders, as `status` calls it.

    Raises:
        ConfigError: it is over.
    """
    if holder(run.path / "launch.lock") or any(island["process"] for island in look["islands"]):
        return "running"  # or about to, and has told nothing yet
    if look["state"] == "finished":
        raise ConfigError(
            "decay-now",
            "a run that goes on",
            "one that has finished",
            "To decay otherwise, branch off a checkpoint: megatron-wsd branch.",
        )
    elsewhere = any(island["state"] == "elsewhere" for island in look["islands"])
    return "running" if elsewhere or look["state"] == "starting" else str(look["state"])


def _decay(
    config: Config,
    folder: ControlFolder,
    steps: int | None,
    shape: str,
    min_lr_ratio: float,
    data_mix: str | None,
    at: int | None,
    then: Then,
) -> Order:
    """The order, after everything that can be checked without the run."""
    if steps is None:
        raise ConfigError("--steps", "the length of the decay in inner steps", "nothing")
    with as_typed("decay"):  # refuses a length, shape or minimum that no schedule takes
        Schedule(0).begin_decay(0, steps, start=at, shape=shape, min_lr_ratio=min_lr_ratio, then=then.value)
    if data_mix is not None and data_mix not in config.data.mixes:
        raise ConfigError("--data-mix", f"one of {sorted(config.data.mixes)}, as in data.mixes", data_mix)
    entry = _in_force(folder)
    if entry is not None and entry["then"] == "stop":
        began = entry["step"] if entry["at"] is None else entry["at"]
        raise ConfigError(
            "decay-now",
            "a run whose decay has not been ordered",
            f"one that decays over {entry['length']} steps from step {began}",
            "--cancel withdraws it before it begins; to decay otherwise, branch off a checkpoint.",
        )
    return Order(
        length=steps,
        shape=shape,
        min_lr_ratio=min_lr_ratio,
        data_mix=data_mix,
        at=at,
        then=then.value,
        nonce=secrets.token_hex(8),
    )


def _in_force(folder: ControlFolder) -> dict[str, Any] | None:
    """The newest decay that the islands have agreed on and not withdrawn, as far as this disk tells."""
    for entry in reversed([e for e in folder.accepted() if "refused" not in e]):
        if entry["kind"] == "cancel":
            return None
        if entry["kind"] == "decay":
            return entry
    return None


def _withdrawn(run: RunDir, folder: ControlFolder) -> str:
    """What to say when the order that waited in this folder was removed."""
    said, look = "Withdrawn; no island had taken it yet.", RunStatus(run.path).look()
    entry = _in_force(folder)
    if entry is not None:
        begins = entry["step"] if entry["at"] is None else entry["at"]
        if look["position"] < begins:
            return f"{said} Agreed before, and not withdrawn: {told(entry)}; --cancel again withdraws that."
        if look["position"] < begins + entry["length"]:
            return f"{said} Agreed before, and under way: {told(entry)}."
    if any(island["state"] in ("elsewhere", "absent") for island in look["islands"]):
        said += " One that waits on another cluster's disk must be withdrawn there."
    return said


def _await(folder: ControlFolder, order: Order, seconds: float) -> None:
    """Wait until the order is settled, and tell how."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for entry in folder.accepted():
            if entry["number"] == order.number:
                if "refused" in entry:
                    raise MegatronWSDError(f"the run refused the order: {entry['refused']}")
                typer.echo(f"Agreed by all islands at step {entry['step']}: {_outcome(entry)}.")
                return
        time.sleep(0.2)
    if seconds:
        raise ConfigError(
            "--wait",
            f"an outer round within {seconds:g} s",
            "none",
            "The order still waits; --cancel withdraws it.",
        )


def _outcome(entry: dict[str, Any]) -> str:
    """What a committed order does, and when."""
    if entry["kind"] != "decay":
        return told(entry)
    begins = entry["step"] if entry["at"] is None else entry["at"]
    after = "and the run with it" if entry["then"] == "stop" else "the stable phase follows"
    return f"the decay begins at step {begins} and ends at step {begins + entry['length']}, {after}"
