"""The level-of-detail index against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltrace.dashboard.timeline.lod import BLOCK, RowIndex


def row_of(gaps_and_durations):
    """A row from alternating gaps and durations."""
    flat = np.array([n for pair in gaps_and_durations for n in pair], dtype=np.int64)
    times = np.cumsum(flat) if len(flat) else np.zeros(0, dtype=np.int64)
    return times[0::2], times[1::2]


def brute_force(start, end, edges):
    """The definition of a reduction, interval by interval and pixel by pixel."""
    expected = []
    entering = [i for i in range(len(start)) if start[i] < edges[0] < end[i]]
    expected += [(i, 1, 1.0) for i in entering[-1:]]
    for left, right in itertools.pairwise(edges):
        inside = [i for i in range(len(start)) if left <= start[i] < right]
        if inside:
            longest = max(inside, key=lambda i: (end[i] - start[i], -i))
            covered = sum(
                max(0, min(end[i], right) - max(start[i], left)) for i in range(len(start))
            )
            share = covered / (right - left) if len(inside) > 1 else 1.0
            expected.append((longest, len(inside), share))
    return expected


pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=400)


@settings(max_examples=150, deadline=None)
@given(pairs, st.integers(-5, 500), st.integers(1, 60), st.integers(1, 40))
def test_reduction_is_what_its_definition_says(gaps, origin, pixels, width):
    start, end = row_of(gaps)
    edges = np.arange(pixels + 1, dtype=np.int64) * width + origin
    got = RowIndex(start, end).reduce(edges)
    expected = brute_force(start.tolist(), end.tolist(), edges.tolist())
    assert list(zip(got.position.tolist(), got.count.tolist(), strict=True)) == [
        (position, count) for position, count, _ in expected
    ]
    assert got.cover == pytest.approx([share for *_, share in expected])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2 * BLOCK, 40 * BLOCK), st.integers(1, 60))
def test_ranges_over_many_blocks_find_the_longest_interval(seed, size, pixels):
    rng = np.random.default_rng(seed)
    start, end = row_of(rng.integers(0, rng.integers(2, 1000), (size, 2)).tolist())
    edges = np.linspace(start[0], end[-1] + 1, pixels + 1).astype(np.int64)
    got = RowIndex(start, end).reduce(edges)
    duration = end - start
    low, high = np.searchsorted(start, edges[:-1]), np.searchsorted(start, edges[1:])
    expected = [
        lo + int(duration[lo:hi].argmax()) for lo, hi in zip(low, high, strict=True) if hi > lo
    ]
    assert got.position.tolist() == expected
    assert got.count.sum() == size


def test_an_interval_longer_than_the_window_is_drawn():
    row = RowIndex(np.array([0], dtype=np.int64), np.array([1_000_000], dtype=np.int64))
    got = row.reduce(np.array([500, 600, 700], dtype=np.int64))
    assert got.position.tolist() == [0]
    assert got.count.tolist() == [1]


def test_instants_are_counted():
    times = np.array([5, 5, 5, 40], dtype=np.int64)
    got = RowIndex(times, times).reduce(np.array([0, 10, 20, 30, 41], dtype=np.int64))
    assert got.position.tolist() == [0, 3]
    assert got.count.tolist() == [3, 1]


def test_coverage_between_times():
    start, end = np.array([10, 30], dtype=np.int64), np.array([20, 50], dtype=np.int64)
    times = np.array([0, 10, 15, 20, 25, 30, 49, 50, 99], dtype=np.int64)
    assert RowIndex(start, end).covered_until(times).tolist() == [0, 0, 5, 10, 10, 10, 29, 30, 30]


def test_an_empty_row_reduces_to_nothing():
    none = np.zeros(0, dtype=np.int64)
    row = RowIndex(none, none)
    assert len(row.reduce(np.array([0, 10], dtype=np.int64)).position) == 0
    assert row.covered_until(np.array([5], dtype=np.int64)).tolist() == [0]
