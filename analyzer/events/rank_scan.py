"""Scans one rank: reduces its events to the data that an analysis keeps.

Events are read and reduced in windows of some ten thousand events. All computations across ranks
use the reduced data, so an analysis holds in memory the events of one window of each rank that is
being scanned, and for all ranks only messages, merged intervals and the numeric columns of the
critical path.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    Columns,
    Gathered,
    IntArray,
    distinct,
    named,
)
from ddltrace.analyzer.events.interval_sets import EMPTY, Spans, divided_at, overlaps, subtract
from ddltrace.analyzer.events.rank_activity import Activity, ActivityBuilder
from ddltrace.analyzer.events.rank_messages import Messages, Waits, read_messages, read_waits
from ddltrace.analyzer.events.rank_timeline import MAIN_LANE, LeadingLane, Timeline
from ddltrace.analyzer.events.superseded import drop_superseded
from ddltrace.tracer.trace.schema import (
    CHECKPOINT,
    EVALUATION,
    EVENTS,
    GARBAGE_COLLECTION,
)

_KEPT_KINDS: Final = ("message", "wait", "step", "phase")
_BATCH_SIZES: Final = ("samples", "tokens")
_MAX_NS: Final = np.iinfo(np.int64).max


class Region(NamedTuple):
    """A checkpoint or an evaluation of a rank.

    Attributes:
        rank: The rank.
        name: The marker's name.
        start: Its start, ns.
        end: Its end.
        step: The step in which it starts: earlier ones are completed; `NULL` outside steps.
        leads: Whether it is on the thread that the rank's timeline follows.
    """

    rank: int
    name: str
    start: int
    end: int
    step: int
    leads: bool


class RankBlocks(NamedTuple):
    """The times in which a rank only waits for messages, ascending and disjoint.

    Attributes:
        start: When the rank begins to be blocked, ns.
        end: When it continues.
        message: Index of the message that it is blocked on; `NULL` if that is not known.
    """

    start: IntArray
    end: IntArray
    message: IntArray


@dataclass(frozen=True)
class RankScan:
    """The data of one rank that an analysis keeps.

    Attributes:
        rank: Its rank.
        events: Number of events.
        damaged: Rows whose times cannot be real.
        backwards: Rows that ended before they started.
        first: Earliest start of any event, ns; 0 without events.
        last: Latest time of any event, ns.
        messages: Its messages.
        waits: When its host was blocked on them.
        activity: The activity of the rank.
        blocks: The times in which the thread that trains, or the device, is blocked.
        step: Numbers of its completed steps, ascending.
        step_start: Their starts, ns.
        step_end: Their ends, ns.
        gradient_time: When gradients became ready, ascending, ns.
        gradient_tensor: Ids of their tensors.
        gradient_step: Their steps.
        launches: Step -> number of kernels, copies and messages whose launch in it is known.
        amounts: ``samples``, ``tokens``, ``flops`` and ``gc_ns`` (garbage collections) -> step ->
            their sum; of samples and tokens NaN if a batch of the step has none that are known.
        leading_lane: The thread that its timeline follows, see `LeadingLane`.
        regions: Its checkpoints and evaluations.
        updated: Numbers of the steps in which an optimizer has stepped, ascending.
        timeline: Its timeline, in a trace of few ranks: the critical path then probably visits all
            ranks, and their events have just been read.
    """

    rank: int
    events: int
    damaged: int
    backwards: int
    first: int
    last: int
    messages: Messages
    waits: Waits
    activity: Activity
    blocks: RankBlocks
    step: IntArray
    step_start: IntArray
    step_end: IntArray
    gradient_time: IntArray
    gradient_tensor: IntArray
    gradient_step: IntArray
    launches: dict[int, int]
    amounts: dict[str, dict[int, float]]
    leading_lane: str | None
    regions: tuple[Region, ...]
    updated: IntArray
    timeline: Timeline | None = None

    def path_blocks(self) -> RankBlocks:
        """The blocks at which the critical path stops: those of the thread of the timeline."""
        return _blocked_times(self.messages, self.waits, self.activity, self.leading_lane)


class RankScanner:
    """Reduces a rank's events in parts; rows of most kinds are not kept.

    Args:
        rank: The rank of the events.
        operations_only: See `ActivityBuilder`.
        stopped: Times in each of which the rank's process was stopped once.
    """

    def __init__(
        self, rank: int, *, operations_only: bool | None = None, stopped: Spans = EMPTY
    ) -> None:
        self._rank = rank
        self._events = self._damaged = self._backwards = 0
        self._first, self._last = _MAX_NS, NULL_NS
        self._kept: list[pa.Table] = []
        self._activity = ActivityBuilder(operations_only=operations_only, stopped=stopped)
        self._leading = LeadingLane()
        self._gradient_time = Gathered(np.int64)
        self._gradient_tensor = Gathered(np.int32)
        self._gradient_step = Gathered(np.int32)
        self._launches: Counter[int] = Counter()
        self._amounts: dict[str, dict[int, float]] = {
            name: {} for name in (*_BATCH_SIZES, "flops", "gc_ns")
        }
        self._regions: list[tuple[str, int, int, int, str | None]] = []

    def add(self, columns: Columns) -> None:
        """Adds a part of the events."""
        start, end = columns.start, columns.end
        self._events += len(columns)
        self._damaged += columns.damaged
        self._backwards += columns.backwards
        if len(columns):
            self._first = min(self._first, int(start.min()))
            self._last = max(self._last, int(start.max()), int(end.max()))
        self._activity.add(columns)
        self._leading.add(columns)
        self._kept.append(columns.table(columns.rows(*_KEPT_KINDS)))
        work = columns.rows("kernel", "copy", "message")
        launched = columns.ints("enqueue_ns", null=NULL_NS)[work] != NULL_NS
        steps, counts = np.unique(columns.step[work[launched]], return_counts=True)
        self._launches.update(dict(zip(steps.tolist(), counts.tolist(), strict=True)))
        rows = columns.rows("data")
        for name in _BATCH_SIZES:
            self._add_amounts(name, columns.step[rows], columns.ints(name, rows))
        rows = columns.rows("host")
        rows = rows[columns.ints("flops", rows) != NULL]
        self._add_amounts("flops", columns.step[rows], columns.ints("flops", rows))
        markers = columns.rows("marker")
        rows = markers[named(columns, GARBAGE_COLLECTION.__eq__, markers)]
        self._add_amounts("gc_ns", columns.step[rows], columns.end[rows] - columns.start[rows])
        self._add_regions(columns, markers[named(columns, _is_region, markers)])
        rows = columns.rows("gradient")
        counts, tensors = columns.lists("tensors", rows)
        self._gradient_time.add(np.repeat(start[rows], counts))
        self._gradient_tensor.add(tensors)
        self._gradient_step.add(np.repeat(columns.step[rows], counts))

    def _add_amounts(self, name: str, step: IntArray, values: IntArray) -> None:
        inside = step != NULL
        values = values[inside]
        numbers, places = np.unique(step[inside], return_inverse=True)
        sums = np.bincount(places, np.where(values == NULL, np.nan, values), len(numbers))
        found = self._amounts[name]
        for number, value in zip(numbers.tolist(), sums.tolist(), strict=True):
            found[number] = found.get(number, 0.0) + value

    def _add_regions(self, columns: Columns, rows: IntArray) -> None:
        codes, names = columns.codes("name", rows)
        lanes: list[str | None] = [*columns.lanes, None]
        for row, code in zip(rows.tolist(), codes.tolist(), strict=True):
            times = int(columns.start[row]), int(columns.end[row])
            lane = lanes[columns.lane[row]]
            self._regions.append((names[code], *times, int(columns.step[row]), lane))

    def finish(self) -> RankScan:
        """Returns the reduced data of all added events."""
        table = pa.concat_tables([EVENTS.empty_table(), *self._kept]).unify_dictionaries()
        self._kept = []
        kept = drop_superseded(table)
        columns = Columns(kept)
        messages = read_messages(columns)
        waits = read_waits(columns, messages)
        step, step_start, step_end = _steps(columns)
        time, tensor = self._gradient_time.values(), self._gradient_tensor.values()
        number = self._gradient_step.values()
        if (time[1:] < time[:-1]).any():
            order = np.argsort(time, kind="stable")
            time, tensor, number = time[order], tensor[order], number[order]
        activity = self._activity.finish(messages, waits)
        leading = self._leading.name()
        return RankScan(
            rank=self._rank,
            events=self._events - (table.num_rows - kept.num_rows),
            damaged=self._damaged,
            backwards=self._backwards,
            first=self._first if self._events else 0,
            last=self._last if self._events else 0,
            messages=messages,
            waits=waits,
            activity=activity,
            blocks=_blocked_times(messages, waits, activity, _training_lane(columns, waits)),
            step=step,
            step_start=step_start,
            step_end=step_end,
            gradient_time=time,
            gradient_tensor=tensor,
            gradient_step=number,
            launches=dict(self._launches) if activity.device else {},
            amounts=self._amounts,
            leading_lane=leading,
            regions=tuple(
                Region(self._rank, name, start, end, in_step, lane == leading)
                for name, start, end, in_step, lane in self._regions
            ),
            updated=_updated(columns),
        )


def _is_region(name: str) -> bool:
    return name == EVALUATION or name.startswith(CHECKPOINT)


def _training_lane(columns: Columns, waits: Waits) -> str | None:
    """The thread with the most steps, else `main`."""
    lanes = columns.lane[columns.rows("step")]
    lanes = lanes[lanes != NULL]
    if len(lanes):
        return columns.lanes[int(np.argmax(np.bincount(lanes)))]
    return MAIN_LANE if MAIN_LANE in waits.lanes else None


def _updated(columns: Columns) -> IntArray:
    rows = columns.rows("phase")
    is_update = named(columns, "optimizer".__eq__, rows)
    return distinct(columns.step[rows[is_update & (columns.step[rows] != NULL)]])


def _steps(columns: Columns) -> tuple[IntArray, IntArray, IntArray]:
    """Number, start and end of completed steps; of a number that occurs twice, the last."""
    rows = columns.rows("step")
    rows = rows[(columns.step[rows] != NULL) & (columns.end[rows] != NULL_NS)]
    rows = rows[columns.end[rows] > columns.start[rows]][::-1]
    step, first = np.unique(columns.step[rows], return_index=True)
    rows = rows[first]
    return step.astype(np.int64), columns.start[rows], columns.end[rows]


def _blocked_times(
    messages: Messages, waits: Waits, activity: Activity, lane: str | None
) -> RankBlocks:
    """Returns the times in which a rank only waits for a message.

    Args:
        activity: The activity of the rank.
        lane: The thread that trains; not used where the device is seen.
    """
    return _exposed(messages, activity) if activity.device else _blocked(waits, lane)


def _blocked(waits: Waits, lane: str | None) -> RankBlocks:
    """Returns one thread's disjoint waits; those of all threads if it has none."""
    waits_rows = np.arange(len(waits.start))
    if lane in waits.lanes:
        waits_rows = waits_rows[waits.lane == waits.lanes.index(lane)]
    start, end = waits.start[waits_rows], waits.end[waits_rows]
    if len(start):
        reach = np.maximum.accumulate(end)
        start = np.append(start[:1], np.maximum(start[1:], reach[:-1]))
    kept = end > start
    return RankBlocks(start[kept], end[kept], waits.message[waits_rows][kept])


def _exposed(messages: Messages, activity: Activity) -> RankBlocks:
    """Returns the times in which a device only communicates."""
    exposed = (
        activity.comm if activity.compute is None else subtract(activity.comm, activity.compute)
    )
    counted = np.flatnonzero(messages.in_flight & messages.closed)
    by_end = counted[np.argsort(messages.end[counted], kind="stable")]
    ends = messages.end[by_end]
    # Divided at the ends of messages, so that each block belongs to the next message to end.
    start, end = overlaps(exposed, divided_at(distinct(ends)))[2]
    place = np.minimum(np.searchsorted(ends, end, side="left"), max(len(ends) - 1, 0))
    return RankBlocks(start, end, by_end[place] if len(ends) else place)
