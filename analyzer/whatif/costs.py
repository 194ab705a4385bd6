"""How long a message takes on another network, or among more ranks.

The data that an operation of ``p`` ranks moves over the busiest link, for a vector of ``n`` bytes,
and how many messages follow each other:

| operation | bytes | messages |
|---|---|---|
| all_reduce (ring) | 2 (p - 1) / p n | 2 (p - 1) |
| all_gather, reduce_scatter, all_to_all, gather, scatter | (p - 1) / p n | p - 1 |
| broadcast, reduce (binomial tree) | ceil(log2 p) n | ceil(log2 p) |
| send | n | 1 |

Time = messages x overhead + bytes / bandwidth. Both are fitted to the trace: from the times in
which at least one message was under way, because messages that share a link are slower than alone.
The overhead of a message, work of its ranks, is not hidden by other messages: with Gloo on
4 hosts at 400 Mbit/s, 14 messages in place of 2 take 22 ms more, nearly 2 ms each, though two are
in flight (`wfbp` in benchmarks/whatif-ledger.jsonl). The latency of the network, which a question
may give, is hidden.
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
from ddltrace.analyzer.whatif.replay import LinkUse, Replayed

PAYLOAD: Final = 1448 / 1514
"""Part of an Ethernet frame of 1,514 bytes that TCP with time stamps over IPv4 fills with data."""

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
        overhead_ns: What the ranks do for one message; other messages wait for it.
        ns_per_byte: Of the busiest link.
        hosts: The host of each rank, numbered.
        latency_ns: Of one message on its way, beside other messages.
    """

    overhead_ns: float
    ns_per_byte: float
    hosts: tuple[int, ...]
    latency_ns: float = 0.0

    def use(self, exchange: Exchange) -> LinkUse:
        """What an exchange costs on the links of its hosts; within a host, on the host's memory."""
        ranks = len(exchange.places)
        size, rounds = exchange.link_bytes, exchange.rounds
        if size is None:
            size = bytes_on_link(exchange.op, ranks, exchange.bytes)
        if rounds is None:
            rounds = messages_in_a_row(exchange.op, ranks)
        links = tuple(sorted({self.hosts[place] for place in exchange.places.tolist()}))
        return LinkUse(
            rounds * self.latency_ns,
            links,
            rounds * self.overhead_ns + size * self.ns_per_byte,
        )


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
    overhead_ns: float,
    *,
    is_measured: bool = False,
) -> Network | None:
    """The overhead and bandwidth that the messages of a trace had; None if it has none with sizes.

    Args:
        program: The program.
        replayed: Its replay with recorded transfers.
        hosts: As in `Network`.
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
    if not is_measured:
        found = _overhead_and_rate(time, size, count)
        if found is not None:
            return Network(*found, hosts)
    large = size >= size.max() / 2
    rest = np.maximum(time[large] - overhead_ns * count[large], 0.0)
    return Network(overhead_ns, float(np.median(rest / size[large])), hosts)


def _overhead_and_rate(
    time: FloatArray, size: FloatArray, count: FloatArray
) -> tuple[float, float] | None:
    """Overhead of a message and time of a byte of the least relative error.

    None where all times have about as many bytes for each message and so do not tell one from the
    other, or one of them would be negative.
    """
    ratio = size / count
    if len(time) < _LEAST or ratio.max() < _SPREAD * ratio.min():
        return None
    terms = np.stack([count, size], axis=1) / time[:, None]
    weight = np.ones(len(time))
    for _ in range(_ROUNDS):  # reweighted: the least absolute error, which outliers do not move
        found, *_ = np.linalg.lstsq(terms * weight[:, None], weight, rcond=None)
        weight = 1 / np.sqrt(np.maximum(np.abs(terms @ found - 1), _CLOSE))
    return (float(found[0]), float(found[1])) if found.min() >= 0 else None
