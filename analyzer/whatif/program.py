"""What the ranks of a job do in consecutive steps, without their waiting: what a replay executes.

A rank is a sequence of *items*: it works for some time, then launches a message, waits for one, or
ends a step. Recorded waiting is not part of it: how long a rank waits is found by a replay. The
ranks' parts of one collective, or of one send and its receive, are an *exchange*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final, Protocol

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    FloatArray,
    IntArray,
    changes,
    distinct,
)
from ddltrace.analyzer.joined.dependencies import Graph
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.joined.rendezvous import is_gloo
from ddltrace.analyzer.measures.measure import JoinedSteps
from ddltrace.tracer.errors import TraceError

SIGNAL: Final = "signal"
"""The operation of an exchange that sends nothing: all its ranks have come to a point."""

BESIDE: Final = "beside"
"""The operation of an exchange that is work of a process beside the ranks, and no message."""

LAUNCH: Final = 0
WAIT: Final = 1
STEP_END: Final = 2
_GLOO_THREADS: Final = 2
"""Threads that a Gloo process group of PyTorch runs its messages on, one each."""

MOST_STEPS: Final = 50
"""Of a longer trace, the last steady steps that follow each other are replayed."""


@dataclass
class Exchange:
    """A collective, or a send and its receive.

    Attributes:
        op: The operation; ``send`` for a send and its receive.
        group: Name of the process group.
        queue: Messages of one queue start one after another; see `Program.in_flight`.
        places: Places of its ranks in `Program.ranks`, ascending, shape (members,).
        bytes: Of the whole vector; 0 if unknown.
        transfer: From its release to its end on each rank, ns, shape (members,).
        needs: Pairs of members of which the first cannot proceed before the second has come, shape
            (pairs, 2); None if every member needs all others.
        tensors: How many tensors it carries.
        step: Index of the step in which its first rank launches it.
        link_bytes: Bytes on its busiest link; None for those of its operation.
        rounds: Messages that follow each other; None for those of its operation.
        processor_ns: What it takes of processors, where it is measured; None for the overhead of
            its messages.
        encoded: Whether half of that comes before its data and half after them, as a codec's work
            does; else it goes on beside them.
        carried: Ids of the tensors that it carries, where they are known.
        ends: Of what a process beside the ranks sends, receives or does: a rank on the host that
            sends, and one on the host that receives.
        weight: Its share of a link that others use as well, relative to that of its size.
    """

    op: str
    group: str
    queue: int
    places: IntArray
    bytes: int
    transfer: FloatArray
    needs: IntArray | None
    tensors: int
    step: int
    link_bytes: float | None = None
    rounds: int | None = None
    processor_ns: float | None = None
    encoded: bool = False
    carried: tuple[int, ...] = ()
    ends: tuple[int, int] | None = None
    weight: float = 1.0


class Controller(Protocol):
    """Decides while a program is replayed when exchanges start that no rank launches."""

    def signalled(self, exchange: int) -> Sequence[int]:
        """All ranks have come to a point, which is an exchange whose operation is `SIGNAL`.

        Returns:
            The exchanges to start now, in order.
        """

    def completed(self, exchange: int) -> Sequence[int]:
        """An exchange has completed; returns those to start now, in order."""


@dataclass
class Items:
    """What one rank does, in its order.

    Attributes:
        kind: `LAUNCH`, `WAIT` or `STEP_END`.
        exchange: Index in `Program.exchanges`; `NULL` at the end of a step.
        work: The rank's own work before the item, ns.
        extra: After a launch, until the message reaches its queue; after a wait, until the rank
            goes on; ns.
        begin: When the work before the item began, ns in the trace.
        until: When it ended.
        step: Index of the step.
    """

    kind: IntArray
    exchange: IntArray
    work: FloatArray
    extra: FloatArray
    begin: IntArray
    until: IntArray
    step: IntArray


@dataclass
class Program:
    """Consecutive steps of a job.

    Attributes:
        ranks: Global ranks, ascending.
        hosts: Name of each rank's host.
        steps: Numbers of the steps. The first one leads in and is not measured, if there are more.
        items: What each rank does, one entry per rank.
        exchanges: All messages.
        in_flight: Queue -> how many of its messages are in flight at a time; without an entry, any
            number.
        begin: When each rank begins, ns after the first one, shape (ranks,).
        recorded: When each rank ended each step in the trace, ns after the first rank's begin,
            shape (steps, ranks).
        controller: Makes the controller of a replay; None if ranks launch all messages.
    """

    ranks: list[int]
    hosts: list[str]
    steps: IntArray
    items: list[Items]
    exchanges: list[Exchange]
    in_flight: dict[int, int]
    begin: FloatArray
    recorded: FloatArray
    controller: Callable[[], Controller] | None = None


def periods(ends: FloatArray | IntArray) -> FloatArray:
    """The time of each measured step: between the ends of two steps on their last ranks, ns.

    Args:
        ends: When each rank ends each step, shape (steps, ranks).
    """
    return np.asarray(np.diff(ends.max(axis=1)))


def find_program(joined: JoinedSteps) -> Program:
    """The program of the last steady steps of a trace.

    Raises:
        TraceError: The trace does not have two steps that all ranks completed.
    """
    steps = consecutive(joined, len(joined.scans))
    graph, messages = joined.graph, joined.joined.messages
    ranks = list(messages.ranks)
    bounds = [step_bounds(joined, rank, steps) for rank in ranks]
    origin = min(int(starts[0]) for starts, _ in bounds)
    exchange_of, exchanges = _exchanges(joined.joined, graph, ranks, bounds)
    items = [
        _items(joined, place, steps, bounds[place], exchange_of) for place in range(len(ranks))
    ]
    for each in items:
        _drop_early_waits(each, len(exchanges))
    return Program(
        ranks=ranks,
        hosts=[joined.trace.infos(rank)[-1].host for rank in ranks],
        steps=steps,
        items=items,
        exchanges=exchanges,
        in_flight=_in_flight(joined, exchange_of, exchanges),
        begin=np.array([float(starts[0] - origin) for starts, _ in bounds]),
        recorded=np.array([ends - origin for _, ends in bounds], dtype=np.float64).T,
    )


def consecutive(joined: JoinedSteps, ranks: int) -> IntArray:
    """The last steady steps that follow each other and that so many ranks completed: their numbers.

    Raises:
        TraceError: There are fewer than two.
    """
    steps = joined.steps
    whole = steps.steady & (steps.ranks == ranks)
    numbers = steps.number[whole][-MOST_STEPS:]
    gaps = np.flatnonzero(np.diff(numbers) != 1)
    numbers = numbers[gaps[-1] + 1 :] if len(gaps) else numbers
    if len(numbers) < 2:
        raise TraceError(
            "the trace has no two steady steps in a row that all ranks completed: nothing to replay"
        )
    return np.asarray(numbers)


def step_bounds(joined: JoinedSteps, rank: int, steps: IntArray) -> tuple[IntArray, IntArray]:
    """Starts and ends of the steps on a rank, ns."""
    scan = joined.scans[rank]
    place = np.searchsorted(scan.step, steps)
    return scan.step_start[place], scan.step_end[place]


def _exchanges(
    joined: Joined,
    graph: Graph,
    ranks: list[int],
    bounds: list[tuple[IntArray, IntArray]],
) -> tuple[IntArray, list[Exchange]]:
    """The exchanges within the steps, and the one of each message; `NULL` for none."""
    messages, count = joined.messages, len(joined.messages)
    place = np.searchsorted(ranks, messages.rank)
    first = np.array([starts[0] for starts, _ in bounds])
    last = np.array([ends[-1] for _, ends in bounds])
    at = graph.handed_over
    inside = (at >= first[place]) & (at < last[place]) & (messages.end != NULL_NS)
    # One number for the parts of a collective, and one for a send and its receive.
    pair = np.where(joined.partner == NULL, np.arange(count), joined.partner)
    pair = np.minimum(pair, np.arange(count)) + len(joined.collectives)
    number = np.where(joined.collective == NULL, pair, joined.collective)
    rows = np.flatnonzero(inside)
    rows = rows[np.lexsort((place[rows], number[rows]))]
    begins = np.flatnonzero(changes(number[rows]))
    _, transfer = joined.wait_and_transfer()
    whole = messages.end - messages.start
    transfer = np.where(transfer == NULL, whole, np.maximum(transfer, 0)).astype(np.float64)
    pairs = _needs(joined, graph)
    alone = np.zeros(count, dtype=bool)
    alone[list(pairs)] = True
    found = np.full(count, NULL)
    exchanges: list[Exchange] = []
    for low, high in pairwise([*begins.tolist(), len(rows)]):
        mine = rows[low:high]
        # A rank that takes part twice was recorded wrongly; its first part counts.
        mine = mine[changes(place[mine])]
        found[mine] = len(exchanges)
        row = int(mine[0])
        collective = int(joined.collective[row])
        size = int(joined.collectives.size[collective]) if collective != NULL else 0
        if collective == NULL:
            size = int(max(messages.bytes[mine].max(), messages.out_bytes[mine].max()))
        op = messages.ops[messages.op[row]]
        step = np.searchsorted(bounds[place[row]][1], at[row], side="right")
        exchanges.append(
            Exchange(
                op="send" if bool(messages.is_p2p[row]) else op,
                group=messages.groups[messages.group[row]],
                queue=int(messages.group[row]) if collective != NULL else -1 - len(exchanges),
                places=place[mine],
                bytes=max(size, 0),
                transfer=transfer[mine],
                needs=_pairs_of(mine, pairs) if alone[mine].any() else None,
                tensors=int(messages.tensor_count[mine].max()),
                step=int(step),
            )
        )
    return found, exchanges


def _in_flight(
    joined: JoinedSteps, exchange_of: IntArray, exchanges: list[Exchange]
) -> dict[int, int]:
    """How many messages of a queue are in flight at a time: the most that were, where some waited.

    Gloo runs at least two messages of a process group at a time, NCCL one in each stream.
    """
    messages, trace = joined.joined.messages, joined.trace
    queue = np.array([*(each.queue for each in exchanges), NULL])[exchange_of]
    waited = (exchange_of != NULL) & (joined.graph.former != NULL)
    limited = set(distinct(queue[waited]).tolist())
    device = trace.infos(trace.ranks[0])[-1].device or "cpu"
    gloo = {
        each.queue
        for each in exchanges
        if each.queue >= 0 and is_gloo(trace.group_backend(each.group), device)
    }
    found: dict[int, int] = {}
    for number in sorted(limited | gloo):
        rows = np.flatnonzero((exchange_of != NULL) & (queue == number))
        time = np.concatenate([messages.end[rows], messages.start[rows]])
        change = np.repeat([-1, 1], len(rows))
        order = np.lexsort((change, time, np.tile(messages.rank[rows], 2)))
        most = int(np.cumsum(change[order]).max(initial=1))
        found[number] = max(most, _GLOO_THREADS) if number in gloo else most
    return found


def _needs(joined: Joined, graph: Graph) -> dict[int, list[int]]:
    """Row -> the other rows that it needs, for messages that do not need all ranks."""
    found: dict[int, list[int]] = {}
    own = np.flatnonzero((graph.join != NULL) & (joined.is_single | joined.messages.is_p2p))
    for row in own.tolist():
        join = int(graph.join[row])
        rows = graph.rows[graph.first[join] : graph.first[join + 1]]
        found[row] = [other for other in rows.tolist() if other != row]
    for row in np.flatnonzero(graph.join == NULL).tolist():
        found[row] = []
    return found


def _pairs_of(rows: IntArray, needs: Mapping[int, list[int]]) -> IntArray:
    """Which parts of an exchange need which others, as `Exchange.needs`."""
    member = {row: place for place, row in enumerate(rows.tolist())}
    pairs = [
        (member[row], member[other])
        for row in member
        for other in needs.get(row, member)
        if other in member and other != row
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _items(
    joined: JoinedSteps,
    place: int,
    steps: IntArray,
    bounds: tuple[IntArray, IntArray],
    exchange_of: IntArray,
) -> Items:
    """The items of one rank."""
    graph, messages = joined.graph, joined.joined.messages
    rank = messages.ranks[place]
    starts, ends = bounds
    rows = np.arange(joined.joined.rows(rank).start, joined.joined.rows(rank).stop)
    rows = rows[exchange_of[rows] != NULL]
    launch = np.maximum(graph.handed_over[rows], starts[0])
    # Where it did not wait for the end of another message, its way to the queue takes its time.
    delay = np.where(
        graph.former[rows] == NULL, np.maximum(messages.start[rows] - launch, 0), 0
    ).astype(np.int64)
    blocks = graph.blocks
    mine = np.arange(blocks.of(place).start, blocks.of(place).stop)
    mine = mine[(blocks.start[mine] >= starts[0]) & (blocks.end[mine] <= ends[-1])]
    mine = mine[(blocks.message[mine] != NULL) & ~graph.done[mine]]
    mine = mine[exchange_of[blocks.message[mine]] != NULL]
    waited = blocks.message[mine]
    known = messages.end[waited] <= blocks.end[mine] + graph.tolerance_ns
    known &= messages.end[waited] > blocks.start[mine]
    mine, waited = mine[known], waited[known]
    block_start, block_end = blocks.start[mine], blocks.end[mine]
    # A message that is launched by another thread while this one is blocked on an earlier one.
    holding = np.searchsorted(block_start, launch, side="right") - 1
    inside = (holding >= 0) & (launch < np.append(block_end, 0)[holding])
    same = inside & (np.append(waited, NULL)[holding] == rows)
    block_start = block_start.copy()
    np.maximum.at(block_start, holding[same], launch[same])
    earlier = inside & ~same
    behind = launch - np.append(block_start, 0)[holding]
    delay[earlier] += np.maximum(behind[earlier], 0)
    launch = np.where(earlier, np.minimum(launch, np.append(block_start, 0)[holding]), launch)
    added = _implied_waits(joined, rank, rows=rows, launch=launch, block_end=block_end, ends=ends)
    kind = np.concatenate(
        [
            np.full(len(rows), LAUNCH),
            np.full(len(mine), WAIT),
            np.full(len(added[0]), WAIT),
            np.full(len(ends), STEP_END),
        ]
    )
    exchange = np.concatenate(
        [exchange_of[rows], exchange_of[waited], exchange_of[added[0]], np.full(len(ends), NULL)]
    )
    time = np.concatenate([launch, block_start, added[1], ends])
    after = np.concatenate([launch, block_end, added[1], ends])
    lag = np.maximum(block_end - np.maximum(messages.end[waited], block_start), 0)
    nothing = np.zeros(len(added[0]) + len(ends), dtype=np.int64)
    extra = np.concatenate([delay, lag, nothing])
    order = np.lexsort((kind, time))
    begin = np.append(starts[:1], np.maximum.accumulate(after[order])[:-1])
    until = np.maximum(time[order], begin)
    return Items(
        kind=kind[order],
        exchange=exchange[order],
        work=(until - begin).astype(np.float64),
        extra=extra[order].astype(np.float64),
        begin=begin,
        until=until,
        step=np.searchsorted(ends, time[order], side="left"),
    )


def _implied_waits(
    joined: JoinedSteps,
    rank: int,
    *,
    rows: IntArray,
    launch: IntArray,
    block_end: IntArray,
    ends: IntArray,
) -> tuple[IntArray, IntArray]:
    """Waits that the trace does not show because the message was complete: rows, and when.

    A message that was complete when its rank came to wait for it was not waited for. If messages
    take longer, the rank waits: for what carries tensors where its optimizer begins, and for
    everything at the latest where it was blocked for the last time in the step, or at the end.
    """
    messages = joined.joined.messages
    update = joined.work[rank]["update"].start
    step = np.searchsorted(ends, launch, side="right")
    end_of_step = ends[np.minimum(step, len(ends) - 1)]
    place = np.searchsorted(update, np.maximum(launch, messages.end[rows]))
    begins = np.append(update, np.iinfo(np.int64).max)[place]
    # The rank's last block that ends in the step: it waited for all before it then.
    last = np.searchsorted(block_end, end_of_step, side="right") - 1
    blocked = np.append(block_end, 0)[last]
    until = np.where((last >= 0) & (blocked > messages.end[rows]), blocked, end_of_step)
    when = np.where((messages.tensor_count[rows] > 0) & (begins <= end_of_step), begins, until)
    kept = (messages.end[rows] <= when) & (step < len(ends))
    return rows[kept], when[kept]


def _drop_early_waits(items: Items, exchanges: int) -> None:
    """Takes out a rank's waits for messages that it launches later, or not at all."""
    launched = np.full(exchanges + 1, np.iinfo(np.int64).max)
    launches = np.flatnonzero(items.kind == LAUNCH)
    launched[items.exchange[launches]] = launches
    early = (items.kind == WAIT) & (launched[items.exchange] > np.arange(len(items.kind)))
    for place in np.flatnonzero(early).tolist():  # rare; its work goes to the next item
        if place + 1 < len(items.kind):
            items.work[place + 1] += items.work[place]
    for each in fields(items):
        setattr(items, each.name, getattr(items, each.name)[~early])
