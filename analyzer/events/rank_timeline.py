"""The timeline of one rank without gaps: its activity at every instant.

The critical path uses it. On a CPU rank, it is the timeline of the training thread: the innermost
event at an instant decides (an operator counts as part of what encloses it), and a device copy
takes precedence over host code. On a rank with recorded kernels, it is the timeline of the device:
a kernel takes precedence over a copy, and gaps are filled with the activity of the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    KIND,
    NULL,
    NULL_NS,
    PHASE,
    BoolArray,
    Columns,
    ColumnTable,
    Gathered,
    IntArray,
    by_place,
    distinct,
)
from ddltrace.analyzer.events.interval_sets import Spans, union
from ddltrace.analyzer.events.process_stops import STOPPED
from ddltrace.analyzer.events.rank_activity import Activity

CATEGORIES: Final = ("compute", "transfer", "wait", "update", "data", "copy", "host", "idle")
"""Categories of pieces of the critical path, in the order of `PathTotals`."""


CATEGORY: Final = {name: code for code, name in enumerate(CATEGORIES)}

MAIN_LANE: Final = "main"
_HOST_KINDS: Final = ("step", "phase", "layer", "codec", "data", "host")
_ENCLOSING: Final = tuple(KIND[kind] for kind in ("phase", "layer", "codec", "data"))
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
_ON_DEVICE: Final = {"kernel": "compute", "copy": "copy"}


class Partition(NamedTuple):
    """Time divided into segments: segment i extends from ``time[i]`` to ``time[i + 1]``.

    Attributes:
        time: Ascending, ns; before the first there is nothing.
        category: Code in `CATEGORY`; negative for a hole.
        name: Code of a name; `NULL` for none.
    """

    time: IntArray
    category: IntArray
    name: IntArray

    def spans(self, chosen: BoolArray) -> Spans:
        """The instants of some segments, without the last one, which has no end."""
        rows = np.flatnonzero(chosen[:-1])
        return union(self.time[rows], self.time[rows + 1])


@dataclass(frozen=True)
class Timeline:
    """A rank's time.

    Attributes:
        rank: Its rank.
        segments: Its time without holes, from the beginning of time.
        names: Names by code.
        gradient_time: When gradients became ready, ascending.
        gradient_tensor: Tensor ids of the gradients.
        backward: Code of the backward phase's name; `NULL` if it has none.
    """

    rank: int
    segments: Partition
    names: list[str]
    gradient_time: IntArray
    gradient_tensor: IntArray
    backward: int


@dataclass(frozen=True)
class Work(ColumnTable):
    """Intervals of work that determine a timeline, in the order of recording.

    Attributes:
        start: Start, ns.
        end: End, ns.
        kind: Code in `KIND`, 8 bits.
        name: Code of the name; `NULL` for none, 32 bits.
        update: Whether it is of the optimizer.
    """

    start: IntArray
    end: IntArray
    kind: IntArray
    name: IntArray
    update: BoolArray


class _Labels(NamedTuple):
    """Time divided into segments as in `Partition`, with the row that determines each.

    Attributes:
        time: Ascending, ns.
        kind: Code in `KIND`; negative for a hole.
        name: Code of a name; `NULL` for none.
        update: Whether it is of the optimizer.
    """

    time: IntArray
    kind: IntArray
    name: IntArray
    update: BoolArray


_NO_WORK: Final = Work(
    np.empty(0, np.int64),
    np.empty(0, np.int64),
    np.empty(0, np.int8),
    np.empty(0, np.int32),
    np.empty(0, np.bool_),
)


class LeadingLane:
    """Finds the thread that a rank's timeline follows, from its events, which are added in parts.

    It is the thread with the most steps, else `main`, else the one with the most host work.
    """

    def __init__(self) -> None:
        self._lanes: Counter[str | None] = Counter()
        self._steps: Counter[str | None] = Counter()

    def add(self, columns: Columns) -> dict[str | None, int]:
        """Adds a part of the events; returns how many of its host events each lane has."""
        names: list[str | None] = [None, *columns.lanes]
        used = _counts(columns.lane[columns.rows(*_HOST_KINDS)], names)
        self._lanes.update(used)
        self._steps.update(_counts(columns.lane[columns.rows("step")], names))
        return used

    def name(self) -> str | None:
        """The lane, of the events so far."""
        if not self._lanes:
            return MAIN_LANE
        return max(
            self._lanes, key=lambda lane: (self._steps[lane], lane == MAIN_LANE, self._lanes[lane])
        )

    def __bool__(self) -> bool:
        return bool(self._lanes)


class TimelineBuilder:
    """Builds a rank's timeline from its events, which are added in parts.

    The events of the leading thread nest, so time before the end of a step can be divided into
    segments and released as soon as the step is recorded. This requires that no earlier event is
    recorded later; otherwise `finish` returns None.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._leading = LeadingLane()
        self._lane: str | None = None
        self._pending: list[Work] = []
        self._until = NULL_NS
        self._late = False
        self._found = [Gathered(dtype) for dtype in (np.int64, np.int8, np.int32, np.bool_)]
        self._device: dict[str, list[Work]] = {kind: [] for kind in _ON_DEVICE}

    def add(self, columns: Columns) -> None:
        """Adds a part of the events."""
        codes = np.array([*(self._code(name) for name in columns.names), NULL], dtype=np.int32)
        optimizer = self._names.get("optimizer", NULL - 1)
        for kind, parts in self._device.items():
            parts.append(_work(columns, columns.rows(kind), codes, optimizer))
        rows = columns.rows(*_HOST_KINDS)
        first = not self._leading
        used = self._leading.add(columns)
        if first:
            self._lane = self._leading.name()
        if self._lane in used:
            number = NULL if self._lane is None else columns.lanes.index(self._lane)
            rows = rows[columns.lane[rows] == number]
            self._add_host(_work(columns, rows, codes, optimizer))

    def finish(self, rank: int, found: Gradients, activity: Activity) -> Timeline | None:
        """Returns the timeline.

        Args:
            found: Its gradients, and when its first event starts.
            activity: The activity of the rank.

        Returns:
            The timeline; None if it cannot be derived from events in parts, but only from all
            events at once.
        """
        if self._late or self._lane != self._leading.name():
            return None
        self._cut(Work.joined([_NO_WORK, *self._pending]))
        self._pending = []
        host = _Labels(*(column.values() for column in self._found))
        stopped = _whole(activity.stopped, "idle", self._code(STOPPED))
        if activity.device:
            unexplained = _whole(activity.unrecorded, "wait", NULL)
            partition = _overlay(unexplained, _describe(host, _BESIDE_DEVICE))
            partition = _overlay(stopped, partition)
            for kind in ("copy", "kernel"):
                top = _describe(_latest(Work.joined([_NO_WORK, *self._device[kind]])), _ON_DEVICE)
                partition = _overlay(top, partition)
        else:
            partition = _with_copies(
                _describe(host, _ON_CPU),
                _describe(_latest(Work.joined([_NO_WORK, *self._device["copy"]])), _ON_DEVICE),
            )
            partition = _overlay(stopped, partition)
        return Timeline(
            rank=rank,
            segments=_without_holes(partition, found.first),
            names=list(self._names),
            gradient_time=found.time,
            gradient_tensor=found.tensor,
            backward=self._names.get("backward", NULL),
        )

    def _code(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _add_host(self, work: Work) -> None:
        self._late |= bool((work.start < self._until).any())
        self._pending.append(work)
        steps = work.end[work.kind == KIND["step"]]
        if not len(steps):
            return
        until = int(steps.max())
        pending = Work.joined([_NO_WORK, *self._pending])
        before = pending.start < until
        if bool((pending.end[before] <= until).all()):
            self._cut(pending.keep(before))
            self._pending = [pending.keep(~before)]
            self._until = until
        else:
            self._pending = [pending]

    def _cut(self, work: Work) -> None:
        """Divides time into segments, up to the last instant without an open event."""
        found = _nested(work)
        former = self._found[0].values()
        # If an event ends where the next one starts, there is no hole between them.
        if len(former) and len(found.time) and former[-1] == found.time[0]:
            for column in self._found:
                column.drop_last()
        for column, values in zip(self._found, found, strict=True):
            column.add(values)


class Gradients(NamedTuple):
    """A rank's gradients in the order of time, and the start of its first event.

    Attributes:
        first: Start of the rank's first event; None without events.
        time: When each became ready, ns.
        tensor: Id of its tensor.
    """

    first: int | None
    time: IntArray
    tensor: IntArray


def _counts(lanes: IntArray, names: Sequence[str | None]) -> dict[str | None, int]:
    """Returns the number of rows of each lane.

    Args:
        lanes: Index of each row's lane; -1 if it has none.
        names: Names of the lanes; the first is that of events without a lane.
    """
    # As 64-bit integers: the number of the last lane may be the largest of 16 bits.
    counts = np.bincount(lanes.astype(np.int64) + 1, minlength=len(names))
    return {names[int(code)]: int(counts[code]) for code in np.flatnonzero(counts)}


def _work(columns: Columns, rows: IntArray, codes: IntArray, optimizer: int) -> Work:
    """Converts rows to work; rows without duration are excluded."""
    start, end = columns.start[rows], columns.end[rows]
    filled = end > start
    rows = rows[filled]
    kind, name = columns.kind[rows], codes[columns.name[rows]]
    update = (name == optimizer) & (kind == KIND["phase"])
    update |= columns.phase[rows] == PHASE["optimizer"]
    return Work(start[filled], end[filled], kind, name, update)


def _nested(work: Work) -> _Labels:
    """Returns the innermost open event at every instant, for nested events of one thread."""
    # If events have the same times, the outer one has the wider kind, or was recorded later.
    order = np.lexsort((-np.arange(len(work.start)), work.kind, -work.end, work.start))
    work = work.keep(order)
    start, end = work.start, work.end
    count = len(order)
    # Sorted by end; events with the same end are sorted from inner (later start) to outer.
    closing = np.lexsort((-np.arange(count), end))
    closed_before = np.searchsorted(end[closing], start, side="right")
    depth = np.arange(count) - closed_before
    parent = _parents(depth)
    work = _with_operators(work, parent)

    time = np.empty(2 * count, dtype=np.int64)
    row = np.empty(2 * count, dtype=np.int64)
    opens_at = np.arange(count) + closed_before
    closes_at = np.arange(count) + np.searchsorted(start, end[closing], side="left")
    time[opens_at], row[opens_at] = start, np.arange(count)
    time[closes_at], row[closes_at] = end[closing], parent[closing]
    final = np.append(time[1:] != time[:-1], True)[: len(time)]
    return _label(work, time[final], row[final])


def _with_operators(work: Work, parent: IntArray) -> Work:
    """Counts operators as part of the phase, layer, codec or fetch of data that encloses them.

    Otherwise the operators of a forward pass on the CPU, or those with which a data loader without
    workers makes a batch, would be host code between these.

    Args:
        work: The events of one thread.
        parent: The event that encloses each, or `NULL`.
    """
    outer = np.where((work.kind == KIND["host"]) & (parent != NULL), parent, np.arange(len(parent)))
    while not np.array_equal(further := outer[outer], outer):
        outer = further
    part = (work.kind == KIND["host"]) & np.isin(work.kind[outer], _ENCLOSING)
    of_data = part & (work.kind[outer] == KIND["data"])
    return replace(
        work,
        kind=np.where(part, work.kind[outer], work.kind),
        name=np.where(of_data, work.name[outer], work.name),
    )


def _parents(depth: IntArray) -> IntArray:
    """Returns the index of the enclosing event of each, or `NULL`; events are sorted by start."""
    parent = np.full(len(depth), NULL)
    for outer, inner in pairwise(by_place(depth, int(depth.max(initial=-1)) + 1)):
        parent[inner] = outer[np.maximum(np.searchsorted(outer, inner) - 1, 0)]
    return parent


def _latest(work: Work) -> _Labels:
    """Returns one open event at every instant, for arbitrarily overlapping events (kernels).

    It is the one that started last, and when that has ended, the one that ends last.
    """
    work = work.keep(np.argsort(work.start, kind="stable"))
    start, end = work.start, work.end
    count = len(start)
    if not count:
        return _label(work, start, np.empty(0, np.int64))
    rows = np.arange(count)
    reach = np.maximum.accumulate(end)
    longest = np.maximum.accumulate(np.where(end >= reach, rows, 0))
    following = np.append(start[1:], np.iinfo(np.int64).max)
    times = np.stack([start, end, reach], axis=1)
    labels = np.stack([rows, longest, np.full(count, NULL)], axis=1)
    shown = np.stack(
        [following > start, (end < reach) & (end < following), reach < following], axis=1
    )
    return _label(work, times[shown], labels[shown])


def _label(work: Work, time: IntArray, row: IntArray) -> _Labels:
    """Labels each segment by the row that determines it; `NULL` denotes a hole."""
    hole = row == NULL
    if not len(work.start):
        return _Labels(time, _NO_WORK.kind, _NO_WORK.name, _NO_WORK.update)
    kind = np.where(hole, np.int8(_HOLE), work.kind[row])
    # A step indicates host work without a name.
    name = np.where(hole | (kind == KIND["step"]), np.int32(NULL), work.name[row])
    return _Labels(time, kind, name, work.update[row] & ~hole)


def _describe(labels: _Labels, meaning: dict[str, str]) -> Partition:
    """Returns the category of each segment by the kind of the row that determines it."""
    codes = np.full(len(KIND) + 1, CATEGORY["host"], dtype=np.int8)
    for kind, name in meaning.items():
        codes[KIND[kind]] = CATEGORY[name]
    codes[_HOLE] = _HOLE
    category = codes[labels.kind]
    category[labels.update & (category == CATEGORY["compute"])] = CATEGORY["update"]
    return Partition(labels.time, category, labels.name)


def _overlay(top: Partition, bottom: Partition) -> Partition:
    """`top`, with its holes filled from `bottom`."""
    time = distinct(np.concatenate([top.time, bottom.time]))
    i = np.searchsorted(top.time, time, side="right") - 1
    j = np.searchsorted(bottom.time, time, side="right") - 1
    top_category = np.append(top.category, _HOLE)[i]
    hole = top_category == _HOLE
    return Partition(
        time,
        np.where(hole, np.append(bottom.category, _HOLE)[j], top_category),
        np.where(hole, np.append(bottom.name, NULL)[j], np.append(top.name, NULL)[i]),
    )


def _whole(spans: Spans, category: str, name: int) -> Partition:
    """A set of instants as one category and name; holes elsewhere."""
    time = np.stack([spans.start, spans.end], axis=1).ravel()
    count = len(spans.start)
    categories = np.tile(np.array([CATEGORY[category], _HOLE], dtype=np.int8), count)
    names = np.tile(np.array([name, NULL], dtype=np.int32), count)
    return Partition(time, categories, names)


def _with_copies(host: Partition, copies: Partition) -> Partition:
    """Replaces host code that is not compute by concurrent copies."""
    if not len(copies.time):
        return host
    plain = host.category == CATEGORY["host"]
    work = host._replace(category=np.where(plain, np.int8(_HOLE), host.category))
    return _overlay(_overlay(work, copies), host)


def _without_holes(partition: Partition, first: int | None) -> Partition:
    """Fills holes: host work between a rank's first and last event, idle time outside."""
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
