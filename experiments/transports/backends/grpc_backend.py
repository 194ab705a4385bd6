"""The backend ``grpc``: one client stream to each other rank.

Each two ranks first prove the job's secret on a connection of their own, over which they tell each
other their ports. The metadata of a stream holds the token that the secret gives for its direction;
the first stream with it is read, others are refused before anything of them is. When all are there,
nobody else can connect.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from concurrent.futures import Future as Result
from datetime import timedelta
from typing import Any, Final

import grpc
import torch
from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.backends.listening import admit_nobody
from ddltrace.experiments.transports.backends.mailbox import Future, Key, as_bytes
from ddltrace.experiments.transports.backends.meeting import (
    JOIN_SECONDS,
    connect_all,
    exchange_lines,
)
from ddltrace.experiments.transports.backends.messaging import MailboxGroup
from ddltrace.tracer.connections.proof import refused, shut, token

_HEADER: Final = struct.Struct("<ii")
_GRACE_S: Final = 5.0
"""Time limit for closing connections; gRPC prints a line for each aborted one."""
_SERVICE: Final = "ddltrace.Messages"
_METHOD: Final = "Deliver"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 3000),
)
_TOKEN: Final = "ddltrace-token"


class _DaemonThreads(Executor):
    """Runs each call on a daemon thread: one reads the messages of each other rank.

    The interpreter waits at exit for the threads of a `ThreadPoolExecutor`, so a process that has
    not closed its group, after an error for example, would never end.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Result[Any]:
        """Starts a thread."""
        result: Result[Any] = Result()

        def run() -> None:
            try:
                result.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                result.set_exception(error)

        threading.Thread(target=run, name="ddltrace-grpc", daemon=True).start()
        return result


class GrpcGroup(MailboxGroup):
    """A process group over gRPC.

    Requests are bytes, not protocol buffers: a header of channel and tag, then the tensor's
    memory. gRPC takes Python bytes only, so that each send copies the tensor once.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connects all ranks of the group. Collective."""
        super().__init__("grpc", rank, size, timeout)
        self._said_bye = threading.Semaphore(0)
        self._came = threading.Semaphore(0)
        meeting, lines = connect_all(store, "grpc", rank, size, timeout=timeout)
        self._expected = {
            token(meeting.secret, f"grpc {peer} {rank}"): peer for peer in self._others()
        }
        self._server = grpc.server(_DaemonThreads(), options=_OPTIONS)
        handler = grpc.stream_unary_rpc_method_handler(self._deliver)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
        )
        port = self._server.add_insecure_port(f"{meeting.address}:0")
        self._server.start()
        own = f"{meeting.address}:{port}"
        places = exchange_lines(lines, dict.fromkeys(lines, own))
        self._outgoing: dict[int, queue.SimpleQueue[bytes | None]] = {}
        self._channels: list[grpc.Channel] = []
        self._calls: list[Any] = []
        for peer, place in places.items():
            self._outgoing[peer] = queue.SimpleQueue()
            channel = grpc.insecure_channel(place, options=_OPTIONS)
            call = channel.stream_unary(f"/{_SERVICE}/{_METHOD}")
            proof = ((_TOKEN, token(meeting.secret, f"grpc {rank} {peer}")),)
            self._channels.append(channel)
            self._calls.append(
                call.future(self._requests(peer), metadata=proof, wait_for_ready=True)
            )
        for _ in places:
            if not self._came.acquire(timeout=JOIN_SECONDS):
                raise RuntimeError(f"a rank did not connect within {JOIN_SECONDS:g} s")
        admit_nobody({port})
        for peer in places:
            shut(lines[peer][0])

    def send_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Copies the tensor into the stream's queue, so that it may change immediately."""
        done: Future = torch.futures.Future()
        self._outgoing[peer].put(b"".join((_HEADER.pack(channel, tag), as_bytes(tensor))))
        done.set_result([tensor])
        return done

    def close(self) -> None:
        """Ends all streams, waits for the peers' ends, and stops the server."""
        for waiting in self._outgoing.values():
            waiting.put(None)
        for call in self._calls:
            call.exception()  # the answer: the peer has read the whole stream
        for _ in self._others():
            self._said_bye.acquire()
        for channel in self._channels:
            channel.close()
        self._server.stop(_GRACE_S).wait()

    def _requests(self, peer: int) -> Iterator[bytes]:
        while (request := self._outgoing[peer].get()) is not None:
            yield request

    def _deliver(self, requests: Iterator[bytes], context: Any) -> bytes:
        given = dict(context.invocation_metadata()).get(_TOKEN)
        # Tokens are random: that looking one up takes a time of its own says nothing of others.
        peer = self._expected.pop(str(given), None)
        if peer is None:
            refused.add()
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            return b""
        self._came.release()
        reason = "has ended its group"
        try:
            for request in requests:
                channel, tag = _HEADER.unpack_from(request)
                self._mailbox.deliver(Key(peer, channel, tag), memoryview(request)[_HEADER.size :])
        except Exception as error:  # noqa: BLE001 - the stream broke: raised where the job waits
            reason = f"is not reachable any more: {error}"
        self._mailbox.lose(peer, f"rank {peer} {reason}")
        self._said_bye.release()
        return b""
