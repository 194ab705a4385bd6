"""Aligns the calls of two ranks by the times at which they ended.

A collective ends on all its ranks at about the same moment, so under the right offset between the
two clocks, nearly every call of one rank coincides with a call of the other. The offset is searched
for at the start of the records and then tracked, because clocks drift slowly.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    ColumnTable,
    FloatArray,
    IntArray,
    changes,
    distinct,
)

_CHUNK: Final = 256
_FAR: Final = 4096
"""Number of calls of the other record among which the first calls of one record are searched."""

_CANDIDATES: Final = 48
_TIED: Final = 0.95
"""Offsets that fit nearly as well as the best are compared over the whole records."""

_MAX_TIED: Final = 3
_FOLLOWED: Final = 100_000
"""Number of calls over which offsets are compared that fit nearly as well as the best."""

_FIRST: Final = 16
_AS_GOOD: Final = 1.5
_EXACT: Final = 1e-3
_MAX_DRIFT: Final = 1e-3
_TIME_BITS: Final = 51
"""Room for 26 days in nanoseconds beside the number of a token."""


@dataclass(frozen=True)
class Calls(ColumnTable):
    """The calls of one rank, in order.

    Attributes:
        token: What each is: equal for the same call on different ranks; from 0 on.
        time: When each ended on the rank's own clock, ns.
        step: Number of its step; negative where that is not known.
    """

    token: IntArray
    time: IntArray
    step: IntArray


def match_by_time(left: Calls, right: Calls, likely: tuple[IntArray, IntArray]) -> Match | None:
    """Finds the calls that two ranks have in common by their times.

    Args:
        left, right: The calls of each.
        likely: Indices of calls that may be the same; their times provide offsets to try.

    Returns:
        The match; None if the times do not determine one.
    """
    if min(len(left), len(right)) < 2:
        return None
    aligner = _TimeAligner(left, right)
    if not aligner.works:
        return None
    found = [aligner.follow(offset) for offset in aligner.likely_offsets(likely)]
    most = max((len(each.left) for each in found), default=0)
    found = [each for each in found if 2 * len(each.left) >= most > 0]
    if not found:
        return None
    # Of offsets that fit equally well, the one that more calls have in common; if these are as
    # many, the one by which the clocks differ less.
    limit = _AS_GOOD * min(each.misfit for each in found) + _EXACT
    found = [each for each in found if each.misfit <= limit]
    return max(found, key=lambda each: (len(each.left), -each.clock_difference))


class Match(NamedTuple):
    """Calls that two records have in common under an offset between their clocks.

    Attributes:
        left, right: Their indices, both ascending.
        misfit: How far apart their ends are: 0 if they coincide, about 2/3 if by chance.
        clock_difference: By how much the clocks differ where the records begin, ns.
    """

    left: IntArray
    right: IntArray
    misfit: float
    clock_difference: float


class _TimeAligner:
    """Aligns the calls of two ranks by their times.

    Args:
        left, right: The calls of each.
    """

    def __init__(self, left: Calls, right: Calls) -> None:
        self._left, self._right = left, right
        self._base = int(left.time.min()), int(right.time.min())
        self._left_time = left.time - self._base[0]
        self._right_time = right.time - self._base[1]
        span = max(int(self._left_time.max()), int(self._right_time.max()))
        gaps = [np.diff(np.sort(times)) for times in (self._left_time, self._right_time)]
        self._spacing = float(np.median(np.concatenate(gaps)))
        self.works = 0 < span < 1 << (_TIME_BITS - 2) and self._spacing > 0
        self._apart = self._spacing / 4
        if self.works:
            keys = (left.token << _TIME_BITS) + self._left_time
            self._by_key = np.argsort(keys, kind="stable")
            self._keys = keys[self._by_key]

    def likely_offsets(self, likely: tuple[IntArray, IntArray]) -> list[float]:
        """Offsets, left less right, under which the first calls of one side meet the other's."""
        rows = np.arange(min(len(self._right), _CHUNK))
        backwards = np.arange(min(len(self._left), _CHUNK))
        differences = [
            self._differences(np.arange(min(len(self._left), _FAR)), rows),
            self._differences(backwards, np.arange(min(len(self._right), _FAR))),
            (self._left_time[likely[0]] - self._right_time[likely[1]])[:_FAR].astype(np.float64),
        ]
        candidates = distinct(np.concatenate([self._peaks(each) for each in differences]))
        if not len(candidates):
            return []
        scores = np.array([self._score(offset) for offset in candidates.tolist()])
        # Of candidates beside each other the best stands for all.
        place = np.cumsum(np.diff(candidates, prepend=candidates[0]) > self._apart / 4)
        order = np.lexsort((-scores, place))
        kept = order[np.diff(place[order], prepend=-1) > 0]
        candidates, scores = candidates[kept], scores[kept]
        tied = candidates[scores >= _TIED * scores.max()]
        count = int(np.clip(_FOLLOWED // len(self._right), _MAX_TIED, _CANDIDATES))
        guess = self._left_time[likely[0]] - self._right_time[likely[1]]
        if len(guess):
            tied = tied[np.argsort(np.abs(tied - np.median(guess[:_FIRST])), kind="stable")]
        best = candidates[int(np.argmax(scores))]
        return [float(best), *tied[:count].tolist()]

    def _differences(self, lefts: IntArray, rights: IntArray) -> FloatArray:
        """Left times less right times of all pairs of equal calls."""
        same = self._left.token[lefts][:, None] == self._right.token[rights][None, :]
        apart = self._left_time[lefts][:, None] - self._right_time[rights][None, :]
        return np.asarray(apart[same], dtype=np.float64)

    def _peaks(self, differences: FloatArray) -> FloatArray:
        """Values near which most of some differences lie."""
        if not len(differences):
            return differences
        bins = np.floor(differences / self._apart).astype(np.int64)
        _, place, counts = np.unique(bins, return_inverse=True, return_counts=True)
        top = np.argsort(-counts, kind="stable")[:_CANDIDATES]
        order = np.argsort(place.reshape(-1), kind="stable")
        ends = np.cumsum(counts)
        return np.array(
            [np.median(differences[order[ends[at] - counts[at] : ends[at]]]) for at in top.tolist()]
        )

    def _score(self, offset: float) -> float:
        """How well the first calls of both records meet under an offset."""
        begin = max(float(self._left_time.min()), float(self._right_time.min()) + offset)
        first = int(np.argmax(self._right_time + offset >= begin - self._apart))
        rows = np.arange(first, min(first + _CHUNK, len(self._right)))
        found, apart = self._nearest(rows, np.full(len(rows), offset))
        weight = self._weight(apart)
        left_step, step = self._left.step[found], self._right.step[rows]
        known = (left_step >= 0) & (step >= 0)
        return float(np.where(known & (left_step != step), weight / 2, weight).sum())

    def _nearest(self, rows: IntArray, offset: FloatArray) -> tuple[IntArray, FloatArray]:
        """For calls of the right the nearest equal one of the left, and how far it is away."""
        token = self._right.token[rows]
        when = self._right_time[rows] + np.rint(offset).astype(np.int64)
        half = 1 << (_TIME_BITS - 1)
        wanted = (token << _TIME_BITS) + np.clip(when, 1 - half, half - 1)
        place = np.searchsorted(self._keys, wanted)
        best = np.zeros(len(rows), dtype=np.int64)
        apart = np.full(len(rows), np.inf)
        for at in (place - 1, place):
            row = self._by_key[np.clip(at, 0, len(self._keys) - 1)]
            distance = np.abs(self._left_time[row] - when).astype(np.float64)
            closer = (self._left.token[row] == token) & (distance < apart)
            best, apart = np.where(closer, row, best), np.where(closer, distance, apart)
        return best, apart

    def follow(self, offset: float) -> Match:
        """Aligns both records from an offset at their beginning on."""
        clock_difference = abs(offset + self._base[0] - self._base[1])
        lefts, rights, distances = [], [], []
        drift, since = 0.0, None
        for low in range(0, len(self._right), _CHUNK):
            rows = np.arange(low, min(low + _CHUNK, len(self._right)))
            times = self._right_time[rows].astype(np.float64)
            middle = float(np.median(times))
            here = offset if since is None else offset + drift * (middle - since)
            found, apart = self._nearest(rows, here + drift * (times - middle))
            near = apart <= 2 * self._apart
            if near.sum() >= len(rows) / 2:
                now = float(np.median(self._left_time[found[near]] - self._right_time[rows[near]]))
                if since is not None and middle > since:
                    slope = (now - offset) / (middle - since)
                    drift = float(np.clip(slope, -_MAX_DRIFT, _MAX_DRIFT))
                offset, since = now, middle
                found, apart = self._nearest(rows, offset + drift * (times - middle))
                near = apart <= 2 * self._apart
            lefts.append(found[near])
            rights.append(rows[near])
            distances.append(apart[near])
        apart = np.concatenate(distances)
        misfit = 1 - float(self._weight(apart).mean()) if len(apart) else 1.0
        left, right = _in_order(np.concatenate(lefts), np.concatenate(rights), apart)
        return Match(left, right, misfit, clock_difference)

    def _weight(self, apart: FloatArray) -> FloatArray:
        """How far calls that are so far apart speak for an offset: from 1 down to 0."""
        return np.asarray(np.maximum(1 - (apart / self._apart) ** 2, 0))


def _in_order(lefts: IntArray, rights: IntArray, apart: FloatArray) -> tuple[IntArray, IntArray]:
    """Of pairs those in which each call occurs once, and both sides ascend."""
    order = np.lexsort((apart, lefts))
    nearest = order[changes(lefts[order])]
    kept = np.sort(nearest)  # by the right
    lefts, rights = lefts[kept], rights[kept]
    if (np.diff(lefts) > 0).all():
        return lefts, rights
    chosen = _longest_ascent(lefts.tolist())
    return lefts[chosen], rights[chosen]


def _longest_ascent(values: list[int]) -> list[int]:
    """Indices of the longest ascending part of a list (Fredman, 1975)."""
    tails: list[int] = []
    ends: list[int] = []
    former = [-1] * len(values)
    for index, value in enumerate(values):
        place = bisect_left(tails, value)
        former[index] = ends[place - 1] if place else -1
        tails[place : place + 1] = [value]
        ends[place : place + 1] = [index]
    chosen = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chosen.append(index)
        index = former[index]
    return chosen[::-1]
