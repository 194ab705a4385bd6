"""Samples, tokens and floating-point operations per second: `analyzer/measures/throughput.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.made_trace import trace_of

from ddltrace.analyzer.importers.imported import Row
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.report.html_report import _tiles
from ddltrace.analyzer.report.text_report import render_first_screen, render_report

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"
STEP_NS = 100_000_000
STEPS = 8


def made(
    *, unknown: bool = False, group: str = "", flops: int | None = None, loads: int = 2
) -> Trace:
    """Two ranks with steps of 0.1 s, in each of which a rank fetches two batches of 4 samples.

    Args:
        unknown: Whether the number of samples is not known of one batch.
        group: Description of the group of their messages.
        flops: Of each of three operators in steps 3 and 4.
        loads: How many of the ranks load data.
    """
    rows_of = {}
    for rank in range(2):
        rows: list[Row] = []
        for step in range(STEPS):
            at = 1000 + step * STEP_NS
            rows.append(Row(at, at + STEP_NS, "step", "step", "main", step=step))
            for batch in range(2 if rank < loads else 0):
                known = 4 if not (unknown and step == 6 and batch) else None
                rows.append(
                    Row(at, at + 5, "data", "next batch", "main", step, samples=known, tokens=40)
                )
                at += 10
            rows += [
                Row(at + n, at + n + 1, "host", "aten::mm", "main", step, flops=flops)
                for n in (range(3) if step in {3, 4} and flops else ())
            ]
            rows.append(
                Row(
                    *(at + 20, at + 30, "message", "all_reduce", "comm/0", step),
                    **{"id": step, "seq": step, "op": "all_reduce", "group": "0"},
                    **{"bytes": 8, "status": "ok", "enqueue_ns": at + 20},
                )
            )
        rows_of[rank] = rows
    return trace_of(rows_of, group, world_size=2)


def rates(analysis: Analysis) -> list[float | None]:
    values = [row.samples_per_s for row in analysis.ranks]
    values += [analysis.summary.samples_per_s, analysis.summary.tokens_per_s]
    return [None if value is None else round(value, 6) for value in values]


def test_batches_are_added_up_over_steps_and_ranks() -> None:
    analysis = made().analyze()
    assert rates(analysis) == [80, 80, 160, 1600]
    assert analysis.summary.flops_per_step is None
    for report in (render_first_screen(analysis, 100), render_report(analysis)):
        assert "Throughput: 160 samples per second, 1,600 tokens per second.\n" in report
    assert ("samples per second", "160") in [
        (tile.name, tile.value) for tile in _tiles(analysis.summary)
    ]


def test_the_sum_is_that_of_the_ranks_that_load_data() -> None:
    assert rates(made(loads=1).analyze()) == [80, None, 80, 800]


def test_a_batch_without_a_known_number_leaves_it_unknown() -> None:
    assert rates(made(unknown=True).analyze()) == [None, None, None, 1600]


def test_ranks_that_share_samples_have_no_sum() -> None:
    assert rates(made(group="mesh_tp").analyze()) == [80, 80, None, None]
    assert rates(made(group="mesh_dp").analyze()) == [80, 80, 160, 1600]


def test_utilization_needs_a_peak() -> None:
    trace = made(flops=2 * 10**9)
    summary = trace.analyze().summary
    assert (summary.flops_per_step, summary.mfu) == (6e9, None)
    trace.peak_tflops = 0.12
    analysis = trace.analyze()
    assert analysis.summary.mfu == pytest.approx(0.5)
    assert "6.00 G FLOP per step of a rank, 50.0 % MFU.\n" in render_report(analysis, 200)


def test_a_trace_without_them_has_none() -> None:
    analysis = open_trace(SAMPLE).analyze()
    assert set(rates(analysis)) == {None}
    assert "Throughput" not in render_report(analysis)
