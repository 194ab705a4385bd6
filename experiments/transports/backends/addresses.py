"""Exchanges the addresses at which ranks of a group can reach each other."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Final

from torch._C._distributed_c10d import Store

_SIOCGIFADDR: Final = 0x8915
_VARIABLE: Final = "GLOO_SOCKET_IFNAME"


def interface() -> str | None:
    """The network interface that the job chose for Gloo; None by default."""
    return os.environ.get(_VARIABLE, "").split(",")[0] or None


def own_address() -> str:
    """The IPv4 address at which other ranks reach this process.

    That of the chosen `interface`; else that of the host's route to ``MASTER_ADDR``.
    """
    name = interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name is not None:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            return socket.inet_ntoa(answer[20:24])
        # Connecting a datagram socket sends nothing; the kernel chooses the source address.
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        return str(probe.getsockname()[0])


def exchange_addresses(
    store: Store, purpose: str, rank: int, size: int, own: str
) -> dict[int, str]:
    """Exchanges addresses with the other ranks of a group.

    Returns:
        Rank -> address, including this rank.
    """
    store.set(f"{purpose}/{rank}", own)
    return {peer: store.get(f"{purpose}/{peer}").decode() for peer in range(size)}
