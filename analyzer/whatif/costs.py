"""How long a message takes on another network, or among more ranks.

The data that an operation of ``p`` ranks moves over the busiest link, for a vector of ``n`` bytes,
and how many messages follow each other:

| operation | bytes | messages |
|---|---|---|
| all_reduce (ring) | 2 (p - 1) / p n | 2 (p - 1) |
| all_gather, reduce_scatter, all_to_all, gather, scatter | (p - 1) / p n | p - 1 |
| broadcast, reduce (binomial tree) | ceil(log2 p) n | ceil(log2 p) |
| send | n | 1 |

On a GPU, time = messages x overhead + bytes / bandwidth. With Gloo, whose ring has two segments in
flight, the overhead is work of processors, most of which goes on while data is on its way. A
message takes what is longer: messages x overhead on the processors of its machines, or bytes /
bandwidth and a part of that work on the links. Messages in flight at the same time share both: the
links in proportion to what each sends before it waits for an answer, bytes / messages, because Gloo
sends everything between two ranks over one connection, in order. On 4 emulated hosts that share two
cores, all_reduces of 1 to 64 KiB take some 4 ms whatever their size, and those of 1 MiB or more
within 2 % of bytes / bandwidth (``ddltrace experiment calibrate``).

The latency of the network, which a question may give, comes before the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.collectives import bus_factor
from ddltrace.analyzer.whatif.program import Exchange, Program
from ddltrace.analyzer.whatif.replay import Demand, LinkUse, Replayed

PAYLOAD: Final = 1448 / 1514
"""Part of an Ethernet frame of 1,514 bytes that TCP with time stamps over IPv4 fills with data."""

HIDDEN: Final = (0.75, 0.5, 1.0)
"""How much of the processors' work for a message data hides: likely, least and most.

Of a message alone, nearly all. In steps, where ranks compute besides, the likely share gave the
least errors on emulated links (docs/whatif-accuracy.md)."""

SMALL: Final = 4096
"""Bytes of a vector whose transfer is all overhead."""

_TREES: Final = ("broadcast", "reduce")
_SPREAD: Final = 4
_LEAST: Final = 4
_ROUNDS: Final = 3
_CLOSE: Final = 0.02


def bytes_on_link(op: str, ranks: int, size: float) -> float:
    """Bytes that the busiest link carries; see the module."""
    if ranks < 2:
        return 0.0
    return (math.ceil(math.log2(ranks)) if op in _TREES else bus_factor(op, ranks)) * size


def messages_in_a_row(op: str, ranks: int) -> int:
    """How many messages of the operation follow each other; see the module."""
    if ranks < 2:
        return 0
    if op == "all_reduce":
        return 2 * (ranks - 1)
    if op in _TREES:
        return math.ceil(math.log2(ranks))
    return 1 if op == "send" else ranks - 1


@dataclass(frozen=True)
class Network:
    """What messages cost.

    Attributes:
        overhead_ns: What the ranks do for one message.
        ns_per_byte: Of the busiest link.
        hosts: The host of each rank, numbered.
        machines: The machine of each rank whose processors do that, numbered; empty if the device
            does.
        latency_ns: Of one message on its way, beside other messages.
        hidden: How much of the processors' work goes on beside data.
        scale: By which factor that work differs from what is known of it.
    """

    overhead_ns: float
    ns_per_byte: float
    hosts: tuple[int, ...]
    machines: tuple[int, ...] = ()
    latency_ns: float = 0.0
    hidden: float = HIDDEN[0]
    scale: float = 1.0

    def alone_ns(self, rounds: int, size: float) -> float:
        """How long messages that follow each other take with their bytes, beside no others."""
        overhead, data = rounds * self.overhead_ns, size * self.ns_per_byte
        if not self.machines:
            return overhead + data
        return max(overhead, data + (1 - self.hidden) * overhead)

    def use(self, exchange: Exchange) -> LinkUse:
        """What an exchange costs on the links of its hosts; within a host, on the host's memory."""
        places = exchange.places.tolist()
        size, rounds = exchange.link_bytes, exchange.rounds
        if size is None:
            size = bytes_on_link(exchange.op, len(places), exchange.bytes)
        if rounds is None:
            rounds = messages_in_a_row(exchange.op, len(places))
        links = self._links(exchange)
        work, data = self.processor_ns(exchange), size * self.ns_per_byte
        if self.machines:
            at = exchange.ends or places
            processors = tuple(sorted({-1 - self.machines[place] for place in at}))
            flows = data + (1 - self.hidden) * work if data else 0.0
            weight = exchange.weight * size / max(rounds, 1)
            demands = [Demand(links, flows, weight), Demand(processors, work)]
            if exchange.encoded:
                coding = Demand(processors, work / 2)
                demands = [coding, Demand(links, data, weight), coding]
        else:
            demands = [Demand(links, work + data)]
        met = tuple(demand for demand in demands if demand.busy_ns and demand.resources)
        return LinkUse(rounds * self.latency_ns, met, in_turn=exchange.encoded)

    def _links(self, exchange: Exchange) -> tuple[int, ...]:
        """The links that it uses: of processes beside the ranks, each direction of one by itself.

        Messages between two processes of a host use none, unless there is only that host.
        """
        if exchange.ends is None:
            return tuple(sorted({self.hosts[place] for place in exchange.places.tolist()}))
        source, target = (self.hosts[place] for place in exchange.ends)
        count = max(self.hosts) + 1
        if source != target:
            return source, target + count
        return () if count > 1 else (source,)

    def processor_ns(self, exchange: Exchange) -> float:
        """What an exchange takes of processors, or of the device, beside its data."""
        if exchange.processor_ns is not None:
            return exchange.processor_ns * self.scale
        rounds = exchange.rounds
        if rounds is None:
            rounds = messages_in_a_row(exchange.op, len(exchange.places))
        return rounds * self.overhead_ns * self.scale


def small_overheads(joined: Joined) -> tuple[float, float, float]:
    """The overhead of one message by the trace's small collectives: likely, least and most, ns.

    Also by those before the first step, such as DDP's checks of the parameters. First messages of a
    group are slower than later ones: the lower quartile is the likely one, the median the most.
    Zero if there are none.
    """
    collectives, messages = joined.collectives, joined.messages
    transfer = collectives.end - collectives.last
    small = collectives.timed & (collectives.ranks > 1) & (collectives.size <= SMALL)
    rows = np.flatnonzero(small & (transfer > 0))
    if not len(rows):
        return 0.0, 0.0, 0.0
    rounds = [
        messages_in_a_row(messages.ops[collectives.op[row]], int(collectives.ranks[row]))
        for row in rows.tolist()
    ]
    likely, least, most = np.quantile(transfer[rows] / np.array(rounds), (0.25, 0.0, 0.5))
    return float(likely), float(least), float(most)


def fit(
    program: Program,
    replayed: Replayed,
    hosts: tuple[int, ...],
    machines: tuple[int, ...],
    overhead_ns: float,
    *,
    is_measured: bool = False,
) -> Network | None:
    """The overhead and bandwidth that the messages of a trace had; None if it has none with sizes.

    Args:
        replayed: Its replay with recorded transfers.
        hosts: As in `Network`.
        machines: As in `Network`.
        overhead_ns: Of one message, by `small_overheads` or a calibration.
        is_measured: Whether that counts in any case; else only where the messages of the program
            are too much alike to tell overhead from bandwidth.
    """
    rows = [
        (each, released, done)
        for each, (released, done) in zip(program.exchanges, replayed.spans, strict=True)
        if each.bytes and len(each.places) > 1 and done > released
    ]
    if not rows:
        return None
    begin, end = (np.array([row[k] for row in rows], dtype=np.float64) for k in (1, 2))
    size = np.array([bytes_on_link(e.op, len(e.places), e.bytes) for e, _, _ in rows])
    count = np.array([messages_in_a_row(e.op, len(e.places)) for e, _, _ in rows], dtype=float)
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, begin[order][1:] >= reach[:-1]))
    time = np.maximum.reduceat(end[order], first) - begin[order][first]
    size = np.add.reduceat(size[order], first)
    count = np.add.reduceat(count[order], first)
    ratio = size / count
    if not is_measured and len(time) >= _LEAST and ratio.max() >= _SPREAD * ratio.min():
        found = _larger_of(time, size, count) if machines else _sum_of(time, size, count)
        if found is not None:
            return Network(*found, hosts, machines)
    large = size >= size.max() / 2
    shown = 1 - HIDDEN[0] if machines else 1.0
    rest = np.maximum(time[large] - shown * overhead_ns * count[large], 0.0)
    return Network(overhead_ns, float(np.median(rest / size[large])), hosts, machines)


def _sum_of(time: FloatArray, size: FloatArray, count: FloatArray) -> tuple[float, float] | None:
    """Overhead of a message and time of a byte of the least relative error of their sum.

    None if one of them would be negative.
    """
    terms = np.stack([count, size], axis=1) / time[:, None]
    weight = np.ones(len(time))
    for _ in range(_ROUNDS):  # reweighted: the least absolute error, which outliers do not move
        found, *_ = np.linalg.lstsq(terms * weight[:, None], weight, rcond=None)
        weight = 1 / np.sqrt(np.maximum(np.abs(terms @ found - 1), _CLOSE))
    return (float(found[0]), float(found[1])) if found.min() >= 0 else None


def _larger_of(time: FloatArray, size: FloatArray, count: FloatArray) -> tuple[float, float] | None:
    """Overhead of a message and time of a byte if the larger one of both is the time.

    None if all times are explained by one of them.
    """
    ratio = size / count
    by_bytes = ratio >= np.sqrt(ratio.max() * ratio.min())
    for _ in range(_ROUNDS):
        if by_bytes.all() or not by_bytes.any():
            return None
        per_byte = float(np.median(time[by_bytes] / size[by_bytes]))
        overhead = float(np.median(time[~by_bytes] / count[~by_bytes]))
        by_bytes = per_byte * size > overhead * count
    return overhead, per_byte
