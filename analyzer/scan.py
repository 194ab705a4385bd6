"""One rank's part of an analysis: what is kept of its events when the events are let go.

Everything across ranks works on these, so the memory of an analysis holds the events of as
many ranks as are scanned at a time, and of all ranks only messages and merged intervals.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.activity import Activity, measure_activity
from ddltrace.analyzer.columns import NULL, NULL_NS, Columns, IntArray
from ddltrace.analyzer.messages import Messages, Waits, read_messages, read_waits
from ddltrace.analyzer.timeline import Timeline, build_timeline

if TYPE_CHECKING:
    from ddltrace.analyzer.trace import Trace

_FEW_RANKS: Final = 16


@dataclass(frozen=True)
class RankScan:
    """What is kept of one rank.

    Attributes:
        rank: Whose it is.
        events: How many events it has.
        damaged: Rows whose times cannot be real.
        backwards: Rows that ended before they started.
        first: Earliest start of any event, ns; 0 without events.
        last: Latest time of any event, ns.
        messages: Its messages.
        waits: When its host was blocked on them.
        activity: What it did when.
        step: Numbers of its completed steps, ascending.
        step_start: Their starts, ns.
        step_end: Their ends, ns.
        gradient_time: When gradients became ready, ns.
        gradient_tensor: Ids of their tensors.
        gradient_step: Their steps.
        timeline: Its timeline, in a trace of few ranks: the critical path is then likely to
            visit them all, and their events are at hand now.
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
    step: IntArray
    step_start: IntArray
    step_end: IntArray
    gradient_time: IntArray
    gradient_tensor: IntArray
    gradient_step: IntArray
    timeline: Timeline | None = None


def scan_ranks(trace: Trace) -> dict[int, RankScan]:
    """Scans every rank, on as many threads as there are cores.

    Threads do: numpy and Arrow let go of the interpreter lock in all that takes long, and
    nothing has to be copied between processes.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, max(len(trace.ranks), 1))) as pool:
        few = len(trace.ranks) <= _FEW_RANKS
        scans = pool.map(lambda rank: _scan(trace, rank, with_timeline=few), trace.ranks)
        return dict(zip(trace.ranks, scans, strict=True))


def _scan(trace: Trace, rank: int, *, with_timeline: bool) -> RankScan:
    columns = trace.columns(rank)
    scan = scan_rank(rank, columns)
    if not with_timeline:
        return scan
    line = build_timeline(rank, columns, scan.messages, scan.waits, scan.activity)
    return replace(scan, timeline=line)


def scan_rank(rank: int, columns: Columns) -> RankScan:
    """Reduces a rank's events to what the analysis keeps."""
    messages = read_messages(columns)
    waits = read_waits(columns, messages)
    start, end = columns.start, columns.end
    step, step_start, step_end = _steps(columns)
    gradients = columns.rows("gradient")
    counts, tensors = columns.lists("tensors", gradients)
    return RankScan(
        rank=rank,
        events=len(columns),
        damaged=columns.damaged,
        backwards=columns.backwards,
        first=int(start.min()) if len(start) else 0,
        last=int(max(start.max(), end.max())) if len(start) else 0,
        messages=messages,
        waits=waits,
        activity=measure_activity(columns, messages, waits),
        step=step,
        step_start=step_start,
        step_end=step_end,
        gradient_time=np.repeat(start[gradients], counts),
        gradient_tensor=tensors,
        gradient_step=np.repeat(columns.step[gradients], counts),
    )


def timeline_of(trace: Trace, scan: RankScan) -> Timeline:
    """A scanned rank's timeline; unless it was kept, its events have to be read again."""
    if scan.timeline is not None:
        return scan.timeline
    columns = trace.columns(scan.rank)
    return build_timeline(scan.rank, columns, scan.messages, scan.waits, scan.activity)


def _steps(columns: Columns) -> tuple[IntArray, IntArray, IntArray]:
    """Number, start and end of completed steps; of a number that occurs twice, the last."""
    rows = columns.rows("step")
    rows = rows[(columns.step[rows] != NULL) & (columns.end[rows] != NULL_NS)]
    rows = rows[columns.end[rows] > columns.start[rows]][::-1]
    step, first = np.unique(columns.step[rows], return_index=True)
    rows = rows[first]
    return step.astype(np.int64), columns.start[rows], columns.end[rows]
