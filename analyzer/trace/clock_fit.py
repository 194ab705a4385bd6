"""The offset between two clocks as a function of time, from bounds on it.

Every bound on an offset is an interval: at local time x, the offset is within [low, high]. An
exchange gives an interval as wide as its round trip; a message that cannot end before another
has begun gives a half-open one. Clocks run at a constant rate, so the offset is a straight line in
time. The lines that pass through all intervals form a convex polygon; the line in its middle is the
estimate, and half its width is the bound on the error. If no straight line passes, a clock was
adjusted while the job ran: then the line is piecewise linear, with knots where needed.
(The polygon: A. Duda et al., "Estimating global time in distributed systems", ICDCS 1987.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import ColumnTable, FloatArray, IntArray

MAX_DRIFT: Final = 1e-3
"""NTP corrects a clock by 500 ppm at most: two clocks differ by 1,000 at most."""

MAX_RATE_CHANGE: Final = 1e-6
"""Maximum change of a clock's rate between two observations, by temperature and corrections."""

MAX_CONTRADICTING: Final = 0.1
"""Maximum share of contradicting bounds; beyond it, the correct ones cannot be determined."""

_ROUNDING_NS: Final = 0.5
"""Bounds are whole nanoseconds: a line that misses one by less than this touches it."""


@dataclass(frozen=True)
class Bounds(ColumnTable):
    """Intervals in which an offset lies; all in nanoseconds.

    Attributes:
        x: Local times.
        low: Lower bounds; -inf where there is none.
        high: Upper bounds; inf where there is none.
        base: Added to `low` and `high`: preserves the precision of offsets of years.
    """

    x: IntArray
    low: FloatArray
    high: FloatArray
    base: int

    def sorted(self) -> Bounds:
        """The same, in time order."""
        return self.keep(np.argsort(self.x, kind="stable"))

    def violation(self, fit: Fit) -> float:
        """By how much a fit misses the interval that it misses most; 0 if it misses none."""
        offset = fit.relative(self.x) + (fit.base - self.base)
        return float(max(0.0, np.max(self.low - offset), np.max(offset - self.high)))

    def on_base(self, base: int) -> Bounds:
        """The same on another base."""
        moved = self.base - base
        return Bounds(self.x, self.low + moved, self.high + moved, base)


@dataclass(frozen=True)
class Fit:
    """An offset, linear between knots.

    Attributes:
        x: Local times of the knots, at least two, ascending.
        y: Offsets there, relative to `base`.
        base: Added to `y`.
        residual: Bound on the error between the first and the last knot.
    """

    x: IntArray
    y: FloatArray
    base: int
    residual: float

    def relative(self, times: IntArray) -> FloatArray:
        """The offsets at local times, relative to `base`; extended by the outermost slopes."""
        first = int(self.x[0])
        x, at = (self.x - first).astype(np.float64), (times - first).astype(np.float64)
        y = np.interp(at, x, self.y)
        for end, neighbour, outside in ((0, 1, at < x[0]), (-1, -2, at > x[-1])):
            slope = (self.y[neighbour] - self.y[end]) / (x[neighbour] - x[end])
            y = np.where(outside, self.y[end] + slope * (at - x[end]), y)
        return np.asarray(y)


def fit_line(bounds: Bounds, first: int, last: int) -> Fit | None:
    """Returns the straight line in the middle of all lines that fit.

    Args:
        bounds: At least one lower and one upper bound.
        first, last: The times between which the offset is wanted, first < last.

    Returns:
        The line; None if no straight line passes through all intervals.
    """
    polygon = _polygon(bounds, first, last)
    if not len(polygon):
        return None
    low, high = polygon.min(axis=0), polygon.max(axis=0)
    residual = float((high - low).max() / 2) + MAX_RATE_CHANGE * _largest_distance(
        bounds, first, last
    )
    return Fit(np.array([first, last], np.int64), (low + high) / 2, bounds.base, residual)


def fit_constant(bounds: Bounds, first: int, last: int, offset: int) -> Fit | None:
    """A given offset, if it satisfies all intervals: there is no reason to correct the clock.

    Args:
        bounds: At least one lower and one upper bound.
        first, last: The times between which the offset is wanted, first < last.
        offset: The offset, ns.

    Returns:
        The constant line, whose residual is the distance to the farthest line that passes
        through all intervals; None if the offset violates an interval.
    """
    at = float(offset - bounds.base)
    if (bounds.low > at + _ROUNDING_NS).any() or (bounds.high < at - _ROUNDING_NS).any():
        return None
    polygon = _polygon(bounds, first, last)
    if not len(polygon):
        return None
    farthest = float(np.abs(polygon - at).max())
    residual = farthest + MAX_RATE_CHANGE * _largest_distance(bounds, first, last)
    return Fit(np.array([first, last], np.int64), np.zeros(2), offset, residual)


def without_contradictions(bounds: Bounds, first: int, last: int) -> Bounds | None:
    """Leaves out intervals that contradict the others, so that a line passes through the rest.

    The line with the least sum of violations balances the lower bounds that it violates against
    the upper ones, so a wrong bound pushes it into about as many right ones; but it misses the
    wrong bound by far more. The half that is violated most is left out, until a line fits.

    Wrong bounds can also be too close to the truth to contradict anything. As many of them as
    contradicted are assumed on each side, and the tightest bounds are left out for them, so that
    the residual covers the truth.

    Args:
        bounds: Intervals with one end each, at least one of each side.
        first, last: The times between which the offset is wanted, first < last.

    Returns:
        The intervals that are left; None if more than `MAX_CONTRADICTING` of them contradict.
    """
    kept, most = bounds, int(MAX_CONTRADICTING * len(bounds))
    while not len(_polygon(kept, first, last)):
        if not _has_both_sides(kept):
            return None
        violation = -_slack(kept, _least_violating(kept, first, last))
        violated = int(np.count_nonzero(violation > 0))
        dropped = max(1, violated // 2)
        if len(bounds) - len(kept) + dropped > most:
            return None
        kept = kept.keep(np.sort(np.argsort(violation, kind="stable")[: len(kept) - dropped]))
    line = fit_line(kept, first, last)
    hidden = len(bounds) - len(kept)
    if line is None or not hidden:
        return kept
    slack = _slack(kept, line)
    is_lower = np.isfinite(kept.low)
    remaining = [
        rows[np.argsort(slack[rows], kind="stable")[hidden:]]
        for rows in (np.flatnonzero(is_lower), np.flatnonzero(~is_lower))
    ]
    kept = kept.keep(np.sort(np.concatenate(remaining)))
    return kept if _has_both_sides(kept) else None


def _has_both_sides(bounds: Bounds) -> bool:
    return bool(np.isfinite(bounds.low).any() and np.isfinite(bounds.high).any())


def _slack(bounds: Bounds, fit: Fit) -> FloatArray:
    """How far a line is inside each interval; negative where it is outside."""
    offset = fit.relative(bounds.x) + (fit.base - bounds.base)
    return np.minimum(offset - bounds.low, bounds.high - offset)


def _least_violating(bounds: Bounds, first: int, last: int) -> Fit:
    """The line with the least sum of violations; its residual is not set.

    The sum is convex. For a given rise over the whole time the best start of the line has as many
    upper bounds below it as lower bounds above it, as the order of all bounds shows; the rise
    is found by ternary search.
    """
    span = max(last - first, 1)
    is_lower = np.isfinite(bounds.low)
    value = np.where(is_lower, bounds.low, bounds.high)
    position = (bounds.x - first) / span
    sign = np.where(is_lower, 1.0, -1.0)
    lower_bounds = int(np.count_nonzero(is_lower))

    def start_of(rise: float) -> float:
        level = value - rise * position
        middle = np.partition(level, [lower_bounds - 1, lower_bounds])
        return float(middle[lower_bounds - 1] + middle[lower_bounds]) / 2

    def violations(rise: float) -> float:
        level = value - rise * position - start_of(rise)
        return float(np.maximum(sign * level, 0.0).sum())

    low, high = -MAX_DRIFT * span, MAX_DRIFT * span
    while high - low > _ROUNDING_NS:
        third = (high - low) / 3
        if violations(low + third) <= violations(high - third):
            high -= third
        else:
            low += third
    rise = (low + high) / 2
    start = start_of(rise)
    x = np.array([first, first + span], np.int64)
    return Fit(x, np.array([start, start + rise]), bounds.base, 0.0)


def fit_broken_line(bounds: Bounds, first: int, last: int) -> Fit:
    """Returns a piecewise linear function through the intervals.

    Args:
        bounds: Intervals with two ends each, at least one.
        first, last: The times between which the offset is wanted, first < last.
    """
    bounds = bounds.sorted()
    x: list[int] = []
    ranges: list[tuple[float, float]] = []
    jump = 0.0
    start, begin = 0, first
    while start < len(bounds):
        stop = _longest_straight(bounds, start)
        is_last = stop == len(bounds)
        end = max(last if is_last else int(bounds.x[stop - 1]), begin + 1)
        polygon = _polygon(bounds.keep(np.arange(start, stop)), begin, end)
        (low, next_low), (high, next_high) = polygon.min(axis=0), polygon.max(axis=0)
        if x and x[-1] == begin:
            # Where two lines meet, either may be right.
            low, high = min(low, ranges[-1][0]), max(high, ranges[-1][1])
            x.pop()
            ranges.pop()
        elif x:
            jump = max(jump, high - ranges[-1][0], ranges[-1][1] - low)
        x += [begin, end]
        ranges += [(low, high), (next_low, next_high)]
        # The next line begins where this one ends, at the interval that both pass through;
        # unless even two neighbours do not fit together: then a clock has jumped.
        start = stop - 1 if stop - start > 1 and not is_last else stop
        begin = max(int(bounds.x[min(start, len(bounds) - 1)]), end)
    low_at, high_at = np.array(ranges, np.float64).T
    half = float((high_at - low_at).max() / 2)
    residual = float(max(half, jump)) + MAX_RATE_CHANGE * _largest_distance(bounds, first, last)
    return Fit(np.array(x, np.int64), (low_at + high_at) / 2, bounds.base, residual)


def _longest_straight(bounds: Bounds, start: int) -> int:
    """The end of the longest run of intervals from `start` that one line passes through."""
    good, bad = start + 1, len(bounds) + 1
    step = 2
    while good < bad - 1:
        probe = min(good + step, bad - 1)
        rows = np.arange(start, probe)
        if len(_polygon(bounds.keep(rows), int(bounds.x[start]), int(bounds.x[probe - 1]))):
            good, step = probe, step * 2
        else:
            bad, step = probe, max(1, (probe - good) // 2)
    return good


def _polygon(bounds: Bounds, first: int, last: int) -> FloatArray:
    """The lines that pass through all intervals, as points (offset at first, offset at last).

    Returns:
        The corners of the convex polygon, shape (n, 2); no rows if no line fits.
    """
    span = max(last - first, 1)
    position = (bounds.x - first).astype(np.float64) / span
    reach = MAX_DRIFT * span
    finite = np.concatenate([bounds.low, bounds.high])
    far = float(np.abs(finite[np.isfinite(finite)]).max()) + 2 * reach
    # All lines that drift no more than any clock does.
    polygon = np.array(
        [(-far, -far - reach), (-far, -far + reach), (far, far + reach), (far, far - reach)]
    )
    for row in _hull(position, bounds.low):
        polygon = _cut(polygon, position[row], bounds.low[row], above=True)
    for row in _hull(position, -bounds.high):
        polygon = _cut(polygon, position[row], bounds.high[row], above=False)
    return polygon


def _cut(polygon: FloatArray, t: float, limit: float, *, above: bool) -> FloatArray:
    """Keeps the lines that pass above (or below) a point; Sutherland and Hodgman's clipping."""
    if not len(polygon):
        return polygon
    side = polygon[:, 0] * (1 - t) + polygon[:, 1] * t - limit
    if not above:
        side = -side
    if (side >= -_ROUNDING_NS).all():
        return polygon
    kept = []
    for index in range(len(polygon)):
        former = index - 1
        if (side[former] < 0) != (side[index] < 0):
            share = side[former] / (side[former] - side[index])
            kept.append(polygon[former] + share * (polygon[index] - polygon[former]))
        if side[index] >= 0:
            kept.append(polygon[index])
    return np.array(kept, np.float64).reshape(-1, 2)


def _hull(x: FloatArray, y: FloatArray) -> list[int]:
    """Rows of the upper convex hull: no other lower bound can touch a line (Andrew, 1979)."""
    rows = np.flatnonzero(np.isfinite(y))
    rows = rows[np.lexsort((-y[rows], x[rows]))]
    hull: list[int] = []
    for row in rows.tolist():
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (x[b] - x[a]) * (y[row] - y[a]) < (y[b] - y[a]) * (x[row] - x[a]):
                break
            hull.pop()
        if not hull or x[row] > x[hull[-1]]:
            hull.append(row)
    return hull


def _largest_distance(bounds: Bounds, first: int, last: int) -> float:
    """The longest time from any moment between first and last to the nearest good interval."""
    width = bounds.high - bounds.low
    narrow = width <= 4 * width.min() if np.isfinite(width).any() else np.ones(len(width), bool)
    looks = np.sort(bounds.x[narrow])
    inside = float(np.diff(looks).max() / 2) if len(looks) > 1 else 0.0
    return max(inside, float(looks[0] - first), float(last - looks[-1]), 0.0)
