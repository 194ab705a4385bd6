"""The time of each rank, split into disjoint parts that sum to its steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL_NS, Columns
from ddltrace.analyzer.events.interval_sets import (
    EMPTY,
    Spans,
    intersect,
    length,
    merge,
    subtract,
    union,
)
from ddltrace.analyzer.events.rank_activity import Activity, measure_activity
from ddltrace.analyzer.events.rank_messages import read_messages, read_waits

PARTS: Final = ("compute", "update", "overlap", "exposed", "copies", "data", "idle")
"""Parts of a rank's step, in the order of drawing."""


@dataclass(frozen=True)
class Breakdown:
    """Mean per step of one rank's time, in microseconds.

    Attributes:
        rank: Global rank.
        steps: Number of steps in the mean; 0 for the whole trace, if it has no steps.
        parts_us: `PARTS` -> time. ``compute`` is compute without communication and without the
            optimizer's ``update``; ``overlap`` is compute and communication at once; ``exposed`` is
            communication alone; ``copies`` and then ``data`` cover time that no earlier part
            covers; ``idle`` is the rest. The parts sum to the mean duration of a step.
        messages: Mean number of messages that start in a step.
        message_bytes: Mean per step of their input bytes; a receive counts as zero.
    """

    rank: int
    steps: int
    parts_us: dict[str, float]
    messages: float
    message_bytes: float


def read_activity(table: pa.Table) -> Activity:
    """A rank's activity, by the analyzer's definitions."""
    columns = Columns(table)
    messages = read_messages(columns)
    return measure_activity(columns, messages, read_waits(columns, messages))


def exposed(activity: Activity) -> Spans:
    """Communication while the rank does not compute; empty if its compute is unknown."""
    return EMPTY if activity.compute is None else subtract(activity.comm, activity.compute)


def break_down(rank: int, table: pa.Table, steady: Collection[int]) -> Breakdown | None:
    """Splits a rank's time into `PARTS`.

    Args:
        rank: Global rank.
        table: The rank's events.
        steady: Numbers of the steps to include; empty for the whole trace.

    Returns:
        The breakdown; None if the trace does not record when the rank computes.
    """
    columns = Columns(table)
    messages = read_messages(columns)
    activity = measure_activity(columns, messages, read_waits(columns, messages))
    if activity.compute is None:
        return None
    steps = columns.rows("step")
    steps = steps[np.isin(columns.step[steps], list(steady)) & (columns.end[steps] != NULL_NS)]
    counted = np.ones(len(messages), dtype=bool)
    if len(steps):
        windows = union(columns.start[steps], columns.end[steps])
        counted = np.isin(messages.step, columns.step[steps])
    else:
        ends = columns.end[columns.end != NULL_NS]
        if not len(ends):
            return None
        windows = union(columns.start[:1], ends.max(keepdims=True))
    parts = _partition(activity, windows)
    count = max(1, len(steps))
    return Breakdown(
        rank=rank,
        steps=len(steps),
        parts_us={name: length(parts[name]) / 1e3 / count for name in PARTS},
        messages=int(counted.sum()) / count,
        message_bytes=int(np.maximum(messages.bytes[counted], 0).sum()) / count,
    )


def _partition(activity: Activity, windows: Spans) -> dict[str, Spans]:
    assert activity.compute is not None
    compute = intersect(activity.compute, windows)
    comm = intersect(activity.comm, windows)
    computing_only = subtract(compute, comm)
    update = EMPTY if activity.device else intersect(computing_only, activity.update)
    busy = merge(compute, comm)
    copies = subtract(intersect(activity.copies, windows), busy)
    busy = merge(busy, copies)
    data = subtract(intersect(activity.data, windows), busy)
    return {
        "compute": subtract(computing_only, update),
        "update": update,
        "overlap": intersect(compute, comm),
        "exposed": subtract(comm, compute),
        "copies": copies,
        "data": data,
        "idle": subtract(windows, merge(busy, data)),
    }
