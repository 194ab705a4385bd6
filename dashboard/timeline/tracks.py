"""The timeline's tracks: the events of a trace, arranged in rows for drawing.

Each rank has tracks (steps, compute per thread, gradients, waits, communication per lane, device
streams), each track has rows, and the intervals of a row do not overlap. All times here are
nanoseconds since the trace's first event.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, by_place, numbers_of
from ddltrace.analyzer.events.interval_sets import EMPTY, Spans, subtract
from ddltrace.analyzer.formatting.units import bytes_text
from ddltrace.analyzer.joined.nccl_events import PREFIX as NCCL_LANES
from ddltrace.dashboard.timeline.event_index import EventIndex
from ddltrace.dashboard.timeline.lod import I64, RowIndex
from ddltrace.dashboard.timeline.packing import MAX_ROWS, cut_overlaps, pack
from ddltrace.dashboard.timeline.rank_events import RankEvents, read_rank
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

Bools = npt.NDArray[np.bool_]


class Role(IntEnum):
    """The role of an interval, which determines its color."""

    STEP = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    DATA = 4
    LAYER = 5
    HOST = 6
    MARKER = 7
    CODEC = 8
    GRADIENT = 9
    WAIT = 10
    COLLECTIVE = 11
    P2P = 12
    UNFINISHED = 13
    KERNEL = 14
    COPY = 15
    EXPOSED = 16
    COMPUTE = 17
    TRANSFER = 18
    IDLE = 19


NO_EVENT: Final = -1
"""The event of an interval that was computed, not recorded."""


_ROLE_OF_KIND: Final = {
    "step": Role.STEP,
    "phase": Role.HOST,
    "layer": Role.LAYER,
    "gradient": Role.GRADIENT,
    "message": Role.COLLECTIVE,
    "wait": Role.WAIT,
    "codec": Role.CODEC,
    "kernel": Role.KERNEL,
    "copy": Role.COPY,
    "data": Role.DATA,
    "marker": Role.MARKER,
    "host": Role.HOST,
}
_ROLE_OF_PHASE: Final = {
    "forward": Role.FORWARD,
    "backward": Role.BACKWARD,
    "optimizer": Role.UPDATE,
    "data": Role.DATA,
}
_LONGEST_NS: Final = 1 << 50  # 13 days
_THREAD_KINDS: Final = ("phase", "layer", "data", "marker", "host", "codec")
_DEVICE_KINDS: Final = ("kernel", "copy")


@dataclass(frozen=True)
class Row:
    """One row of a track.

    Attributes:
        index: The intervals, indexed for reduction.
        event: Row of each interval in the rank's event table.
        name: Number of each interval's label in `labels`; for a step, the step number.
        role: `Role` of each interval.
        labels: Number of each label in `Timeline.names`; None if `name` holds that itself.
    """

    index: RowIndex
    event: npt.NDArray[np.int32]
    name: npt.NDArray[np.int32]
    role: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int32] | None = None

    def label(self, position: I64) -> npt.NDArray[np.int32]:
        """Numbers of the labels of some intervals in `Timeline.names`; of steps, the steps."""
        name = self.name[position]
        return name if self.labels is None else self.labels[name]


@dataclass(frozen=True)
class Track:
    """One track: a kind of activity of one rank.

    Attributes:
        rank: Global rank.
        kind: ``steps``, ``compute``, ``gradients``, ``waits``, ``communication``,
            ``exposed``, ``device``.
        label: Shown before the track: the name of the lane or of the kind.
        first_row: Number of its first row in `Timeline.rows`.
        num_rows: Number of its rows.
        crowded: Whether overlapping intervals share the last row and are drawn shortened.
    """

    rank: int
    kind: str
    label: str
    first_row: int
    num_rows: int
    crowded: bool


@dataclass
class Timeline:
    """A trace, arranged for drawing.

    Attributes:
        tracks: From top to bottom.
        rows: All rows of all tracks, in the same order.
        names: Labels of intervals.
        span_ns: Time from the first start to the last end.
        num_events: Number of events in the rows.
        busy: Rank -> its compute and communication, each as disjoint intervals.
        indexes: Rank -> the columns of its events that clicks and searches need.
        roles: The roles that occur in the rows.
        unread: Rank -> times of which no events were read yet, as starts and ends.
    """

    tracks: list[Track] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    span_ns: int = 0
    num_events: int = 0
    busy: dict[int, tuple[RowIndex, RowIndex]] = field(default_factory=dict)
    indexes: dict[int, EventIndex] = field(default_factory=dict)
    roles: set[int] = field(default_factory=set)
    unread: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _number_of_name: dict[str, int] = field(default_factory=dict, init=False)

    def append(self, part: Timeline) -> None:
        """Adds the tracks of another rank below the tracks so far."""
        shared = self.intern(part.names)
        first = len(self.rows)
        self.tracks += [replace(track, first_row=first + track.first_row) for track in part.tracks]
        for track in part.tracks:
            rows = part.rows[track.first_row : track.first_row + track.num_rows]
            if track.kind != "steps":  # whose labels are the numbers of steps
                rows = [replace(row, labels=shared) for row in rows]
            self.rows += rows
        self.span_ns = max(self.span_ns, part.span_ns)
        self.num_events += part.num_events
        self.busy |= part.busy
        self.indexes |= part.indexes
        self.roles |= part.roles
        self.unread |= part.unread

    def intern(self, labels: list[str]) -> npt.NDArray[np.int32]:
        """Numbers of labels; new labels are added to `names`."""
        numbers = np.empty(len(labels), dtype=np.int32)
        for i, label in enumerate(labels):
            number = self._number_of_name.setdefault(label, len(self.names))
            if number == len(self.names):
                self.names.append(label)
            numbers[i] = number
        return numbers

    def step_span(self, rank: int, step: int) -> tuple[int, int] | None:
        """Start and end of a step on a rank, since the trace's first event; None if not known."""
        for track in self.tracks:
            if track.rank == rank and track.kind == "steps":
                row = self.rows[track.first_row]
                found = np.flatnonzero(row.name == step)
                if len(found):
                    return int(row.index.start[found[0]]), int(row.index.end(found[:1])[0])
        return None

    def row_of_event(self, rank: int, event: int) -> tuple[int, int] | None:
        """The row that shows an event, and the event's position in it."""
        for track in self.tracks:
            if track.rank == rank:
                for number in range(track.first_row, track.first_row + track.num_rows):
                    found = np.flatnonzero(self.rows[number].event == event)
                    if len(found):
                        return number, int(found[0])
        return None


def build_timeline(trace: Trace) -> Timeline:
    """Arranges a trace's events in tracks, in time linear in the number of events."""
    timeline = Timeline()
    for part in rank_timelines(trace):
        timeline.append(part)
    return timeline


def rank_timelines(trace: Trace) -> Iterator[Timeline]:
    """The timeline of each rank in order; as many are built at a time as there are cores."""
    origin = trace.origin_ns
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield from _ahead(pool, lambda rank: build_rank(trace, rank, origin), trace.ranks)


def build_rank(trace: Trace, rank: int, origin_ns: int) -> Timeline:
    """Arranges one rank's events in tracks; the timeline numbers rows and labels from 0."""
    timeline = Timeline()
    RankTracks(timeline, trace, read_rank(trace, rank), origin_ns).add()
    return timeline


def _ahead(
    pool: ThreadPoolExecutor, make: Callable[[int], Timeline], ranks: Sequence[int]
) -> Iterator[Timeline]:
    """The results for all ranks in order, with as many in progress as there are threads."""
    under_way: deque[Future[Timeline]] = deque()
    for rank in ranks:
        under_way.append(pool.submit(make, rank))
        if len(under_way) >= (os.cpu_count() or 1):
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


class RankTracks:
    """Adds one rank's tracks to a timeline."""

    def __init__(
        self, timeline: Timeline, trace: Trace, events: RankEvents, origin_ns: int
    ) -> None:
        self._timeline = timeline
        self._rank = events.rank
        self._events = events
        self._tensor_names = trace.tensor_names(events.rank)
        self._origin = origin_ns
        # In place: of a rank with millions of events, each copy counts.
        self._start, self._end = events.start, events.end
        # Events that were still open at the end of the trace are drawn up to that end.
        known = self._end != NULL_NS
        last = int(max(self._start.max(initial=0), self._end.max(initial=0, where=known)))
        self._end[~known] = last
        np.maximum(self._end, self._start, out=self._end)
        self._start -= self._origin
        self._end -= self._origin
        # Times beyond any machine's uptime are damage, and would compress all others.
        self._shown: Bools = (self._start >= 0) & (self._end < _LONGEST_NS)
        self._kinds = events.kind, events.words["kind"]
        self._lanes = events.lane, events.words["lane"]

    def add(self) -> None:
        """Adds the tracks, from top to bottom."""
        timeline = self._timeline
        timeline.num_events += int(self._shown.sum())
        timeline.span_ns = max(timeline.span_ns, int(self._end[self._shown].max(initial=0)))
        self._name = self._labels()
        self._role = self._roles()
        self._add_track("steps", "steps", self._of_kind("step"))
        of_threads = list(self._by_lane(*_THREAD_KINDS))
        of_nccl = [each for each in of_threads if each[0].startswith(NCCL_LANES)]
        of_nccl.sort(key=lambda each: each[0])
        for lane, which in of_threads:
            if not lane.startswith(NCCL_LANES):
                self._add_track("compute", lane, which)
        self._add_track("gradients", "gradients", self._of_kind("gradient"))
        self._add_track("waits", "waits", self._of_kind("wait"))
        for lane, which in self._by_lane("message"):
            self._add_track("communication", lane, which)
        timeline.indexes[self._rank] = self._events.index
        activity = self._events.activity
        # Where compute is not known, neither is the communication that it does not hide.
        exposed = EMPTY if activity.compute is None else subtract(activity.comm, activity.compute)
        self._add_exposed(self._since_origin(exposed))
        for lane, which in (*self._by_lane(*_DEVICE_KINDS), *of_nccl):
            self._add_track("device", lane, which)
        timeline.busy[self._rank] = (
            RowIndex(*self._since_origin(activity.compute or EMPTY)),
            RowIndex(*self._since_origin(activity.comm)),
        )

    def _since_origin(self, spans: Spans) -> Spans:
        return Spans(spans.start - self._origin, spans.end - self._origin)

    def _add_exposed(self, spans: Spans) -> None:
        if not len(spans.start):
            return
        timeline = self._timeline
        timeline.tracks.append(
            Track(self._rank, "exposed", "exposed", len(timeline.rows), 1, False)
        )
        size = len(spans.start)
        timeline.roles.add(int(Role.EXPOSED))
        name = timeline.intern(["exposed communication"])
        timeline.rows.append(
            Row(
                RowIndex(*spans),
                np.full(size, NO_EVENT, dtype=np.int32),
                np.repeat(name, size),
                np.full(size, Role.EXPOSED, dtype=np.uint8),
            )
        )

    def _add_track(self, kind: str, label: str, which: I64) -> None:
        if not len(which):
            return
        which = which[np.lexsort((-self._end[which], self._start[which]))]
        start, end = self._start[which], self._end[which]
        if kind in ("steps", "gradients"):
            row = np.zeros(len(which), dtype=np.int32)
            end = cut_overlaps(start, end)
            crowded = False
        else:
            row = pack(start, end)
            last = np.flatnonzero(row == MAX_ROWS - 1)
            cut = cut_overlaps(start[last], end[last])
            crowded = bool(np.any(cut < end[last]))
            end = end.copy()
            end[last] = cut
        timeline = self._timeline
        num_rows = int(row.max()) + 1
        timeline.tracks.append(
            Track(self._rank, kind, label, len(timeline.rows), num_rows, crowded)
        )
        for mine in by_place(row, num_rows):
            events = which[mine]
            timeline.rows.append(
                Row(
                    RowIndex(start[mine], end[mine]),
                    events.astype(np.int32),
                    self._name[events],
                    self._role[events],
                )
            )
        present = np.bincount(self._role[which], minlength=len(Role))
        timeline.roles |= {int(role) for role in np.flatnonzero(present)}

    def _of_kind(self, *kinds: str) -> I64:
        codes, words = self._kinds
        wanted = [code for code, word in enumerate(words) if word in kinds]
        return np.flatnonzero(np.isin(codes, wanted) & self._shown).astype(np.int64)

    def _by_lane(self, *kinds: str) -> Iterator[tuple[str, I64]]:
        """Events of some kinds, by lane, in the order of the lanes' first events."""
        which = self._of_kind(*kinds)
        codes, words = self._lanes
        lanes, first = np.unique(codes[which], return_index=True)
        for lane in lanes[np.argsort(first)]:
            yield words[lane] if lane >= 0 else "unknown lane", which[codes[which] == lane]

    def _roles(self) -> npt.NDArray[np.uint8]:
        codes, words = self._kinds
        of_code = np.array([_ROLE_OF_KIND.get(word, Role.HOST) for word in words], dtype=np.uint8)
        role = of_code[codes] if len(codes) else np.zeros(0, dtype=np.uint8)
        phases = self._of_kind("phase")
        of_name = np.array(
            [
                *(_ROLE_OF_PHASE.get(word, Role.HOST) for word in self._events.words["name"]),
                Role.HOST,
            ],
            dtype=np.uint8,
        )
        role[phases] = of_name[self._events.name[phases]]
        messages = self._events.index.messages
        which = messages["event"].to_numpy().astype(np.int64)
        for column, roles in (
            ("op", dict.fromkeys(P2P_OPS, Role.P2P)),
            ("status", {"open": Role.UNFINISHED, "failed": Role.UNFINISHED}),
        ):
            values, words = _codes(messages, column)
            for code, word in enumerate(words):
                if word in roles:
                    role[which[values == code]] = roles[word]
        return role

    def _labels(self) -> npt.NDArray[np.int32]:
        """Number of each event's label."""
        timeline = self._timeline
        names, name_words = self._events.name, self._events.words["name"]
        kinds, kind_words = self._kinds
        # Events without a name show their kind.
        plain = timeline.intern([*name_words, *kind_words])
        label = plain[np.where(names >= 0, names, len(name_words) + kinds)]
        self._label_messages(label)
        self._label_waits(label)
        self._label_gradients(label, names)
        steps = self._of_kind("step")
        of_steps, numbers = self._events.steps
        label[steps] = numbers[np.searchsorted(of_steps, steps)]
        return label

    def _label_messages(self, label: npt.NDArray[np.int32]) -> None:
        messages = self._events.index.messages
        which = messages["event"].to_numpy().astype(np.int64)
        ops, op_words = _codes(messages, "op")
        size = _ints(messages, "bytes")
        size = np.where(size < 0, _ints(messages, "out_bytes"), size)
        pairs, inverse = np.unique(
            np.stack([ops.astype(np.int64), size]), axis=1, return_inverse=True
        )
        texts = []
        for op, num_bytes in pairs.T.tolist():
            word = op_words[op] if op >= 0 else "message"
            texts.append(f"{word} {bytes_text(num_bytes)}" if num_bytes >= 0 else word)
        label[which] = self._timeline.intern(texts)[inverse.reshape(-1)]

    def _label_waits(self, label: npt.NDArray[np.int32]) -> None:
        which = self._of_kind("wait")
        numbers, inverse = np.unique(label[which], return_inverse=True)
        texts = [self._timeline.names[n] for n in numbers.tolist()]
        texts = [_wait_label(text) for text in texts]
        label[which] = self._timeline.intern(texts)[inverse]

    def _label_gradients(self, label: npt.NDArray[np.int32], names: npt.NDArray[np.int32]) -> None:
        which = self._of_kind("gradient")
        which = which[names[which] < 0]
        if not len(which):
            return
        first = self._events.first_tensor[which]
        which, first = which[first >= 0], first[first >= 0]
        numbers, inverse = np.unique(first, return_inverse=True)
        texts = [self._tensor_names.get(n, f"tensor {n}") for n in numbers.tolist()]
        label[which] = self._timeline.intern(texts)[inverse]


def _codes(table: pa.Table, column: str) -> tuple[npt.NDArray[np.int32], list[str]]:
    """A dictionary-coded column as codes (-1 for null) and values."""
    coded = table[column].combine_chunks()
    if isinstance(coded, pa.ChunkedArray):  # of an empty table
        return np.zeros(0, dtype=np.int32), []
    codes = numbers_of(coded.indices, NULL).astype(np.int32)
    return codes, coded.dictionary.to_pylist()


def _ints(table: pa.Table, column: str) -> I64:
    values = table[column].combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        return np.zeros(0, dtype=np.int64)
    return numbers_of(values, NULL).astype(np.int64)


def _wait_label(name: str) -> str:
    if name == "backward":
        return "wait for buckets"  # DistributedDataParallel's, inside of backward
    return name if name.startswith("wait") else f"wait for {name}"
