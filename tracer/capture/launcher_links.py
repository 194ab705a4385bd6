"""Passes orders between the ranks of several launchers (nodes, pods, ``mpirun``).

Rank 0 listens, and publishes where through the job's own store, with the secret that each
connection proves. One rank of each other launcher connects and waits for questions. An order that
is given on another host goes to rank 0, which carries it out on all ranks that it reaches.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any, Final

from ddltrace.tracer.capture.control import Control
from ddltrace.tracer.capture.job_order import Member, Order
from ddltrace.tracer.connections.addresses import LOOPBACK, host_identity, own_address
from ddltrace.tracer.connections.job_store import is_of_ended_store, own_client, read_published
from ddltrace.tracer.connections.proof import SECRET_BYTES, ProvenListener, connect_proven, shut
from ddltrace.tracer.connections.requests import exchange, receive, send
from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.trace.run_info import RankInfo

_PURPOSE: Final = "switch"
_CONNECT_TIMEOUT_S: Final = 20.0
_ANSWER_TIMEOUT_S: Final = 10.0
_ORDER_TIMEOUT_S: Final = 25.0
_STOP_TIMEOUT_S: Final = 1.0

Fault = Callable[[str, Exception], None]


def start(info: RankInfo, control: Control, fault: Fault) -> Callable[[float], object] | None:
    """Links this rank with those of other launchers, if there may be some.

    Args:
        info: This rank.
        control: Takes its orders.
        fault: Called with errors.

    Returns:
        A function that ends the link; None if this rank has none.
    """
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if info.world_size < 2 or local_size == str(info.world_size):
        return None
    if info.rank != 0 and info.local_rank:
        return None  # the first rank of its launcher passes orders on
    try:
        store = own_client()
        if store is None:
            return None
        link = Hub(info, store, control, fault) if info.rank == 0 else Leader(info, store, control)
        threading.Thread(target=quiet(link.run, fault), name="ddltrace-links", daemon=True).start()
        os.register_at_fork(after_in_child=quiet(link.close_after_fork, fault))
    except Exception as error:  # noqa: BLE001 - the job continues; orders reach this launcher only
        fault("links", error)
        return None
    return link.stop


class Hub:
    """Rank 0: reaches the ranks of all launchers.

    Args:
        info: This rank.
        store: A client of the job's store, used by no other thread.
        control: Takes this rank's orders; from now on, they reach the ranks of all launchers.
        fault: Called with errors.
    """

    def __init__(self, info: RankInfo, store: Any, control: Control, fault: Fault) -> None:
        self._info = info
        self._store = store
        self._control = control
        self._fault = fault
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._closed = threading.Event()
        self._leaders: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._listeners = [self._listen(LOOPBACK)]
        with contextlib.suppress(OSError):  # it has no other address
            self._listeners.append(self._listen(own_address()))
        control.job_members = self.members

    def run(self) -> None:
        """Publishes the addresses and accepts connections until stopped."""
        try:
            if self._publish():
                self._selector.register(self._wake, selectors.EVENT_READ)
                while self._serve():
                    pass
        finally:  # not in `stop`: this thread may be reading from them
            for listener in self._listeners:
                with contextlib.suppress(OSError, KeyError, ValueError):
                    listener.close()
            self._closed.set()

    def _publish(self) -> bool:
        """Says in the job's store where this rank listens; returns whether the store was there."""
        record = {
            "version": metadata.version("ddltrace"),
            "host": host_identity(),
            "secret": self._secret.hex(),
            "places": [listener.place for listener in self._listeners],
        }
        try:
            self._store.set(_key(self._info), json.dumps(record))
        except Exception as error:
            if not is_of_ended_store(error):
                raise
            return False
        finally:
            # This connection must not outlive the store's server.
            self._store = None
        return True

    def _serve(self) -> bool:
        """Waits for connections and accepts them; returns whether to continue."""
        waits = [w for listener in self._listeners if (w := listener.patience_s()) is not None]
        for key, _ in self._selector.select(min(waits, default=None)):
            if key.fileobj is self._wake:
                return False
            key.data.attend(key.fileobj)
        for listener in self._listeners:
            listener.expire()
            for rank, connection in listener.taken():
                serve = quiet(partial(self._welcome, rank, connection), self._fault)
                threading.Thread(target=serve, name="ddltrace-order", daemon=True).start()
        return True

    def stop(self, timeout_s: float) -> None:
        """Ends all connections."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        for connection, _ in list(self._leaders.values()):
            shut(connection)
        self._closed.wait(min(timeout_s, _STOP_TIMEOUT_S))

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the sockets, which belong to the parent."""
        for listener in self._listeners:
            listener.close_after_fork()
        for connection in (
            self._wake,
            self._waker,
            *(connection for connection, _ in self._leaders.values()),
        ):
            connection.close()

    def members(self) -> list[Member]:
        """The ranks of the job that can be reached."""
        members = {member.rank: member for member in self._control.members()}
        for leader in sorted(self._leaders):
            try:
                answer = self._ask(leader, {"do": "members"})
                for rank in answer["ranks"]:
                    members.setdefault(
                        int(rank), Member(int(rank), partial(self._pass, leader, rank))
                    )
            except (OSError, KeyError, TypeError, ValueError):
                self._leaders.pop(leader, None)  # it has ended: its ranks are missing
        return [members[rank] for rank in sorted(members)]

    def _pass(self, leader: int, rank: int, request: dict[str, Any]) -> dict[str, Any]:
        return self._ask(leader, {"do": "pass", "rank": rank, "request": request})

    def _ask(self, leader: int, request: dict[str, Any]) -> dict[str, Any]:
        connection, asking = self._leaders[leader]
        with asking:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            return exchange(connection, request)

    def _listen(self, address: str) -> ProvenListener:
        return ProvenListener(address, self._secret, _PURPOSE, selector=self._selector)

    def _welcome(self, rank: int, connection: socket.socket) -> None:
        """Keeps the connection of a leader, or answers an order."""
        try:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            request = receive(connection)
            if request is not None and request.get("do") == "lead":
                self._leaders[rank] = (connection, threading.Lock())
                return
            if request is not None:
                send(connection, self._control.answer(request))
        except OSError:
            pass  # it has gone
        shut(connection)


class Leader:
    """The first rank of another launcher: passes questions on to the ranks of its launcher.

    Args:
        info: This rank.
        store: A client of the job's store, used by no other thread.
        control: Takes this rank's orders; rank 0 carries them out from now on.
    """

    def __init__(self, info: RankInfo, store: Any, control: Control) -> None:
        self._info = info
        self._store = store
        self._control = control
        self._stopping = threading.Event()
        self._connection: socket.socket | None = None
        self._record: dict[str, Any] = {}

    def run(self) -> None:
        """Connects to rank 0 and answers its questions until one of both ends."""
        record = self._find()
        if record is None or record.get("version") != metadata.version("ddltrace"):
            return
        self._record = record
        try:
            self._connection = self._connect()
            send(self._connection, {"do": "lead"})
            self._control.order_job = self._hand_over
            while (request := receive(self._connection)) is not None:
                send(self._connection, self._answer(request))
        except OSError:
            pass  # rank 0 has ended
        finally:
            self._control.order_job = self._control.carry_out_here
            if self._connection is not None:
                shut(self._connection)

    def stop(self, timeout_s: float) -> None:
        """Ends the connection."""
        del timeout_s
        self._stopping.set()
        if self._connection is not None:
            shut(self._connection)

    def close_after_fork(self) -> None:
        """In a forked child: closes its copy of the socket, which belongs to the parent."""
        if self._connection is not None:
            self._connection.close()

    def _find(self) -> dict[str, Any] | None:
        """Waits until rank 0 has published where it listens; None if it does not."""
        try:
            record: dict[str, Any] | None = read_published(
                self._store, _key(self._info), self._stopping.wait
            )
        except Exception as error:
            if not is_of_ended_store(error):
                raise
            return None
        finally:
            self._store = None
        return record

    def _connect(self) -> socket.socket:
        places = self._record["places"]
        is_here = self._record["host"] == host_identity()
        address, port = places[0] if is_here else places[-1]
        return connect_proven(
            (str(address), int(port)),
            bytes.fromhex(self._record["secret"]),
            _PURPOSE,
            number=self._info.rank,
            timeout_s=_CONNECT_TIMEOUT_S,
        )

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        members = {member.rank: member for member in self._control.members()}
        if request.get("do") == "members":
            return {"ranks": sorted(members)}
        try:
            return members[request["rank"]].ask(request["request"])
        except (KeyError, TypeError, OSError) as error:
            return {"error": f"it does not answer: {error!r:.100}"}

    def _hand_over(self, order: Order) -> dict[str, Any]:
        """Lets rank 0 carry out an order that was given here."""
        try:
            connection = self._connect()
            try:
                connection.settimeout(_ORDER_TIMEOUT_S)
                return exchange(connection, {"do": "order", **order.to_json()})
            finally:
                shut(connection)
        except OSError as error:
            return {"error": f"rank 0 does not answer: {error}"}


def _key(info: RankInfo) -> str:
    return f"ddltrace/switch/{info.attempt}"
