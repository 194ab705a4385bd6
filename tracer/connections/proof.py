"""Connections on which both ends prove that they know the job's secret before anything is sent.

The accepting end begins. `mac` is HMAC-SHA-256 with the secret, over the role, the purpose, both
nonces and the number of the connecting end; nonces are fresh, so a recorded exchange is worth
nothing the next time::

    accepting end    greeting, nonce  ------------------------->  connecting end
                     <-----  greeting, nonce, number, mac("connects")
                     mac("accepts")  -------------------------->

All parts have fixed lengths, so nothing that a stranger sends decides how much is read. Whoever
sends another greeting or a wrong `mac` is dropped at once, whoever sends nothing after some
seconds. What follows is neither encrypted nor authenticated: the cost is per connection, not per
message.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

SECRET_BYTES: Final = 32

_GREETING: Final = b"ddltrace proof 1"
_NONCE_BYTES: Final = 32
_CLAIM: Final = struct.Struct(f"!{len(_GREETING)}s{_NONCE_BYTES}sQ32s")
_MAC_BYTES: Final = 32

_MOST_UNPROVEN: Final = 64
_SHARE_OF_DESCRIPTORS: Final = 8
"""Unproven connections hold at most one of so many of the process's free file descriptors."""
_DEADLINE_S: Final = 3.0
"""Longest time in which a connecting end proves itself."""
_CROWDED_S: Final = 0.1
"""The same, once there are as many unproven connections as may be."""
_REST_S: Final = 0.002
"""Pause after a dropped connection: strangers who come in a loop cost little processor time."""
_BACKLOG: Final = 1024
_RETRY_S: Final = 0.05


class Refusals:
    """Counts the connections to this process that did not prove the secret."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        """Counts one."""
        with self._lock:
            self.count += 1


refused: Final = Refusals()
"""Of all listeners of this process."""


class Proven(NamedTuple):
    """A connection whose other end has proven that it knows the secret.

    Attributes:
        number: What the connecting end calls itself.
        connection: A blocking socket without a timeout.
    """

    number: int
    connection: socket.socket


@dataclass
class _Unproven:
    nonce: bytes
    since: float
    received: bytearray = field(default_factory=bytearray)


class ProvenListener:
    """Listens on one address, and hands over proven connections only.

    At most 64 connections, and at most an eighth of the process's free file descriptors, are
    unproven at a time; others wait in the kernel.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        purpose: str,
        *,
        prepare: Callable[[socket.socket], object] | None = None,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """Begins to listen.

        Args:
            address: A numeric address of this host.
            secret: What both ends know.
            purpose: What the connections are for; the same at both ends.
            prepare: Sets options of the listening socket, which connections inherit.
            selector: A caller that waits for other sockets, too, gives its selector. The sockets
                of this listener have the listener itself as ``data`` there: `attend` to them.

        Raises:
            OSError: The address is not one of this host.
        """
        self._secret = secret
        self._purpose = purpose
        self._has_own_selector = selector is None
        self._selector = selector or selectors.DefaultSelector()
        self._unproven: dict[socket.socket, _Unproven] = {}
        self._proven: deque[Proven] = deque()
        self._rests_until: float | None = None
        self._listener = _socket(address)
        try:
            if prepare is not None:
                prepare(self._listener)
            self._listener.bind((address, 0))
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self)
        self.port: int = self._listener.getsockname()[1]
        self.place = (address, self.port)

    def accept(self, timeout_s: float) -> Proven:
        """Waits for the next proven connection.

        Raises:
            TimeoutError: None came.
        """
        deadline = time.monotonic() + timeout_s
        while not self._proven:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no connection with a proof came within {timeout_s:g} s")
            patience = self.patience_s()
            for key, _ in self._selector.select(left if patience is None else min(left, patience)):
                self.attend(key.fileobj)  # type: ignore[arg-type]
            self.expire()
        return self._proven.popleft()

    def accept_each(self, numbers: Collection[int], timeout_s: float) -> Iterator[Proven]:
        """Waits for one connection of each of these numbers, and refuses others.

        Raises:
            TimeoutError: One did not come.
        """
        missing = set(numbers)
        while missing:
            proven = self.accept(timeout_s)
            if proven.number in missing:
                missing.discard(proven.number)
                yield proven
            else:
                refused.add()
                shut(proven.connection)

    def taken(self) -> Iterator[Proven]:
        """The connections that are proven by now."""
        while self._proven:
            yield self._proven.popleft()

    def patience_s(self) -> float | None:
        """How long a caller may wait before it calls `expire`; None for as long as it likes."""
        moments = [] if self._rests_until is None else [self._rests_until]
        if self._unproven:
            moments.append(next(iter(self._unproven.values())).since + _DEADLINE_S)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def attend(self, ready: socket.socket) -> None:
        """Reads from a socket of this listener, or accepts a connection."""
        if ready.fileno() < 0:
            return  # closed for what was ready with it: another connection, or the last client
        if ready is self._listener:
            self._accept()
        else:
            self._read(ready)

    def expire(self) -> None:
        """Drops the connections whose time is over."""
        now = time.monotonic()
        for connection, state in list(self._unproven.items()):
            if now - state.since < _DEADLINE_S:
                break  # the others are younger
            self._drop(connection)
        if self._rests_until is not None and now >= self._rests_until:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Ends listening; proven connections that were taken stay open."""
        for connection in list(self._unproven):
            self._drop(connection)
        for proven in self.taken():
            shut(proven.connection)
        if self._rests_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()
        if self._has_own_selector:
            self._selector.close()

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the sockets, which belong to the parent."""
        for copy in (self._listener, *self._unproven, *(p.connection for p in self._proven)):
            copy.close()

    def _accept(self) -> None:
        if len(self._unproven) >= min(_MOST_UNPROVEN, max(1, _free_descriptors())):
            connection, oldest = next(iter(self._unproven.items()))
            if time.monotonic() - oldest.since < _CROWDED_S:
                self._rest(oldest.since + _CROWDED_S)
                return
            self._drop(connection)
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone, or there are no file descriptors
            self._rest(time.monotonic() + _REST_S)
            return
        connection.setblocking(False)
        state = _Unproven(secrets.token_bytes(_NONCE_BYTES), time.monotonic())
        self._unproven[connection] = state
        self._selector.register(connection, selectors.EVENT_READ, self)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.send(_GREETING + state.nonce)
        except OSError:
            self._drop(connection)

    def _read(self, connection: socket.socket) -> None:
        state = self._unproven[connection]
        try:
            # No byte beyond the proof: what follows is for the caller.
            part = connection.recv(_CLAIM.size - len(state.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        state.received += part
        begin = bytes(state.received[: len(_GREETING)])
        if not part or not _GREETING.startswith(begin):
            self._drop(connection)
        elif len(state.received) == _CLAIM.size:
            self._verify(connection, state)

    def _verify(self, connection: socket.socket, state: _Unproven) -> None:
        _, nonce, number, claimed = _CLAIM.unpack(state.received)

        def mac(role: str) -> bytes:
            return _mac(self._secret, f"{role} {self._purpose} {number} ", state.nonce + nonce)

        if not hmac.compare_digest(claimed, mac("connects")):
            self._drop(connection)
            return
        try:
            connection.send(mac("accepts"))
            connection.setblocking(True)
        except OSError:
            self._drop(connection)
            return
        del self._unproven[connection]
        self._selector.unregister(connection)
        self._proven.append(Proven(number, connection))

    def _drop(self, connection: socket.socket) -> None:
        refused.add()
        del self._unproven[connection]
        self._selector.unregister(connection)
        shut(connection)
        self._rest(time.monotonic() + _REST_S)

    def _rest(self, until: float) -> None:
        if self._rests_until is None:
            self._selector.unregister(self._listener)
            self._rests_until = until


def connect_proven(
    place: tuple[str, int],
    secret: bytes,
    purpose: str,
    *,
    number: int,
    timeout_s: float,
    prepare: Callable[[socket.socket], object] | None = None,
) -> socket.socket:
    """Connects to a `ProvenListener`; tries again until it succeeds.

    Args:
        place: Numeric address and port.
        secret: What both ends know.
        purpose: What the connection is for; the same at both ends.
        number: What this end calls itself.
        timeout_s: Longest time until both ends have proven the secret.
        prepare: Sets options of the socket before it connects.

    Returns:
        A blocking socket without a timeout.

    Raises:
        OSError: The other end did not answer, or does not know the secret.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection = _socket(place[0])
        try:
            if prepare is not None:
                prepare(connection)
            connection.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            connection.connect(place)
            _prove(connection, secret, purpose, number, deadline)
        except OSError as error:
            shut(connection)
            if time.monotonic() + _RETRY_S > deadline:
                raise ConnectionError(
                    f"no process of the job answers at {place[0]} port {place[1]}: {error}"
                ) from error
            time.sleep(_RETRY_S)
        except BaseException:
            shut(connection)
            raise
        else:
            connection.settimeout(None)
            return connection


def shut(connection: socket.socket) -> None:
    """Ends a connection, also if a forked child of the job has a copy of the descriptor."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def token(secret: bytes, purpose: str) -> str:
    """What proves the secret to a library that takes a text of its own; 64 hexadecimal digits."""
    return hmac.digest(secret, f"token {purpose}".encode(), "sha256").hex()


def _prove(
    connection: socket.socket, secret: bytes, purpose: str, number: int, deadline: float
) -> None:
    greeting = _receive(connection, len(_GREETING) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_GREETING):
        raise ConnectionError("a program answers that is not ddltrace, or another version of it")
    own = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(_GREETING) :] + own
    claim = _mac(secret, f"connects {purpose} {number} ", nonces)
    connection.sendall(_CLAIM.pack(_GREETING, own, number, claim))
    answer = _receive(connection, _MAC_BYTES, deadline)
    if not hmac.compare_digest(answer, _mac(secret, f"accepts {purpose} {number} ", nonces)):
        raise ConnectionError("it does not know the job's secret")


def _mac(secret: bytes, what: str, nonces: bytes) -> bytes:
    return hmac.digest(secret, what.encode() + nonces, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(_RETRY_S, deadline - time.monotonic()))
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return received


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)


def _free_descriptors() -> int:
    """How many file descriptors unproven connections may hold now."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0  # there are none to read the directory with
    return (most - used) // _SHARE_OF_DESCRIPTORS
