"""Scanning in windows: wherever a rank's events are cut, the same comes out."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltrace.analyzer.events.event_columns import NULL, Gathered, place_in
from ddltrace.analyzer.joined.trace_scans import scan_ranks, timeline_of
from ddltrace.analyzer.open_trace import open_trace

_SAMPLES = Path(__file__).parents[3] / "sample_traces"


def flat(value):
    """A scan as plain values that can be compared."""
    if is_dataclass(value):
        return {field.name: flat(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [flat(part) for part in value]
    if isinstance(value, dict):
        return {key: flat(part) for key, part in value.items()}
    if isinstance(value, float) and np.isnan(value):
        return None  # equals itself
    return value.tolist() if isinstance(value, np.ndarray) else value


def scanned(trace):
    scans = scan_ranks(trace)
    return {
        rank: (flat(scan) | {"timeline": None}, flat(timeline_of(trace, scan)))
        for rank, scan in scans.items()
    }


def cut(trace, rows):
    """The same trace, read in windows of a given number of rows."""
    windows = trace.windows

    def small(rank):
        whole = pa.concat_tables(windows(rank)).unify_dictionaries().combine_chunks()
        for first in range(0, whole.num_rows, rows):
            yield whole.slice(first, rows)

    trace.windows = small
    return trace


@pytest.mark.parametrize("name", ["straggler", "ddp-4-hosts-400mbit"])
@pytest.mark.parametrize("rows", [7, 100, 1000])
def test_windows_of_any_size_give_the_same(name, rows):
    assert scanned(cut(open_trace(_SAMPLES / name), rows)) == scanned(open_trace(_SAMPLES / name))


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_windows_hold_a_message_once_like_the_whole(build, rows):
    built = build(1)
    done = built[0].message("all_reduce", 0, None)
    still_open = built[0].message("barrier", 5, None)
    built[0].add("phase", 1, 2, name="forward")
    built[0].message("all_reduce", 6, None, id=None)
    built[0].message("all_reduce", 0, 9, id=done)
    trace = cut(built.trace(), rows)
    found = pa.concat_tables(trace.event_windows(0)).sort_by("start_ns")
    assert found.to_pylist() == trace.events(0).to_pylist()
    assert found["id"].to_pylist() == [done, None, still_open, None]


def _two_steps(build, name):
    trace = build(1, name)
    rank = trace[0]
    for number, start in enumerate((0, 100)):
        rank.step = number
        rank.add("layer", start + 10, start + 40, name=f"layer {number}")
        rank.add("phase", start + 5, start + 60, name="forward", phase="forward")
        rank.whole_step(number, start, start + 100)
    return trace, rank


def _segments(trace):
    (scan,) = scan_ranks(trace).values()
    line = timeline_of(trace, scan)
    names = [*line.names, None]
    return [
        (time, names[code])
        for time, code in zip(line.segments.time.tolist(), line.segments.name.tolist(), strict=True)
    ]


def _late(rank):
    rank.add("layer", 2, 190, name="around")


def _led_later(rank):
    rank.rows = [row | {"lane": "loader"} for row in rank.rows[:2]] + rank.rows


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize("change", [_late, _led_later])
def test_what_cannot_be_told_window_by_window_is_told_from_all_events(build, change, rows):
    for name in ("whole", "cut"):
        trace, rank = _two_steps(build, name)
        change(rank)
        opened = trace.trace()
        found = _segments(opened if name == "whole" else cut(opened, rows))
        if name == "whole":
            expected = found
    assert found == expected
    assert ("around" in dict(found).values()) == (change is _late)


@given(st.lists(st.integers(0, 3000), max_size=5), st.booleans())
def test_a_gathered_column_holds_what_came(sizes, drops):
    column = Gathered(np.int32)
    expected = []
    for size in sizes:
        part = list(range(size))
        column.add(np.array(part, dtype=np.int64))
        expected += part
        if drops and expected:
            column.drop_last()
            expected.pop()
    assert column.values().tolist() == expected


@given(
    st.lists(st.integers(-1, 9), max_size=20), st.sets(st.integers(0, 8), max_size=9).map(sorted)
)
def test_steps_are_found_among_those_that_count(steps, numbers):
    place = place_in(np.array(steps, dtype=np.int32), np.array(numbers, dtype=np.int64))
    assert place.tolist() == [numbers.index(n) if n in numbers else NULL for n in steps]
