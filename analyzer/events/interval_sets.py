"""Sets of instants as sorted, disjoint intervals; every operation is vectorized and linear.

All arrays are int64 nanoseconds. An interval includes its start and excludes its end, so intervals
that touch are merged, and empty intervals are dropped.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import IntArray, ranges

_LOW: Final = np.iinfo(np.int64).min
_HIGH: Final = np.iinfo(np.int64).max
_FEW: Final = 1 << 14
_FEW_WINDOWS: Final = 1 << 10


class Spans(NamedTuple):
    """A set of instants: ascending, disjoint intervals [start, end) that do not touch."""

    start: IntArray
    end: IntArray


EMPTY: Final = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: IntArray, end: IntArray) -> Spans:
    """The instants in any of the intervals, which may overlap and stand in any order."""
    kept = end > start
    if not kept.all():
        start, end = start[kept], end[kept]
    if not len(start):
        return EMPTY
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.empty(len(start), dtype=bool)
    first[0] = True
    np.greater(start[1:], reach[:-1], out=first[1:])
    begins = np.flatnonzero(first)
    return Spans(start[begins], reach[np.append(begins[1:] - 1, len(start) - 1)])


def merge(*parts: Spans) -> Spans:
    """The instants in any of the sets."""
    filled = [part for part in parts if len(part.start)]
    if len(filled) < 2:
        return filled[0] if filled else EMPTY
    return union(
        np.concatenate([part.start for part in filled]),
        np.concatenate([part.end for part in filled]),
    )


class Growing:
    """The union of intervals that are added in parts.

    Its memory is close to that of the union, independent of the number of added intervals.

    Args:
        few: Minimum number of intervals that are collected before they are merged.
    """

    def __init__(self, few: int = _FEW) -> None:
        self._few = few
        self._whole = EMPTY
        self._fresh: list[Spans] = []
        self._waiting = 0

    def add(self, start: IntArray, end: IntArray) -> None:
        """Adds intervals, which may overlap and stand in any order."""
        part = union(start, end)
        if not len(part.start):
            return  # parts without intervals would be collected and never merged
        self._fresh.append(part)
        self._waiting += len(part.start)
        # Merging only when the number has doubled keeps the total cost linear.
        if self._waiting > max(len(self._whole.start), self._few):
            self._merge()

    def spans(self) -> Spans:
        """The union so far."""
        self._merge()
        return self._whole

    def _merge(self) -> None:
        self._whole = merge(self._whole, *self._fresh)
        self._fresh, self._waiting = [], 0


def touched(a: Spans, b: Spans) -> tuple[IntArray, IntArray]:
    """Of each interval of `a`, the first of `b` that shares instants with it, and how many do.

    The intervals of `a` may overlap and stand in any order, here and in `overlaps`.
    """
    low = np.searchsorted(b.end, a.start, side="right")
    high = np.searchsorted(b.start, a.end, side="left")
    return low, np.maximum(high - low, 0)


def overlaps(a: Spans, b: Spans) -> tuple[IntArray, IntArray, Spans]:
    """Cuts intervals along others, without what is in none of these.

    Returns:
        For each part the index of its interval in `a`, that of its interval in `b`, and the parts.
    """
    i, j = ranges(*touched(a, b))
    return i, j, Spans(np.maximum(a.start[i], b.start[j]), np.minimum(a.end[i], b.end[j]))


def divided_at(times: IntArray) -> Spans:
    """All instants, divided at ascending, distinct times."""
    return Spans(np.append(_LOW, times), np.append(times, _HIGH))


def intersect(a: Spans, b: Spans) -> Spans:
    """The instants in both sets."""
    return overlaps(a, b)[2] if len(a.start) and len(b.start) else EMPTY


def subtract(a: Spans, b: Spans) -> Spans:
    """The instants of `a` that are not in `b`."""
    if not len(b.start) or not len(a.start):
        return a
    gaps = Spans(np.append(_LOW, b.end), np.append(b.start, _HIGH))
    return intersect(a, gaps)


def length(spans: Spans) -> int:
    """Length of the set, ns."""
    return int((spans.end - spans.start).sum())


def length_before(spans: Spans, times: IntArray) -> IntArray:
    """Length of the set before each of the times, ns."""
    count = len(spans.start)
    if not count:
        return np.zeros(len(times), dtype=np.int64)
    covered = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(spans.end - spans.start, out=covered[1:])
    begun = spans.start.searchsorted(times, side="right")
    # Of the last interval that begins before a time, what lies after the time does not count.
    after = np.maximum(spans.end[begun - 1] - times, 0)
    after[begun == 0] = 0
    return np.asarray(covered[begun] - after)


def lengths_within(spans: Spans, start: IntArray, end: IntArray) -> IntArray:
    """Length of the set within each window [start, end), ns; windows may overlap."""
    if len(start) > _FEW_WINDOWS:
        return length_before(spans, end) - length_before(spans, start)
    # In one call: of few windows, the calls take the time.
    before = length_before(spans, np.concatenate([start, end]))
    return before[len(start) :] - before[: len(start)]


def clip(spans: Spans, start: int, end: int) -> Spans:
    """The part of the set within one window."""
    low = int(np.searchsorted(spans.end, start, side="right"))
    high = int(np.searchsorted(spans.start, end, side="left"))
    if high <= low:
        return EMPTY
    return Spans(
        np.maximum(spans.start[low:high], start),
        np.minimum(spans.end[low:high], end),
    )
