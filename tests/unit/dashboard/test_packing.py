"""Packing of overlapping intervals into rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltrace.dashboard.timeline.packing import cut_overlaps, pack

intervals = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=80)


def arrays(pairs):
    ordered = sorted(((s, s + d) for s, d in pairs), key=lambda p: (p[0], -p[1]))
    values = np.array(ordered, dtype=np.int64).reshape(-1, 2)
    return values[:, 0].copy(), values[:, 1].copy()


@settings(max_examples=200, deadline=None)
@given(intervals)
def test_no_two_intervals_of_a_row_overlap(pairs):
    start, end = arrays(pairs)
    row = pack(start, end, max_rows=1000)
    for r in set(row.tolist()):
        mine = row == r
        assert np.all(end[mine][:-1] <= start[mine][1:])


@settings(max_examples=200, deadline=None)
@given(intervals)
def test_rows_are_as_few_as_intervals_that_run_at_once(pairs):
    start, end = arrays(pairs)
    row = pack(start, end, max_rows=1000)
    taken = np.maximum(end, start + 1)
    at_once = [int(np.sum((start <= t) & (taken > t))) for t in start.tolist()]
    assert (row.max() + 1 if len(row) else 0) == max(at_once, default=0)


def test_nested_calls_get_their_depth():
    start = np.array([0, 0, 1, 3, 10], dtype=np.int64)
    end = np.array([9, 5, 2, 4, 11], dtype=np.int64)
    assert pack(start, end).tolist() == [0, 1, 2, 2, 0]


def test_messages_that_outlive_their_successors_do_not_collide():
    start = np.array([0, 5, 11], dtype=np.int64)
    end = np.array([10, 15, 20], dtype=np.int64)
    assert pack(start, end).tolist() == [0, 1, 0]


def test_rows_are_bounded():
    start, end = np.arange(50, dtype=np.int64), np.full(50, 100, dtype=np.int64)
    row = pack(start, end, max_rows=8)
    assert row.max() == 7
    shared = row == 7
    cut = cut_overlaps(start[shared], end[shared])
    assert np.all(cut[:-1] <= start[shared][1:])
    assert cut[-1] == 100
