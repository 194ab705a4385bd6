"""Counters of the TCP connections of the rank's process, as the kernel keeps them.

While a connection has bytes to send, they leave at the rate of the slowest part of its way: a rate
over that time tells a slow link from a connection that is used little.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Final

from ddltrace.tracer.trace.counters import Reading

_FOLDER: Final = "/proc/self/fd"
_INFO: Final = struct.Struct("=8B24I4Q6I4Q")
"""The first fields of ``struct tcp_info`` (linux/tcp.h)."""

_RETRANSMITS, _SENT, _RECEIVED, _BUSY_US, _NO_ROOM_US = 31, 34, 35, 43, 44
_ESTABLISHED: Final = 1
_LEAST_BYTES: Final = 1 << 20
_MAPPED: Final = bytes(10) + b"\xff\xff"
_MOST: Final = 256
"""Connections of one process that are read, the first ones by descriptor."""


class TcpConnections:
    """Reads the counters of connections that have carried a mebibyte in one direction.

    Sockets are read by their numbers: an object of Python's for a socket could change the mode of
    the job's own. An instance is a digest of both addresses and a direction; the analysis finds
    the two ends of a connection by it, and the addresses of other peers are not recorded.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)

    def sample(self) -> Iterator[Reading]:
        """Reads every connection once; without Linux's /proc, there are none."""
        try:
            numbers = sorted(map(int, os.listdir(_FOLDER)))
        except OSError:
            return
        left = _MOST
        for number in numbers:
            try:
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
            except OSError:  # closed meanwhile
                continue
            info = self._info(number)
            if info is None or info[0] != _ESTABLISHED:
                continue
            if max(info[_SENT], info[_RECEIVED]) < _LEAST_BYTES:
                continue
            name = self._name(number)
            if name is None:
                continue
            yield Reading("connection_sent", info[_SENT], name)
            busy_us = info[_BUSY_US] - info[_NO_ROOM_US]
            yield Reading("connection_busy", busy_us / 1e6, name)
            yield Reading("connection_retransmits", info[_RETRANSMITS], name)
            left -= 1
            if not left:
                return

    def _info(self, number: int) -> tuple[int, ...] | None:
        """The fields of ``struct tcp_info``; None for other sockets and old kernels."""
        buffer, size = ctypes.create_string_buffer(_INFO.size), ctypes.c_uint32(_INFO.size)
        failed = self._libc.getsockopt(
            number, socket.IPPROTO_TCP, socket.TCP_INFO, buffer, ctypes.byref(size)
        )
        return None if failed or size.value < _INFO.size else _INFO.unpack(buffer.raw)

    def _name(self, number: int) -> str | None:
        """The instance: equal on both ends, but for the direction."""
        ends = []
        for ask in (self._libc.getsockname, self._libc.getpeername):
            buffer, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
            if ask(number, buffer, ctypes.byref(size)):
                return None
            end = _address(buffer.raw)
            if end is None:
                return None
            ends.append(end)
        own, peer = ends
        digest = hashlib.sha256(min(own, peer) + max(own, peer)).hexdigest()[:16]
        return digest + (">" if own < peer else "<")


def _address(raw: bytes) -> bytes | None:
    """Port and IP address of a ``sockaddr``; an IPv4 address in IPv6 is that IPv4 address."""
    (family,) = struct.unpack_from("=H", raw)
    if family == socket.AF_INET:
        return raw[2:8]
    if family == socket.AF_INET6:
        port, address = raw[2:4], raw[8:24]
        return port + (address[12:] if address.startswith(_MAPPED) else address)
    return None
