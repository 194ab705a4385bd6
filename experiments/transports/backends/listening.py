"""The sockets on which message libraries listen, which have no function that ends it.

Once all ranks are connected, nobody else is to come.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final

_SO_ATTACH_FILTER: Final = 26
_DROP: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction (BPF_RET | BPF_K): of each packet, keep 0 bytes."""


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    return {port for _, port in _listening()}


def admit_nobody(ports: Collection[int]) -> None:
    """Lets the kernel drop what arrives at listening sockets; established connections stay.

    The sockets stay open and in the library's poll sets, so the library notices nothing.

    Args:
        ports: Of this process; others are left alone.
    """
    instruction = ctypes.create_string_buffer(_DROP)
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    for listener, port in _listening():
        if port in ports:
            # A sandbox may forbid it: then strangers meet the library's own checks.
            with suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _listening() -> Iterator[tuple[socket.socket, int]]:
    """A copy of each listening TCP socket of this process, closed after its turn, and its port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and copy.family in {socket.AF_INET, socket.AF_INET6}:
                    yield copy, copy.getsockname()[1]
        except OSError:
            continue  # it was closed meanwhile
