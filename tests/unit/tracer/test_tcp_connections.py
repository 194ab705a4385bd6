"""Counters of TCP connections, of real sockets of this process."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from ddltrace.tracer.resources.tcp_connections import TcpConnections

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
SIZE = 5 << 20


@contextlib.contextmanager
def connection(family: socket.AddressFamily, address: str) -> Iterator[None]:
    """A connection within this process that has carried some bytes in one direction."""
    with socket.socket(family) as server:
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::" if family == socket.AF_INET6 else "127.0.0.1", 0))
        server.listen()
        with socket.create_connection((address, server.getsockname()[1])) as client:
            accepted, _ = server.accept()
            with accepted:
                sender = threading.Thread(target=client.sendall, args=(bytes(SIZE),))
                sender.start()
                left = SIZE
                while left:
                    left -= len(accepted.recv(1 << 16))
                sender.join()
                yield


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "127.0.0.1"),  # one end sees an IPv4 address, the other one IPv6
    ],
)
def test_both_ends_have_one_name_and_two_directions(
    family: socket.AddressFamily, address: str
) -> None:
    connections = TcpConnections()
    before = {reading.instance for reading in connections.sample()}
    with connection(family, address):
        found = {
            (reading.instance, reading.name): reading.value
            for reading in connections.sample()
            if reading.instance not in before
        }
    sent = {name: value for (name, counter), value in found.items() if counter == "connection_sent"}
    assert len(sent) == 2
    assert len({name[:-1] for name in sent}) == 1
    assert {name[-1] for name in sent} == {"<", ">"}
    assert SIZE <= max(sent.values()) <= SIZE + 10
    assert min(sent.values()) <= 10
    busy = {name: value for (name, counter), value in found.items() if counter == "connection_busy"}
    assert busy.keys() == sent.keys()
    assert all(value >= 0 for value in busy.values())


def test_the_sockets_of_the_job_stay_blocking() -> None:
    """Python's object of a socket sets its mode when it is made under a default timeout."""
    with connection(socket.AF_INET, "127.0.0.1"):
        before = modes()
        socket.setdefaulttimeout(5)
        try:
            list(TcpConnections().sample())
        finally:
            socket.setdefaulttimeout(None)
        assert modes() == before


def modes() -> dict[int, bool]:
    """Whether each descriptor of this process blocks."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found[number] = os.get_blocking(number)
    return found
