"""The dependency graph of blocked times and messages, which replays and the delay analysis use.

A rank works until it is blocked on a message, continues when the message is complete, and so on.
A *block* is one such blocked time. A *join* is the moment at which all ranks that a message needs
have arrived: the last arrival of a collective, or the later side of a send and its receive. A block
depends on the previous block of its rank and on the join of its message; a join depends, for each
of its ranks, on the block after which that rank launched the message, and on the join of the
message that occupied its queue: a process group runs few messages at a time, Gloo two and NCCL one,
so a message that is enqueued while the group is busy begins when one of the earlier messages ends.
Until then, it waits for that message, and not for the concurrent work of its rank.

Every node has a *level*: one more than the highest level of its dependencies. Nodes of one level
are independent of each other, so all of them are computed at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, BoolArray, IntArray, changes
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined, State, rows_of

_HANDOVER_NS: Final = 200_000
"""Maximum delay between the end of a message and the next start in a queue that it occupied."""


class Queues:
    """For each message, the message that it waited for in its queue.

    Args:
        joined: All messages.
    """

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._former = find_formers(joined)

    def starting(self, rank: int, at_ns: int) -> int | None:
        """Returns the row of a rank's message that begins at an instant; None if there is none."""
        rows = self._joined.rows(rank)
        starts = self._joined.messages.start[rows]
        place = int(np.searchsorted(starts, at_ns))
        if place == len(starts) or starts[place] != at_ns:
            return None
        return int(rows.start) + place

    def former(self, row: int) -> int | None:
        """Returns the row of the message whose end let another one begin; see `find_formers`."""
        former = int(self._former[row])
        return None if former == NULL else former


def find_formers(joined: Joined) -> IntArray:
    """Returns, for each message, the row of the message whose end let it begin.

    That is the last to end of those of its rank and group that ended before it began, if it
    had been enqueued by then.

    Returns:
        One row per message; `NULL` for a message that did not wait in its queue, or for unknown
        reasons.
    """
    messages = joined.messages
    ended = np.flatnonzero(messages.end != NULL_NS)
    began = np.arange(len(messages))
    rows = np.concatenate([ended, began])
    time = np.concatenate([messages.end[ended], messages.start])
    begins = np.concatenate([np.zeros(len(ended), bool), np.ones(len(began), bool)])
    # At one instant ends come before beginnings, and of messages without duration their own last.
    order = np.lexsort((begins, time, messages.group[rows], messages.rank[rows]))
    place = np.where(begins[order], NULL, np.arange(len(order)))
    last = np.maximum.accumulate(place)
    at = np.flatnonzero(begins[order])
    row, before = rows[order[at]], last[at]
    known = before >= 0
    row, former = row[known], rows[order[before[known]]]
    end, start = messages.end[former], messages.start[row]
    kept = (messages.rank[former] == messages.rank[row]) & (former != row)
    kept &= messages.group[former] == messages.group[row]
    kept &= end > np.maximum(messages.enqueue[row], start - _HANDOVER_NS)
    found = np.full(len(messages), NULL)
    found[row[kept]] = former[kept]
    return found


_CALL_NS: Final = 100_000
"""A wait for a message that is complete takes no longer."""

_UNSEEN: Final = -1
_OPEN: Final = -2


@dataclass(frozen=True)
class Blocks:
    """The times in which ranks are blocked on messages, rank after rank, ascending.

    Attributes:
        ranks: The ranks, in this order.
        first: Where each rank's blocks begin; one more than there are ranks.
        place: Index of each block's rank in `ranks`.
        start: When the rank begins to be blocked, ns.
        end: When it continues.
        message: Row in `Joined.messages`; `NULL` if unknown.
    """

    ranks: list[int]
    first: IntArray
    place: IntArray
    start: IntArray
    end: IntArray
    message: IntArray

    def __len__(self) -> int:
        return len(self.start)

    def of(self, place: int) -> slice:
        """The blocks of one rank."""
        return slice(int(self.first[place]), int(self.first[place + 1]))

    def before(self, place: int, times: IntArray) -> IntArray:
        """The last block of a rank that ends no later than each time; `NULL` for none."""
        mine = self.of(place)
        found = np.searchsorted(self.end[mine], times, side="right") - 1
        return np.where(found < 0, NULL, found + mine.start)

    def almost_before(self, place: int, times: IntArray, tolerance_ns: int) -> IntArray:
        """The same with an error of recorded times.

        A block counts that ends by at most `tolerance_ns` later, if it began earlier by more.
        """
        before = self.before(place, times)
        if not tolerance_ns:
            return before
        found = self.before(place, times + tolerance_ns)
        return np.where(times - np.append(self.start, 0)[found] > tolerance_ns, found, before)


@dataclass(frozen=True)
class Graph:
    """Blocks and joins with their dependencies.

    Attributes:
        blocks: All blocks.
        join: For each message the join that releases it; `NULL` where that is not known.
        rows: Messages of all joins, those of one join side by side.
        first: Where each join's messages begin in `rows`; one more than there are joins.
        handed_over: For each message, when the rank's own work had brought it about, ns.
        after: For each message, the last block that had ended by then; `NULL` for none.
        former: For each message, the one that kept its queue busy; `NULL` for none.
        block_level: Level of each block.
        join_level: Level of each join; negative where no block depends on it.
        tolerance_ns: What follows a block may begin so much before the block ends.
        done: Whether each block is the mere call of a wait for a message that may have been
            complete before: the wait is the only record of its completion.
    """

    blocks: Blocks
    join: IntArray
    rows: IntArray
    first: IntArray
    handed_over: IntArray
    after: IntArray
    former: IntArray
    block_level: IntArray
    join_level: IntArray
    tolerance_ns: int
    done: BoolArray


def find_blocks(scans: Mapping[int, RankScan], joined: Joined) -> Blocks:
    """Concatenates the blocks of all ranks."""
    ranks = list(joined.messages.ranks)
    of_rank = [scans[rank].blocks for rank in ranks]
    counts = [len(each.start) for each in of_rank]
    none = np.empty(0, np.int64)
    message = [
        np.where(each.message == NULL, NULL, each.message + joined.messages.offsets[rank])
        for rank, each in zip(ranks, of_rank, strict=True)
    ]
    return Blocks(
        ranks=ranks,
        first=np.append(0, np.cumsum(counts)).astype(np.int64),
        place=np.repeat(np.arange(len(ranks)), counts),
        start=np.concatenate([none, *(each.start for each in of_rank)]),
        end=np.concatenate([none, *(each.end for each in of_rank)]),
        message=np.concatenate([none, *message]).astype(np.int64),
    )


def find_graph(scans: Mapping[int, RankScan], joined: Joined, *, tolerance_ns: int = 0) -> Graph:
    """Finds the dependencies of every block.

    Args:
        joined: All messages.
        tolerance_ns: See `Graph`.
    """
    blocks = find_blocks(scans, joined)
    messages = joined.messages
    join, rows, first = _joins(joined)
    on_device = np.zeros(len(messages), dtype=bool)
    for rank in messages.ranks:
        on_device[joined.rows(rank)] = scans[rank].activity.device
    handed_over = np.where(on_device, messages.start, np.minimum(messages.enqueue, messages.start))
    after = np.full(len(messages), NULL)
    for place, rank in enumerate(blocks.ranks):
        mine = joined.rows(rank)
        after[mine] = blocks.almost_before(place, handed_over[mine], tolerance_ns)
    former = find_formers(joined)
    none = np.empty(0, np.int64)
    waited = np.append(messages.is_p2p & ~on_device, False)[blocks.message]
    length = blocks.end - blocks.start
    released = np.append(joined.released, NULL_NS)[blocks.message]
    done = waited & (length <= _CALL_NS) & (blocks.start - released >= length)
    graph = Graph(
        blocks, join, rows, first, handed_over, after, former, none, none, tolerance_ns,
        done & (released != NULL_NS),
    )  # fmt: skip
    block_level, join_level = _levels(graph)
    return replace(graph, block_level=block_level, join_level=join_level)


def _joins(joined: Joined) -> tuple[IntArray, IntArray, IntArray]:
    """The join of each message, the messages of all joins, and where each join's begin."""
    messages, collectives = joined.messages, joined.collectives
    known = np.isin(collectives.state, (State.COMPLETE, State.OPEN)) & (collectives.ranks > 1)
    # Some may have left a collective in which others waited for all: they had arrived, too.
    waiting = np.append(known, False)[joined.collective] & ~joined.is_single
    kind = np.zeros(len(collectives) + 1, dtype=bool)
    kind[joined.collective[waiting]] = True
    kind[NULL] = False
    shared = joined.order[kind[joined.collective[joined.order]]]
    new = changes(joined.collective[shared])
    join = np.full(len(messages), NULL)
    join[shared] = np.cumsum(new) - 1
    join[joined.is_single] = NULL
    begins = np.flatnonzero(new)
    # What does not need all ranks has a join of its own: itself and what it needs.
    other = np.where(joined.is_single, NULL, other_sides(joined))
    alone = (joined.releaser == messages.rank) & (joined.released != NULL_NS)
    own = np.flatnonzero((join == NULL) & (alone | joined.is_single | (other != NULL)))
    join[own] = len(begins) + np.arange(len(own))
    paired = own[other[own] != NULL]
    row = np.concatenate([own, paired, joined.needs.row])
    needed = np.concatenate([own, other[paired], joined.needs.needed])
    sides = np.argsort(join[row], kind="stable")
    sizes = np.bincount(join[row] - len(begins), minlength=len(own))
    rows = np.concatenate([shared, needed[sides]])
    first = np.concatenate([begins, len(shared) + np.append(0, np.cumsum(sizes))])
    return join, rows.astype(np.int64), first.astype(np.int64)


def other_sides(joined: Joined) -> IntArray:
    """For messages that wait for another rank: that rank's message; `NULL` for none."""
    messages, releaser = joined.messages, joined.releaser
    other = np.full(len(messages), NULL)
    waits = (joined.released != NULL_NS) & (releaser != NULL) & (releaser != messages.rank)
    pairs = np.flatnonzero(waits & (joined.partner != NULL))
    other[pairs] = joined.partner[pairs]
    # In a collective, the part of the rank that is waited for: of its root, or of the last to come.
    rest = np.flatnonzero(waits & (joined.collective != NULL))
    of = joined.collective[rest]
    other[rest] = rows_of(joined.order, joined.collective, messages.rank, of, releaser[rest])
    return other


def _levels(graph: Graph) -> tuple[IntArray, IntArray]:
    """Returns the levels of blocks and joins; nodes in a cycle count as independent.

    Blocks are visited by their end, so nearly everything that a block depends on has its level
    already; the stack is for what ends at the same instant.
    """
    blocks = graph.blocks
    join_of, after_of, former_of = (
        column.tolist() for column in (graph.join, graph.after, graph.former)
    )
    needed, bounds = graph.rows.tolist(), graph.first.tolist()
    begins = set(blocks.first.tolist())
    message = blocks.message.tolist()
    count = len(blocks)
    level = [_UNSEEN] * (count + len(bounds) - 1)  # blocks, then joins

    def needs(node: int) -> list[int]:
        if node < count:
            found = [] if node in begins else [node - 1]
            row = message[node]
            if row != NULL and join_of[row] != NULL:
                found.append(count + join_of[row])
            return found
        found = []
        for row in needed[bounds[node - count] : bounds[node - count + 1]]:
            if after_of[row] != NULL:
                found.append(after_of[row])
            before = former_of[row]
            if before != NULL and join_of[before] != NULL:
                found.append(count + join_of[before])
        return found

    for block in np.argsort(blocks.end, kind="stable").tolist():
        stack = [block]
        while stack:
            node = stack[-1]
            if level[node] >= 0:
                stack.pop()
                continue
            wanted = needs(node)
            if level[node] == _UNSEEN:
                level[node] = _OPEN
                missing = [other for other in wanted if level[other] == _UNSEEN]
                if missing:
                    stack += missing
                    continue
            level[node] = 1 + max((level[other] for other in wanted), default=_UNSEEN)
            level[node] = max(level[node], 0)
            stack.pop()
    return np.array(level[:count], dtype=np.int64), np.array(level[count:], dtype=np.int64)
