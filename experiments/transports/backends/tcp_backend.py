"""The backend ``tcp``: some TCP connections between each two ranks."""

from __future__ import annotations

import itertools
import queue
import socket
import struct
import threading
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.backends.mailbox import Future, Key, Mailbox, as_bytes, fail
from ddltrace.experiments.transports.backends.meeting import connect_all
from ddltrace.experiments.transports.backends.messaging import MailboxGroup
from ddltrace.experiments.transports.transport import Tcp
from ddltrace.tracer.errors import MissingCapabilityError

_FRAME: Final = struct.Struct("<iiqqqq")
"""Channel, tag, number of the message, its bytes, first byte and bytes of this part."""
_BYE: Final = -1
_DIVIDED_FROM: Final = 1 << 16
"""Bytes of a message from which it is divided over all connections."""
_AVAILABLE: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def check_options(transport: Tcp) -> None:
    """Checks that this kernel has the options.

    Raises:
        MissingCapabilityError: It lacks the congestion control.
    """
    if transport.congestion is None:
        return
    with socket.socket() as probe:
        try:
            _set_congestion(probe, transport.congestion)
        except OSError as error:
            known = _AVAILABLE.read_text().split() if _AVAILABLE.exists() else []
            raise MissingCapabilityError(
                f"this kernel has no congestion control {transport.congestion!r:.40}; "
                f"it has: {', '.join(known) or 'none that can be chosen'}"
            ) from error


class _Part(NamedTuple):
    header: bytes
    payload: memoryview
    sent: _Countdown


class _Countdown:
    """Completes a send when all parts of its message have been sent."""

    def __init__(self, parts: int, tensor: torch.Tensor) -> None:
        self.done: Future = torch.futures.Future()
        self._left = parts
        self._tensor = tensor
        self._lock = threading.Lock()

    def count(self, error: Exception | None) -> None:
        """A part has been sent, or has failed with an error."""
        with self._lock:
            self._left -= 1
            if error is not None and not self.done.done():
                fail(self.done, error)
            elif not self._left and not self.done.done():
                self.done.set_result([self._tensor])


class _Incoming:
    """Puts the parts of one rank's messages together, and hands them over in their order."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._buffers: dict[int, bytearray] = {}
        self._missing: dict[int, int] = {}
        self._keys: dict[int, Key] = {}
        self._next = 0

    def buffer(self, key: Key, number: int, size: int) -> memoryview:
        """Where the parts of a message go."""
        with self._lock:
            if number not in self._buffers:
                self._buffers[number] = bytearray(size)
                self._missing[number] = size
                self._keys[number] = key
            return memoryview(self._buffers[number])

    def arrived(self, number: int, size: int) -> None:
        """A part of a message is complete."""
        with self._lock:
            self._missing[number] -= size
            while self._missing.get(self._next) == 0:
                del self._missing[self._next]
                payload = memoryview(self._buffers.pop(self._next))
                self._mailbox.deliver(self._keys.pop(self._next), payload)
                self._next += 1


class TcpGroup(MailboxGroup):
    """A process group over plain TCP.

    Each connection has a sending and a receiving thread. A message of 64 KiB or more is divided
    over all connections of its peer.
    """

    def __init__(
        self, transport: Tcp, store: Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        """Connects all ranks of the group. Collective.

        Args:
            transport: The options.
            store: Where ranks find each other.
            rank: This rank within the group.
            size: Ranks in the group.
            timeout: Longest time to wait for one operation.
        """
        super().__init__("tcp", rank, size, timeout)
        self._options = transport
        self._numbers: defaultdict[int, Any] = defaultdict(itertools.count)
        self._locks = {peer: threading.Lock() for peer in self._others()}
        self._outgoing: dict[int, list[queue.SimpleQueue[_Part | None]]] = {}
        _, sockets = connect_all(
            store,
            "tcp",
            rank,
            size,
            timeout=timeout,
            each=transport.connections,
            prepare=self._set_options,
        )
        for peer, lines in sockets.items():
            incoming = _Incoming(self._mailbox)
            self._outgoing[peer] = [queue.SimpleQueue() for _ in lines]
            for line, waiting in zip(lines, self._outgoing[peer], strict=True):
                self._set_options(line)
                self._start(self._send_all, line, waiting)
                self._start(self._receive_all_from, line, peer, incoming)

    def send_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Queues the parts of the tensor for the peer's sending threads."""
        payload = as_bytes(tensor)
        queues = self._outgoing[peer]
        count = len(queues) if payload.nbytes >= _DIVIDED_FROM else 1
        bounds = [payload.nbytes * part // count for part in range(count + 1)]
        countdown = _Countdown(count, tensor)
        with self._locks[peer]:
            number = next(self._numbers[peer])
            for waiting, (start, stop) in zip(queues, itertools.pairwise(bounds), strict=False):
                header = _FRAME.pack(channel, tag, number, payload.nbytes, start, stop - start)
                waiting.put(_Part(header, payload[start:stop], countdown))
        return countdown.done

    def close(self) -> None:
        """Sends a goodbye to all peers, waits for theirs, and closes the connections."""
        for queues in self._outgoing.values():
            for waiting in queues:
                waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _set_options(self, line: socket.socket) -> None:
        options = self._options
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(not options.nagle))
        if options.buffer_kb is not None:
            for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                line.setsockopt(socket.SOL_SOCKET, name, options.buffer_kb << 10)
        if options.congestion is not None:
            _set_congestion(line, options.congestion)

    def _send_all(self, line: socket.socket, waiting: queue.SimpleQueue[_Part | None]) -> None:
        while (part := waiting.get()) is not None:
            try:
                sent = line.sendmsg([part.header, part.payload])
                if sent < len(part.header):
                    line.sendall(part.header[sent:])
                    sent = len(part.header)
                line.sendall(part.payload[sent - len(part.header) :])
            except OSError as error:
                part.sent.count(RuntimeError(f"a message could not be sent: {error}"))
            else:
                part.sent.count(None)
        try:
            line.sendall(_FRAME.pack(_BYE, 0, 0, 0, 0, 0))
            line.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the peer has gone, which the receiving thread sees, too

    def _receive_all_from(self, line: socket.socket, peer: int, incoming: _Incoming) -> None:
        header = bytearray(_FRAME.size)
        reason = f"the connection to rank {peer} broke"
        try:
            while True:
                _fill(line, memoryview(header))
                channel, tag, number, size, start, length = _FRAME.unpack(header)
                if channel == _BYE:
                    reason = f"rank {peer} has ended its group"
                    break
                buffer = incoming.buffer(Key(peer, channel, tag), number, size)
                _fill(line, buffer[start : start + length])
                incoming.arrived(number, length)
        except OSError:
            pass  # the reason has been set
        self._mailbox.lose(peer, reason)


def _fill(line: socket.socket, view: memoryview) -> None:
    """Receives exactly as many bytes as fit.

    Raises:
        OSError: The connection ended before.
    """
    while view.nbytes:
        received = line.recv_into(view)
        if not received:
            raise ConnectionError("the connection ended")
        view = view[received:]


def _set_congestion(line: socket.socket, name: str) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
