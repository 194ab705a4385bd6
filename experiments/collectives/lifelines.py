"""One TCP connection between each worker and each server, which breaks when either dies.

Message libraries notice a dead peer late, or not at all. The kernel closes the connections of a
process when it ends, whatever ended it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.backends.meeting import meet
from ddltrace.tracer.connections.proof import ProvenListener, connect_proven

_PURPOSE: Final = "lifeline"
_BYE: Final = b"b"


class ServerEnd:
    """A server's ends of the lifelines of all workers."""

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        """Takes the connection of each worker."""
        self._lines = lines

    def watch(self, lost: Callable[[int, bool], None]) -> None:
        """Watches on a thread of its own.

        Args:
            lost: Called with a worker whose line has ended, and whether it said goodbye.
        """
        _watch(self._lines, lost)

    def close(self) -> None:
        """Says goodbye to the workers."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_BYE)
            line.close()


class WorkerEnd:
    """A worker's ends of its lifelines to all servers."""

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        """Takes the connection to each server."""
        self._lines = lines

    def watch(self, died: Callable[[int], None]) -> None:
        """Watches on a thread of its own.

        Args:
            died: Called with a server that has ended without a goodbye.
        """

        def lost(server: int, said_goodbye: bool) -> None:
            if not said_goodbye:
                died(server)

        _watch(self._lines, lost)

    def close(self) -> None:
        """Says goodbye to the servers."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_BYE)
                line.shutdown(socket.SHUT_WR)


def connect(store: Store, worker: int, workers: int, servers: int, timeout_s: float) -> WorkerEnd:
    """Connects a worker with all servers. Collective of workers and servers.

    Args:
        store: Where workers and servers meet.
        worker: The worker's number.
        workers: Number of workers.
        servers: Number of servers.
        timeout_s: Longest time to wait for each other process, in seconds.

    Raises:
        RuntimeError: A worker or a server did not come.
        OSError: A server cannot be reached.
    """
    timeout = timedelta(seconds=timeout_s)
    meeting = meet(store, _PURPOSE, worker, workers + servers, timeout)
    lines = {}
    for server in range(servers):
        store.wait([f"line/{server}"], timeout)
        host, _, port = store.get(f"line/{server}").decode().rpartition(":")
        lines[server] = connect_proven(
            (host, int(port)),
            meeting.secret,
            f"{_PURPOSE} {server}",
            number=worker,
            timeout_s=timeout_s,
        )
    return WorkerEnd(lines)


def listen(store: Store, server: int, workers: int, servers: int, timeout_s: float) -> ServerEnd:
    """Waits until all workers are connected with a server. Collective of workers and servers.

    Args:
        store: Where workers and servers meet.
        server: The server's number.
        workers: Number of workers.
        servers: Number of servers.
        timeout_s: Longest time to wait for each other process, in seconds.

    Raises:
        RuntimeError: A worker or a server did not come.
        OSError: A worker did not connect.
    """
    timeout = timedelta(seconds=timeout_s)
    meeting = meet(store, _PURPOSE, workers + server, workers + servers, timeout)
    listener = ProvenListener(meeting.address, meeting.secret, f"{_PURPOSE} {server}")
    try:
        store.set(f"line/{server}", f"{meeting.address}:{listener.port}")
        return ServerEnd(dict(listener.accept_each(range(workers), timeout_s)))
    finally:
        listener.close()


def _watch(lines: Mapping[int, socket.socket], lost: Callable[[int, bool], None]) -> None:
    """Calls `lost` for each line that ends, on a thread of its own."""

    def run() -> None:
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

    threading.Thread(target=run, name="ddltrace-lifelines", daemon=True).start()
