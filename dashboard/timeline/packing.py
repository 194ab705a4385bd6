"""Packs intervals into rows so that overlapping intervals do not hide each other.

No two intervals of a row overlap. Exports need another rule, by which intervals of one track may
nest: see `analyzer/exporters/tracks.py`.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import distinct

I64 = npt.NDArray[np.int64]

MAX_ROWS: Final = 24
"""Rows of one lane; intervals that need more share the last row."""


def pack(start: I64, end: I64, max_rows: int = MAX_ROWS) -> npt.NDArray[np.int32]:
    """Assigns each interval the lowest row that is free when it starts.

    Intervals of one thread nest, and their row is the depth of the call. Messages may overlap
    arbitrarily; they stack.

    Args:
        start: Starts in ns, sorted; of equal starts the longer interval first.
        end: Ends in ns.
        max_rows: Maximum number of rows; further intervals go to the last one.

    Returns:
        The row of each interval, shape (n,), from 0.
    """
    if not len(start):
        return np.zeros(0, dtype=np.int32)
    # An interval of zero length occupies a row as well.
    end = np.maximum(end, start + 1)
    # While intervals nest, an interval's depth is the number of those that still run.
    row = np.arange(len(start)) - np.searchsorted(np.sort(end), start, side="right")
    for first, last in _clusters_that_collide(start, end, row):
        row[first:last] = _pack_greedily(start[first:last], end[first:last])
    packed: npt.NDArray[np.int32] = np.minimum(row, max_rows - 1).astype(np.int32)
    return packed


def _clusters_that_collide(start: I64, end: I64, row: I64) -> list[tuple[int, int]]:
    """Ranges of intervals, separate in time, in which two of one row overlap."""
    order = np.argsort(row, kind="stable")
    same_row = row[order][1:] == row[order][:-1]
    overlaps = start[order][1:] < end[order][:-1]
    colliding = order[1:][same_row & overlaps]
    if not len(colliding):
        return []
    opens = np.concatenate([[True], start[1:] >= np.maximum.accumulate(end)[:-1]])
    bounds = np.append(np.flatnonzero(opens), len(start))
    clusters = distinct(np.searchsorted(bounds, colliding, side="right") - 1)
    return [(int(bounds[c]), int(bounds[c + 1])) for c in clusters]


def _pack_greedily(start: I64, end: I64) -> I64:
    row = np.empty(len(start), dtype=np.int64)
    free: list[int] = []
    running: list[tuple[int, int]] = []
    rows = 0
    for i, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while running and running[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(running)[1])
        if free:
            mine = heapq.heappop(free)
        else:
            mine, rows = rows, rows + 1
        heapq.heappush(running, (finish, mine))
        row[i] = mine
    return row


def cut_overlaps(start: I64, end: I64) -> I64:
    """Shortens intervals to the start of the next one, for a row that has to be shared."""
    if not len(start):
        return end
    return np.append(np.minimum(end[:-1], start[1:]), end[-1])
