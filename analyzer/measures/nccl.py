"""What NCCL's own events tell: waiting and transfer in its kernels, its choices, links, slow ranks.

All times are differences of times of one process or of one GPU, so they do not depend on how clocks
are aligned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL_NS
from ddltrace.analyzer.events.interval_sets import length, union
from ddltrace.analyzer.joined.nccl_events import nccl_events
from ddltrace.analyzer.measures.measure import derived
from ddltrace.analyzer.nccl.messages import is_kind, numbers, parents_in_job

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_LEAST_STEPS: Final = 20
_SLOW: Final = 1.5
"""A rank is slow if it needs so many times as long as the median of the other ranks."""

_LEAST_COLLECTIVES: Final = 5
_LEAST_GAIN: Final = 0.1


@dataclass(frozen=True)
class NcclCollective:
    """Collectives of NCCL that it executed in the same way.

    Attributes:
        func: NCCL's operation, such as AllReduce.
        bytes: Elements that NCCL was given, in bytes.
        ranks: Ranks of the communicator.
        algo: NCCL's algorithm, such as ``RING``.
        proto: NCCL's protocol, such as ``SIMPLE``.
        channels: Number of channels.
        count: How many there were, however many ranks took part.
        kernel_us: Time of the kernel by the GPU's timer, from the first channel's begin to the last
            one's end; median over ranks and collectives.
        wait_us: Part of it before the last rank came, mean over ranks and collectives: the initial
            synchronization, or without phases of kernels what a rank's kernel took longer than the
            shortest of all ranks.
        transfer_us: The rest of it: the compute phase, or the shortest kernel of all ranks; median
            over collectives. Null if not all ranks were recorded.
        final_sync_us: Final synchronization, mean; null without phases.
        algbw_gbps: `bytes` per `transfer_us`.
    """

    func: str | None
    bytes: int | None
    ranks: int | None
    algo: str | None
    proto: str | None
    channels: int | None
    count: int
    kernel_us: float | None
    wait_us: float | None
    transfer_us: float | None
    final_sync_us: float | None
    algbw_gbps: float | None


@dataclass(frozen=True)
class NcclChoice:
    """A size for which NCCL mostly chose what was slower than another choice in the same run.

    Attributes:
        func: NCCL's operation.
        bytes: Elements that NCCL was given, in bytes.
        ranks: Ranks of the communicator.
        algo: The algorithm that NCCL mostly chose.
        proto: Its protocol.
        transfer_us: Median transfer with them.
        count: How often they were chosen.
        better_algo: The algorithm of the shortest median transfer.
        better_proto: Its protocol.
        better_transfer_us: Median transfer with them, at least a tenth shorter.
        better_count: How often they were chosen, at least five times.
    """

    func: str | None
    bytes: int | None
    ranks: int | None
    algo: str | None
    proto: str | None
    transfer_us: float
    count: int
    better_algo: str | None
    better_proto: str | None
    better_transfer_us: float
    better_count: int


@dataclass(frozen=True)
class NcclLink:
    """What the proxies of a rank sent to, or received from, another rank.

    Attributes:
        rank: Global rank of the process whose proxy it was.
        peer: Global rank of the other side; null if the trace has no record of it.
        comm_peer: Rank of the other side in the communicator, if `peer` is null.
        is_send: Whether it sent.
        device: Network device of the requests; null unless the network plugin reports it.
        inside_host: Whether both sides are on one host; null if `peer` is.
        steps: Number of steps.
        bytes: Bytes that they carried.
        bandwidth_gbps: `bytes` per time in which at least one step was with the network.
        net_us: Mean time of a step in which it was with the network; of a receive also before the
            other side sent.
        gpu_wait_us: Mean time of a step in which it waited for the GPU: of a send for its data, of
            a receive for the space.
        peer_wait_us: Mean time in which the step of a send waited for its peer.
    """

    rank: int
    peer: int | None
    comm_peer: int | None
    is_send: bool
    device: int | None
    inside_host: bool | None
    steps: int
    bytes: int
    bandwidth_gbps: float | None
    net_us: float | None
    gpu_wait_us: float | None
    peer_wait_us: float | None


@dataclass(frozen=True)
class NcclRank:
    """The proxies of a rank compared with those of the others.

    Attributes:
        rank: Global rank.
        sent_bytes: Bytes that its proxies sent.
        send_gbps: Bandwidth of its sends; null with fewer than 20 steps.
        receive_gpu_wait_us: Mean time in which data that it had received waited for its GPU.
        slow: ``network`` if the median bandwidth of the others is more than 1.5 times its own;
            otherwise ``gpu`` if what it received waits more than 1.5 times as long for its GPU as
            in the median of the others, and longer than for the network; null if neither.
    """

    rank: int
    sent_bytes: int
    send_gbps: float | None
    receive_gpu_wait_us: float | None
    slow: str | None


@dataclass(frozen=True)
class Nccl:
    """What NCCL's profiler plugin recorded (``ddltrace run --nccl``).

    Attributes:
        events: Number of events.
        collectives: By operation, size and NCCL's choices, the longest total first.
        choices: Sizes for which another choice was faster in this run.
        links: By pair of ranks, direction and network device.
        ranks: By rank with proxies.
        inside_host_bytes: Bytes that proxies sent to ranks of the same host.
        between_hosts_bytes: Bytes that proxies sent to other hosts.
        unknown_bytes: Bytes that they sent to ranks that the trace has no record of.
    """

    events: int
    collectives: tuple[NcclCollective, ...]
    choices: tuple[NcclChoice, ...]
    links: tuple[NcclLink, ...]
    ranks: tuple[NcclRank, ...]
    inside_host_bytes: int
    between_hosts_bytes: int
    unknown_bytes: int


def nccl_measures(trace: Trace) -> Nccl | None:
    """The measures of a trace; None if it has no events of NCCL."""
    table = nccl_events(trace)
    if not len(table):
        return None
    parents = parents_in_job(table)
    collectives = list(_collectives(table, parents))
    members = _members(table)
    hosts = {rank: trace.infos(rank)[-1].host for rank in trace.ranks}
    links = tuple(_links(table, parents, members, hosts))
    sent = [link for link in links if link.is_send]

    def bytes_where(inside: bool | None) -> int:
        return sum(link.bytes for link in sent if link.inside_host is inside)

    rows = tuple(_collective_rows(collectives))
    return Nccl(
        events=len(table),
        collectives=rows,
        choices=tuple(_choices(collectives)),
        links=links,
        ranks=tuple(_ranks(links)),
        inside_host_bytes=bytes_where(True),
        between_hosts_bytes=bytes_where(False),
        unknown_bytes=bytes_where(None),
    )


# --- collectives: waiting and transfer -----------------------------------------------------------


_PHASES: Final = ("initial", "compute", "final")


class _Collective(NamedTuple):
    """One collective on all ranks that recorded it; times in nanoseconds."""

    func: str | None
    bytes: int | None
    ranks: int | None
    algo: str | None
    proto: str | None
    channels: int | None
    kernels: Sequence[int]
    initial: Sequence[int]
    compute: Sequence[int]
    final: Sequence[int]

    @property
    def transfer(self) -> int | None:
        """Without the waiting: the longest compute phase, or the shortest of all ranks' kernels.

        The rank that comes last does not wait, so its kernel is the shortest. This is known only
        if all ranks recorded it.
        """
        if self.compute:
            return max(self.compute)
        whole = self.ranks is not None and len(self.kernels) == self.ranks
        return min(self.kernels) if whole else None

    @property
    def wait(self) -> float | None:
        """Mean over ranks."""
        if self.initial:
            return float(np.mean(self.initial))
        transfer = self.transfer
        return None if transfer is None else float(np.mean(self.kernels)) - transfer


def _collectives(table: pa.Table, parents: Ints) -> Iterable[_Collective]:
    """Joins the collectives of all ranks by communicator, operation and number."""
    spans = _spans(table, parents)
    rows = np.flatnonzero(is_kind(table, "coll"))
    names = ("comm", "func", "seq", "bytes", "comm_size", "algo", "proto", "channels", "rank")
    found: dict[tuple[Any, ...], list[tuple[int, tuple[Any, ...]]]] = defaultdict(list)
    values = zip(*(table[name].take(pa.array(rows)).to_pylist() for name in names), strict=True)
    for row, (comm, func, seq, *rest) in zip(rows.tolist(), values, strict=True):
        # Without a communicator nothing tells which records of several ranks are one collective.
        key = (comm, func, seq) if comm is not None and seq is not None else (row,)
        found[key].append((row, (func, *rest)))
    for parts in found.values():
        func, size, ranks, algo, proto, channels, _ = parts[0][1]
        yield _Collective(
            func, size, ranks, algo, proto, channels,
            *(
                [int(spans[kind][row]) for row, _ in parts if spans[kind][row] >= 0]
                for kind in ("kernel", *_PHASES)
            ),
        )  # fmt: skip


def _spans(table: pa.Table, parents: Ints) -> dict[str, Ints]:
    """Nanoseconds of each message's kernel, and of its phases, on its GPU's timer; -1 if unknown.

    From the first channel's begin to the last one's end; a phase lasts as long as in the channel
    in which it is longest.
    """
    begin, end = numbers(table, "gpu_start_ns"), numbers(table, "gpu_end_ns")
    known = (begin != NULL_NS) & (end != NULL_NS) & (parents >= 0)
    kernels = np.flatnonzero(is_kind(table, "kernel_ch") & known)
    first = np.full(len(table), np.iinfo(np.int64).max)
    last = np.full(len(table), NULL_NS)
    np.minimum.at(first, parents[kernels], begin[kernels])
    np.maximum.at(last, parents[kernels], end[kernels])
    has = last != NULL_NS
    spans = {"kernel": np.where(has, last - np.where(has, first, 0), -1)}
    which = numbers(table, "step_number")
    is_phase = is_kind(table, "kernel_phase") & known
    for number, name in enumerate(_PHASES):
        rows = np.flatnonzero(is_phase & (which == number))
        message = parents[parents[rows]]
        rows, message = rows[message >= 0], message[message >= 0]
        longest = np.full(len(table), -1)
        np.maximum.at(longest, message, end[rows] - begin[rows])
        spans[name] = longest
    return spans


def _by(
    collectives: Iterable[_Collective], *names: str
) -> dict[tuple[Any, ...], list[_Collective]]:
    groups: dict[tuple[Any, ...], list[_Collective]] = defaultdict(list)
    for each in collectives:
        groups[tuple(getattr(each, name) for name in names)].append(each)
    return groups


_CHOICE: Final = ("func", "bytes", "ranks", "algo", "proto", "channels")


def _collective_rows(collectives: Sequence[_Collective]) -> Iterable[NcclCollective]:
    groups = _by(collectives, *_CHOICE)
    for key in sorted(groups, key=lambda key: -sum(sum(each.kernels) for each in groups[key])):
        mine = groups[key]
        func, size, ranks, algo, proto, channels = key
        transfer = _median(each.transfer for each in mine)
        yield NcclCollective(
            func=func,
            bytes=size,
            ranks=ranks,
            algo=algo,
            proto=proto,
            channels=channels,
            count=len(mine),
            kernel_us=_us(_median(length for each in mine for length in each.kernels)),
            wait_us=_us(_mean(each.wait for each in mine)),
            transfer_us=_us(transfer),
            final_sync_us=_us(_mean(length for each in mine for length in each.final)),
            algbw_gbps=8 * size / transfer if size is not None and transfer else None,
        )


def _choices(collectives: Sequence[_Collective]) -> Iterable[NcclChoice]:
    """Sizes for which another algorithm or protocol of the same run was faster than the usual."""
    for (func, size, ranks), mine in _by(collectives, "func", "bytes", "ranks").items():
        times: dict[tuple[str | None, str | None], list[int]] = defaultdict(list)
        for each in mine:
            if (transfer := each.transfer) is not None:
                times[each.algo, each.proto].append(transfer)
        enough = {key: of for key, of in times.items() if len(of) >= _LEAST_COLLECTIVES}
        if len(enough) < 2:
            continue
        usual = max(enough, key=lambda key: len(enough[key]))
        best = min(enough, key=lambda key: float(np.median(enough[key])))
        now, other = float(np.median(enough[usual])), float(np.median(enough[best]))
        # The quartiles must not overlap: the difference is none of chance.
        apart = np.percentile(enough[best], 75) < np.percentile(enough[usual], 25)
        if other < (1 - _LEAST_GAIN) * now and apart:
            yield NcclChoice(
                func=func,
                bytes=size,
                ranks=ranks,
                algo=usual[0],
                proto=usual[1],
                transfer_us=now / 1e3,
                count=len(enough[usual]),
                better_algo=best[0],
                better_proto=best[1],
                better_transfer_us=other / 1e3,
                better_count=len(enough[best]),
            )


# --- links: what the proxies sent and received ---------------------------------------------------


def _members(table: pa.Table) -> dict[tuple[str, int], int]:
    """Communicator and rank in it -> rank of the job."""
    distinct = table.select(["comm", "comm_rank", "rank"]).group_by(["comm", "comm_rank", "rank"])
    return {
        (row["comm"], row["comm_rank"]): row["rank"]
        for row in distinct.aggregate([]).to_pylist()
        if row["comm"] is not None and row["comm_rank"] is not None
    }


def _links(
    table: pa.Table,
    parents: Ints,
    members: dict[tuple[str, int], int],
    hosts: dict[int, str],
) -> Iterable[NcclLink]:
    rank = numbers(table, "rank")
    steps = np.flatnonzero(is_kind(table, "proxy_step"))
    device = _devices(table, parents)
    comm, peer = table["comm"].to_pylist(), table["peer"].to_pylist()
    is_send = table["is_send"].to_pylist()
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row, op in zip(steps.tolist(), parents[steps].tolist(), strict=True):
        if op >= 0 and is_send[op] is not None:
            other = members.get((comm[op], peer[op]))
            place = None if other is not None else peer[op]
            groups[int(rank[op]), other, place, is_send[op], device.get(row)].append(row)
    times = {
        name: numbers(table, name)
        for name in ("gpu_wait_ns", "peer_wait_ns", "net_wait_ns", "end_ns")
    }
    size = numbers(table, "bytes", 0)
    order = sorted(groups, key=lambda key: tuple((each is not None, each or 0) for each in key))
    for key in order:
        mine = np.array(groups[key])
        own, other, place, sends, card = key
        at = {name: values[mine] for name, values in times.items()}
        gpu, second, net, end = (at[name] for name in times)
        # A send waits for its GPU, its peer, the network; a receive for the network, a flush, its
        # GPU.
        in_net = _between(net, end if sends else second)
        in_gpu = _between(gpu, np.where(second == NULL_NS, net, second) if sends else end)
        in_peer = _between(second, net) if sends else np.zeros(0)
        busy = _covered(net, end if sends else second)
        carried = int(size[mine].sum())
        yield NcclLink(
            rank=own,
            peer=other,
            comm_peer=place,
            is_send=bool(sends),
            device=card,
            inside_host=None if other is None else hosts.get(own) == hosts.get(other),
            steps=len(mine),
            bytes=carried,
            bandwidth_gbps=8 * carried / busy if busy else None,
            net_us=_us(_mean(in_net)),
            gpu_wait_us=_us(_mean(in_gpu)),
            peer_wait_us=_us(_mean(in_peer)),
        )


def _devices(table: pa.Table, parents: Ints) -> dict[int, int]:
    """Row of a step -> the network device of its last request."""
    device = numbers(table, "device")
    known = is_kind(table, "net_plugin") & (device != NULL_NS) & (parents >= 0)
    return dict(zip(parents[known].tolist(), device[known].tolist(), strict=True))


def _ranks(links: Sequence[NcclLink]) -> Iterable[NcclRank]:
    """Each rank's sends and receives, and what of it is slower than the others'.

    A slow network shows in the bandwidth of the rank's own sends. If a GPU is late, its data has
    come and waits for it: the receives of that rank wait for the GPU, those of the others for data.
    """
    ranks = sorted({link.rank for link in links})
    bandwidth = {rank: _bandwidth(links, rank) for rank in ranks}
    held = {rank: _receives_held(links, rank) for rank in ranks}
    for rank in ranks:
        others_bandwidth = [b for r, b in bandwidth.items() if r != rank and b is not None]
        others_held = [h for r, h in held.items() if r != rank and h is not None]
        own_bandwidth, own_held = bandwidth[rank], held[rank]
        slow = None
        if own_bandwidth is not None and others_bandwidth:
            slow = "network" if np.median(others_bandwidth) > _SLOW * own_bandwidth else None
        if slow is None and own_held is not None and others_held:
            net = _receives_held(links, rank, "net_us") or 0.0
            late = own_held > _SLOW * float(np.median(others_held)) and own_held > net
            slow = "gpu" if late else None
        yield NcclRank(
            rank=rank,
            sent_bytes=sum(link.bytes for link in links if link.rank == rank and link.is_send),
            send_gbps=own_bandwidth,
            receive_gpu_wait_us=own_held,
            slow=slow,
        )


def _bandwidth(links: Sequence[NcclLink], rank: int) -> float | None:
    """Bandwidth of a rank's sends, weighted by their bytes; None if it made too few."""
    mine = [
        link
        for link in links
        if link.rank == rank and link.is_send and link.bandwidth_gbps is not None
    ]
    if sum(link.steps for link in mine) < _LEAST_STEPS:
        return None
    busy = sum(link.bytes / (link.bandwidth_gbps or 1.0) for link in mine)
    return sum(link.bytes for link in mine) / busy if busy else None


def _receives_held(links: Sequence[NcclLink], rank: int, what: str = "gpu_wait_us") -> float | None:
    """Mean time per step of a rank's receives; None if it made too few."""
    mine = [
        (link.steps, getattr(link, what))
        for link in links
        if link.rank == rank and not link.is_send and getattr(link, what) is not None
    ]
    steps = sum(count for count, _ in mine)
    return sum(count * value for count, value in mine) / steps if steps >= _LEAST_STEPS else None


def _between(low: Ints, high: Ints) -> Floats:
    """Times between instants that are both known, and in this order."""
    known = (low != NULL_NS) & (high != NULL_NS) & (high >= low)
    return np.asarray(high[known] - low[known], np.float64)


def _covered(low: Ints, high: Ints) -> int:
    """Length of the union of intervals."""
    known = (low != NULL_NS) & (high != NULL_NS)
    return length(union(low[known], high[known]))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _us(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e3


NCCL: Final = derived("nccl", lambda whole: nccl_measures(whole.trace))
