"""Exchanges timestamps with rank 0 to find the offset between its clock and this rank's.

Rank 0 answers on a TCP port and publishes its addresses through the job's own store; ranks must be
able to reach each other by TCP anyway. Everything runs on threads of the tracer, with store
clients of their own, so that no call of the job waits for it. One exchange is

    this rank  t0 --------> t1  rank 0
               t3 <-------- t2

The offset to add to this rank's clock is ((t1 - t0) + (t2 - t3)) / 2; its error is at most half the
round trip (t3 - t0) - (t2 - t1) (RFC 5905, section 8). Of a burst of exchanges, the one with the
shortest round trip is kept.

Every rank exchanges at its start, which shows whether it really shares rank 0's clock. Of each
other clock, one rank continues until the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.timing.clocks import clock_domain
from ddltrace.tracer.trace.run_info import RankInfo

_PREFIX: Final = "ddltrace/clock"
_TOKEN_BYTES: Final = 16
_ASK: Final = struct.Struct("!Q")
_ANSWER: Final = struct.Struct("!Qqq")
_LAST_CALL: Final = (1 << 64) - 1
"""Rank 0 sends this instead of an answer when it is about to end."""

_BURST: Final = 10
_LONG_BURST: Final = 50
"""The most requests of a burst while every round trip is longer than the one before."""
_EARLY_ROUNDS_S: Final = (1.0, 2.0, 5.0)
_PERIOD_S: Final = 10.0
_ANSWER_TIMEOUT_S: Final = 1.0
_CONNECT_TIMEOUT_S: Final = 2.0
_PUBLISH_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05
_LINGER_S: Final = 0.3
_MAX_SAMPLES: Final = 512
_READING_NS: Final = 1_000

Save = Callable[[], None]
Fault = Callable[[str, Exception], None]
Sample = dict[str, int]


class _Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


def start(info: RankInfo, save: Save, fault: Fault) -> Callable[[float], object] | None:
    """Starts to exchange timestamps, or on rank 0 to answer.

    Args:
        info: This rank; ``clock["samples"]`` is filled in.
        save: Writes `info` to disk.
        fault: Called with errors.

    Returns:
        A function that makes a last exchange within the given number of seconds and stops; None if
        the job has no second rank, or no store through which ranks find each other.
    """
    if info.world_size < 2:
        return None
    try:
        store = _own_client()
        if store is None:
            return None
        exchanger: ClockServer | ClockClient
        exchanger = (
            ClockServer(info, store, fault)
            if info.rank == 0
            else ClockClient(info, store, save, fault)
        )
        os.register_at_fork(after_in_child=quiet(exchanger.close_after_fork, fault))
        exchanger.start()
    except Exception as error:  # noqa: BLE001 - the job continues; clocks stay uncertain
        fault("clock exchange", error)
        return None
    return exchanger.stop


class ClockServer(threading.Thread):
    """Rank 0: answers with its time.

    Args:
        info: Rank 0.
        store: A client of the job's store, used by no other thread.
        fault: Called with errors.
    """

    def __init__(self, info: RankInfo, store: _Store, fault: Fault) -> None:
        super().__init__(name="ddltrace-clock", daemon=True)
        self._info = info
        self._store: _Store | None = store
        self._fault = fault
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = _listen()
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._unverified: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._deadline: float | None = None

    def run(self) -> None:
        """Publishes the addresses and answers until stopped."""
        try:
            try:
                self._publish()
                self._serve()
            finally:
                for connection in (*self._clients, *self._unverified):
                    _shut(connection)
                self._listener.close()
        except Exception as error:  # noqa: BLE001 - the job continues; clocks stay uncertain
            if not _is_of_ended_store(error):
                self._fault("clock responder", error)

    def stop(self, timeout_s: float) -> bool:
        """Stops; ranks that are still connected may make a last exchange within the time-out."""
        self._deadline = time.monotonic() + min(timeout_s, _LINGER_S)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self.join(timeout_s)
        return not self.is_alive()

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the sockets, which belong to the parent."""
        for open_socket in (self._listener, self._wake, self._waker, *self._clients):
            with contextlib.suppress(OSError):
                open_socket.close()

    def _publish(self) -> None:
        assert self._store is not None
        record = {
            "addresses": _own_addresses(self._listener.family == socket.AF_INET6),
            "port": self._listener.getsockname()[1],
            "token": self._token.hex(),
            "domain": self._info.clock_domain,
        }
        self._store.set(_key("rank0", self._info), json.dumps(record))
        # This connection must not outlive the store's server, which may run in another process.
        self._store = None

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._listener, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        while self._deadline is None:
            for key, _ in selector.select():
                self._attend(key.fileobj)  # type: ignore[arg-type]
        selector.unregister(self._wake)
        for asker in list(self._clients):
            self._send(asker, _ANSWER.pack(_LAST_CALL, 0, 0))
        while self._clients and (left := self._deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                self._attend(key.fileobj)  # type: ignore[arg-type]

    def _attend(self, ready: socket.socket) -> None:
        if ready is self._listener:
            with contextlib.suppress(OSError):
                connection, _ = ready.accept()
                connection.settimeout(_ANSWER_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._unverified.add(connection)
                self._selector.register(connection, selectors.EVENT_READ)
        elif ready in self._clients:
            self._answer(ready)
        elif ready in self._unverified:
            self._unverified.discard(ready)
            # A request is sent in one piece: anything shorter is not a request.
            if secrets.compare_digest(_receive(ready, _TOKEN_BYTES), self._token):
                self._clients.add(ready)
            else:
                self._drop(ready)

    def _answer(self, asker: socket.socket) -> None:
        question = _receive(asker, _ASK.size)
        received = time.monotonic_ns()
        if len(question) != _ASK.size:
            self._drop(asker)
            return
        (number,) = _ASK.unpack(question)
        self._send(asker, _ANSWER.pack(number, received, time.monotonic_ns()))

    def _send(self, asker: socket.socket, answer: bytes) -> None:
        try:
            asker.sendall(answer)
        except OSError:
            self._drop(asker)

    def _drop(self, connection: socket.socket) -> None:
        self._clients.discard(connection)
        self._unverified.discard(connection)
        self._selector.unregister(connection)
        _shut(connection)


class ClockClient(threading.Thread):
    """Every other rank: asks rank 0 for its time, frequently at first, then every ten seconds.

    Args:
        info: This rank; ``clock["samples"]`` is filled in.
        store: A client of the job's store, used by no other thread.
        save: Writes `info` to disk.
        fault: Called with errors.
    """

    def __init__(self, info: RankInfo, store: _Store, save: Save, fault: Fault) -> None:
        super().__init__(name="ddltrace-clock", daemon=True)
        self._info = info
        self._store: _Store | None = store
        self._save = save
        self._fault = fault
        self._samples: list[Sample] = []
        self._asked = 0
        self._stopping = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._connection: socket.socket | None = None
        self._record: dict[str, Any] = {}
        info.clock["samples"] = self._samples

    def run(self) -> None:
        """Exchanges until stopped, or once if another rank continues for this clock."""
        try:
            try:
                if self._find() and self._connect():
                    self._rounds()
            finally:
                if self._connection is not None:
                    _shut(self._connection)
        except Exception as error:  # noqa: BLE001 - the job continues; clocks stay uncertain
            if not _is_of_ended_store(error):
                self._fault("clock exchange", error)

    def stop(self, timeout_s: float) -> bool:
        """Makes a last exchange and stops."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self.join(min(timeout_s, _LINGER_S))
        domain = clock_domain()
        if domain != self._info.clock_domain:
            self._info.clock_domain = domain  # the clock was changed under the running job
        return not self.is_alive()

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the sockets, which belong to the parent."""
        for open_socket in (self._wake, self._waker, self._connection):
            if open_socket is not None:
                with contextlib.suppress(OSError):
                    open_socket.close()

    def _find(self) -> bool:
        """Waits until rank 0 has published its addresses."""
        assert self._store is not None
        key = _key("rank0", self._info)
        deadline = time.monotonic() + _PUBLISH_TIMEOUT_S
        # Polled: PyTorch prints a warning when a `get` times out.
        while not self._store.check([key]):
            if self._pause(_POLL_S) or time.monotonic() > deadline:
                return False
        self._record = json.loads(self._store.get(key))
        leads = self._info.clock_domain != self._record["domain"] and self._is_first()
        self._store = None
        self._record["leads"] = leads
        return True

    def _is_first(self) -> bool:
        """Whether this is the first rank of its clock, which continues to exchange."""
        assert self._store is not None
        domain = hashlib.sha256(self._info.clock_domain.encode()).hexdigest()[:16]
        return self._store.add(_key(f"leader/{domain}", self._info), 1) == 1

    def _connect(self) -> bool:
        for address in self._record["addresses"]:
            if self._stopping.is_set():
                return False
            place = (str(address), int(self._record["port"]))
            connection: socket.socket | None = None
            try:
                connection = socket.create_connection(place, _CONNECT_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_ANSWER_TIMEOUT_S)
                connection.sendall(bytes.fromhex(self._record["token"]))
                self._connection = connection
                # Only rank 0 answers correctly: another program at that address does not.
                if self._ask() is not None:
                    return True
            except OSError:
                pass
            self._connection = None
            if connection is not None:
                _shut(connection)
        return False

    def _rounds(self) -> None:
        if not self._burst():
            return
        self._save()
        if not self._record["leads"] and not self._contradicts():
            return
        number = 0
        while True:
            pause = _EARLY_ROUNDS_S[number] if number < len(_EARLY_ROUNDS_S) else _PERIOD_S
            last = self._pause(pause)
            if not self._burst() or last:
                return
            self._save()
            number += 1

    def _pause(self, seconds: float) -> bool:
        """Waits for the next round.

        Returns:
            Whether the next round is the last: this rank or rank 0 is about to end.
        """
        # Not `Event.wait`: under a library that replaces the clock, as in the tests of drift, it
        # would wait for a time on another clock.
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            if self._connection is not None:
                selector.register(self._connection, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def _contradicts(self) -> bool:
        """Whether the exchange contradicts the assumption that rank 0's clock is shared."""
        shares = self._info.clock_domain == self._record["domain"]
        best = min(self._samples, key=lambda sample: sample["rtt_ns"])
        return shares and abs(best["offset_ns"]) > best["rtt_ns"] / 2 + _READING_NS

    def _burst(self) -> bool:
        """Exchanges repeatedly and keeps the sample with the shortest round trip.

        Returns:
            Whether rank 0 still answers.
        """
        best: Sample | None = None
        usual = min((sample["rtt_ns"] for sample in self._samples), default=0)
        for number in range(_LONG_BURST):
            if number >= _BURST and best is not None and best["rtt_ns"] <= 3 * usual:
                break
            sample = self._ask()
            if sample is None:
                break
            if best is None or sample["rtt_ns"] < best["rtt_ns"]:
                best = sample
        if best is None:
            return False
        if len(self._samples) >= _MAX_SAMPLES:
            # Keep the better of each two neighbors, so that samples cover the whole job.
            pairs = zip(self._samples[::2], self._samples[1::2], strict=False)
            self._samples[:] = [min(pair, key=lambda s: s["rtt_ns"]) for pair in pairs]
        self._samples.append(best)
        return True

    def _ask(self) -> Sample | None:
        assert self._connection is not None
        self._asked += 1
        try:
            asked = time.monotonic_ns()
            self._connection.sendall(_ASK.pack(self._asked))
            number, received, answered = _LAST_CALL, 0, 0
            while number == _LAST_CALL:
                answer = _receive(self._connection, _ANSWER.size)
                got = time.monotonic_ns()
                if len(answer) != _ANSWER.size:
                    return None
                number, received, answered = _ANSWER.unpack(answer)
        except OSError:
            return None
        rtt = (got - asked) - (answered - received)
        if number != self._asked or rtt < 0:
            return None
        return {
            "local_ns": (asked + got) // 2,
            "offset_ns": ((received - asked) + (answered - got)) // 2,
            "rtt_ns": rtt,
        }


def _own_client() -> _Store | None:
    """A client of the job's store for one thread of the tracer."""
    import torch.distributed as dist

    c10d: Any = dist
    try:
        store = c10d.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):
        return None
    if store is None:
        return None  # MPI has no store
    client: _Store | None = None
    if hasattr(store, "clone"):
        try:
            client = store.clone()
        except RuntimeError as error:
            if "pure virtual" not in str(error):
                raise
            # A store in Python may not implement it, such as that of the fake backend.
        return client
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    if isinstance(store, c10d.TCPStore):
        client = c10d.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    elif isinstance(store, c10d.FileStore):
        client = c10d.FileStore(store.path)
    return client


def _is_of_ended_store(error: Exception) -> bool:
    """Whether the store's server has ended, as in jobs that are over before their ranks meet."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError)


def _key(name: str, info: RankInfo) -> str:
    return f"{_PREFIX}/{info.attempt}/{name}"


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    return socket.create_server(("0.0.0.0", 0), backlog=1024)


def _own_addresses(ipv6: bool) -> list[str]:
    """Addresses at which other ranks may reach this host, the most likely first."""
    found = [*_ipv4_of_interfaces(), *(_ipv6_of_interfaces() if ipv6 else [])]
    with contextlib.suppress(OSError):
        kind = socket.SOCK_STREAM
        found += [str(a[4][0]) for a in socket.getaddrinfo(socket.gethostname(), None, type=kind)]
    loopback = [a for a in found if a.startswith("127.") or a == "::1"]
    others = [a for a in found if a not in loopback]
    return list(dict.fromkeys([*others, *loopback, "127.0.0.1"]))


def _ipv4_of_interfaces() -> list[str]:
    try:
        import fcntl
    except ImportError:
        return []
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with contextlib.suppress(OSError):  # the interface has no such address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                addresses.append(socket.inet_ntoa(answer[20:24]))
    return addresses


def _ipv6_of_interfaces() -> list[str]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    # Columns: address, interface, prefix length, scope (00 is global), flags, name.
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[3] == "00"
    ]


def _receive(connection: socket.socket, size: int) -> bytes:
    """Reads up to `size` bytes; fewer if the peer closes the connection or stops sending."""
    received = b""
    try:
        while len(received) < size:
            part = connection.recv(size - len(received))
            if not part:
                break
            received += part
    except OSError:
        pass
    return received


def _shut(connection: socket.socket) -> None:
    # A forked child of the job may hold the descriptor, too: closing this copy alone does not
    # end the connection.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
