"""Generated traces whose answers follow from how they were made, at a size for every run."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support import simulated

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.commands import analyze, compare, query
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.trace import step_selection
from ddltrace.dashboard.timeline import coarse
from ddltrace.dashboard.timeline.tracks import build_timeline
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.event_reader import EventReader


@pytest.fixture(scope="module")
def synthetic():
    return simulated.synthetic()


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_known_path_is_found_in_every_step(synthetic, tmp_path, ranks):
    shape = synthetic.Shape(ranks=ranks, steps=6, layers=40, buckets=4, straggler=1)
    trace = open_trace(synthetic.write_trace(tmp_path / "trace", shape))
    analyzed = analyze_in_full(trace)
    analysis = analyzed.analysis
    assert analysis.trace.events == shape.events * ranks * shape.steps
    assert [row.step for row in analysis.steps] == list(range(6))
    for row in analysis.steps:
        assert round(row.wall_us * 1000) == shape.step
        assert analyzed.paths[row.step].totals_ns() == synthetic.expected_path(shape)


def test_the_known_straggler_and_its_cause_are_named(synthetic, tmp_path):
    shape = synthetic.Shape(ranks=5, steps=6, layers=40, buckets=4, straggler=3)
    analysis = open_trace(synthetic.write_trace(tmp_path / "trace", shape)).analyze()
    (worst,) = analysis.stragglers
    assert (worst.rank, worst.share, worst.cause) == (3, 1.0, "compute")
    assert worst.lateness_us == pytest.approx(shape.late / 1e3)
    assert worst.cause_us == pytest.approx(shape.late / 1e3)


def test_bytes_and_messages_are_those_of_the_gradients(synthetic, tmp_path):
    shape = synthetic.Shape(ranks=3, steps=4, layers=40, buckets=4)
    analysis = open_trace(synthetic.write_trace(tmp_path / "trace", shape)).analyze()
    (row,) = analysis.collectives
    assert row.count == 4 * shape.steps
    assert row.bytes * 4 == shape.layers * shape.tensor_bytes
    assert all(one.messages == 4 * shape.steps for one in analysis.ranks)
    sent = shape.layers * shape.tensor_bytes * shape.steps
    assert all(one.bytes_sent == sent for one in analysis.ranks)
    assert len(analysis.tensors) == shape.layers
    assert all(one.bucket == 10 and one.messages == 1 for one in analysis.tensors)


def test_intermediate_results_of_a_long_trace_are_of_its_last_steps(
    synthetic, tmp_path, monkeypatch
):
    shape = synthetic.Shape(ranks=3, steps=40, layers=40, buckets=4)
    path = synthetic.write_trace(tmp_path / "trace", shape)
    asked = open_trace(path).analyze(range(30, 40))
    step = shape.ranks * (shape.events * step_selection._EVENT_BYTES + shape.buckets * 430)
    monkeypatch.setattr(step_selection, "MOST_BYTES", 10 * step)
    trace = open_trace(path)
    last = analyze_in_full(trace).analysis
    assert [row.step for row in last.steps] == list(range(30, 40))
    assert last.summary.rule == step_selection.RULE
    assert last.trace.events == shape.events * shape.ranks * shape.steps
    note = "of steps 0 to 39, 30 to 39 are analyzed"
    assert [text for text in last.trace.notes if note in text]
    done = CliRunner().invoke(query, [str(path), "FROM steps"])
    assert (done.exit_code, note in done.stderr) == (0, True)
    done = CliRunner().invoke(compare, [str(path), str(path)])
    assert (done.exit_code, "steps 0 to 39 in " in done.stderr) == (0, True)
    # A larger limit than the default is for a machine with more memory.
    larger = open_trace(path)
    larger.memory_limit = 20 * step
    assert [row.step for row in analyze_in_full(larger).analysis.steps] == list(range(20, 40))
    done = CliRunner().invoke(analyze, [str(path), "--json", "--memory-limit", "1GB"])
    assert len(json.loads(done.stdout)["steps"]) == shape.steps
    count = run_query(trace, "SELECT count(*) AS n FROM events")["n"].to_pylist()
    assert count == [shape.events * shape.ranks * shape.steps]
    # Read alone or among all others, the same steps say the same.
    assert last.steps == asked.steps
    assert last.stragglers == asked.stragglers
    for mine, other in zip(last.tensors, asked.tensors, strict=True):
        assert vars(mine) == pytest.approx(vars(other))
    assert last.critical_path == asked.critical_path
    assert last.slow_steps == asked.slow_steps
    first = trace.analyze(range(3))
    assert [row.step for row in first.steps] == [0, 1, 2]
    assert [row.messages for row in first.ranks] == [3 * shape.buckets] * shape.ranks
    with pytest.raises(TraceError, match="has steps 0 to 39, none of 50:60"):
        trace.analyze(range(50, 60))


def test_of_many_ranks_some_of_each_host_are_sampled(synthetic, tmp_path, monkeypatch):
    shape = synthetic.Shape(ranks=24, steps=1, layers=20, buckets=2)
    trace = open_trace(synthetic.write_trace(tmp_path / "trace", shape))
    monkeypatch.setattr(coarse, "_RANKS", 4)
    found = coarse.coarse_timelines(trace)
    assert sorted(found) == trace.ranks
    assert [rank for rank, timeline in found.items() if timeline.rows] == [0, 1, 8, 16]
    # Nothing is known of the others, from the begin to the end.
    assert found[5].unread == {5: [(0, found[0].span_ns)]}


def test_a_sample_of_a_long_trace_is_evenly_spread(synthetic, tmp_path, monkeypatch):
    shape = synthetic.Shape(ranks=1, steps=1200, layers=200)
    trace = open_trace(synthetic.write_trace(tmp_path / "trace", shape))
    segment = trace.run.ranks[0].segment
    every = [batch["start_ns"].to_pylist() for batch in EventReader(trace.path, segment)]
    some = [batch["start_ns"].to_pylist() for batch in EventReader(trace.path, segment, most=3)]
    assert len(every) > 3
    assert some[0] == every[0]
    assert some[1] in every[1:-1]
    assert some[2] == every[-1]
    monkeypatch.setattr(coarse, "_BATCHES", 3)
    monkeypatch.setattr(coarse, "_ROWS", 3 * 500)
    sample = coarse.coarse_timelines(trace)[0]
    whole = build_timeline(trace)
    assert sample.num_events == 3 * 500
    # What is not read is said to be unread, and nothing is drawn in it.
    assert len(sample.unread[0]) == 2
    for begin, end in sample.unread[0]:
        assert 0 < begin < end < sample.span_ns <= whole.span_ns
        gradients = next(track for track in sample.tracks if track.kind == "gradients")
        starts = sample.rows[gradients.first_row].index.start
        assert not ((starts > begin) & (starts < end)).any()
    shown, all_of_them = (
        {start for row in timeline.rows for start in row.index.start.tolist()}
        for timeline in (sample, whole)
    )
    assert shown <= all_of_them
