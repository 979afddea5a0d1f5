"""A thin link on one machine: a network namespace of its own, whose loopback interface has a rate."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# Packets of loopback are as long as 64 KiB; those of a link are not.
_SCRIPT = """
ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate {rate:g}mbit burst 64kb latency 400ms \
    && echo made && exec cat
"""


class NoLinkError(RuntimeError):
    """This machine does not let us make one."""


@contextmanager
def thin_link(mbit_per_s: float) -> Iterator[list[str]]:
    """A network in which everything that is sent shares one link; nothing else on this machine sees it.

    Needs no root where user namespaces are allowed.

    Args:
        mbit_per_s: rate of the link, of both directions together.

    Returns:
        What to put before a command that shall run in it.

    Raises:
        NoLinkError: unshare, nsenter, ip or tc are missing or not permitted.
    """
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoLinkError(f"without {', '.join(missing)}")
    holder = subprocess.Popen(
        ["unshare", "--map-root-user", "--net", "sh", "-c", _SCRIPT.format(rate=mbit_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stderr is not None
        if not holder.stdout.readline():
            raise NoLinkError(holder.stderr.read().strip())
        yield ["nsenter", "--target", str(holder.pid), "--user", "--net", "--preserve-credentials"]
    finally:
        holder.kill()
        holder.wait()
