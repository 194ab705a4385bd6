"""Protocols whose hardware is not here, as profiles that pace real messages.

A message of n bytes takes ``latency + n / bandwidth`` from its start to its arrival when its link
is free. Each number has its published source. A number without one is None: it is not modelled.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ddltrace.tracer.errors import UsageError

ENVIRONMENT: Final = "DDLTRACE_PROTOCOL"
"""Variable with the job's protocol, which servers of a parameter server inherit."""

_US: Final = 1e3
_MAX_SLOWDOWN: Final = 1e6


@dataclass(frozen=True)
class Sourced:
    """A number and its source.

    Attributes:
        value: The number; None if it is not modelled.
        source: Where it was published, or why it is not modelled.
    """

    value: float | None
    source: str


@dataclass(frozen=True)
class Protocol:
    """One protocol.

    Attributes:
        name: Its name in ``--protocol``.
        summary: What it is, in one line.
        latency_us: One-way time of an empty message (us).
        gbit_s: Bandwidth of one direction of a link (Gbit/s).
        processor_us_per_message: Processor time of the sender for a message (us).
        processor_ns_per_byte: Processor time of the sender for a byte (ns).
        slowdown: All times are this many times as long as those of the profile, so that a machine
            whose own messages take longer can keep their ratios.
    """

    name: str
    summary: str
    latency_us: Sourced
    gbit_s: Sourced
    processor_us_per_message: Sourced
    processor_ns_per_byte: Sourced
    slowdown: float = 1.0

    @property
    def spec(self) -> str:
        """Its name with the slowdown, as `read_protocol` reads it."""
        return self.name if self.slowdown == 1 else f"{self.name}:slowdown={self.slowdown:g}"

    @property
    def is_paced(self) -> bool:
        """Whether messages are paced; those of TCP are as fast as they are."""
        return self.latency_us.value is not None

    @property
    def latency_ns(self) -> float:
        """Latency of a paced message, slowed down (ns)."""
        return (self.latency_us.value or 0.0) * _US * self.slowdown

    def occupied_ns(self, size: int) -> float:
        """How long a message of `size` bytes occupies its link, slowed down (ns)."""
        rate = self.gbit_s.value
        return 0.0 if rate is None else size * 8 / rate * self.slowdown

    def planned_ns(self, size: int) -> float:
        """Time of a message of `size` bytes on a free link, slowed down (ns)."""
        return self.latency_ns + self.occupied_ns(size)

    def processor_ns(self, size: int) -> float:
        """Processor time of the sender of a message of `size` bytes, slowed down (ns).

        Parts that are not modelled count as zero.
        """
        for_message = (self.processor_us_per_message.value or 0.0) * _US
        return (for_message + (self.processor_ns_per_byte.value or 0.0) * size) * self.slowdown

    def to_json(self) -> dict[str, Any]:
        """All numbers with their sources, as JSON values."""
        return asdict(self)


_NOT_FOUND: Final = "no published number found; not modelled"
_RED_HAT: Final = (
    "Red Hat, Configuring InfiniBand and RDMA networks, Red Hat Enterprise Linux 8, section "
    "Testing an RDMA network using qperf after IPoIB is configured: rc_bw over an mlx4 adapter, "
)
_ARCH: Final = (
    "ArchWiki, InfiniBand, section TCP/IP over IPoIB: qperf over a link of 20 Gbit/s (4X DDR), "
)
_ERPC: Final = (
    "Kalia, Kaminsky and Andersen, Datacenter RPCs can be General and Fast, NSDI 2019, as stated "
    "in the README of github.com/erpc-io/eRPC: "
)
_REAL: Final = "as it is: messages are not paced"

PROTOCOLS: Final = (
    Protocol(
        "tcp",
        "TCP of this machine's kernel, for real",
        Sourced(None, _REAL),
        Sourced(None, _REAL),
        Sourced(None, _REAL),
        Sourced(None, _REAL),
    ),
    Protocol(
        "rdma",
        "RDMA by verbs over InfiniBand",
        Sourced(
            1.2,
            "Microsoft, Azure documentation, HBv3-series virtual machine performance: RDMA latency "
            "of 1 byte",
        ),
        Sourced(49.52, _RED_HAT + "bw 6.19 GB/s"),
        Sourced(None, _NOT_FOUND),
        Sourced(0.0635, _RED_HAT + "send_cost 63.5 ms/GB"),
    ),
    Protocol(
        "ipoib",
        "TCP over IP over InfiniBand",
        Sourced(19.8, _ARCH + "tcp_lat 19.8 us"),
        Sourced(5.608, _ARCH + "tcp_bw 701 MB/s"),
        Sourced(None, _NOT_FOUND),
        Sourced(None, _NOT_FOUND),
    ),
    Protocol(
        "dpdk",
        "kernel bypass: messages over UDP and Ethernet in user space, as with DPDK",
        Sourced(1.15, _ERPC + "half of the round trip of 2.3 us of an RPC with UDP over Ethernet"),
        Sourced(75.0, _ERPC + "75 Gbit/s on one connection"),
        Sourced(0.1, _ERPC + "10 million RPCs of 32 bytes a second with one processor core"),
        Sourced(8 / 75, _ERPC + "75 Gbit/s with one processor core at each end"),
    ),
)

NAMES: Final = tuple(protocol.name for protocol in PROTOCOLS)


def read_protocol(spec: str) -> Protocol:
    """Reads a protocol, such as ``rdma`` or ``rdma:slowdown=200``.

    Raises:
        UsageError: There is no such protocol, or the slowdown is not a number of at least 1.
    """
    name, _, argument = spec.partition(":")
    found = next((protocol for protocol in PROTOCOLS if protocol.name == name), None)
    if found is None:
        raise UsageError(
            f"--protocol {spec!r:.60}: there is no {name!r:.40}; there are: {', '.join(NAMES)}"
        )
    if not argument:
        return found
    key, _, text = argument.partition("=")
    try:
        slowdown = float(text)
    except ValueError:
        slowdown = 0.0
    if key != "slowdown" or not 1 <= slowdown <= _MAX_SLOWDOWN:
        raise UsageError(
            f"--protocol {spec!r:.60}: write for example {name}:slowdown=200, with a slowdown of 1 "
            f"to {_MAX_SLOWDOWN:g}"
        )
    if not found.is_paced:
        raise UsageError(f"--protocol {spec!r:.60}: {name} is not paced, so it has no slowdown")
    return replace(found, slowdown=slowdown)


def protocol_of_job() -> Protocol | None:
    """The protocol that paces this job's messages; None if they are as fast as they are."""
    spec = os.environ.get(ENVIRONMENT)
    if not spec:
        return None
    protocol = read_protocol(spec)
    return protocol if protocol.is_paced else None
