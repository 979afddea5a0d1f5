"""Addresses under which machines reach each other, found out without importing torch."""

from __future__ import annotations

import functools
import re
import socket
from urllib.parse import urlsplit

import psutil

from megatron_wsd.errors import ConfigError, IslandError


def address_for(lighthouse: str, interface: str | None) -> str:
    """The IPv4 address under which other islands reach this machine.

    It is that of ``interface`` if one is named, else the one from which packets to the lighthouse leave:
    127.0.0.1 for a lighthouse on this machine.

    Raises:
        ConfigError: there is no such interface, or it has no IPv4 address.
        IslandError: the host of the lighthouse is unknown.
    """
    if interface is not None:
        known = psutil.net_if_addrs()
        for address in known.get(interface, []):
            if address.family == socket.AF_INET:
                return address.address
        raise ConfigError(
            "--interface", f"an interface with an IPv4 address, of {', '.join(sorted(known))}", interface
        )
    host, port = lighthouse_host_port(lighthouse)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: it only picks the route
            return str(probe.getsockname()[0])
    except OSError as e:
        raise IslandError(
            "--lighthouse", "a host that can be reached", f"{host}: {e}", "Check it, or give --interface."
        ) from None


def is_loopback(host: str) -> bool:
    """Whether a host is whoever asks: a name or IPv4 address of the loopback interface."""
    return host == "localhost" or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


@functools.cache
def is_here(host: str) -> bool:
    """Whether a host is this machine, by its name or by one of its addresses; a name is looked up once."""
    if is_loopback(host) or host == socket.gethostname():
        return True
    own = {address.address for each in psutil.net_if_addrs().values() for address in each}
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(address in own or is_loopback(address) for address in found)


def lighthouse_host_port(address: str) -> tuple[str, int]:
    """Host and port of ``http://HOST:PORT``.

    Raises:
        ConfigError: it is not of that form.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or not address.startswith("http://"):
        raise ConfigError("--lighthouse", "an address like http://HOST:PORT", address)
    return host, port
