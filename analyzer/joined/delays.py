"""Delay analysis: attributes waiting, through messages, to the rank and activity that caused it.

When rank A waits for rank B, both have worked since their last common message. The activities on
which B spent more time than A in this period delayed B. If B itself waited longer for another
rank, this is not a cause: that part of A's waiting is attributed to the cause of B's waiting, and
so on. This is the delay analysis of Böhme, Geimer, Wolf and Arnold ("Identifying the Root Causes of
Wait States in Large-Scale Parallel Applications", ICPP 2010), as implemented in Scalasca, on the
times of a trace: waiting that an activity causes itself is *direct* (short-term in the paper),
waiting that it causes through other waiting ranks is *propagated* (long-term).

Waiting of a rank: the time in which it is blocked on a message that another rank has not yet
entered. Each instant of waiting is divided among causes in proportion to the excess time of each
activity, so direct and propagated waiting of all causes sum to all waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    BoolArray,
    ColumnTable,
    FloatArray,
    IntArray,
    by_place,
)
from ddltrace.analyzer.events.interval_sets import Spans, lengths_within
from ddltrace.analyzer.events.own_work import ACTIVITIES
from ddltrace.analyzer.joined.dependencies import Graph, other_sides
from ddltrace.analyzer.joined.join import Joined, rows_of

CAUSES: Final = (*ACTIVITIES, "transfer")
"""Activities in which lateness can begin; ``transfer`` is a message that took longer."""

_HOPS: Final = 64
"""Maximum number of messages that the search for a common message of two ranks goes back."""

_TRANSFER: Final = len(ACTIVITIES)
_WAITING: Final = len(CAUSES)


class _Windows(NamedTuple):
    """Windows of ranks.

    Attributes:
        place: Index of each one's rank in `Blocks.ranks`; `NULL` for none.
        since: Its start, ns.
        until: Its end.
    """

    place: IntArray
    since: IntArray
    until: IntArray


@dataclass(frozen=True)
class Delays(ColumnTable):
    """The waits of all ranks and their causes; one entry per wait.

    Attributes:
        block: Index of the block.
        rank: The waiting rank.
        cause_rank: The rank that is waited for.
        waiting: Duration, ns.
        start: Start of the wait.
        since: When the rank that is waited for last had a common message with the waiting rank.
        came: When it arrived.
        excess: By how much longer it spent on each of `CAUSES`, ns, shape (waits, causes).
        direct: The part of each wait that is due to each of `CAUSES`, shape (waits, causes).
        propagated: The waiting of other ranks that follows from this wait, by cause, same shape.
        link: For waiting due to ``transfer``: the rank that sent the longest transfer; `NULL` for
            a collective.
    """

    block: IntArray
    rank: IntArray
    cause_rank: IntArray
    waiting: IntArray
    start: IntArray
    since: IntArray
    came: IntArray
    excess: IntArray
    direct: FloatArray
    propagated: FloatArray
    link: IntArray


def find_delays(
    graph: Graph,
    joined: Joined,
    work: Mapping[int, Mapping[str, Spans]],
    counted: BoolArray,
) -> Delays:
    """Finds the causes of all waiting.

    Args:
        graph: The dependency graph.
        joined: All messages.
        work: Each rank's own work by activity.
        counted: Whether the waiting in each block counts; what does not still hands on.
    """
    blocks, messages = graph.blocks, joined.messages
    other = other_sides(joined)
    row = blocks.message
    released = np.append(joined.released, NULL_NS)[row]
    blamed = np.append(other, NULL)[row]
    block = np.flatnonzero((blamed != NULL) & (released > blocks.start) & (row != NULL))
    until = np.minimum(released[block], blocks.end[block])
    waiting = until - blocks.start[block]
    cause_row = blamed[block]
    since, since_other = _last_in_common(graph, joined, block, cause_row)
    came = graph.handed_over[cause_row]
    since_other = np.minimum(since_other, came)
    place = blocks.place[block]
    cause_place = np.searchsorted(blocks.ranks, messages.rank[cause_row])
    own_blocks = by_place(place, len(blocks.ranks))
    kinds = [
        (work[rank], Spans(blocks.start[block[mine]], until[mine]))
        for rank, mine in zip(blocks.ranks, own_blocks, strict=True)
    ]
    own = _spent(graph, kinds, place, since, blocks.start[block])
    theirs = _spent(graph, kinds, cause_place, since_other, came)
    # What keeps a message in its queue, after it was handed over, is other messages.
    theirs[:, _TRANSFER] += messages.start[cause_row] - came
    excess = np.maximum(theirs - own, 0)
    total = excess.sum(axis=1)
    # Where nothing took longer, the cause is the time between the activities.
    between = _between(work, blocks.ranks)[cause_place]
    unclear = np.flatnonzero(total == 0)
    excess[unclear, between[unclear]] = 1
    share = excess / excess.sum(axis=1, keepdims=True)
    cost = np.where(counted[block], waiting, 0).astype(np.float64)
    window = _Windows(cause_place, since_other, came)
    handed_on = _propagate(graph, block, window, cost, share[:, _WAITING])
    # What can be handed on to no wait stays with the rank that was waited for.
    lost = np.flatnonzero(handed_on.lost)
    share[lost, between[lost]] += share[lost, _WAITING]
    direct = cost[:, None] * share[:, :_WAITING]
    propagated = handed_on.received[:, None] * share[:, :_WAITING]
    return Delays(
        block=block,
        rank=messages.rank[row[block]],
        cause_rank=messages.rank[cause_row],
        waiting=np.where(counted[block], waiting, 0),
        start=blocks.start[block],
        since=since_other,
        came=came,
        excess=excess[:, :_WAITING],
        direct=direct,
        propagated=propagated,
        link=_links(
            graph,
            joined,
            window._replace(place=np.where(excess[:, _TRANSFER] > 0, cause_place, NULL)),
        ),
    )


def _between(work: Mapping[int, Mapping[str, Spans]], ranks: Sequence[int]) -> IntArray:
    """The cause that stands for unknown activities of each rank: host code, if it is recorded."""
    names = ["unrecorded" if len(work[rank]["unrecorded"].start) else "host" for rank in ranks]
    return np.array([ACTIVITIES.index(name) for name in names], dtype=np.int64)


def _last_in_common(
    graph: Graph, joined: Joined, block: IntArray, cause_row: IntArray
) -> tuple[IntArray, IntArray]:
    """When both ranks of each wait last went on after a message that they had in common.

    That is the last message of the same group, or between the same two ranks, or a later one of
    all ranks, that the waiting rank was blocked on, and that the other was not blocked on any
    more when it came. (A bucket that it had launched, but waits for only later, is none.)

    Returns:
        The time on the rank that waits and on the one that is waited for; without such a message
        the earliest of all.
    """
    blocks, messages = graph.blocks, joined.messages
    row = blocks.message
    known = row != NULL
    before = _former_blocks(graph, joined)
    waited = np.full(len(messages) + 1, NULL)
    waited[row[known]] = np.flatnonzero(known)
    # Index -1 of both is for what is not known.
    ends, handed_over = np.append(blocks.end, NULL_NS), np.append(graph.handed_over, NULL_NS)
    at_once = np.append(messages.is_p2p | (messages.end == messages.start), False)
    cause_rank, came = messages.rank[cause_row], graph.handed_over[cause_row]
    since, since_other = np.full(len(block), NULL_NS), np.full(len(block), NULL_NS)
    common, left = before[block], np.arange(len(block))
    for hop in range(_HOPS):
        left = left[common[left] != NULL]
        if not len(left):
            break
        theirs = _same_message(joined, row[common[left]], cause_rank[left])
        at = waited[theirs]
        time = np.where(at != NULL, ends[at], handed_over[theirs])
        found = (time != NULL_NS) & (time <= came[left])
        # Who was not blocked on a collective may have launched it only; sends are never waited for.
        found &= (at != NULL) | at_once[theirs] | (hop == _HOPS - 1)
        # Where not all ranks need each other, the other may have waited for a third one after that.
        end = ends[common[left]]
        time = np.where(joined.is_single[row[common[left]]], np.minimum(time, end), time)
        since[left[found]], since_other[left[found]] = end[found], time[found]
        left = left[~found]
        common[left] = before[common[left]]
    first = min(int(blocks.start.min(initial=0)), int(graph.handed_over.min(initial=0)))
    none = since == NULL_NS
    return np.where(none, first, since), np.where(none, first, since_other)


def _former_blocks(graph: Graph, joined: Joined) -> IntArray:
    """For each block the last one of its rank that synchronizes the same ranks, or all ranks.

    That is one on a message of the same group, or with the same peer, or of all ranks; `NULL`
    for none.
    """
    blocks, messages = graph.blocks, joined.messages
    row = blocks.message
    known = row != NULL
    collective = np.append(joined.collective, NULL)[row]
    group, peer = np.append(messages.group, NULL)[row], np.append(messages.peer, NULL)[row]
    beyond = len(messages.groups) + 1
    key = np.where(collective != NULL, group, beyond + peer + 1)
    key = np.where(known, key, NULL)
    order = np.lexsort((np.arange(len(blocks)), key, blocks.place))
    former = np.full(len(blocks), NULL)
    same = key[order][1:] == key[order][:-1]
    same &= (blocks.place[order][1:] == blocks.place[order][:-1]) & (key[order][1:] != NULL)
    former[order[1:][same]] = order[:-1][same]
    sizes = np.append(messages.group_size, 0)
    of_all = (collective != NULL) & (sizes[group] == len(blocks.ranks))
    last = np.maximum.accumulate(np.where(of_all, np.arange(len(blocks)), NULL))
    last = np.append(NULL, last)[: len(blocks)]
    last = np.where(last >= blocks.first[blocks.place], last, NULL)
    return np.asarray(np.maximum(former, last))


def _same_message(joined: Joined, message: IntArray, rank: IntArray) -> IntArray:
    """Row of each message on another of its ranks; `NULL` where that is not known."""
    messages = joined.messages
    found = np.append(joined.partner, NULL)[message]
    found = np.where((found != NULL) & (np.append(messages.rank, NULL)[found] == rank), found, NULL)
    collective = np.append(joined.collective, NULL)[message]
    rows = np.flatnonzero(collective != NULL)
    found[rows] = rows_of(
        joined.order, joined.collective, messages.rank, collective[rows], rank[rows]
    )
    return found


def _spent(
    graph: Graph,
    kinds: Sequence[tuple[Mapping[str, Spans], Spans]],
    place: IntArray,
    since: IntArray,
    until: IntArray,
) -> IntArray:
    """Returns the time of ranks in windows for each of `CAUSES` and for waiting, ns.

    Args:
        graph: Has the blocks.
        kinds: For each rank, its own work by activity and its waiting for other ranks.
        place: The rank of each window.
        since: The start of each window.
        until: Its end.
    """
    blocks = graph.blocks
    found = np.zeros((len(place), len(CAUSES) + 1), dtype=np.int64)
    for rank, mine in enumerate(by_place(place, len(blocks.ranks))):
        begin = since[mine]
        end = np.maximum(until[mine], begin)
        work, waits = kinds[rank]
        for number, name in enumerate(ACTIVITIES):
            found[mine, number] = lengths_within(work[name], begin, end)
        found[mine, _WAITING] = lengths_within(waits, begin, end)
        own = blocks.of(rank)
        blocked = lengths_within(Spans(blocks.start[own], blocks.end[own]), begin, end)
        found[mine, _TRANSFER] = blocked - found[mine, _WAITING]
    return found


@dataclass(frozen=True)
class _Propagated:
    """The waiting of other ranks that is propagated to waits.

    Attributes:
        received: Waiting propagated to each wait, ns.
        lost: Which waits could not propagate anything.
    """

    received: FloatArray
    lost: BoolArray


def _propagate(
    graph: Graph,
    block: IntArray,
    window: _Windows,
    cost: FloatArray,
    share: FloatArray,
) -> _Propagated:
    """Propagates waiting to the waits that cause it, those with most dependencies first.

    Args:
        graph: Has the levels: a wait depends on waits of lower levels only.
        block: The block of each wait, ascending.
        window: When the own waits of the rank that is waited for delayed it.
        cost: Duration of each wait.
        share: How much of it is handed on.
    """
    blocks = graph.blocks
    wait_place = blocks.place[block]
    begins = np.searchsorted(wait_place, np.arange(len(blocks.ranks) + 1))
    low, high = np.zeros(len(block), np.int64), np.zeros(len(block), np.int64)
    start, end = blocks.start[block], blocks.end[block]
    for place, mine in enumerate(by_place(window.place, len(blocks.ranks))):
        own = slice(begins[place], begins[place + 1])
        low[mine] = begins[place] + np.searchsorted(end[own], window.since[mine], side="right")
        high[mine] = begins[place] + np.searchsorted(start[own], window.until[mine], side="left")
    handing = np.flatnonzero(share > 0)
    order = handing[np.argsort(-graph.block_level[block[handing]], kind="stable")]
    lows, highs, shares = low.tolist(), high.tolist(), share.tolist()
    starts, ends = start.tolist(), end.tolist()
    since, until = window.since.tolist(), window.until.tolist()
    received, costs, lost = [0.0] * len(block), cost.tolist(), [False] * len(block)
    for wait in order.tolist():
        amount = (costs[wait] + received[wait]) * shares[wait]
        if not amount:
            continue
        first, beyond = lows[wait], highs[wait]
        if beyond == first + 1:
            received[first] += amount
            continue
        lengths = [
            min(ends[each], until[wait]) - max(starts[each], since[wait])
            for each in range(first, beyond)
        ]
        whole = sum(lengths)
        if not whole:
            lost[wait] = True
            continue
        for each, length in enumerate(lengths, start=first):
            received[each] += amount * length / whole
    return _Propagated(np.array(received), np.array(lost))


def _links(graph: Graph, joined: Joined, window: _Windows) -> IntArray:
    """The other side of the longest transfer in each window of a rank.

    `NULL` where that is a collective, and for windows of no rank.
    """
    blocks, messages = graph.blocks, joined.messages
    released = np.append(joined.released, NULL_NS)[blocks.message]
    moving = blocks.end - np.clip(released, blocks.start, blocks.end)
    peer = np.append(np.where(messages.is_p2p, messages.peer, NULL), NULL)[blocks.message]
    link = np.full(len(window.place), NULL)
    for place, mine in enumerate(by_place(window.place, len(blocks.ranks))):
        own = blocks.of(place)
        low = np.searchsorted(blocks.end[own], window.since[mine], side="right") + own.start
        high = np.searchsorted(blocks.start[own], window.until[mine], side="left") + own.start
        for wait, first, beyond in zip(mine.tolist(), low.tolist(), high.tolist(), strict=True):
            if beyond > first:
                link[wait] = peer[first + int(np.argmax(moving[first:beyond]))]
    return link
