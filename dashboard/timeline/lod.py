"""Level of detail: reduces a row of intervals to at most one interval per pixel.

The intervals of a row do not overlap, so both starts and ends are sorted and binary search finds a
window. Of the intervals that start in a pixel, the longest is kept. It is looked up in tables that
are computed once: within blocks, the longest interval up to and from each position; over blocks,
the longest of every run whose length is a power of two (a sparse table: Bender and Farach-Colton,
The LCA Problem Revisited, 2000). Any range consists of the end of one block, two overlapping runs
and the beginning of another block, so the cost of a reduction grows with the number of pixels, not
with the number of intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

BLOCK: Final = 64
"""Intervals per block."""

_CHUNK: Final = 1 << 14
"""Blocks that are processed together while the tables are computed: bounds the memory."""


@dataclass(frozen=True)
class Reduction:
    """The intervals of one row that represent a window, in order of start.

    Attributes:
        position: Positions in the row, shape (m,).
        count: Number of intervals that each one represents, shape (m,): those that start in the
            same pixel, itself included.
        cover: Share of its pixel that the row's intervals cover, 0..1, shape (m,); 1 for an
            interval that represents only itself.
    """

    position: I64
    count: I64
    cover: npt.NDArray[np.float64]


class RowIndex:
    """Intervals of one row, with tables that find the longest one of any range.

    Attributes:
        start: Starts in ns, shape (n,), sorted.
        covered: Sum of the durations of all intervals before position i, shape (n + 1,). It
            contains the durations, so two arrays give start, end and coverage.
    """

    def __init__(self, start: I64, end: I64) -> None:
        """Builds the index.

        Args:
            start: Starts in ns, sorted.
            end: Ends in ns; no interval ends after the next one starts.
        """
        assert start.dtype == np.int64
        assert end.dtype == np.int64
        assert not len(start) or bool(np.all(end[:-1] <= start[1:]) and np.all(start <= end))
        self.start = start
        self.covered: I64 = np.zeros(len(start) + 1, dtype=np.int64)
        np.cumsum(end - start, out=self.covered[1:])
        self._until, self._from, longest = _within_blocks(end - start)
        self._runs = _runs_of_blocks(longest, end - start)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays of the index, for `of_arrays`."""
        return self.start, self.covered, self._until, self._from, self._runs

    @classmethod
    def of_arrays(cls, *arrays: npt.NDArray[Any]) -> RowIndex:
        """The index that `arrays` was called on."""
        index = cls.__new__(cls)
        index.start, index.covered, index._until, index._from, index._runs = arrays
        return index

    def __len__(self) -> int:
        return len(self.start)

    def end(self, position: I64) -> I64:
        """Ends in ns of the intervals at some positions."""
        ends: I64 = self.start[position] + self.duration(position)
        return ends

    def duration(self, position: I64) -> I64:
        """Durations in ns of the intervals at some positions."""
        durations: I64 = self.covered[position + 1] - self.covered[position]
        return durations

    def covered_until(self, times: I64) -> I64:
        """Time in ns that the row's intervals cover before each of the given times."""
        return self._covered_until(times, np.searchsorted(self.start, times))

    def _covered_until(self, times: I64, first: I64) -> I64:
        if not len(self):
            return np.zeros(len(times), dtype=np.int64)
        before = np.maximum(first - 1, 0)
        beyond = np.maximum(self.end(before) - times, 0)
        covered: I64 = np.where(first > 0, self.covered[first] - beyond, 0)
        return covered

    def reduce(self, edges: I64) -> Reduction:
        """Selects the intervals to draw in a window.

        Args:
            edges: Pixel edges in ns, shape (pixels + 1,), increasing; int64 like the starts,
                because a float key would make numpy convert the whole row.

        Returns:
            At most one interval for each pixel in which an interval starts (the longest; the first
            of equals), preceded by the interval that extends into the window, if any.
        """
        assert edges.dtype == np.int64
        first = np.searchsorted(self.start, edges)
        low, high = first[:-1], first[1:]
        pixels = np.flatnonzero(high > low)
        position = self._longest(low[pixels], high[pixels])
        count = (high - low)[pixels].astype(np.int64)
        share = np.diff(self._covered_until(edges, first)) / np.diff(edges)
        cover = np.where(count > 1, share[pixels], 1.0)
        entering = np.array([first[0] - 1], dtype=np.int64)
        if entering[0] >= 0 and self.end(entering)[0] > edges[0]:
            position = np.concatenate([entering, position])
            count = np.concatenate([np.ones(1, dtype=np.int64), count])
            cover = np.concatenate([np.ones(1), cover])
        return Reduction(position, count, cover)

    def _longest(self, low: I64, high: I64) -> I64:
        """Position of the longest interval in each of some non-empty, adjacent ranges."""
        if not len(low) or high[-1] - low[0] <= BLOCK * len(low):
            return self._look_through(low, high)
        best: I64 = low.copy()
        many = np.flatnonzero(high - low > 1)
        low, last = low[many], high[many] - 1
        within = low // BLOCK == last // BLOCK
        if within.any():
            best[many[within]] = self._look_at_all(low[within], last[within] + 1)
        if not within.all():
            best[many[~within]] = self._look_up(low[~within], last[~within])
        return best

    def _look_through(self, low: I64, high: I64) -> I64:
        """`_longest` by scanning all intervals of the ranges, faster while they are few."""
        if not len(low):
            return low
        duration = np.diff(self.covered[low[0] : high[-1] + 1])
        offset = low - low[0]
        longest = np.repeat(np.maximum.reduceat(duration, offset), high - low)
        hits = np.flatnonzero(duration == longest)
        found: I64 = low[0] + hits[np.searchsorted(hits, offset)]
        return found

    def _look_up(self, low: I64, last: I64) -> I64:
        """`_longest` for ranges that begin in one block and end in a later one."""
        best: I64 = low + self._from[low]
        begin, count = low // BLOCK + 1, last // BLOCK - low // BLOCK - 1
        some = np.flatnonzero(count > 0)
        if len(some):
            begin, count = begin[some], count[some]
            power = np.frexp(count)[1] - 1  # exact, as counts are far below 2**53
            for offset in (begin, begin + count - (1 << power)):
                best[some] = self._longer(best[some], self._runs[power, offset])
        return self._longer(best, last - self._until[last])

    def _longer(self, former: I64, latter: I64) -> I64:
        """The longer interval of each pair; the first of equals."""
        longer: I64 = np.where(self.duration(latter) > self.duration(former), latter, former)
        return longer

    def _look_at_all(self, low: I64, high: I64) -> I64:
        """`_longest` for short ranges, by scanning their intervals."""
        length = high - low
        offset = np.cumsum(length) - length
        position = np.arange(int(length.sum())) - np.repeat(offset - low, length)
        duration = self.duration(position)
        longest = np.repeat(np.maximum.reduceat(duration, offset), length)
        hits = np.flatnonzero(duration == longest)
        first_hit = np.searchsorted(hits, offset)
        found: I64 = position[hits[first_hit]]
        return found


def _within_blocks(
    duration: I64,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Finds the longest interval of each block, up to and from each position.

    Returns:
        For each interval, the distance back to the longest interval of its block up to it, and the
        distance forward to the longest from it on; for each block the position of its longest
        interval. Always the first of equals.
    """
    blocks = -(-len(duration) // BLOCK)
    until = np.zeros((blocks, BLOCK), dtype=np.uint8)
    onward = np.zeros((blocks, BLOCK), dtype=np.uint8)
    longest = np.zeros(blocks, dtype=np.int32)
    place = np.arange(BLOCK, dtype=np.uint8)
    for first in range(0, blocks, _CHUNK):
        last = min(blocks, first + _CHUNK)
        padded = np.full((last - first, BLOCK), -1, dtype=np.int64)
        part = duration[first * BLOCK : last * BLOCK]
        padded.reshape(-1)[: len(part)] = part
        # Forward: a new longest interval is longer than all before it ...
        most = np.maximum.accumulate(padded, axis=1)
        is_new = np.ones(padded.shape, dtype=bool)
        is_new[:, 1:] = most[:, 1:] > most[:, :-1]
        at = np.maximum.accumulate(np.where(is_new, place, 0), axis=1).astype(np.uint8)
        until[first:last] = place - at
        longest[first:last] = at[:, -1] + np.arange(first, last) * BLOCK
        # ... backward: it is at least as long as all after it.
        most = np.maximum.accumulate(padded[:, ::-1], axis=1)[:, ::-1]
        at = np.where(padded == most, place, BLOCK)[:, ::-1]
        at = np.minimum.accumulate(at, axis=1)[:, ::-1].astype(np.uint8)
        onward[first:last] = at - place
    return until.reshape(-1), onward.reshape(-1), longest


def _runs_of_blocks(longest: npt.NDArray[np.int32], duration: I64) -> npt.NDArray[np.int32]:
    """Position of the longest interval of the 2**k blocks that start at block b, at [k, b]."""
    powers = max(1, len(longest).bit_length())
    runs = np.zeros((powers, len(longest)), dtype=np.int32)
    runs[0] = longest
    for power in range(1, powers):
        half = 1 << (power - 1)
        count = len(longest) - 2 * half + 1
        left, right = runs[power - 1, :count], runs[power - 1, half : half + count]
        runs[power, :count] = np.where(duration[right] > duration[left], right, left)
    return runs
