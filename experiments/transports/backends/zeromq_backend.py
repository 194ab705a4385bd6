"""The backend ``zmq``: a PUSH socket to, and a PULL socket from, each other rank.

Each two ranks first prove the job's secret on a connection of their own, over which they tell each
other the ports of the PULL sockets. To such a socket, ZeroMQ's PLAIN mechanism admits the first who
has the token that the secret gives for this direction, which is sent once; nobody comes later.
ZeroMQ's CURVE mechanism would encrypt every message: 25 MiB over loopback took 46 ms, not 7.
"""

from __future__ import annotations

import queue
import struct
import time
from datetime import timedelta
from hmac import compare_digest
from typing import Any, Final, NamedTuple

import torch
import zmq
import zmq.utils.monitor
from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.backends.listening import admit_nobody
from ddltrace.experiments.transports.backends.mailbox import Future, Key, as_bytes, fail
from ddltrace.experiments.transports.backends.meeting import (
    JOIN_SECONDS,
    connect_all,
    exchange_lines,
)
from ddltrace.experiments.transports.backends.messaging import MailboxGroup
from ddltrace.tracer.connections.proof import refused, shut, token

_HEADER: Final = struct.Struct("<ii")
_BYE: Final = b"bye"
_ADMISSION: Final = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whom to admit (ZeroMQ RFC 27)."""
_HANDSHAKE_MS: Final = 3000
_COPY_BELOW: Final = 1 << 16
"""Bytes up to which a copy is cheaper than a message that ZeroMQ has to give back."""


class _Outgoing(NamedTuple):
    header: bytes
    tensor: torch.Tensor
    done: Future


class ZeroMqGroup(MailboxGroup):
    """A process group over ZeroMQ.

    A sending thread for each peer hands tensors to ZeroMQ without a copy, and completes the send
    when ZeroMQ has released the memory. A receiving thread for each peer also sees the
    connection break.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connects all ranks of the group. Collective."""
        super().__init__("zmq", rank, size, timeout)
        self._context = zmq.Context()
        self._outgoing: dict[int, queue.SimpleQueue[_Outgoing | None]] = {}
        meeting, lines = connect_all(store, "zmq", rank, size, timeout=timeout)
        incoming = {peer: self._context.socket(zmq.PULL) for peer in self._others()}
        outgoing = {peer: self._context.socket(zmq.PUSH) for peer in self._others()}
        admission = _Admission(
            self._context,
            {f"{peer}": token(meeting.secret, f"zmq {peer} {rank}") for peer in incoming},
        )
        ports = {}
        for peer, pull in incoming.items():
            pull.setsockopt(zmq.RCVHWM, 0)
            pull.setsockopt(zmq.PLAIN_SERVER, 1)
            pull.setsockopt(zmq.ZAP_DOMAIN, f"{peer}".encode())
            pull.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            ports[peer] = pull.bind_to_random_port(f"tcp://{meeting.address}")
        own = {peer: f"{meeting.address}:{port}" for peer, port in ports.items()}
        for peer, place in exchange_lines(lines, own).items():
            outgoing[peer].setsockopt(zmq.SNDHWM, 0)
            # A connection that breaks is an error of the job: nobody else is to be given its data.
            outgoing[peer].setsockopt(zmq.RECONNECT_IVL, -1)
            outgoing[peer].setsockopt(zmq.PLAIN_USERNAME, f"{rank}".encode())
            outgoing[peer].setsockopt(
                zmq.PLAIN_PASSWORD, token(meeting.secret, f"zmq {rank} {peer}").encode()
            )
            outgoing[peer].connect(f"tcp://{place}")
        admission.wait(JOIN_SECONDS)
        admit_nobody(ports.values())
        for peer in self._others():
            shut(lines[peer][0])
            self._outgoing[peer] = queue.SimpleQueue()
            self._start(self._send_all, outgoing[peer], self._outgoing[peer])
            self._start(self._receive_all_from, incoming[peer], peer)

    def send_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Queues the tensor for the peer's sending thread."""
        done: Future = torch.futures.Future()
        self._outgoing[peer].put(_Outgoing(_HEADER.pack(channel, tag), tensor, done))
        return done

    def close(self) -> None:
        """Sends a goodbye to all peers, waits for theirs, and closes the sockets."""
        for waiting in self._outgoing.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._context.term()

    def _send_all(self, socket: Any, waiting: queue.SimpleQueue[_Outgoing | None]) -> None:
        while (outgoing := waiting.get()) is not None:
            header, tensor, done = outgoing
            try:
                payload = as_bytes(tensor)
                socket.send(header, zmq.SNDMORE)
                if payload.nbytes <= _COPY_BELOW:
                    socket.send(payload)
                else:
                    socket.send(payload, copy=False, track=True).wait()
            except Exception as error:  # noqa: BLE001 - raised where the job waits
                fail(done, error)
            else:
                done.set_result([tensor])
        socket.send(_BYE)
        socket.close()

    def _receive_all_from(self, socket: Any, peer: int) -> None:
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if socket in ready:
                frames = socket.recv_multipart(copy=False)
                if len(frames) == 1:
                    reason = f"rank {peer} has ended its group"
                    break
                channel, tag = _HEADER.unpack(frames[0].buffer)
                self._mailbox.deliver(Key(peer, channel, tag), frames[1].buffer)
            elif monitor in ready:
                zmq.utils.monitor.recv_monitor_message(monitor)
                reason = f"the connection to rank {peer} broke"
                break
        self._mailbox.lose(peer, reason)
        socket.disable_monitor()
        socket.close()


class _Admission:
    """Admits one connection to each socket: the first that has the token for it."""

    def __init__(self, context: Any, tokens: dict[str, str]) -> None:
        """Begins to answer.

        Args:
            context: Of the sockets.
            tokens: The token of each socket, by the socket's domain.
        """
        self._tokens = tokens
        self._questions = context.socket(zmq.REP)
        self._questions.bind(_ADMISSION)

    def wait(self, timeout_s: float) -> None:
        """Answers until each socket has its connection.

        Raises:
            RuntimeError: One did not come.
        """
        deadline = time.monotonic() + timeout_s
        while self._tokens:
            left = deadline - time.monotonic()
            if left <= 0 or not self._questions.poll(1e3 * left):
                raise RuntimeError(f"rank {min(self._tokens)} did not connect in {timeout_s:g} s")
            version, request, domain, _, _, _, *credentials = self._questions.recv_multipart()
            own = self._tokens.get(domain.decode(), "")
            # Credentials: name and password; another mechanism than PLAIN is not admitted before.
            if own and len(credentials) == 2 and compare_digest(credentials[1], own.encode()):
                del self._tokens[domain.decode()]
                answer = (b"200", b"admitted")
            else:
                refused.add()
                answer = (b"400", b"refused")
            self._questions.send_multipart([version, request, *answer, b"", b""])
        self._questions.close()
