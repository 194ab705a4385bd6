"""ZeroMQ: message queues over TCP, with threads of its own for the sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique
from ddltrace.experiments.transports.transport import Transport


@technique(
    "transport",
    "zmq",
    "ZeroMQ's queues over TCP",
    "ZeroMQ, zeromq.org; pyzmq",
    needs=("pip install 'ddltrace[zmq]'",),
)
@dataclass(frozen=True)
class ZeroMq(Transport):
    """One PUSH and PULL pair of sockets in each direction between two ranks."""

    name: ClassVar[str] = "zmq"
    backend: ClassVar[str] = "zmq"
    extra: ClassVar[str | None] = "zmq"
