"""One TCP connection between each worker and each server, which breaks when either dies.

Message libraries notice a dead peer late, or not at all. The kernel closes the connections of a
process when it ends, whatever ended it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from ddltrace.experiments.architectures.parameter_server import SERVER_DIED
from ddltrace.experiments.transports.backends.addresses import own_address

_HELLO: Final = struct.Struct("<i")
_BYE: Final = b"b"


class ServerEnd:
    """A server's ends of the lifelines of all workers."""

    def __init__(self, address: str) -> None:
        """Begins to listen.

        Args:
            address: The IPv4 address at which workers reach this process.
        """
        self._listener = socket.create_server((address, 0))
        self._lines: dict[int, socket.socket] = {}
        self.port: int = self._listener.getsockname()[1]

    def accept(self, workers: int, timeout_s: float) -> None:
        """Waits until all workers are connected.

        Args:
            workers: Number of workers.
            timeout_s: Longest time to wait for a worker, in seconds.

        Raises:
            OSError: A worker did not come, or went away.
        """
        self._listener.settimeout(timeout_s)
        while len(self._lines) < workers:
            line, _ = self._listener.accept()
            line.settimeout(timeout_s)
            (worker,) = _HELLO.unpack(_read(line, _HELLO.size))
            line.settimeout(None)
            self._lines[worker] = line
        self._listener.close()

    def watch(self, lost: Callable[[int, bool], None]) -> None:
        """Watches on a thread of its own.

        Args:
            lost: Called with a worker whose line has ended, and whether it said goodbye.
        """
        _start(self._watch, lost)

    def close(self) -> None:
        """Says goodbye to the workers."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_BYE)
            line.close()

    def _watch(self, lost: Callable[[int, bool], None]) -> None:
        _watch(self._lines, lost)


class WorkerEnd:
    """A worker's ends of its lifelines to all servers."""

    def __init__(self, worker: int, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connects.

        Args:
            worker: This worker's number.
            addresses: Address and port of each server.

        Raises:
            OSError: A server cannot be reached.
        """
        self._lines: dict[int, socket.socket] = {}
        for server, address in addresses.items():
            line = socket.create_connection(address, timeout=30.0)
            line.settimeout(None)
            line.sendall(_HELLO.pack(worker))
            self._lines[server] = line

    def watch(self, died: Callable[[int], None]) -> None:
        """Watches on a thread of its own.

        Args:
            died: Called with a server that has ended without a goodbye.
        """

        def lost(server: int, said_goodbye: bool) -> None:
            if not said_goodbye:
                died(server)

        _start(_watch, self._lines, lost)

    def close(self) -> None:
        """Says goodbye to the servers."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_BYE)
                line.shutdown(socket.SHUT_WR)


def say_server_died(server: int, servers: int) -> None:
    """Prints one line that says why the training ends.

    Args:
        server: Number of the server that has died.
        servers: Number of servers.
    """
    print(
        f"ddltrace: server {server} of {servers} {SERVER_DIED}; "
        "the training ends, because its parameters are lost",
        file=sys.stderr,
        flush=True,
    )


def connect(store: Store, worker: int, servers: int, timeout_s: float) -> WorkerEnd:
    """Connects a worker with all servers.

    Args:
        store: Store that holds the addresses of the servers.
        worker: The worker's number.
        servers: Number of servers.
        timeout_s: Longest time to wait for an address.

    Raises:
        RuntimeError: A server did not say its address.
        OSError: A server cannot be reached.
    """
    addresses = {}
    for server in range(servers):
        key = f"line/{server}"
        store.wait([key], timedelta(seconds=timeout_s))
        host, _, port = store.get(key).decode().rpartition(":")
        addresses[server] = (host, int(port))
    return WorkerEnd(worker, addresses)


def listen(store: Store, server: int, workers: int, timeout_s: float) -> ServerEnd:
    """Waits until all workers are connected with a server.

    Args:
        store: Store in which the server sets its address.
        server: The server's number.
        workers: Number of workers.
        timeout_s: Longest time to wait for a worker, in seconds.

    Raises:
        OSError: A worker did not come, or went away.
    """
    address = own_address()
    lines = ServerEnd(address)
    store.set(f"line/{server}", f"{address}:{lines.port}")
    lines.accept(workers, timeout_s)
    return lines


def _watch(lines: Mapping[int, socket.socket], lost: Callable[[int, bool], None]) -> None:
    with selectors.DefaultSelector() as selector:
        for number, line in lines.items():
            selector.register(line, selectors.EVENT_READ, number)
        goodbyes = set()
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    data = lines[key.data].recv(1)
                except OSError:
                    data = b""
                if data:
                    goodbyes.add(key.data)
                    continue
                selector.unregister(key.fileobj)
                lost(key.data, key.data in goodbyes)


def _read(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise ConnectionError("a worker has gone before it was connected")
        data += piece
    return data


def _start(run: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, name="ddltrace-lifelines", daemon=True).start()
