"""The backend ``zmq``: a PUSH socket to, and a PULL socket from, each other rank."""

from __future__ import annotations

import queue
import struct
import threading
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import zmq
import zmq.utils.monitor
from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.backends.addresses import exchange_addresses, own_address
from ddltrace.experiments.transports.backends.mailbox import Future, Key, Mailbox, as_bytes, fail
from ddltrace.experiments.transports.backends.messaging import MessagingGroup

_HEADER: Final = struct.Struct("<ii")
_BYE: Final = b"bye"
_COPY_BELOW: Final = 1 << 16
"""Bytes up to which a copy is cheaper than a message that ZeroMQ has to give back."""


class _Outgoing(NamedTuple):
    header: bytes
    tensor: torch.Tensor
    done: Future


class ZeroMqGroup(MessagingGroup):
    """A process group over ZeroMQ.

    A sending thread for each peer hands tensors to ZeroMQ without a copy, and completes the send
    when ZeroMQ has released the memory. A receiving thread for each peer also sees the
    connection break.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connects all ranks of the group. Collective."""
        super().__init__("zmq", rank, size, timeout)
        self._mailbox = Mailbox()
        self._context = zmq.Context()
        self._outgoing: dict[int, queue.SimpleQueue[_Outgoing | None]] = {}
        self._threads: list[threading.Thread] = []
        host = own_address()
        incoming: dict[int, Any] = {}
        for peer in self._others():
            incoming[peer] = self._context.socket(zmq.PULL)
            incoming[peer].setsockopt(zmq.RCVHWM, 0)
        ports = {
            peer: socket.bind_to_random_port(f"tcp://{host}") for peer, socket in incoming.items()
        }
        addresses = exchange_addresses(
            store,
            "zmq",
            rank,
            size,
            " ".join(f"{peer}={host}:{port}" for peer, port in ports.items()),
        )
        for peer in self._others():
            mine = dict(pair.split("=") for pair in addresses[peer].split())[str(rank)]
            out = self._context.socket(zmq.PUSH)
            out.setsockopt(zmq.SNDHWM, 0)
            out.connect(f"tcp://{mine}")
            self._outgoing[peer] = queue.SimpleQueue()
            self._start(self._send_all, out, self._outgoing[peer])
            self._start(self._receive_all_from, incoming[peer], peer)

    def send_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Queues the tensor for the peer's sending thread."""
        done: Future = torch.futures.Future()
        self._outgoing[peer].put(_Outgoing(_HEADER.pack(channel, tag), tensor, done))
        return done

    def receive_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Asks the mailbox."""
        return self._mailbox.receive(Key(peer, channel, tag), tensor)

    def close(self) -> None:
        """Sends a goodbye to all peers, waits for theirs, and closes the sockets."""
        for waiting in self._outgoing.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._context.term()

    def _start(self, job: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=job, args=arguments, name="ddltrace-zmq", daemon=True)
        thread.start()
        self._threads.append(thread)

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
