"""Slow steps: found by the stated rule, explained by what was made to take longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.report.html_report import render
from ddltrace.analyzer.report.text_report import render_report

STEPS = 24
SAMPLES = sorted((Path(__file__).resolve().parents[3] / "sample_traces").glob("*/run.json"))


def _training(built, extra) -> Trace:
    """Two ranks, steps of about 1 ms: data 100, forward 500, transfer 300, optimizer 100 us.

    `extra` gives what takes how much longer: (step, rank, part) -> microseconds; a part is
    data, forward, transfer or optimizer. Steps vary by up to 4 us, so that MAD is 1 us.
    """
    begin = 0.0
    for number in range(STEPS):
        longer = {(rank, part): us for (step, rank, part), us in extra.items() if step == number}
        arrivals = {}
        for rank in (0, 1):
            data = begin + 100 + longer.get((rank, "data"), 0)
            arrivals[rank] = data, data + 500 + number % 5 + longer.get((rank, "forward"), 0)
        done = max(arrival for _, arrival in arrivals.values()) + 300
        done += longer.get((0, "transfer"), 0)
        end = done + 100 + max(longer.get((rank, "optimizer"), 0) for rank in (0, 1))
        for rank in (0, 1):
            one, (data, arrival) = built[rank], arrivals[rank]
            one.step = number
            one.add("data", begin, data, name="next batch")
            one.add("phase", data, arrival, name="forward")
            one.add("layer", data, arrival, name="net.big")
            message = one.message("all_reduce", arrival, done, seq=number, bytes=4)
            one.wait(arrival, done, message)
            own = done + 100 + longer.get((rank, "optimizer"), 0)
            one.add("phase", done, own, name="optimizer")
            one.whole_step(number, begin, own)
        begin = end
    return built.trace()


@pytest.mark.parametrize(
    ("part", "rank", "category", "name"),
    [
        ("data", 1, "data", "next batch"),
        ("forward", 0, "compute", "net.big"),
        ("optimizer", 1, "update", "optimizer"),
        ("transfer", 0, "transfer", "all_reduce"),
    ],
)
def test_a_slow_step_is_named_with_its_cause_and_rank(build, part, rank, category, name):
    slow = _training(build(2), {(9, rank, part): 800.0}).analyze().slow_steps
    (row,) = slow.steps
    assert row.step == 9
    assert slow.median_us == pytest.approx(1002)
    assert slow.limit_us == pytest.approx(1002 * 1.05)  # 5.2 MAD would be 5 us
    assert row.longer_us == pytest.approx(802)
    assert row.score == pytest.approx(0.6745 * 802)
    first = row.extra[0]
    assert (first.category, first.name) == (category, name)
    if part != "transfer":  # of a transfer, the path stays with either of its ranks
        assert first.rank == rank
    assert first.us == pytest.approx(800, rel=0.01)
    assert sum(extra.us for extra in row.extra) == pytest.approx(row.longer_us, abs=0.01)


def test_the_slowest_comes_first_and_both_are_explained(build):
    trace = _training(build(2), {(9, 1, "data"): 300.0, (20, 0, "forward"): 700.0})
    rows = trace.analyze().slow_steps.steps
    assert [row.step for row in rows] == [20, 9]
    assert [(row.extra[0].category, row.extra[0].rank) for row in rows] == [
        ("compute", 0),
        ("data", 1),
    ]


def test_steps_that_vary_a_little_are_not_slow(build):
    trace = _training(build(2), {(9, 1, "data"): 40.0})  # 40 MAD, but 4 % only
    analysis = trace.analyze()
    assert analysis.slow_steps.steps == ()
    assert "Slow steps" not in render_report(analysis)
    assert 'id="slow-steps"' not in render(analyze_in_full(trace), trace)


def test_few_steps_are_too_few_to_tell(build):
    trace = _training(build(2), {(9, 1, "data"): 800.0})
    slow = trace.analyze(range(6, 12)).slow_steps
    assert (slow.median_us, slow.limit_us, slow.steps) == (None, None, ())
    assert "too few" in slow.rule


def test_all_reports_show_them(build):
    trace = _training(build(2), {(9, 1, "data"): 800.0})
    analysis = trace.analyze()
    text = render_report(analysis)
    assert "Slow steps: 1 of 23" in text
    assert "data +800 µs, rank 1 (next batch)" in text
    assert "data +800 µs, rank 1 (next batch)" in render(analyze_in_full(trace), trace)
    result = CliRunner().invoke(analyze, [str(trace.path), "--json"])
    (row,) = json.loads(result.stdout)["slow_steps"]["steps"]
    assert row["extra"][0]["rank"] == 1


@pytest.mark.parametrize("run", SAMPLES, ids=lambda path: path.parent.name)
def test_the_parts_of_every_step_s_extra_time_sum(run, monkeypatch):
    """On real traces, with a limit so low that half of the steps are slow."""
    monkeypatch.setattr("ddltrace.analyzer.measures.slow_steps._SCORE", 0.0)
    monkeypatch.setattr("ddltrace.analyzer.measures.slow_steps._LEAST", 0.0)
    analysis = open_trace(run.parent).analyze()
    rows = analysis.slow_steps.steps
    assert len(rows) > 5 or analysis.summary.steps < 10
    for row in rows:
        assert sum(extra.us for extra in row.extra) == pytest.approx(row.longer_us, abs=0.02)
