from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddltrace.analyzer.events import interval_sets

raw = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), max_size=12)


def _spans(pairs):
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return interval_sets.union(array[:, 0], array[:, 1])


def _instants(pairs):
    return {t for start, end in pairs for t in range(start, end)}


def _instants_of(spans):
    return _instants(zip(spans.start.tolist(), spans.end.tolist(), strict=True))


def _check_form(spans):
    assert (spans.end > spans.start).all()
    assert (spans.start[1:] > spans.end[:-1]).all()


@given(raw)
def test_union_holds_the_instants_of_all(a):
    spans = _spans(a)
    _check_form(spans)
    assert _instants_of(spans) == _instants(a)
    assert interval_sets.length(spans) == len(_instants(a))


@given(raw, raw)
def test_intersection_difference_and_merge_are_those_of_sets(a, b):
    first, second = _spans(a), _spans(b)
    assert _instants_of(interval_sets.intersect(first, second)) == _instants(a) & _instants(b)
    assert _instants_of(interval_sets.subtract(first, second)) == _instants(a) - _instants(b)
    assert _instants_of(interval_sets.merge(first, second)) == _instants(a) | _instants(b)
    for spans in (interval_sets.merge(first, second), interval_sets.subtract(first, second)):
        assert (spans.end > spans.start).all()
        assert (spans.start[1:] >= spans.end[:-1]).all()


@given(raw, raw)
def test_lengths_within_windows(a, windows):
    windows = [(min(w), max(w)) for w in windows]
    array = np.array(windows, dtype=np.int64).reshape(-1, 2)
    found = interval_sets.lengths_within(_spans(a), array[:, 0], array[:, 1])
    assert found.tolist() == [len(_instants(a) & set(range(*w))) for w in windows]


@given(raw, st.integers(-20, 20), st.integers(0, 20))
def test_clip_keeps_what_is_within(a, start, size):
    clipped = interval_sets.clip(_spans(a), start, start + size)
    assert _instants_of(clipped) == _instants(a) & set(range(start, start + size))


@given(st.lists(raw, max_size=8))
def test_a_union_that_grows_is_the_union_of_all(parts):
    growing = interval_sets.Growing(few=3)
    for part in parts:
        array = np.array(part, dtype=np.int64).reshape(-1, 2)
        growing.add(array[:, 0], array[:, 1])
    whole = _spans([pair for part in parts for pair in part])
    assert [*map(list, growing.spans())] == [*map(list, whole)]


@given(raw, st.sets(st.integers(-20, 20)))
def test_intervals_are_divided_at_times(intervals, times):
    """The intervals may overlap and stand in any order."""
    intervals = [pair for pair in intervals if pair[0] < pair[1]]
    array = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    gaps = interval_sets.divided_at(np.array(sorted(times), dtype=np.int64))
    of_interval, of_gap, parts = interval_sets.overlaps(interval_sets.Spans(*array.T), gaps)
    bounds = [sorted({*pair, *(t for t in times if pair[0] < t < pair[1])}) for pair in intervals]
    assert list(zip(of_interval.tolist(), *map(list, parts), strict=True)) == [
        (number, *pair) for number, each in enumerate(bounds) for pair in pairwise(each)
    ]
    assert (gaps.start[of_gap] <= parts.start).all()
    assert (gaps.end[of_gap] >= parts.end).all()
