"""Idle time by cause: known answers, and causes that sum to the idle time on every trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.html_report import render
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.tracer.errors import ThresholdError

ROOT = Path(__file__).resolve().parents[3]
TRACES = [
    *sorted(path.parent for path in (ROOT / "sample_traces").glob("*/run.json")),
    ROOT / "tests" / "data" / "foreign" / "kineto-cpu",
]
CAUSES = ("data", "other_rank", "message", "host", "unknown")


def _step(built, rank, number, begin, forward):
    """A step of 200 us: data 20, forward, all_reduce to 120, 30 of other code, optimizer 50."""
    one = built[rank]
    one.step = number
    one.add("data", begin, begin + 20, name="next batch")
    one.add("phase", begin + 20, begin + 20 + forward, name="forward")
    message = one.message("all_reduce", begin + 20 + forward, begin + 120, seq=number, bytes=4)
    one.wait(begin + 20 + forward, begin + 120, message)
    one.add("phase", begin + 150, begin + 200, name="optimizer")
    one.whole_step(number, begin, begin + 200)


@pytest.fixture
def training(build):
    built = build(2)
    for number in range(4):
        _step(built, 0, number, 200 * number, 30)
        _step(built, 1, number, 200 * number, 80)
    return built


def test_a_rank_waits_for_its_data_its_own_code_and_the_late_rank(training):
    trace = training.trace()
    analysis = trace.analyze()
    first, second = analysis.idle
    # From the first forward (20) to the last optimizer (800): three fetches, four gaps.
    assert first.idle_us == pytest.approx(3 * 20 + 4 * 30)
    assert (first.data_us, first.host_us) == (pytest.approx(60), pytest.approx(120))
    assert (first.other_rank_us, first.message_us, first.unknown_us) == (0, 0, 0)
    # Rank 0 enters the all_reduce 50 us before rank 1.
    assert (first.in_message_us, first.waits_for) == (pytest.approx(4 * 50), 1)
    assert (second.in_message_us, second.waits_for) == (0, None)
    summary = analysis.summary
    assert summary.idle.data_share == pytest.approx(20 / 200)
    assert summary.idle.host_share == pytest.approx(30 / 200)
    assert summary.idle.in_message_share == pytest.approx(25 / 200)
    text = " ".join(render_report(analysis).split())
    said = (
        "On average, a rank is idle 25.0 % of a step: 15.0 % while the host runs other code and "
        "10.0 % waiting for data. In another 12.5 %, it only waits for other ranks inside messages."
    )
    assert said in text
    assert said.replace("'", "&#39;") in render(analyze_in_full(trace), trace)


def test_selected_steps_only(training):
    analysis = training.trace().analyze(range(1, 3))
    first = analysis.idle[0]
    assert first.idle_us == pytest.approx(analysis.ranks[0].idle_us)
    assert (first.data_us, first.host_us) == (pytest.approx(20), pytest.approx(60))
    assert first.in_message_us == pytest.approx(100)


def test_a_device_waits_for_a_message_that_has_not_started(build):
    """The host of rank 0 is blocked on a collective that its device has not begun."""
    built = build(2)
    for rank, late in ((0, 0), (1, 60)):
        one = built[rank]
        one.add("kernel", 0, 10 + late, lane="stream-7", name="gemm")
        message = one.message("all_reduce", 10 + late, 90, lane="stream-20", seq=0, bytes=4)
        one.add("kernel", 120, 130, lane="stream-7", name="gemm")
        one.wait(90, 110, message)
    built[0].message("all_reduce", 80, 100, lane="comm/0", seq=1, bytes=4)
    built[1].message("all_reduce", 95, 100, lane="comm/0", seq=1, bytes=4)
    built[0].wait(80, 100, 1)
    first, second = built.trace().analyze().idle
    # Idle from 90 to 120. Until rank 1 came at 95 rank 0 is blocked for it, then for the
    # messages only; after 110 nothing is recorded.
    assert first.idle_us == pytest.approx(30)
    assert first.other_rank_us == pytest.approx(5)
    assert first.message_us == pytest.approx(15)
    assert first.unknown_us == pytest.approx(10)
    assert (second.other_rank_us, second.message_us) == (0, pytest.approx(20))


def test_who_hangs_is_idle_for_a_message(build):
    built = build(2)
    built[0].add("phase", 0, 10, name="forward")
    built[0].message("all_reduce", 10, None, seq=0, bytes=4)
    built[0].add("phase", 500, 510, name="forward")  # another thread may continue
    built[1].add("phase", 0, 10, name="forward")
    first = built.trace().analyze().idle[0]
    assert (first.idle_us, first.message_us) == (pytest.approx(490), pytest.approx(490))


def test_nothing_is_claimed_where_compute_is_not_known(build):
    built = build(1)
    built[0].message("all_reduce", 10, 20, seq=0, bytes=4)
    analysis = built.trace().analyze()
    (row,) = analysis.idle
    assert {getattr(row, f"{name}_us") for name in ("idle", *CAUSES)} == {None}
    assert "Idle by" not in render_report(analysis)


def test_a_cause_can_fail_a_build(training):
    path = training.write()
    result = CliRunner().invoke(analyze, [str(path), "--fail-on", "idle.data_share>0.05"])
    assert isinstance(result.exception, ThresholdError)
    result = CliRunner().invoke(analyze, [str(path), "--json"])
    assert set(json.loads(result.stdout)["idle"][0]) >= {f"{name}_us" for name in CAUSES}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_causes_sum_to_the_idle_time(path):
    analysis = open_trace(path).analyze()
    for row, rank in zip(analysis.idle, analysis.ranks, strict=True):
        assert row.idle_us == rank.idle_us
        parts = [getattr(row, f"{name}_us") for name in CAUSES]
        if row.idle_us is not None:
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(row.idle_us, abs=1e-3)
    columns = analysis.rank_steps
    total = sum(columns[f"idle_{name}_ns"] for name in CAUSES)
    assert np.array_equal(total, columns["idle_ns"], equal_nan=True)
    summary = analysis.summary
    if summary.idle_share is not None:
        shares = [getattr(summary.idle, f"{name}_share") for name in CAUSES]
        assert sum(shares) == pytest.approx(summary.idle_share, abs=1e-9)
