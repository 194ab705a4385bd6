"""One end of a TCP connection that measures a link. Run as a script; imports nothing of ddltrace.

Use::

    flow.py receive ADDRESS SECONDS WARMUP   prints its port, then the bytes per second that arrived
    flow.py send ADDRESS PORT                sends until the other end closes
    flow.py reply ADDRESS                    prints its port, then returns every byte
    flow.py ping ADDRESS PORT COUNT          prints the shortest round trip in seconds

ADDRESS of a receiver is its own, in a network namespace that only the measurement uses.
"""

from __future__ import annotations

import socket
import sys
import time

_TIMEOUT_S = 30.0


def receive(address: str, seconds: float, warmup: float) -> None:
    """Counts received bytes."""
    connection = _accept(address)
    buffer = bytearray(1 << 20)
    start = time.monotonic()
    while time.monotonic() - start < warmup:
        connection.recv_into(buffer)
    begin, arrived, now = time.monotonic(), 0, 0.0
    while now < seconds:
        arrived += connection.recv_into(buffer)
        now = time.monotonic() - begin
    print(arrived / now, flush=True)


def send(address: str, port: int) -> None:
    """Sends zeros."""
    data = bytes(1 << 20)
    with socket.create_connection((address, port), _TIMEOUT_S) as connection:
        try:
            while True:
                connection.sendall(data)
        except OSError:
            return


def reply(address: str) -> None:
    """Returns every byte."""
    connection = _accept(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(1):
        connection.sendall(data)


def ping(address: str, port: int, count: int) -> None:
    """Times round trips of one byte."""
    with socket.create_connection((address, port), _TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shortest = float("inf")
        for _ in range(count):
            start = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            shortest = min(shortest, time.monotonic() - start)
    print(shortest, flush=True)


def _accept(address: str) -> socket.socket:
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    connection.settimeout(_TIMEOUT_S)
    return connection


def main() -> None:
    """Runs the operation of the arguments."""
    what, *rest = sys.argv[1:]
    if what == "receive":
        receive(rest[0], float(rest[1]), float(rest[2]))
    elif what == "send":
        send(rest[0], int(rest[1]))
    elif what == "reply":
        reply(rest[0])
    else:
        ping(rest[0], int(rest[1]), int(rest[2]))


if __name__ == "__main__":
    main()
