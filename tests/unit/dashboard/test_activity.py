"""The breakdown of a rank's time: known values, and parts that sum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltrace.analyzer.events.interval_sets import EMPTY, intersect, length, merge, union
from ddltrace.analyzer.events.rank_activity import Activity
from ddltrace.dashboard.timeline.activity_bars import PARTS, _partition, break_down


def test_known_values(opened):
    parts = break_down(0, opened.events(0), {1, 2}).parts_us
    # Forward 25 ms and backward 50 ms less its wait of 18 ms; messages from 41 to 78 ms.
    assert parts == {
        "compute": pytest.approx((25 + 11 + 2) * 1e3),
        "update": pytest.approx(10e3),
        "overlap": pytest.approx(19e3),
        "exposed": pytest.approx(18e3),
        "copies": 0,
        "data": pytest.approx(5e3),
        "idle": pytest.approx(10e3),
    }


def test_without_steps_it_is_over_the_whole_trace(opened):
    broken_down = break_down(1, opened.events(1), ())
    assert broken_down.steps == 0
    assert sum(broken_down.parts_us.values()) == pytest.approx(403e3)


spans = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=12).map(
    lambda pairs: union(
        np.array([s for s, _ in pairs], dtype=np.int64),
        np.array([s + d for s, d in pairs], dtype=np.int64),
    )
)


@settings(max_examples=200, deadline=None)
@given(st.tuples(spans, spans, spans, spans, spans), spans, st.booleans())
def test_parts_are_disjoint_and_sum_to_the_window(sets, windows, device):
    compute, comm, copies, data, update = sets
    activity = Activity(
        device=device,
        compute=compute,
        comm=comm,
        copies=copies,
        copies_by_direction=(copies,),
        data=data,
        update=update,
        device_update=EMPTY,
        blocked=EMPTY,
        host=EMPTY,
        both=intersect(compute, comm),
        work=merge(compute, comm, copies),
    )
    parts = _partition(activity, windows)
    assert set(parts) == set(PARTS)
    assert sum(length(part) for part in parts.values()) == length(windows)
    assert length(merge(*parts.values())) == length(windows)
