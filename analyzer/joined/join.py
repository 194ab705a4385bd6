"""Joins messages across ranks: collectives on all their ranks, and each send with its receive.

A collective is identified by its group and its number in the group, a send or receive by group,
source, destination, tag and number. If a format has no numbers, the messages of a group are aligned
between ranks by operation, size, order and time. Messages that cannot be joined are counted, and
excluded from all measures of time.

For one collective: the *arrival* of rank r is the start of its message, A is the last arrival.
A rank waits until it is *released*: by the last of the ranks that it needs, see `rendezvous.py`; a
receive by its send, and a blocking send by its receive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    BoolArray,
    ColumnTable,
    IntArray,
    changes,
    distinct,
    find,
    places_by_value,
)
from ddltrace.analyzer.events.rank_messages import Messages
from ddltrace.analyzer.events.sequence_alignment import call_tokens, common_numbers
from ddltrace.analyzer.events.time_alignment import Calls
from ddltrace.analyzer.joined.rendezvous import (
    GLOO,
    MAY_LEAVE,
    STAR,
    TREE,
    Needs,
    is_gloo,
    last_needed,
    links,
    places,
)
from ddltrace.tracer.trace.schema import OPS, P2P_OPS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_FROM_ROOT: Final = ("broadcast", "scatter")
_EQUAL_SIZES: Final = ("all_reduce", "reduce", "reduce_scatter")
"""Operations whose input has the same size on every rank."""


class State(IntEnum):
    """The state of a collective: how well its messages could be joined."""

    COMPLETE = 0
    """Recorded and completed on every member, possibly at an unknown time."""
    OPEN = 1
    """Recorded on every member, not completed on some."""
    PARTIAL = 2
    """The part of a member is missing: it never entered, or its record was lost."""
    MISMATCH = 3
    """The members disagree on operation or size, or one of them has it twice."""


@dataclass(frozen=True)
class Collectives(ColumnTable):
    """One entry per collective.

    Attributes:
        op: Index into `Joined.ops`.
        group: Index into `Joined.groups`.
        seq: Its number in the group; its place in the aligned records where the trace has none.
        bytes: Input bytes of one rank: the largest; `NULL` if unknown.
        size: Bytes of the whole vector: of an all_gather or gather the output (the input of one
            rank times the ranks if a format records no output), of others the input; `NULL` if
            unknown.
        step: Step in which its last arriver entered it; `NULL` for none.
        ranks: How many ranks' parts were seen.
        first: First arrival, ns.
        last: A, the last arrival.
        lead: How much the last arriver comes after the one before it; 0 if it is alone.
        others: Median arrival of the ranks other than the last to arrive; its own if it is alone.
        last_rank: The last rank to arrive.
        end: Last end over ranks; `NULL_NS` where it is not known on some rank.
        state: A `State`.
        wait: Sum over ranks of A - arrival.
        first_row: Where its rows begin in `Joined.order`.
    """

    op: IntArray
    group: IntArray
    seq: IntArray
    bytes: IntArray
    size: IntArray
    step: IntArray
    ranks: IntArray
    first: IntArray
    last: IntArray
    lead: IntArray
    others: IntArray
    last_rank: IntArray
    end: IntArray
    state: IntArray
    wait: IntArray
    first_row: IntArray

    @property
    def timed(self) -> BoolArray:
        """Whether each completed on every member, at a known time."""
        return np.asarray((self.state == State.COMPLETE) & (self.end != NULL_NS))


@dataclass(frozen=True)
class AllMessages(ColumnTable):
    """The messages of all ranks, rank after rank; columns as in `Messages`.

    Attributes:
        ranks: The ranks, ascending.
        offsets: Rank -> row of its first message.
        ops: Names of operations.
        groups: Names of process groups.
        members: Their global ranks; empty if unknown.
        group_size: How many ranks each group has: its members, or those seen in it.
        first_tensor: Id of the first of the tensors that each carries; `NULL` for none.
        is_p2p: Whether the message is a send or a receive.
        split_count: As in `Messages`.
        split_bytes: As in `Messages`, of all ranks.
    """

    ranks: list[int]
    offsets: dict[int, int]
    rank: IntArray
    start: IntArray
    end: IntArray
    enqueue: IntArray
    unfinished: BoolArray
    failed: BoolArray
    op: IntArray
    ops: list[str]
    group: IntArray
    groups: list[str]
    members: list[tuple[int, ...]]
    group_size: IntArray
    seq: IntArray
    peer: IntArray
    tag: IntArray
    bytes: IntArray
    out_bytes: IntArray
    step: IntArray
    tensor_count: IntArray
    first_tensor: IntArray
    is_p2p: BoolArray
    split_count: IntArray
    split_bytes: IntArray

    @property
    def is_collective(self) -> BoolArray:
        """Whether each message is part of a collective.

        A remote call is neither a collective nor a send: its other side records nothing.
        """
        calls = [code for code, name in enumerate(self.ops) if name == "rpc"]
        return ~self.is_p2p & ~np.isin(self.op, calls)

    def op_is(self, *names: str) -> BoolArray:
        """Whether each message is one of the operations."""
        return np.isin(self.op, [self.ops.index(name) for name in names])


class Releases(NamedTuple):
    """When the messages of one rank were released, and by whom: see `Joined`."""

    released: IntArray
    releaser: IntArray


@dataclass(frozen=True)
class Joined:
    """All messages, joined across ranks; arrays have one entry per message.

    Attributes:
        messages: The messages.
        collective: Index into `collectives`; `NULL` for sends and receives.
        partner: Row of the other side of a send or receive; `NULL` if there is none.
        released: When all required ranks had arrived, ns; `NULL_NS` if unknown.
        releaser: The rank that was waited for; itself if none was; `NULL` if unknown.
        collectives: One entry per collective.
        order: Rows of collectives, those of one collective side by side, by arrival.
        by_order: Whether some collectives had no sequence number.
        needs: Whom the messages need that do not need all ranks of their collective.
        is_single: Whether each message is one of them; those that need nobody else included.
    """

    messages: AllMessages
    collective: IntArray
    partner: IntArray
    released: IntArray
    releaser: IntArray
    collectives: Collectives
    order: IntArray
    by_order: bool
    needs: Needs
    is_single: BoolArray

    def rows(self, rank: int) -> slice:
        """The rows of a rank's messages, in the order of its `Messages`."""
        ranks = self.messages.ranks
        place = bisect_left(ranks, rank)
        end = (
            self.messages.offsets[ranks[place + 1]]
            if place + 1 < len(ranks)
            else len(self.messages)
        )
        return slice(self.messages.offsets[rank], end)

    def releases(self, rank: int) -> Releases:
        """When a rank's messages were released, in the order of its `Messages`."""
        rows = self.rows(rank)
        return Releases(self.released[rows], self.releaser[rows])

    def wait_and_transfer(self) -> tuple[IntArray, IntArray]:
        """Returns wait and transfer of each message in ns; their sum is its duration.

        wait = min(released, end) - start and transfer = end - start - wait, so neither is
        negative even where clocks disagree; `NULL` where the release or the end is unknown.
        """
        start, end = self.messages.start, self.messages.end
        known = (self.released != NULL_NS) & (end != NULL_NS)
        wait = np.where(known, np.minimum(self.released, end) - start, NULL)
        return wait, np.where(known, end - start - wait, NULL)


def join(trace: Trace, messages: Mapping[int, Messages]) -> Joined:
    """Joins the messages of all ranks.

    Args:
        trace: Provides the members of groups.
        messages: Rank -> its messages.
    """
    everything = _concatenate(trace, messages)
    seq, by_order = _numbered(everything)
    collectives, order, collective = _collect(everything, seq)
    partner = _pair(everything)
    hosts = [rank for rank in messages if trace.infos(rank)[-1].device == "cpu"]
    posted = _posted(everything, partner, np.isin(everything.rank, hosts))
    gloo = np.array([_is_gloo(trace, name) for name in everything.groups], dtype=bool)
    needs, single = _find_needs(everything, collectives, collective, order, gloo)
    collected = collectives, collective, order
    released, releaser = _release(everything, collected, posted, needs, single)
    return Joined(
        everything,
        collective,
        partner,
        released,
        releaser,
        collectives,
        order,
        by_order,
        needs,
        single,
    )


def _is_gloo(trace: Trace, group: str) -> bool:
    """Whether a group's messages are Gloo's."""
    device = trace.infos(trace.ranks[0])[-1].device
    return is_gloo(trace.group_backend(group), device or "cpu")


def _concatenate(trace: Trace, messages: Mapping[int, Messages]) -> AllMessages:
    ranks = sorted(messages)
    counts = [len(messages[rank]) for rank in ranks]
    rank = np.repeat(np.array(ranks, dtype=np.int64), counts)

    def column(name: str) -> IntArray:
        parts = [getattr(messages[r], name) for r in ranks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    ops = {name: code for code, name in enumerate(OPS)}
    op = _recode(ops, [(messages[r].op, messages[r].ops) for r in ranks])
    keys: dict[tuple[str, tuple[int, ...]], int] = {}
    group = _recode(
        keys,
        [
            (messages[r].group, [(name, trace.group_ranks(name, r)) for name in messages[r].groups])
            for r in ranks
        ],
        missing=("", ()),
    )
    stride = max(ranks, default=0) + 1
    seen_ranks = np.bincount(distinct(group * stride + rank) // stride, minlength=len(keys))
    sizes = [
        len(members) or trace.group_size(name) or int(seen_ranks[code])
        for (name, members), code in keys.items()
    ]
    return AllMessages(
        ranks=ranks,
        offsets=dict(zip(ranks, (np.cumsum(counts) - counts).tolist(), strict=True)),
        rank=rank,
        start=column("start"),
        end=column("end"),
        enqueue=column("enqueue"),
        unfinished=column("unfinished").astype(bool),
        failed=column("failed").astype(bool),
        op=op,
        ops=list(ops),
        group=group,
        groups=[name for name, _ in keys],
        members=[members for _, members in keys],
        group_size=np.array(sizes, dtype=np.int64),
        seq=column("seq"),
        peer=column("peer"),
        tag=column("tag"),
        bytes=column("bytes"),
        out_bytes=column("out_bytes"),
        step=column("step"),
        tensor_count=column("tensor_count"),
        first_tensor=column("first_tensor"),
        is_p2p=np.isin(op, [ops[name] for name in P2P_OPS]),
        split_count=column("split_count"),
        split_bytes=column("split_bytes"),
    )


def _recode(
    codes: dict[Any, int], parts: Sequence[tuple[IntArray, Sequence[Any]]], missing: Any = ""
) -> IntArray:
    """Maps columns of codes, each with its own values, to one growing vocabulary."""
    recoded = []
    for column, values in parts:
        used = [*values, missing] if (column == NULL).any() else values
        mapping = np.array([codes.setdefault(value, len(codes)) for value in used], np.int64)
        recoded.append(mapping[column])  # NULL is -1: the last, which is `missing`
    return np.concatenate(recoded) if recoded else np.empty(0, np.int64)


def _numbered(messages: AllMessages) -> tuple[IntArray, bool]:
    """Returns sequence numbers; if the trace has none, indices in the aligned records of the ranks.

    Positions are negative, to distinguish them from numbers: -2 for the first, -3 for the second.
    """
    seq = messages.seq.astype(np.int64)
    rows = np.flatnonzero((seq == NULL) & messages.is_collective)
    if not len(rows):
        return seq, False
    group, rank = messages.group[rows], messages.rank[rows]
    order = rows[np.lexsort((messages.start[rows], rank, group))]
    time = np.where(messages.end == NULL_NS, messages.start, messages.end)
    group, rank = messages.group[order], messages.rank[order]
    parts = np.split(order, np.flatnonzero(changes(group, rank))[1:])
    of_group = group[np.cumsum([0, *map(len, parts[:-1])])]
    for begin, end in pairwise([*np.flatnonzero(changes(of_group)).tolist(), len(parts)]):
        ranks = parts[begin:end]
        tokens = call_tokens(
            [messages.op[part] for part in ranks],
            [messages.bytes[part] for part in ranks],
            [messages.out_bytes[part] for part in ranks],
            messages.ops,
        )
        calls = [
            Calls(token, time[part], messages.step[part])
            for token, part in zip(tokens, ranks, strict=True)
        ]
        for part, at in zip(ranks, common_numbers(calls), strict=True):
            seq[part] = -2 - at
    return seq, True


def _collect(messages: AllMessages, seq: IntArray) -> tuple[Collectives, IntArray, IntArray]:
    """Groups the rows of each collective and reduces them."""
    rows = np.flatnonzero(messages.is_collective)
    by_place = seq < NULL
    number = np.where(by_place, -2 - seq, seq)
    keys = (number[rows], by_place[rows], messages.group[rows])
    order = rows[np.lexsort((messages.start[rows], *keys))]
    new = changes(messages.group[order], seq[order])
    begins = np.flatnonzero(new)
    of_row = np.cumsum(new) - 1
    collective = np.full(len(messages), NULL)
    collective[order] = of_row
    counts = np.diff(np.append(begins, len(order)))

    start, end = messages.start[order], messages.end[order]
    rank, op, size = messages.rank[order], messages.op[order], messages.bytes[order]
    lasts = begins + counts - 1
    # The last to arrive stands last: the two middles of those before it are one for an odd number.
    before = begins + np.maximum(counts - 2, 0) // 2
    after = begins + (counts - 1) // 2
    input_bytes = _reduce(np.maximum, size, begins)
    output_bytes = _reduce(np.maximum, messages.out_bytes[order], begins)
    gathers = np.isin(op[begins], [messages.ops.index("all_gather"), messages.ops.index("gather")])
    group_size = messages.group_size[messages.group[order][begins]]
    gathered = np.where(input_bytes == NULL, NULL, input_bytes * group_size)
    whole = np.where(output_bytes == NULL, gathered, output_bytes)
    vector = np.where(gathers, whole, input_bytes)
    is_open = _reduce(np.logical_or, messages.unfinished[order], begins)
    untimed = _reduce(np.logical_or, end == NULL_NS, begins)

    equal_sizes = np.isin(op[begins], [messages.ops.index(name) for name in _EQUAL_SIZES])
    sizes_differ = input_bytes != _reduce(np.minimum, size, begins)
    ops_differ = _reduce(np.maximum, op, begins) != _reduce(np.minimum, op, begins)
    by_rank = np.lexsort((rank, of_row))
    same = ~changes(of_row[by_rank], rank[by_rank])
    twice = np.zeros(len(begins), dtype=bool)
    twice[of_row[by_rank][same]] = True

    state = np.select(
        [
            ops_differ | (equal_sizes & sizes_differ) | twice,
            counts < group_size,
            is_open,
        ],
        [State.MISMATCH, State.PARTIAL, State.OPEN],
        default=State.COMPLETE,
    )
    last = start[lasts]
    collectives = Collectives(
        op=op[begins],
        group=messages.group[order][begins],
        seq=number[order][begins],
        bytes=input_bytes,
        size=vector,
        step=messages.step[order][lasts],
        ranks=counts,
        first=start[begins],
        last=last,
        lead=last - start[np.where(counts > 1, lasts - 1, lasts)],
        others=start[before] + (start[after] - start[before]) // 2,
        last_rank=rank[lasts],
        end=np.where(untimed, NULL_NS, _reduce(np.maximum, end, begins)),
        state=state,
        wait=_reduce(np.add, np.repeat(last, counts) - start, begins),
        first_row=begins,
    )
    return collectives, order, collective


def _reduce(ufunc: np.ufunc, values: IntArray, begins: IntArray) -> IntArray:
    if not len(begins):
        return values[:0]
    return np.asarray(ufunc.reduceat(values, begins))


def _pair(messages: AllMessages) -> IntArray:
    """Returns the row of the peer of every send and receive, or `NULL`."""
    partner = np.full(len(messages), NULL)
    rows = np.flatnonzero(messages.is_p2p & (messages.peer != NULL))
    sends = messages.op_is("send")[rows]
    rank, peer = messages.rank[rows], messages.peer[rows]
    source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
    group, tag, seq = messages.group[rows], messages.tag[rows], messages.seq[rows].astype(np.int64)
    missing = seq == NULL
    if missing.any():
        place = np.lexsort((messages.start[rows], sends, tag, target, source, group))
        new = changes(group[place], source[place], target[place], tag[place], sends[place])
        begins = np.flatnonzero(new)
        count = np.arange(len(place)) - np.repeat(begins, np.diff(np.append(begins, len(place))))
        in_order = np.empty(len(rows), dtype=np.int64)
        in_order[place] = count
        seq = np.where(missing, -2 - in_order, seq)
    keys = (seq, tag, target, source, group)
    order = np.lexsort((sends, *keys))
    new = changes(*(key[order] for key in keys))
    begins = np.flatnonzero(new)
    counts = np.diff(np.append(begins, len(order)))
    # A pair is one receive and one send; anything else under a key is ambiguous.
    two = begins[counts == 2]
    two = two[~sends[order[two]] & sends[order[two + 1]]]
    receive, send = rows[order[two]], rows[order[two + 1]]
    partner[receive], partner[send] = send, receive
    return partner


def _posted(
    messages: AllMessages, partner: IntArray, on_host: BoolArray
) -> tuple[IntArray, IntArray]:
    """Returns the other side of each send and receive, and when it was posted; `NULL_NS` for none.

    That is the start of the other side's message. On a busy machine, a host records this start
    some time after it has posted the message: a message that was complete before counts as posted
    when the host made the call.

    Args:
        partner: Row of the other side of each.
        on_host: Whether a message was sent or received by a host, without a device.
    """
    other = np.append(messages.start, NULL_NS)[partner]
    called = np.append(messages.enqueue, NULL_NS)[partner]
    complete = (messages.end != NULL_NS) & (called <= messages.end) & (other > messages.end)
    return partner, np.where(np.append(on_host, False)[partner] & complete, called, other)


def _release(
    messages: AllMessages,
    collected: tuple[Collectives, IntArray, IntArray],
    posted: tuple[IntArray, IntArray],
    needs: Needs,
    is_single: BoolArray,
) -> tuple[IntArray, IntArray]:
    """Returns when each message was released, and by which rank.

    Args:
        collected: All collectives, the index of each message's, and the messages by collective.
        posted: For each send and receive, the other side, and when it was posted.
        needs: See `Joined`.
        is_single: See `Joined`.
    """
    collectives, collective, order = collected
    start, rank = messages.start, messages.rank
    released = np.full(len(messages), NULL_NS)
    releaser = np.full(len(messages), NULL)

    entered = np.isin(collectives.state, (State.COMPLETE, State.OPEN))
    rows = order[entered[collective[order]]]
    released[rows] = collectives.last[collective[rows]]
    releaser[rows] = collectives.last_rank[collective[rows]]

    last = last_needed(needs, start)
    single = np.flatnonzero(is_single)
    released[single], releaser[single] = start[last[single]], rank[last[single]]

    partner, when = posted
    pairs = np.flatnonzero(partner != NULL)
    released[pairs] = when[pairs]
    releaser[pairs] = rank[partner[pairs]]

    # A rank that arrives after the rank that it needs does not wait; neither does a sender that
    # has left before its receiver came. (Otherwise, this order is a clock error.)
    known = released != NULL_NS
    left = (messages.end != NULL_NS) & (released > messages.end)
    alone = known & ((released <= start) | (left & messages.op_is("send")))
    released[alone], releaser[alone] = start[alone], rank[alone]
    return released, releaser


def _find_needs(
    messages: AllMessages,
    collectives: Collectives,
    collective: IntArray,
    order: IntArray,
    gloo: BoolArray,
) -> tuple[Needs, BoolArray]:
    """Finds the messages that do not need all ranks of their collective, and whom they need.

    Args:
        collective: Index of each message's collective.
        order: Messages by collective.
        gloo: Whether each group's messages are Gloo's.

    Returns:
        What they need, see `Joined.needs`, and whether each message is one of them.
    """
    entered = np.isin(collectives.state, (State.COMPLETE, State.OPEN))
    rows = order[entered[collective[order]] & messages.op_is(*MAY_LEAVE)[order]]
    of, group = collective[rows], messages.group[rows]
    root = rows_of(rows, collective, messages.rank, of, messages.peer[rows])
    is_single = np.zeros(len(messages), dtype=bool)
    row, needed = [], []
    for shape in (TREE, STAR):
        ops = [op for op, its in GLOO.items() if its == shape]
        of_shape = messages.op_is(*ops)[rows] & gloo[group] & (root != NULL)
        mine = np.flatnonzero(of_shape)
        size = messages.group_size[group[mine]]
        place = _group_places(messages, rows[mine])
        first = _group_places(messages, root[mine])
        names = np.full(len(messages), NULL)
        names[rows[mine]] = place
        # From each rank to the root, link by link; the ranks of the first link need each other.
        link = links(shape, (place - first) % size, size)
        is_first = True
        while (link != NULL).any():
            target = np.where(link == NULL, NULL, (link + first) % size)
            found = rows_of(rows[mine], collective, names, of[mine], target)
            linked = found != NULL
            row.append(rows[mine][linked])
            needed.append(found[linked])
            if is_first:
                row.append(found[linked])
                needed.append(rows[mine][linked])
                is_first = False
            link = np.where(link == NULL, NULL, links(shape, link, size))
        is_single[rows[mine]] = True
    # Of other libraries, those that left before the last rank came; their data came from the root.
    left = (messages.end[rows] != NULL_NS) & (collectives.last[of] > messages.end[rows])
    left &= ~is_single[rows]
    is_single[rows[left]] = True
    fed = left & messages.op_is(*_FROM_ROOT)[rows] & (root != NULL) & (root != rows)
    needs = Needs.of_pairs([*row, rows[fed]], [*needed, root[fed]])
    return needs.of_started(messages.start, messages.end), is_single


def rows_of(
    rows: IntArray, collective: IntArray, names: IntArray, of: IntArray, name: IntArray
) -> IntArray:
    """Finds messages by their collective and their rank, or another name that is unique in it.

    Args:
        rows: The messages to search.
        collective: The collective of each message.
        names: The name of each message in its collective.
        of: The collectives to search in.
        name: The name to search for in each.

    Returns:
        The row of each; `NULL` for none.
    """
    width = max(int(names.max(initial=0)), int(name.max(initial=0))) + 2
    wanted = np.where(name == NULL, NULL, of * width + name)
    found = find(wanted, collective[rows] * width + names[rows])
    return np.append(rows, NULL)[found]


def _group_places(messages: AllMessages, rows: IntArray) -> IntArray:
    """The rank of each message's process within its group, in the order of the members."""
    place = np.array(messages.rank[rows], dtype=np.int64)
    for group, mine in places_by_value(messages.group[rows]):
        members = messages.members[group]
        rank = messages.rank[rows[mine]]
        place[mine] = places(members or tuple(distinct(rank).tolist()), rank)
    return place
