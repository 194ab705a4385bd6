"""Resource counters as measures and findings: what was put in is found, and nothing else."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner

from ddltrace.analyzer.commands import query
from ddltrace.analyzer.events.counter_series import CounterSeries, counter_series
from ddltrace.analyzer.exporters.perfetto import write as write_perfetto
from ddltrace.analyzer.findings.advice import find_findings, resource_findings
from ddltrace.analyzer.formatting.units import time_text
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.measures.job_facts import JobFacts
from ddltrace.analyzer.measures.resources import (
    ResourceRow,
    Stop,
    find_stops,
    memory_growth,
    resource_rows,
)
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.report.sentences import sentences
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.tracer.trace.counters import COUNTERS, CounterRows, Reading
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import counters_name

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "straggler"
SECOND = 1_000_000_000
MB = 1e6


def memory(value: np.ndarray) -> CounterSeries:
    count = len(value)
    step = 10 * np.arange(count)
    return CounterSeries("process_memory", "", "bytes", step * SECOND, step, 500 * MB + value)


@pytest.mark.parametrize("seed", range(5))
def test_growth_is_found_with_its_slope(seed: int) -> None:
    """3 MB a step, among noise and a few peaks."""
    noise = np.random.default_rng(seed)
    value = 30 * MB * np.arange(60) + noise.normal(0, 20 * MB, 60)
    value[noise.choice(60, 4)] += 2000 * MB
    growth = memory_growth(memory(value))
    assert growth is not None
    assert growth.bytes_per_step == pytest.approx(3 * MB, rel=0.1)
    assert (growth.first_step, growth.last_step) == (200, 590)


@pytest.mark.parametrize("seed", range(5))
def test_noise_warm_up_and_peaks_are_no_growth(seed: int) -> None:
    noise = np.random.default_rng(seed)
    flat = noise.normal(0, 30 * MB, 60)
    warm_up = 800 * MB * (1 - np.exp(-np.arange(60) / 5))
    step_up = np.where(np.arange(60) > 30, 400 * MB, 0.0)
    peaks = np.where(np.arange(60) % 7 == 0, 300 * MB, 0.0)
    shrinking = -10 * MB * np.arange(60)
    for value in (flat, warm_up, warm_up + flat / 10, step_up, peaks, shrinking, flat[:6]):
        assert memory_growth(memory(value)) is None


def test_rates_of_cumulative_counters() -> None:
    rows = CounterRows()
    readings = [
        (int(t * SECOND), None, Reading("network_sent", value, "eth0"))
        for t, value in ((0, 100.0), (2, 300.0), (3, 50.0), (4, 60.0))
    ]
    batch = rows.batch(readings)
    table = type(COUNTERS.empty_table()).from_batches([batch])
    (series,) = counter_series(table)
    assert series.label == "network sent eth0"
    assert series.unit == "bytes/s"
    assert series.value.tolist() == [100.0, 10.0]  # none where the counter began again


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A real trace, with counters of a job on a busy host, with a leak and a hot device."""
    directory = Path(shutil.copytree(SAMPLE, tmp_path_factory.mktemp("t") / "trace"))
    bare = open_trace(directory)
    for info in bare.run.ranks:
        leaks = 4 * MB if info.rank == 1 else 0.0
        stream = StreamWriter(directory / f"{counters_name(info.segment)}.arrows", COUNTERS)
        rows = CounterRows()
        for n in range(40):
            readings = [
                Reading("process_memory", 500 * MB + leaks * n),
                Reading("process_cpu_wait", 0.1 + 0.1 * info.rank),
                Reading("host_cpu", 0.99 if n % 4 else 0.5),
                Reading("device_throttling", float(0x40 if n % 2 else 0x01), "GPU-1"),
            ]
            at = bare.origin_ns + n * SECOND // 100
            stream.write(rows.batch([(at, n, reading) for reading in readings]))
        stream.close()
    return open_trace(directory)


def test_findings_have_their_evidence(trace: Trace) -> None:
    analysis = trace.analyze()
    found = {finding.kind: finding for finding in resource_findings(analysis)}
    assert found.keys() == {"memory", "device", "processors"}
    assert "on rank 1: by 4.00 MB a step" in found["memory"].evidence
    assert "50.0 % of the samples (hardware thermal limit)" in found["device"].evidence
    assert "in 75.0 % of the samples" in found["processors"].evidence
    assert analysis.summary.step_us.mean is not None
    waited = time_text(0.2 * analysis.summary.step_us.mean)
    assert f"({waited} of a mean step)" in found["processors"].evidence
    shared = [finding for finding in analysis.findings if finding.rank is None]
    assert shared[0].kind == "processors", "it makes the other numbers unsure"
    assert "start fewer threads" in shared[0].advice
    assert set(found) <= {finding.kind for finding in analysis.findings}
    text = render_report(analysis)
    assert "memory: the memory of its process grows on rank 1" in " ".join(text.split())


def test_a_trace_without_counters_has_no_resources() -> None:
    bare = open_trace(SAMPLE)
    assert resource_rows(bare) == ()
    analysis = bare.analyze()
    assert not list(resource_findings(analysis))
    idle = replace(analysis, resources=())
    assert idle == analysis


def test_counters_can_be_queried(trace: Trace) -> None:
    sql = (
        "SELECT rank, name, unit, max(step) AS last, count(*) AS n FROM counters "
        "WHERE name = 'process_memory' GROUP BY ALL ORDER BY rank"
    )
    done = CliRunner().invoke(query, [str(trace.path), sql, "--format", "csv"])
    assert done.output.splitlines()[1:] == [
        f"{rank},process_memory,bytes,39,40" for rank in trace.ranks
    ]


def test_perfetto_has_every_counter_as_a_track(trace: Trace, tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    path = tmp_path / "trace.pftrace"
    write_perfetto(trace, path)
    packets = protos.Trace.FromString(path.read_bytes()).packet
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in packets
        if p.HasField("track_descriptor") and p.track_descriptor.HasField("counter")
    }
    assert {t.name for t in tracks.values()} == {
        *("process memory", "process cpu wait", "host cpu", "device throttling GPU-1"),
    }
    units = {t.name: t.counter.unit_name for t in tracks.values()}
    assert (units["process memory"], units["host cpu"]) == ("bytes", "share")
    counter = protos.TrackEvent.Type.TYPE_COUNTER
    found: dict[str, list[float]] = {}
    for packet in packets:
        if packet.track_event.type == counter:
            name = tracks[packet.track_event.track_uuid].name
            found.setdefault(name, []).append(packet.track_event.double_counter_value)
    assert all(len(values) == 40 * len(trace.ranks) for values in found.values())
    assert max(found["process memory"]) == 500 * MB + 39 * 4 * MB


def processor_time(
    gap_s: float, used_s: float, *, usual: float = 0.5, waits: float = 0.0
) -> dict[str, CounterSeries]:
    """A process that is read every second, but for one gap, in which it used some time."""
    time_s = np.concatenate([np.arange(10.0), 9.0 + gap_s + np.arange(10.0)])
    value = np.full(20, usual)
    value[10] = used_s / gap_s
    share = np.full(20, 0.01)
    share[10] = waits
    at, step = (time_s * SECOND).astype(np.int64), np.arange(20)
    return {
        "process_cpu": CounterSeries("process_cpu", "", "cores", at, step, value),
        "process_cpu_wait": CounterSeries("process_cpu_wait", "", "share", at, step, share),
    }


@pytest.mark.parametrize("gap_s", [2.6, 4.0, 100.0])
@pytest.mark.parametrize("used_s", [0.0, 0.4])
def test_a_process_that_was_stopped_is_found(gap_s: float, used_s: float) -> None:
    (stop,) = find_stops(processor_time(gap_s, used_s))
    assert stop.last_step == 10
    assert stop.least_us == pytest.approx((gap_s - 1) * 1e6)
    assert stop.most_us == pytest.approx(gap_s * 1e6)


@pytest.mark.parametrize(
    "series",
    [
        processor_time(1.9, 0.0),  # a late reading
        processor_time(4.0, 2.0),  # the readings were late, as on a disk that does not answer
        processor_time(4.0, 0.0, waits=0.9),  # no processor was free
        processor_time(4.0, 0.0, usual=0.01),  # a process that does next to nothing
    ],
)
def test_a_process_that_may_have_run_is_not_said_to_have_stopped(series) -> None:
    assert find_stops(series) == ()


def test_it_is_not_known_without_the_time_in_which_a_processor_was_waited_for() -> None:
    series = processor_time(4.0, 0.0)
    assert find_stops({"process_cpu": series["process_cpu"]}) is None


def test_a_stopped_process_is_the_first_finding() -> None:
    analysis = open_trace(SAMPLE).analyze()
    stop = Stop(last_step=12, least_us=2e6, most_us=3e6)
    unknown = dict.fromkeys([field.name for field in fields(ResourceRow)])
    known = {"rank": 1, "host": "a", "growth": (), "device_throttling": (), "stops": (stop,)}
    stopped = replace(analysis, resources=(ResourceRow(**unknown | known),))
    first, *others = find_findings(stopped, JobFacts())
    assert first.kind == "stopped"
    assert "no thread of rank 1 ran for 2.00 s to 3.00 s, until step 12" in first.evidence
    assert first.advice in sentences(replace(stopped, findings=(first, *others)))[-1]
    # One that hardly matters is not a first finding.
    short = replace(stop, least_us=1.0)
    row = replace(stopped.resources[0], stops=(short,))
    assert find_findings(replace(stopped, resources=(row,)), JobFacts())[0].kind != "stopped"


def with_a_stop(path: Path) -> Path:
    """The sample, in which rank 1 is stopped for 3 s in a layer while rank 0 waits for it."""
    trace = open_trace(SAMPLE)
    waiting, layers = trace.events(0), trace.events(1)
    waiting = waiting.filter(pc.equal(waiting["kind"], "wait"))
    layers = layers.filter(pc.and_(pc.equal(layers["kind"], "layer"), pc.equal(layers["step"], 15)))
    start, end = (waiting[name].fill_null(0).to_numpy() for name in ("start_ns", "end_ns"))
    stop = next(
        middle
        for middle in (layers["start_ns"].to_numpy() + layers["end_ns"].to_numpy()) // 2
        if ((start < middle) & (middle < end)).any()
    )
    tables = {}
    for info in trace.run.ranks:
        table = trace.events(info.rank)
        for place, name in enumerate(table.column_names):
            if name in ("start_ns", "end_ns", "enqueue_ns"):
                later = pc.if_else(pc.greater(table[name], int(stop)), 3 * SECOND, 0)
                table = table.set_column(place, table.field(name), pc.add(table[name], later))
        tables[info.segment] = table
        info.clock = {}
    save(ImportedTrace(trace.run, tables), path, force=False)
    for info in trace.run.ranks:
        stream = StreamWriter(path / f"{counters_name(info.segment)}.arrows", COUNTERS)
        rows = CounterRows()
        for n in range(-5, 9):
            if n in (0, 1, 2) and info.rank == 1:
                continue
            readings = [
                Reading("process_cpu", 0.2 if n == 3 and info.rank == 1 else 1.0),
                Reading("process_cpu_wait", 0.01),
            ]
            at = int(stop) + SECOND // 3 + n * SECOND
            stream.write(rows.batch([(at, 15, reading) for reading in readings]))
        stream.close()
    return path


def test_a_stop_is_the_same_in_headline_path_idle_time_root_cause_and_finding(
    tmp_path: Path,
) -> None:
    before = open_trace(SAMPLE).analyze()
    after = open_trace(with_a_stop(tmp_path / "stopped")).analyze()
    first, second, *_ = sentences(after)
    assert "a stopped process" in first
    assert "The process of rank 1 was stopped" in second
    [slow] = [row for row in after.steps if row.wall_us > 2e6]
    [former] = [row for row in before.steps if row.step == slow.step]
    assert slow.critical_path.idle_us == pytest.approx(3e6, rel=0.02)
    assert slow.critical_path.host_us == pytest.approx(former.critical_path.host_us, abs=2e4)
    assert slow.critical_path.compute_us == pytest.approx(former.critical_path.compute_us, abs=5e4)
    stopped = {row.rank: row.stopped_us for row in after.idle}
    assert stopped == {0: 0.0, 1: pytest.approx(3e6, rel=0.02)}
    for row in after.idle:
        causes = (row.data_us, row.other_rank_us, row.message_us, row.host_us, row.stopped_us)
        assert sum(causes) + row.unknown_us == pytest.approx(row.idle_us)
    cause = max(after.root_causes, key=lambda each: each.direct_us)
    assert (cause.rank, cause.activity) == (1, "stopped")
    assert after.findings[0].kind == "stopped"
    steps = sum(row.steady for row in after.steps)
    assert after.findings[0].saves_us == pytest.approx(3e6 / steps, rel=0.1)
    assert "stopped" in render_report(after)
    # Work is not counted as longer because of it.
    mine, theirs = (next(row for row in each.ranks if row.rank == 1) for each in (before, after))
    assert theirs.compute_us == pytest.approx(mine.compute_us, rel=0.02)
