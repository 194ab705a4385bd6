"""The address at which the processes of a job reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import UsageError

LOOPBACK: Final = "127.0.0.1"

_SIOCGIFADDR: Final = 0x8915
_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_ANY_PORT: Final = 9


def interface() -> str | None:
    """The network interface that the job chose for Gloo; None by default."""
    return os.environ.get(_VARIABLE, "").split(",")[0] or None


def host_identity() -> str:
    """The same for processes that reach each other over loopback, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    with contextlib.suppress(OSError):
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return boot


def own_address() -> str:
    """The IPv4 address at which processes on other hosts reach this one.

    That of the chosen `interface`; else that of the host's route to ``MASTER_ADDR``, or to its
    own name without one.

    Raises:
        OSError: The interface has none, or ``MASTER_ADDR`` has none.
    """
    name = interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name is not None:
            address = _ipv4_of(probe, name)
            if address is None:
                raise OSError(f"the interface {name} of {_VARIABLE} has no IPv4 address")
            return address
        # Connecting a datagram socket sends nothing; the kernel chooses the source address.
        probe.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address; None if there is none."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return next((name for name in names if _ipv4_of(probe, name) == address), None)


def address_of(host: str) -> str:
    """The numeric address to which a host's name resolves first.

    Raises:
        OSError: It does not resolve.
    """
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def parse_address(text: str) -> tuple[str, int]:
    """Reads ``:PORT`` or ``HOST:PORT``; the host is 127.0.0.1 by default.

    Raises:
        UsageError: It is none.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address like :9464 or 10.0.0.5:9464")
    return host.strip("[]") or LOOPBACK, int(port)


def _ipv4_of(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
