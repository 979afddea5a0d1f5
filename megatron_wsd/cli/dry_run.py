"""What ``--dry-run`` tells before the commands: config, ranks, addresses, memory. Comments for a shell."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import typer

from megatron_wsd.addresses import address_for
from megatron_wsd.cli.checks import Checks
from megatron_wsd.cli.command import Island
from megatron_wsd.cli.machine import island_devices, read_hostfile, visible_cuda_devices
from megatron_wsd.config import Config
from megatron_wsd.errors import ConfigError, MegatronWSDError, Refused

_VPN = (
    "nothing between islands is authenticated or encrypted, neither torchft's messages nor gloo's:",
    "put the link into a VPN, and open these ports to nobody else",
)


def preamble(config: Config, plans: Sequence[Island], *, local: bool) -> list[str]:
    """Comment lines about a run, or about one island of it.

    Args:
        config: of the run.
        plans: the islands that would be started.
        local: all islands and the lighthouse are on this machine, behind its loopback interface.
    """
    lines = ["config, complete:"]
    lines += [f"  {line}" for line in json.dumps(config.resolved(), indent=2).splitlines()]
    lines += ["ranks: each meets its equal of the other islands, and no other"]
    lines += [f"  {line}" for plan in plans for line in _ranks(plan)]
    lines += ["addresses:"] + [f"  {line}" for line in _addresses(plans[0], local)]
    lines += [f"memory and traffic of a rank, estimated: {_needs(config)}"]
    lines += [f"run folder: {plans[0].run_dir}"]
    return [f"# {line}" for line in lines]


def end_dry_run(found: Checks) -> None:
    """Tell what a start would say, after what was asked for, which may be meant for another machine.

    Raises:
        MegatronWSDError: what is wrong with the run.
    """
    for line in found.dry_lines():
        typer.echo(line)
    Refused.raise_all(found.problems)


def _ranks(plan: Island) -> list[str]:
    name = f"island {plan.island} of {plan.islands}"
    if plan.hostfile is not None:
        first, lines = 0, []
        for host, slots in read_hostfile(plan.hostfile, plan.ranks).items():
            lines.append(f"{name}: ranks {_span(first, slots)} on {host}")
            first += slots
        if plan.elsewhere:
            lines.append(
                f"{name}: each machine takes the devices that it has, else its CPU; this one "
                f"({socket.gethostname()}) is not asked for theirs"
            )
        return lines
    here = f"{name}: ranks {_span(0, plan.ranks)} on {socket.gethostname()}"
    devices = visible_cuda_devices()
    try:
        used = island_devices(plan.island, plan.ranks, devices) if devices else []
    except ConfigError:
        return [f"{here}, which has only {len(devices)} CUDA devices"]
    return [f"{here}, CUDA devices {','.join(used)}" if used else f"{here}, which has no CUDA device"]


def _span(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else str(first)


def _addresses(plan: Island, local: bool) -> list[str]:
    try:
        here = address_for(plan.lighthouse, plan.interface)
    except MegatronWSDError as e:
        here = f"unknown here ({e})"
    lines = [
        f"lighthouse {plan.lighthouse}" + (", on a free port" if local else ""),
        f"this machine towards the islands: {here}"
        + (f", interface {plan.interface}" if plan.interface else ""),
        "free ports for the island's store, torchft's managers, and gloo's pairs of equal ranks",
    ]
    return lines if local else [*lines, *_VPN]


def _needs(config: Config) -> str:
    from megatron_wsd.cli.plan import size
    from megatron_wsd.planner import Fleet, memory_parts, parameters_of, peak, vocabulary

    if config.model is None:
        return "not known, the config names no model"
    try:
        vocab = vocabulary(config)
    except ConfigError as e:
        return f"not known ({e})"
    parameters, sync = parameters_of(config.model, vocab), config.sync
    islands, ranks = config.islands.count or 1, config.islands.ranks or 1
    parts = memory_parts(config, parameters, vocab, flash=False)
    traffic = Fleet(parameters, islands, ranks, sync.bucket_bytes).traffic(sync.wire, sync.fragments)
    return (
        f"{size(peak(parts, 'device'))} on the device, {size(peak(parts, 'host'))} on the host; "
        f"{size(traffic.sent())} sent and {size(traffic.received())} received every {sync.inner_steps} steps"
    )
