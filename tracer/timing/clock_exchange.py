"""Exchanges timestamps with rank 0 to find the offset between its clock and this rank's.

Rank 0 answers on a TCP port of the loopback interface and, once a rank of another host asks for it,
on one of the address at which that host reaches the job's first host. It publishes them through
the job's own store, with the secret that each connection proves. When every rank has come, it
listens no more. Everything runs on threads of the tracer, with store clients of their own, so that
no call of the job waits for it. One exchange is

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
from importlib import metadata
from typing import Any, Final

from ddltrace.tracer.connections.addresses import (
    LOOPBACK,
    address_of,
    host_identity,
    interface,
    own_address,
)
from ddltrace.tracer.connections.job_store import (
    PUBLISH_TIMEOUT_S,
    Store,
    is_of_ended_store,
    own_client,
    read_published,
)
from ddltrace.tracer.connections.proof import SECRET_BYTES, ProvenListener, connect_proven, shut
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.timing.clocks import clock_domain
from ddltrace.tracer.trace.run_info import RankInfo

_PREFIX: Final = "ddltrace/clock"
_PURPOSE: Final = "clock"
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
_CONNECT_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.05
_LONGEST_POLL_S: Final = 1.0
_LINGER_S: Final = 0.3
_MAX_SAMPLES: Final = 512
_READING_NS: Final = 1_000

Save = Callable[[], None]
Fault = Callable[[str, Exception], None]
Sample = dict[str, int]


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
        store = own_client()
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

    def __init__(self, info: RankInfo, store: Store, fault: Fault) -> None:
        super().__init__(name="ddltrace-clock", daemon=True)
        self._info = info
        self._store: Store | None = store
        self._fault = fault
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._listeners = [self._listen(LOOPBACK)]
        self._clients: dict[socket.socket, int] = {}
        self._missing = set(range(1, info.world_size))
        self._deadline: float | None = None

    def run(self) -> None:
        """Publishes the addresses and answers until stopped."""
        try:
            try:
                self._publish()
                self._serve()
            finally:
                for connection in self._clients:
                    shut(connection)
                self._listen_no_more()
        except Exception as error:  # noqa: BLE001 - the job continues; clocks stay uncertain
            if not is_of_ended_store(error):
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
        for listener in self._listeners:
            listener.close_after_fork()
        for open_socket in (self._wake, self._waker, *self._clients):
            with contextlib.suppress(OSError):
                open_socket.close()

    def _listen(self, address: str) -> ProvenListener:
        return ProvenListener(address, self._secret, _PURPOSE, selector=self._selector)

    def _listen_no_more(self) -> None:
        while self._listeners:
            self._listeners.pop().close()
        # This connection must not outlive the store's server, which may run in another process.
        self._store = None

    def _publish(self) -> None:
        assert self._store is not None
        record = {
            "version": metadata.version("ddltrace"),
            "host": host_identity(),
            "port": self._listeners[0].port,
            "secret": self._secret.hex(),
            "domain": self._info.clock_domain,
        }
        self._store.set(_key("rank0", self._info), json.dumps(record))

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._wake, selectors.EVENT_READ)
        pause = _POLL_S
        began = looked = time.monotonic()
        while self._deadline is None:
            waits = [listener.patience_s() for listener in self._listeners]
            if self._store is not None:
                waits.append(pause)
            for key, _ in selector.select(min((w for w in waits if w is not None), default=None)):
                if isinstance(key.data, ProvenListener):
                    key.data.attend(key.fileobj)  # type: ignore[arg-type]
                elif key.fileobj in self._clients:
                    self._answer(key.fileobj)
            self._welcome()
            now = time.monotonic()
            if self._store is not None and now - looked >= pause:
                self._look_for_other_hosts(now - began)
                looked, pause = now, min(1.5 * pause, _LONGEST_POLL_S)
        selector.unregister(self._wake)
        self._listen_no_more()
        for asker in list(self._clients):
            self._send(asker, _ANSWER.pack(_LAST_CALL, 0, 0))
        while self._clients and (left := self._deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                self._answer(key.fileobj)  # type: ignore[arg-type]

    def _welcome(self) -> None:
        """Takes the connections that are proven by now."""
        for listener in self._listeners:
            listener.expire()
            for rank, connection in listener.taken():
                connection.settimeout(_ANSWER_TIMEOUT_S)
                self._clients[connection] = rank
                self._selector.register(connection, selectors.EVENT_READ)

    def _look_for_other_hosts(self, waited_s: float) -> None:
        """Listens for the other hosts if a rank on one of them has asked for it."""
        assert self._store is not None
        elsewhere = _key("elsewhere", self._info)
        try:
            if self._store.check([elsewhere]):
                listener = self._listen_at(self._store.get(elsewhere).decode())
                self._listeners.append(listener)
                self._store.set(_key("rank0/elsewhere", self._info), json.dumps(listener.place))
                self._store = None
            elif waited_s > PUBLISH_TIMEOUT_S:
                self._store = None
        except Exception as error:
            if not is_of_ended_store(error):
                raise
            self._store = None

    def _listen_at(self, reached: str) -> ProvenListener:
        """Listens at the interface that the job chose, else where other hosts reach this one."""
        if interface() is None and reached:
            # It may resolve to another address there, such as one that a router translates.
            with contextlib.suppress(OSError):
                return self._listen(reached)
        return self._listen(own_address())

    def _answer(self, asker: socket.socket) -> None:
        question = _receive(asker, _ASK.size)
        received = time.monotonic_ns()
        if len(question) != _ASK.size:
            self._drop(asker)
            return
        (number,) = _ASK.unpack(question)
        self._send(asker, _ANSWER.pack(number, received, time.monotonic_ns()))
        self._missing.discard(self._clients.get(asker, 0))
        if not self._missing:
            self._listen_no_more()

    def _send(self, asker: socket.socket, answer: bytes) -> None:
        try:
            asker.sendall(answer)
        except OSError:
            self._drop(asker)

    def _drop(self, connection: socket.socket) -> None:
        del self._clients[connection]
        self._selector.unregister(connection)
        shut(connection)


class ClockClient(threading.Thread):
    """Every other rank: asks rank 0 for its time, frequently at first, then every ten seconds.

    Args:
        info: This rank; ``clock["samples"]`` is filled in.
        store: A client of the job's store, used by no other thread.
        save: Writes `info` to disk.
        fault: Called with errors.
    """

    def __init__(self, info: RankInfo, store: Store, save: Save, fault: Fault) -> None:
        super().__init__(name="ddltrace-clock", daemon=True)
        self._info = info
        self._store: Store | None = store
        self._save = save
        self._fault = fault
        self._samples: list[Sample] = []
        self._asked = 0
        self._stopping = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._connection: socket.socket | None = None
        self._record: dict[str, Any] = {}
        self._place = ("", 0)
        info.clock["samples"] = self._samples

    def run(self) -> None:
        """Exchanges until stopped, or once if another rank continues for this clock."""
        try:
            try:
                if self._find() and self._connect():
                    self._rounds()
            finally:
                if self._connection is not None:
                    shut(self._connection)
        except Exception as error:  # noqa: BLE001 - the job continues; clocks stay uncertain
            if not is_of_ended_store(error):
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
        record = self._wait_for("rank0")
        if record is None:
            return False
        own = metadata.version("ddltrace")
        if record.get("version") != own:
            raise DdltraceError(
                f"rank 0 has another version of ddltrace than this rank, {own}: install the same "
                "version for all ranks"
            )
        self._record = record
        self._place = (LOOPBACK, int(record["port"]))
        if record["host"] != host_identity():
            self._store.set(_key("elsewhere", self._info), _address_of_first_host(self._store))
            place = self._wait_for("rank0/elsewhere")
            if place is None:
                return False
            self._place = (str(place[0]), int(place[1]))
        leads = self._info.clock_domain != record["domain"] and self._is_first()
        self._store = None
        self._record["leads"] = leads
        return True

    def _wait_for(self, name: str) -> Any:
        """Waits until rank 0 has published something; None if it does not."""
        assert self._store is not None
        return read_published(self._store, _key(name, self._info), self._pause)

    def _is_first(self) -> bool:
        """Whether this is the first rank of its clock, which continues to exchange."""
        assert self._store is not None
        domain = hashlib.sha256(self._info.clock_domain.encode()).hexdigest()[:16]
        return self._store.add(_key(f"leader/{domain}", self._info), 1) == 1

    def _connect(self) -> bool:
        try:
            self._connection = connect_proven(
                self._place,
                bytes.fromhex(self._record["secret"]),
                _PURPOSE,
                number=self._info.rank,
                timeout_s=_CONNECT_TIMEOUT_S,
            )
        except OSError:
            return False  # rank 0 has ended
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.settimeout(_ANSWER_TIMEOUT_S)
        return True

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


def _address_of_first_host(store: Any) -> str:
    """The numeric address at which this host reaches the job's first; empty if it is not known."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    name = os.environ.get("MASTER_ADDR") or getattr(store, "host", None)
    return address_of(str(name)) if name else ""


def _key(name: str, info: RankInfo) -> str:
    return f"{_PREFIX}/{info.attempt}/{name}"


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
