"""One rank's time without gaps: what it was doing at every instant, and when it was blocked.

The critical path walks on this. On a CPU rank it is the host's main thread: the innermost of
the events open at an instant decides. On a rank whose kernels are seen it is the device: a
kernel before a copy, and in the gaps what the host was doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.activity import Activity
from ddltrace.analyzer.columns import KIND, NULL, NULL_NS, PHASE, Columns, IntArray
from ddltrace.analyzer.intervals import subtract
from ddltrace.analyzer.messages import Messages, Waits
from ddltrace.analyzer.model import CATEGORIES

CATEGORY: Final = {name: code for code, name in enumerate(CATEGORIES)}

_MAIN_LANE: Final = "main"
_HOST_KINDS: Final = ("step", "phase", "layer", "codec", "data", "host")
_HOLE: Final = -1
_ON_CPU: Final = {
    "step": "host",
    "phase": "compute",
    "layer": "compute",
    "codec": "compute",
    "data": "data",
    "host": "host",
}
_BESIDE_DEVICE: Final = dict.fromkeys(_HOST_KINDS, "host") | {"data": "data"}
_ON_DEVICE: Final = {"kernel": "compute", "copy": "data"}


class Partition(NamedTuple):
    """Time cut into segments: segment i reaches from ``time[i]`` to ``time[i + 1]``.

    Attributes:
        time: Ascending, ns; before the first there is nothing.
        category: Code in `CATEGORY`; negative for a hole.
        name: Code of a name; `NULL` for none.
    """

    time: IntArray
    category: IntArray
    name: IntArray


@dataclass(frozen=True)
class Timeline:
    """A rank's time, and the blocks at which the critical path stops.

    Attributes:
        rank: Whose it is.
        segments: Its time without holes, from the beginning of time.
        names: What the codes of names stand for.
        block_start: Where the rank begins to be blocked: ascending; blocks are disjoint.
        block_end: Where it goes on.
        block_message: Index of the message it is blocked on; `NULL` if unknown.
        gradient_time: When gradients became ready, ascending.
        gradient_tensor: Whose they are: ids of tensors.
        backward: Code of the backward phase's name; `NULL` if it has none.
    """

    rank: int
    segments: Partition
    names: list[str]
    block_start: IntArray
    block_end: IntArray
    block_message: IntArray
    gradient_time: IntArray
    gradient_tensor: IntArray
    backward: int

    @property
    def nbytes(self) -> int:
        """Memory that it holds, about."""
        columns = (*self.segments, self.block_start, self.block_end, self.block_message)
        return sum(column.nbytes for column in (*columns, self.gradient_time))


def build_timeline(
    rank: int, columns: Columns, messages: Messages, waits: Waits, activity: Activity
) -> Timeline:
    """Builds a rank's timeline from its events."""
    host_rows = _main_thread(columns, columns.rows(*_HOST_KINDS))
    if activity.device:
        start, end, message = _exposed(messages, activity)
        partition = _describe(columns, *_nested(columns, host_rows), _BESIDE_DEVICE)
        for kind in ("copy", "kernel"):
            top = _describe(columns, *_latest(columns, columns.rows(kind)), _ON_DEVICE)
            partition = _overlay(top, partition)
    else:
        start, end, message = _blocked(columns, waits)
        partition = _describe(columns, *_nested(columns, host_rows), _ON_CPU)
    gradients = columns.rows("gradient")
    gradients = gradients[np.argsort(columns.start[gradients], kind="stable")]
    counts, tensors = columns.lists("tensors", gradients)
    return Timeline(
        rank=rank,
        segments=_without_holes(partition, _first(columns)),
        names=columns.names,
        block_start=start,
        block_end=end,
        block_message=message,
        gradient_time=np.repeat(columns.start[gradients], counts),
        gradient_tensor=tensors,
        backward=columns.names.index("backward") if "backward" in columns.names else NULL,
    )


def _main_thread(columns: Columns, rows: IntArray) -> IntArray:
    """The rows of the thread that leads: `main`, or the one with the most of them."""
    lanes = columns.lane[rows]
    if not len(lanes):
        return rows
    if _MAIN_LANE in columns.lanes and (lanes == columns.lanes.index(_MAIN_LANE)).any():
        leading = columns.lanes.index(_MAIN_LANE)
    else:
        leading = int(np.argmax(np.bincount(lanes + 1))) - 1
    return np.asarray(rows[lanes == leading])


def _nested(columns: Columns, rows: IntArray) -> tuple[IntArray, IntArray]:
    """For events of one thread, which nest: the innermost one open at every instant.

    Returns:
        The instants at which the answer changes, ascending, and the row from there on;
        `NULL` where none is open.
    """
    start, end = columns.start[rows], columns.end[rows]
    filled = end > start
    rows, start, end = rows[filled], start[filled], end[filled]
    # Of events with the same times the outer one is of the wider kind, or recorded later.
    order = np.lexsort((-rows, columns.kind[rows], -end, start))
    rows, start, end = rows[order], start[order], end[order]
    count = len(rows)
    # By end, and of events that end together the inner ones, which start later, first.
    closing = np.lexsort((-np.arange(count), end))
    closed_before = np.searchsorted(end[closing], start, side="right")
    depth = np.arange(count) - closed_before
    parent = _parents(depth)

    time = np.empty(2 * count, dtype=np.int64)
    row = np.empty(2 * count, dtype=np.int64)
    opens_at = np.arange(count) + closed_before
    closes_at = np.arange(count) + np.searchsorted(start, end[closing], side="left")
    time[opens_at], row[opens_at] = start, rows
    outer = parent[closing]
    time[closes_at] = end[closing]
    row[closes_at] = np.where(outer == NULL, NULL, rows[outer])
    final = np.append(time[1:] != time[:-1], True)[: len(time)]
    return time[final], row[final]


def _parents(depth: IntArray) -> IntArray:
    """Of nesting events sorted by start: the index of the one around each, or `NULL`."""
    parent = np.full(len(depth), NULL)
    by_depth = np.argsort(depth, kind="stable")
    levels = np.flatnonzero(np.append(True, np.diff(depth[by_depth]) != 0)[: len(depth)])
    bounds = [*levels.tolist(), len(depth)]
    for i in range(1, len(levels)):
        outer = by_depth[bounds[i - 1] : bounds[i]]
        inner = by_depth[bounds[i] : bounds[i + 1]]
        parent[inner] = outer[np.maximum(np.searchsorted(outer, inner) - 1, 0)]
    return parent


def _latest(columns: Columns, rows: IntArray) -> tuple[IntArray, IntArray]:
    """For events that may overlap in any way (kernels on streams): one open at every instant.

    It is the one that started last, and when that has ended, the one that ends last.

    Returns:
        As `_nested`.
    """
    rows = rows[columns.end[rows] > columns.start[rows]]
    rows = rows[np.argsort(columns.start[rows], kind="stable")]
    start, end = columns.start[rows], columns.end[rows]
    if not len(rows):
        return start, rows
    reach = np.maximum.accumulate(end)
    longest = np.maximum.accumulate(np.where(end >= reach, np.arange(len(rows)), 0))
    following = np.append(start[1:], np.iinfo(np.int64).max)
    times = np.stack([start, end, reach], axis=1)
    labels = np.stack([rows, rows[longest], np.full(len(rows), NULL)], axis=1)
    shown = np.stack(
        [following > start, (end < reach) & (end < following), reach < following], axis=1
    )
    return times[shown], labels[shown]


def _describe(
    columns: Columns, time: IntArray, row: IntArray, meaning: dict[str, str]
) -> Partition:
    """Category and name of each segment from the row that decides it."""
    codes = np.full(len(KIND) + 1, CATEGORY["host"])
    for kind, name in meaning.items():
        codes[KIND[kind]] = CATEGORY[name]
    category = codes[columns.kind[row]]
    named = np.array([name == "optimizer" for name in [*columns.names, ""]])
    updates = named[columns.name[row]] & (columns.kind[row] == KIND["phase"])
    updates |= columns.phase[row] == PHASE["optimizer"]
    category = np.where(updates & (category == CATEGORY["compute"]), CATEGORY["update"], category)
    # A step only says that the host is at work; it does not name it.
    unnamed = (row == NULL) | (columns.kind[row] == KIND["step"])
    return Partition(
        time,
        np.where(row == NULL, _HOLE, category),
        np.where(unnamed, NULL, columns.name[row]),
    )


def _overlay(top: Partition, bottom: Partition) -> Partition:
    """`top`, with its holes filled from `bottom`."""
    time = np.union1d(top.time, bottom.time)
    i = np.searchsorted(top.time, time, side="right") - 1
    j = np.searchsorted(bottom.time, time, side="right") - 1
    top_category = np.append(top.category, _HOLE)[i]
    hole = top_category == _HOLE
    return Partition(
        time,
        np.where(hole, np.append(bottom.category, _HOLE)[j], top_category),
        np.where(hole, np.append(bottom.name, NULL)[j], np.append(top.name, NULL)[i]),
    )


def _first(columns: Columns) -> int | None:
    return int(columns.start.min()) if len(columns) else None


def _without_holes(partition: Partition, first: int | None) -> Partition:
    """Between a rank's first and last event its host is at work on something; beside, idle."""
    category = np.where(partition.category == _HOLE, CATEGORY["host"], partition.category)
    if len(category) and partition.category[-1] == _HOLE:
        category[-1] = CATEGORY["idle"]
    before: list[tuple[int, int]] = [(NULL_NS, CATEGORY["idle"])]
    if first is not None and len(partition.time) and first < partition.time[0]:
        before.append((first, CATEGORY["host"]))
    times, categories = zip(*before, strict=True)
    return Partition(
        np.append(times, partition.time),
        np.append(categories, category).astype(np.int8),
        np.append([NULL] * len(before), partition.name).astype(np.int32),
    )


def _blocked(columns: Columns, waits: Waits) -> tuple[IntArray, IntArray, IntArray]:
    """Start, end and message of the main thread's waits, made disjoint."""
    waits_rows = np.arange(len(waits.start))
    if _MAIN_LANE in columns.lanes:
        waits_rows = waits_rows[waits.lane == columns.lanes.index(_MAIN_LANE)]
    start, end = waits.start[waits_rows], waits.end[waits_rows]
    if len(start):
        reach = np.maximum.accumulate(end)
        start = np.append(start[:1], np.maximum(start[1:], reach[:-1]))
    kept = end > start
    return start[kept], end[kept], waits.message[waits_rows][kept]


def _exposed(messages: Messages, activity: Activity) -> tuple[IntArray, IntArray, IntArray]:
    """Start, end and message of the times in which a device does nothing but communicate."""
    exposed = (
        activity.comm if activity.compute is None else subtract(activity.comm, activity.compute)
    )
    counted = np.flatnonzero(messages.in_flight & messages.closed)
    by_end = counted[np.argsort(messages.end[counted], kind="stable")]
    ends = messages.end[by_end]
    # Cut at the ends of messages, so that each block belongs to one: the next one to end.
    first = np.searchsorted(ends, exposed.start, side="right")
    last = np.searchsorted(ends, exposed.end, side="left")
    cuts = np.maximum(last - first, 0)
    inner = np.repeat(first - np.cumsum(cuts) + cuts, cuts) + np.arange(int(cuts.sum()))
    inside = ends[inner]
    start = np.unique(np.concatenate([exposed.start, inside]))
    end = np.unique(np.concatenate([exposed.end, inside]))
    place = np.minimum(np.searchsorted(ends, end, side="left"), max(len(ends) - 1, 0))
    return start, end, by_end[place] if len(ends) else place
