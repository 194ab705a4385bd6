"""Counts the bytes that this process sends on the network.

The kernel keeps the counts per TCP socket (``struct tcp_info``, linux/tcp.h): payload without
headers, sent again where it was lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from typing import Final

_BYTES_SENT_OFFSET: Final = 200  # of tcpi_bytes_sent, Linux 4.19 and later
_SIZE: Final = _BYTES_SENT_OFFSET + 8


def tcp_bytes_sent() -> int | None:
    """Bytes sent so far over all open TCP sockets of this process.

    Returns:
        The sum; None where the kernel does not report it.
    """
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        # Descriptors may be closed concurrently, and most are not TCP sockets.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            duplicate = os.dup(int(entry))
            with socket.socket(fileno=duplicate) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            if len(info) < _SIZE:
                return None
            total += struct.unpack_from("=Q", info, _BYTES_SENT_OFFSET)[0]
    return total
