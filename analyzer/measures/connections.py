"""How fast bytes pass on the TCP connections between ranks of different hosts.

The kernel adds up, for each connection, the time in which it has bytes to send (`connection_busy`):
the bytes over this time are the rate of the slowest part of the connection's way, whether the ranks
send much or little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.measures.measure import Table, derived

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_LEAST_BYTES: Final = 1 << 20
_LEAST_BUSY_S: Final = 0.02
_FEW: Final = 2
_SLOW: Final = 0.5
_NAMES: Final = ("connection_sent", "connection_busy", "connection_retransmits")


@dataclass(frozen=True)
class ConnectionRow:
    """One direction of the TCP connections from one rank to another, on different hosts.

    From the first to the last reading of the kernel's counters while the job was recorded; from the
    start of the connection, if it was read once. Connections of less than 1 MiB, and those that had
    bytes to send for less than 20 ms, are left out.

    Attributes:
        src: The sending rank.
        dst: The receiving rank.
        src_host: Host of `src`.
        dst_host: Host of `dst`.
        bytes: Bytes that arrived.
        busy_us: Time in which there were bytes to send and the receiver had room for them.
        rate_gbps: `bytes` over `busy_us`, in Gbit/s.
        retransmits: Segments that were sent again.
    """

    src: int
    dst: int
    src_host: str
    dst_host: str
    bytes: float
    busy_us: float
    rate_gbps: float
    retransmits: float


class _End(NamedTuple):
    """What one end of a connection has sent: bytes, seconds, segments."""

    rank: int
    sent: tuple[float, float, float]


def connection_rows(trace: Trace) -> tuple[ConnectionRow, ...]:
    """The connections between ranks of different hosts, the slowest first."""
    ends: dict[str, dict[str, list[_End]]] = {}
    with_counters = [rank for rank in trace.ranks if trace.has_counters(rank)]
    for rank, found in zip(
        with_counters, trace.map_ranks(_sent, "reading connections", with_counters), strict=True
    ):
        for instance, sent in found.items():
            digest, direction = instance[:-1], instance[-1]
            ends.setdefault(digest, {}).setdefault(direction, []).append(_End(rank, sent))
    hosts = {rank: trace.infos(rank)[-1].host for rank in with_counters}
    sums: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for sides in ends.values():
        if sorted(map(len, sides.values())) != [1, 1]:
            continue  # the other end is not a rank; or equal addresses, as of loopback interfaces
        (one,), (other,) = sides.values()
        if hosts[one.rank] != hosts[other.rank]:
            for end, peer in ((one, other), (other, one)):
                pair = end.rank, peer.rank
                sums[pair] = sums.get(pair, np.zeros(3)) + end.sent
    rows = [
        ConnectionRow(
            src=src,
            dst=dst,
            src_host=hosts[src],
            dst_host=hosts[dst],
            bytes=size,
            busy_us=busy_s * 1e6,
            rate_gbps=size * 8 / busy_s / 1e9,
            retransmits=retransmits,
        )
        for (src, dst), (size, busy_s, retransmits) in (
            (pair, values.tolist()) for pair, values in sums.items()
        )
        if size >= _LEAST_BYTES and busy_s >= _LEAST_BUSY_S
    ]
    return tuple(sorted(rows, key=lambda row: row.rate_gbps))


def _sent(trace: Trace) -> dict[str, tuple[float, float, float]]:
    """What each connection of a trace of one rank has sent, by instance."""
    (rank,) = trace.ranks
    table = trace.counters(rank)
    table = table.filter(pc.is_in(table["name"].cast(pa.string()), pa.array(_NAMES)))
    if not len(table):
        return {}
    sums = table.group_by(["instance", "name"]).aggregate(
        [("value", "max"), ("value", "min"), ("value", "count")]
    )
    found: dict[str, dict[str, float]] = {}
    for row in sums.to_pylist():
        start = row["value_min"] if row["value_count"] > 1 else 0.0
        found.setdefault(row["instance"], {})[row["name"]] = row["value_max"] - start
    return {
        instance: (values[_NAMES[0]], values[_NAMES[1]], values[_NAMES[2]])
        for instance, values in found.items()
        if len(values) == len(_NAMES)
    }


class SlowConnections(NamedTuple):
    """Connections that are much slower than the others of a job.

    Attributes:
        rows: Their rows, the slowest first.
        host: The host that all of them have in common; None if there is none, or if they are
            between two hosts only.
        usual_gbps: The rate that a quarter of all connections exceeds.
    """

    rows: tuple[ConnectionRow, ...]
    host: str | None
    usual_gbps: float


def slow_connections(rows: Sequence[ConnectionRow]) -> SlowConnections | None:
    """The connections of less than half the rate that is usual in the job; None without any.

    Args:
        rows: See `connection_rows`.
    """
    if len(rows) <= _FEW:
        return None
    # Where a host's link is slow, two connections of each ring of three or four hosts are.
    usual = float(np.quantile([row.rate_gbps for row in rows], 0.75))
    slow = tuple(row for row in rows if row.rate_gbps < _SLOW * usual)
    if not slow:
        return None
    common = set.intersection(*({row.src_host, row.dst_host} for row in slow))
    return SlowConnections(slow, common.pop() if len(common) == 1 else None, usual)


CONNECTIONS: Final = derived(
    "connections",
    lambda whole: connection_rows(whole.trace),
    rows=ConnectionRow,
    table=Table[ConnectionRow](
        "TCP connections between hosts, the slowest first (rate: while there were bytes to send)",
        {
            "from rank": lambda row: f"{row.src} ({row.src_host})",
            "to rank": lambda row: f"{row.dst} ({row.dst_host})",
            "bytes": "bytes",
            "busy": "busy_us",
            "rate": "rate_gbps",
            "sent again": lambda row: f"{row.retransmits:.0f}",
        },
    ),
)
