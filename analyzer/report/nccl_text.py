"""The part of the terminal's report on NCCL's own events."""

from __future__ import annotations

from typing import Final

from ddltrace.analyzer.formatting.terminal import Columns, Section, more, table_of
from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bandwidth_text,
    bytes_text,
    printable,
    time_text,
)
from ddltrace.analyzer.measures.nccl import (
    Nccl,
    NcclChoice,
    NcclCollective,
    NcclLink,
    NcclRank,
)

_MAX_ROWS: Final = 8


def nccl_section(nccl: Nccl | None) -> Section:
    """The section; empty without events of NCCL."""
    if nccl is None:
        return []
    lines: Section = [f"NCCL's own events ({nccl.events:,})"]
    if nccl.collectives:
        lines.append(table_of(nccl.collectives[:_MAX_ROWS], _COLLECTIVE))
        lines += more(len(nccl.collectives), _MAX_ROWS)
    if nccl.links:
        links = sorted(nccl.links, key=lambda link: -link.bytes)
        lines.append(table_of(links[:_MAX_ROWS], _LINK))
        lines += more(len(links), _MAX_ROWS)
        inside, between = bytes_text(nccl.inside_host_bytes), bytes_text(nccl.between_hosts_bytes)
        unknown = bytes_text(nccl.unknown_bytes)
        lines.append(
            f"  sent by proxies: {inside} within hosts, {between} between hosts, {unknown} to "
            "ranks that were not recorded"
        )
    lines += [f"  {verdict}" for verdict in nccl_verdicts(nccl)]
    return lines


def nccl_verdicts(nccl: Nccl | None) -> list[str]:
    """Sentences on slow ranks and on choices of NCCL that lost."""
    if nccl is None:
        return []
    slow = [_slow(row) for row in nccl.ranks if row.slow is not None]
    return [*slow, *map(_choice, nccl.choices[:_MAX_ROWS])]


def _chosen(row: NcclCollective) -> str:
    channels = "" if row.channels is None else f" x{row.channels}"
    return printable(f"{row.algo or NOT_KNOWN}/{row.proto or NOT_KNOWN}{channels}")


def _direction(link: NcclLink) -> str:
    other = f"{link.peer}" if link.peer is not None else f"{link.comm_peer} of its group"
    device = "" if link.device is None else f", device {link.device}"
    return f"{link.rank} {'to' if link.is_send else 'from'} {other}{device}"


_COLLECTIVE: Final[Columns] = {
    "collective": lambda row: f"{printable(row.func or NOT_KNOWN)} ({row.ranks or NOT_KNOWN})",
    "count": "count",
    "bytes": "bytes",
    "chosen": _chosen,
    "kernel": "kernel_us",
    "waiting": "wait_us",
    "transfer": "transfer_us",
    "alg bw": "algbw_gbps",
}
_LINK: Final[Columns] = {
    "proxy of rank": _direction,
    "steps": "steps",
    "bytes": "bytes",
    "bandwidth": "bandwidth_gbps",
    "network": "net_us",
    "GPU wait": "gpu_wait_us",
    "peer wait": "peer_wait_us",
}


def _slow(row: NcclRank) -> str:
    if row.slow == "network":
        return f"rank {row.rank} sends at {bandwidth_text(row.send_gbps)}: its network is slow"
    waits = time_text(row.receive_gpu_wait_us)
    return f"rank {row.rank}: received data waits {waits} a step for its GPU, which is late"


def _choice(row: NcclChoice) -> str:
    size, func = bytes_text(row.bytes), printable(row.func or NOT_KNOWN)
    return (
        f"{func} of {size} in {row.ranks or NOT_KNOWN} ranks: "
        f"{printable(f'{row.algo}/{row.proto}')} takes {time_text(row.transfer_us)}, "
        f"{printable(f'{row.better_algo}/{row.better_proto}')} "
        f"{time_text(row.better_transfer_us)} "
        f"(medians of {row.count} and {row.better_count} in this run): "
        f"try NCCL_ALGO={printable(row.better_algo)} NCCL_PROTO={printable(row.better_proto)}"
    )
