"""The difference of a range of two traces on one axis."""

import pytest
from unit.dashboard.test_details import MS, texts

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.pages import range_difference
from ddltrace.dashboard.pages.comparison_page import aligned_steps
from ddltrace.dashboard.pages.range_difference import difference_panel
from ddltrace.dashboard.timeline.range_summary import RangeRow, differences
from ddltrace.dashboard.workspace import Workspace


@pytest.fixture
def pair(write_run_of):
    """A: steps of 100 ms, rank 1 is late. B: steps of 120 ms."""
    paths = write_run_of("a"), write_run_of("b", step_ms=120, late_ms=0)
    workspace = Workspace([open_trace(path) for path in paths])
    return workspace.get(0), workspace.get(1)


def row_of(shown, name):
    at = shown.index(name)
    return shown[at + 1 : at + 4]


def test_a_step_of_each_begins_at_zero(pair):
    shown = texts(difference_panel(pair, (1, 2), (100 * MS, 110 * MS), is_measured=True))
    assert row_of(shown, "step 1 and step 2") == ["100 ms", "120 ms", "+20.0 ms"]
    assert shown[shown.index("From") + 1] == "0 ns"
    # The first 10 ms of both are alike: 5 ms of data, 5 of forward, 4 of a layer.
    assert row_of(shown, "data") == ["5.00 ms", "5.00 ms", "0 ns"]
    assert row_of(shown, "layer") == ["4.00 ms", "4.00 ms", "0 ns"]
    assert "gradient" not in shown


def test_times_are_means_over_the_ranks_of_each(pair):
    shown = texts(difference_panel(pair, (0, 0), (0, 100 * MS), is_measured=True))
    # Rank 1 of A enters both collectives 10 ms later.
    assert row_of(shown, "collective") == ["51.0 ms", "61.0 ms", "+10.0 ms"]
    assert row_of(shown, "net.conv") == ["9.00 ms", "9.00 ms", "0 ns"]


def test_without_the_step_nothing_is_said_of_its_time(pair):
    shown = texts(difference_panel(pair, (3, 9), (300 * MS, 310 * MS), is_measured=True))
    assert row_of(shown, "step 3 and step 9") == ["100 ms", NOT_KNOWN, NOT_KNOWN]
    shown = texts(difference_panel(pair, (None, None), (0, 10 * MS), is_measured=True))
    assert "Step time" not in shown


def test_so_many_events_are_summed_only_for_a_measured_range(pair, monkeypatch):
    monkeypatch.setattr(range_difference, "_MOST_EVENTS", 10)
    shown = texts(difference_panel(pair, (0, 0), (0, 400 * MS), is_measured=False))
    assert "By kind" not in shown
    assert "events are shown" in shown[-1]
    assert "By kind" in texts(difference_panel(pair, (0, 0), (0, 400 * MS), is_measured=True))


def test_the_largest_difference_is_first():
    before = [RangeRow("layer", "a", 2, 4, 800), RangeRow("wait", "w", 2, 1, 20)]
    after = [RangeRow("layer", "b", 1, 1, 100), RangeRow("layer", "a", 1, 4, 390)]
    by_kind, by_name = differences(before, after, (2, 1))
    assert [(row.kind, row.change_ns) for row in by_kind] == [("layer", 90), ("wait", -10)]
    assert [(row.name, row.change_ns) for row in by_name] == [("b", 100), ("a", -10), ("w", -10)]


def test_steps_come_from_the_address():
    assert aligned_steps(Address.parse("?a=0")) == (None, None)
    assert aligned_steps(Address.parse("?step=3")) == (3, 3)
    assert aligned_steps(Address.parse("?step=3&step_b=5")) == (3, 5)
