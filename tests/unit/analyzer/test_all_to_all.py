"""How evenly all-to-alls load the ranks (`ddltrace.analyzer.measures.all_to_all`)."""

from __future__ import annotations

import pytest

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.report.text_report import render_report


def exchange(built, number, received, *, start=0.0, late=0.0, op="all_to_all", **more):
    """One collective: rank 0 comes first, the last one `late` after it; transfer 300 us."""
    for rank, size in enumerate(received):
        begin = start + late * (rank == len(received) - 1)
        sizes = {"bytes": 600, "out_bytes": size} | more
        built[rank].message(op, begin, start + late + 300, seq=number, **sizes)


def test_loads_and_what_they_cost(build):
    built = build(3)
    exchange(built, 0, [300, 600, 900], late=30.0)
    exchange(built, 1, [600, 600, 600], start=1000.0)
    exchange(built, 2, [0, 600, 1200], start=2000.0)
    (row,) = analyze(built.trace()).all_to_all
    assert (row.group, row.ranks, row.count) == ("0", (0, 1, 2), 3)
    assert row.bytes == pytest.approx(600)
    assert row.imbalance == pytest.approx((900 + 600 + 1200) / 1800)
    assert row.busiest_rank == 2
    assert row.loads == pytest.approx((900 / 1800, 1.0, 2700 / 1800))
    # Two ranks wait for the last one, in one of three.
    assert row.wait_us == pytest.approx(2 * 30 / 3 / 3)
    assert row.transfer_us == pytest.approx(300)
    # A third of the first, nothing of the second, half of the last.
    assert row.lost_us == pytest.approx(300 * (1 / 3 + 0 + 1 / 2) / 3)


def test_only_steady_steps_count_where_there_are_steps(build):
    built = build(2)
    for step in range(6):
        for rank in range(2):
            built[rank].step = step
            built[rank].whole_step(step, 1000.0 * step, 1000.0 * (step + 1))
        # The first step is not steady: it takes in the libraries.
        sizes = [100, 900] if step == 0 else [400, 600]
        exchange(built, step, sizes, start=1000.0 * step + 100)
    trace = built.trace()
    in_ranges = open_trace(trace.path)
    in_ranges.memory_limit = 1
    for analysis in (analyze(trace), in_ranges.analyze()):
        (row,) = analysis.all_to_all
        assert row.count == analysis.summary.steps < 6
        assert row.loads == pytest.approx((0.8, 1.2))
    assert "were analyzed in" in analysis.trace.notes[-1]


def test_what_is_not_known_is_left_out(build):
    built = build(2)
    exchange(built, 0, [100, 300], op="all_gather")
    exchange(built, 1, [100, None], start=1000.0)
    built[0].message("all_to_all", 2000.0, 2300.0, seq=2, bytes=1, out_bytes=1)  # alone
    assert analyze(built.trace()).all_to_all == ()


def test_the_report_and_sql_have_the_rows(build):
    built = build(2)
    exchange(built, 0, [100, 300])
    trace = built.trace()
    text = render_report(analyze(trace))
    assert "Load in all-to-alls" in text
    assert "1.50  1 (1.50x)" in text
    assert "100 µs" in text  # a third of 300
    (row,) = run_query(trace, "SELECT busiest_rank, imbalance FROM all_to_all").to_pylist()
    assert row == {"busiest_rank": 1, "imbalance": 1.5}
