"""How evenly all-to-alls load the ranks (`ddltrace.analyzer.measures.all_to_all`)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ddltrace.analyzer.analysis import analyze, analyze_in_full
from ddltrace.analyzer.measures.traffic import TrafficRow
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.report import figures
from ddltrace.analyzer.report.html_report import render
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


def rows_exchange(built, number, sent, *, start=0.0, ranks=None):
    """An all-to-all in which each rank gives the sizes for each rank."""
    for place, rank in enumerate(ranks or range(len(sent))):
        sizes = {"bytes": sum(sent[place]), "out_bytes": sum(row[place] for row in sent)}
        built[rank].message(
            "all_to_all", start, start + 300, seq=number, split_bytes=sent[place], **sizes
        )


def test_a_heat_map_by_hand(build):
    built = build(3)
    rows_exchange(built, 0, [[10, 0, 90], [30, 30, 40], [0, 0, 100]])
    rows_exchange(built, 1, [[30, 20, 50], [50, 10, 40], [20, 0, 80]], start=1000.0)
    # Their calls did not give the sizes, so they count among the loads only.
    exchange(built, 2, [300, 300, 300], start=2000.0)
    trace = built.trace()
    analysis = analyze(trace)
    (row,) = analysis.all_to_all
    assert (row.count, row.sized) == (3, 2)
    assert row.sent == ((20, 10, 70), (40, 20, 40), (10, 0, 90))
    # What stays on rank 2 is more, but does not travel.
    assert (row.busiest_pair, row.pair_bytes) == ((0, 2), 70)
    assert "0 to 2 (70 B)" in render_report(analysis)
    assert 'data-figure="all_to_all"' in render(analyze_in_full(trace), trace)
    figure = figures.all_to_all(analysis)
    assert figure is not None
    expected = [[40, 20, 140], [80, 40, 80], [20, np.nan, 180]]
    np.testing.assert_array_equal(np.array(figure.data[0].z), np.array(expected))
    assert figures.traffic(analysis) is None  # there are no sends and receives
    known = [row for row in analysis.traffic if row.assumed is None]
    assert known == [
        *(TrafficRow(0, 2, 140, None), TrafficRow(1, 0, 80, None), TrafficRow(1, 2, 80, None)),
        *(TrafficRow(0, 1, 20, None), TrafficRow(2, 0, 20, None)),
    ]
    # The other one is laid out evenly: 600 bytes of each rank to three.
    assert {row.bytes for row in analysis.traffic if row.assumed == "pairwise"} == {200}


def test_a_heat_map_is_only_of_what_all_ranks_gave(build):
    built = build(2)
    rows_exchange(built, 0, [[10, 20], [30, 40]])
    for rank, sizes in enumerate(([1, 2], None)):
        more = {} if sizes is None else {"split_bytes": sizes}
        built[rank].message("all_to_all", 1000.0, 1300.0, seq=1, bytes=3, out_bytes=3, **more)
    rows_exchange(built, 2, [[10, 20, 30], [30, 40, 50]], start=2000.0)  # of more ranks than two
    rows_exchange(built, 3, [[10, -20], [30, 40]], start=3000.0)  # damaged
    damaged = analyze(built.trace())
    assert damaged.all_to_all[0].sized == 0
    assert damaged.all_to_all[0].sent is damaged.all_to_all[0].pair_bytes is None
    assert figures.all_to_all(damaged) is None


def test_heat_maps_of_ranges_are_added(build):
    built = build(2)
    for step in range(6):
        for rank in range(2):
            built[rank].step = step
            built[rank].whole_step(step, 1000.0 * step, 1000.0 * (step + 1))
        rows_exchange(built, step, [[1, 2 + step], [3, 4]], start=1000.0 * step + 100)
    trace = built.trace()
    in_ranges = open_trace(trace.path)
    in_ranges.memory_limit = 1
    whole, ranges = analyze(trace), in_ranges.analyze()
    assert whole.all_to_all == ranges.all_to_all
    assert whole.all_to_all[0].sized > 1


def test_a_large_heat_map_is_left_out_of_the_rows(build):
    built = build(65)
    rows_exchange(
        built, 0, [[10 + (src == 3 and dst == 64) for dst in range(65)] for src in range(65)]
    )
    (row,) = analyze(built.trace()).all_to_all
    assert row.sent is None
    assert (row.busiest_pair, row.pair_bytes) == ((3, 64), 11)


def test_json_and_sql_have_the_heat_map(build):
    built = build(2)
    rows_exchange(built, 0, [[1, 2], [3, 4]])
    trace = built.trace()
    (row,) = json.loads(json.dumps(analyze(trace).to_json()))["all_to_all"]
    assert row["sent"] == [[1, 2], [3, 4]]
    assert (row["busiest_pair"], row["pair_bytes"], row["sized"]) == ([1, 0], 3, 1)
    (found,) = run_query(trace, "SELECT sent, sized FROM all_to_all").to_pylist()
    assert found == {"sent": [[1, 2], [3, 4]], "sized": 1}
    (sizes,) = run_query(
        trace, "SELECT split_bytes FROM events WHERE rank = 1 AND op = 'all_to_all'"
    ).to_pylist()
    assert sizes == {"split_bytes": [3, 4]}
