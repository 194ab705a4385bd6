"""Counter tracks of the timeline: every sample, with its text and its height."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.timeline.counter_tracks import counter_tracks
from ddltrace.tracer.trace.counters import COUNTERS, CounterRows, Reading
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import counters_name

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "straggler"


def test_tracks_have_every_sample_or_the_largest_of_neighbors(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(SAMPLE, tmp_path / "trace"))
    bare = open_trace(directory)
    assert counter_tracks(bare) == []
    info = bare.run.ranks[1]
    stream = StreamWriter(directory / f"{counters_name(info.segment)}.arrows", COUNTERS)
    rows = CounterRows()
    for n in range(5000):
        peak = 1e9 if n == 4321 else 2e8
        readings = [Reading("process_memory", peak), Reading("host_memory_total", 1e10)]
        readings += [Reading("host_cpu", 0.25)] if n < 3 else []
        stream.write(rows.batch([(bare.origin_ns + n, n, reading) for reading in readings]))
    stream.close()
    memory, cpu = counter_tracks(open_trace(directory))
    assert (memory["rank"], memory["label"], memory["most"]) == (
        info.rank,
        "process memory",
        "1.00 GB",
    )
    assert len(memory["time"]) == 2000
    assert max(memory["level"]) == 1
    assert memory["level"].count(0.2) == 1999
    assert cpu["time"] == pytest.approx([0, 1, 2], abs=0)
    assert (cpu["level"], cpu["text"]) == ([0.25] * 3, ["25.0 %"] * 3)
