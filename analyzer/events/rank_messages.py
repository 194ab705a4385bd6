"""The messages of one rank, and the times in which its host is blocked on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, BoolArray, Columns, IntArray, find
from ddltrace.analyzer.events.interval_sets import Spans, union
from ddltrace.tracer.trace.schema import BUCKET

_BACKWARD = "backward"  # name of the phase, and of the wait inside of it
_STREAM_PREFIX = "stream"


@dataclass(frozen=True)
class Messages:
    """Messages of one rank, sorted by start; negative numbers stand for null.

    Attributes:
        start: When each entered the communication library or began to execute, ns.
        end: When it completed; `NULL_NS` if it is open or the time is unknown.
        unfinished: Whether it had not completed when last seen.
        failed: Whether it ended with an error.
        enqueue: When the host enqueued it; its start if that is unknown.
        id: Its number in the rank.
        op: Index into `ops`.
        ops: Names of operations.
        group: Index into `groups`.
        groups: Names of process groups.
        seq: Its number in its group.
        peer: The other side, or the root.
        tag: Tag of a send or receive.
        bytes: Input bytes.
        out_bytes: Output bytes.
        wire_bytes: Bytes put on the network, where known.
        clock: Index into `clocks`.
        clocks: What times were read from, as in the column `clock`.
        step: The step in whose window it starts.
        in_flight: Whether it counts as communication: if some messages execute on a device's
            streams, only these count.
        in_bucket: Whether it carries a bucket of DistributedDataParallel.
        tensor_count: Number of tensors that each carries.
        tensors: Ids of the tensors of all messages, in order.
        split_count: Of an all-to-all whose call gave the sizes, how many ranks it sends to; else 0.
        split_bytes: What they send to each member of their group, all-to-all after all-to-all.
    """

    start: IntArray
    end: IntArray
    unfinished: BoolArray
    failed: BoolArray
    enqueue: IntArray
    id: IntArray
    op: IntArray
    ops: list[str]
    group: IntArray
    groups: list[str]
    seq: IntArray
    peer: IntArray
    tag: IntArray
    bytes: IntArray
    out_bytes: IntArray
    wire_bytes: IntArray
    clock: IntArray
    clocks: list[str]
    step: IntArray
    in_flight: BoolArray
    in_bucket: BoolArray
    tensor_count: IntArray
    tensors: IntArray
    split_count: IntArray
    split_bytes: IntArray

    def __len__(self) -> int:
        return len(self.start)

    @property
    def first_tensor(self) -> IntArray:
        """Id of the first tensor that each carries; `NULL` for none."""
        first = np.cumsum(self.tensor_count) - self.tensor_count
        return np.where(self.tensor_count > 0, np.append(self.tensors, NULL)[first], NULL)

    @property
    def closed(self) -> BoolArray:
        """Whether each has completed, at a time that is known."""
        return np.asarray(self.end != NULL_NS)

    def spans(self) -> Spans:
        """M: the instants in which a message is in flight. An open one extends to nothing."""
        counted = self.in_flight & self.closed
        return union(self.start[counted], self.end[counted])


def read_messages(columns: Columns) -> Messages:
    """Extracts the messages from a rank's events."""
    rows = columns.rows("message")
    start = columns.start[rows]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        rows, start = rows[order], start[order]
    enqueue = columns.ints("enqueue_ns", rows, null=NULL_NS)
    op, ops = columns.codes("op", rows)
    group, groups = columns.codes("group", rows)
    clock, clocks = columns.codes("clock", rows)
    tensor_count, tensors = columns.lists("tensors", rows)
    split_count, split_bytes = columns.lists("split_bytes", rows)
    on_stream = np.array([lane.startswith(_STREAM_PREFIX) for lane in [*columns.lanes, ""]])
    executes = on_stream[columns.lane[rows]]
    of_bucket = np.array([name.startswith(BUCKET) for name in [*columns.names, ""]])
    return Messages(
        start=start,
        end=columns.end[rows],
        unfinished=columns.unfinished[rows],
        failed=columns.failed[rows],
        enqueue=np.where(enqueue == NULL_NS, start, enqueue),
        id=columns.ints("id", rows),
        op=op,
        ops=ops,
        group=group,
        groups=groups,
        seq=columns.ints("seq", rows),
        peer=columns.ints("peer", rows),
        tag=columns.ints("tag", rows),
        bytes=columns.ints("bytes", rows),
        out_bytes=columns.ints("out_bytes", rows),
        wire_bytes=columns.ints("wire_bytes", rows),
        clock=clock,
        clocks=clocks,
        step=columns.step[rows],
        in_flight=executes if executes.any() else np.ones(len(rows), dtype=bool),
        in_bucket=of_bucket[columns.name[rows]],
        tensor_count=tensor_count,
        tensors=tensors,
        split_count=split_count,
        split_bytes=split_bytes,
    )


@dataclass(frozen=True)
class Waits:
    """Times in which a thread of the host is blocked, sorted by start.

    Attributes:
        start: When it blocks.
        end: When it continues. DistributedDataParallel's wait inside backward is recorded up to the
            return of backward; its end is the completion of the last message enqueued in this
            backward.
        message: Index of the message waited for in the rank's `Messages`; `NULL` if unknown.
            If the wait does not name it: the last to complete of the messages enqueued in this
            backward or within the wait; otherwise the last to complete within the wait.
        lane: Index of the thread's lane in `lanes`.
        lanes: Names of lanes.
    """

    start: IntArray
    end: IntArray
    message: IntArray
    lane: IntArray
    lanes: list[str]


def read_waits(columns: Columns, messages: Messages) -> Waits:
    """Extracts the waits from a rank's events and finds the message of each."""
    rows = columns.rows("wait")
    start = columns.start[rows]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        rows, start = rows[order], start[order]
    end = np.maximum(columns.end[rows], start)
    message = find(columns.ints("parent", rows), messages.id)
    unknown = np.flatnonzero(message == NULL)
    if len(unknown):
        named = np.array([name == _BACKWARD for name in [*columns.names, ""]])
        backward = named[columns.name[rows[unknown]]]
        since = np.where(backward, _backward_starts(columns, start[unknown]), start[unknown])
        message[unknown] = _last_enqueued(messages, since, end[unknown])
        # The wait is for the last to complete of the messages enqueued before it.
        none = np.flatnonzero((message[unknown] == NULL) & ~backward)
        message[unknown[none]] = _last_ended(messages, start[unknown[none]], end[unknown[none]])
        ends = np.append(messages.end, NULL_NS)[message[unknown]]
        known = (message[unknown] != NULL) & (ends != NULL_NS)
        # Of the time after the last gradient, only that before its last message completed was
        # waiting; where there is no message, nothing was.
        clipped = np.where(known, np.clip(ends, start[unknown], end[unknown]), end[unknown])
        clipped = np.where(message[unknown] == NULL, start[unknown], clipped)
        end[unknown] = np.where(backward, clipped, end[unknown])
    return Waits(start, end, message, columns.lane[rows], columns.lanes)


def _backward_starts(columns: Columns, instants: IntArray) -> IntArray:
    """The start of the backward pass around each instant, or the instant itself."""
    phases = columns.rows("phase")
    named = np.array([name == _BACKWARD for name in [*columns.names, ""]])
    begins = np.sort(columns.start[phases[named[columns.name[phases]]]])
    place = np.searchsorted(begins, instants, side="right")
    return np.where(place > 0, np.append(begins, 0)[place - 1], instants)


def _last_enqueued(messages: Messages, since: IntArray, until: IntArray) -> IntArray:
    """Of the messages enqueued within each window: the last to complete; `NULL` if there is none.

    One that is still open counts as the last.
    """
    order = np.argsort(messages.enqueue, kind="stable")
    ends = np.where(messages.closed, messages.end, np.iinfo(np.int64).max)[order]
    low = np.searchsorted(messages.enqueue[order], since, side="left")
    high = np.searchsorted(messages.enqueue[order], until, side="right")
    last = np.full(len(since), NULL)
    for i in np.flatnonzero(high > low):
        last[i] = order[low[i] + int(np.argmax(ends[low[i] : high[i]]))]
    return last


def _last_ended(messages: Messages, since: IntArray, until: IntArray) -> IntArray:
    """Returns the message that ends last within each window; `NULL` if none does."""
    closed = np.flatnonzero(messages.closed)
    order = closed[np.argsort(messages.end[closed], kind="stable")]
    last = np.searchsorted(messages.end[order], until, side="right") - 1
    found = np.append(order, NULL)[last]
    ends = np.append(messages.end[order], NULL_NS)[last]
    return np.where((last >= 0) & (ends >= since), found, NULL)
