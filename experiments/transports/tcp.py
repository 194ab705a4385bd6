"""Plain TCP sockets of ddltrace's own, with the options of the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique
from ddltrace.experiments.transports.transport import Transport

MAX_CONNECTIONS = 64
MAX_BUFFER_KB = 1 << 20


@technique(
    "transport",
    "tcp",
    "TCP sockets without a library, with the protocol's options",
    "RFC 9293; Nagle: RFC 896",
)
@dataclass(frozen=True)
class Tcp(Transport):
    """Connections between each two ranks, without a message library.

    Attributes:
        nagle: Whether the kernel delays small segments until earlier ones are acknowledged
            (RFC 896); else TCP_NODELAY is set.
        buffer_kb: Size of the send and receive buffers in KiB (SO_SNDBUF, SO_RCVBUF; Linux doubles
            it, and limits it to net.core.wmem_max and rmem_max); None lets the kernel tune them.
        congestion: Congestion control (TCP_CONGESTION), such as ``cubic`` or ``reno``; None leaves
            the kernel's default.
        connections: Connections between two ranks; a large message is divided over all of them.
    """

    name: ClassVar[str] = "tcp"
    backend: ClassVar[str] = "tcp"

    nagle: bool = False
    buffer_kb: int | None = None
    congestion: str | None = None
    connections: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ValueError(f"connections must be 1 to {MAX_CONNECTIONS}")
        if self.buffer_kb is not None and not 1 <= self.buffer_kb <= MAX_BUFFER_KB:
            raise ValueError(f"buffer_kb must be 1 to {MAX_BUFFER_KB}")
