"""What `analyze` says of an export that it can read again is what it says of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.exporters import FORMATS, export
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import TraceError

ROOT = Path(__file__).resolve().parents[3]
READ = {"chrome": "out.json", "chakra": "out", "chakra-json": "out"}
"""The formats that are read again; Chakra's has whole microseconds."""

SOURCES = (
    "sample_traces/straggler",
    "sample_traces/ddp-4-hosts-400mbit",
    "tests/data/foreign/kineto-cpu",
    "tests/data/foreign/flight-recorder",
)


def opened(source: str, folder: Path) -> Path:
    path = ROOT / source
    if (path / "run.json").exists():
        return path
    save(formats.read(path), folder, force=False)
    return folder


def counts_of(analysis: Analysis) -> dict[str, Any]:
    """What must be equal to the last digit."""
    return {
        "ranks": analysis.trace.ranks,
        "world size": analysis.trace.world_size,
        "steps": [row.step for row in analysis.steps],
        "collectives": sorted(
            (row.op, row.group, row.count, str(row.bytes), row.transfer_us is None)
            for row in analysis.collectives
        ),
        "sends": [(row.src, row.dst, row.count, row.bytes) for row in analysis.p2p],
        "of ranks": [
            (row.rank, row.messages, row.open_messages, row.bytes_sent, row.compute_us is None)
            for row in analysis.ranks
        ],
    }


def times_of(analysis: Analysis) -> list[float]:
    """Times in microseconds; unknown ones as -1."""
    times = [row.wall_us for row in analysis.steps]
    for rank in analysis.ranks:
        times += [rank.comm_us, rank.compute_us, rank.update_us]
        both = rank.wait_us, rank.transfer_us
        times.append(None if None in both else sum(both))
    return [-1.0 if us is None else us for us in times]


@pytest.mark.parametrize("to", READ)
@pytest.mark.parametrize("source", SOURCES)
def test_an_export_that_is_read_again_is_the_same_job(tmp_path: Path, source: str, to: str) -> None:
    path = opened(source, tmp_path / "source")
    before = analyze(open_trace(path))
    export(open_trace(path), to, tmp_path / READ[to])
    save(formats.read(tmp_path / READ[to]), tmp_path / "again", force=False)
    after = analyze(open_trace(tmp_path / "again"))
    assert counts_of(after) == counts_of(before)
    assert times_of(after) == pytest.approx(times_of(before), rel=1e-4, abs=4)


@pytest.mark.parametrize("to", sorted(set(FORMATS) - set(READ)))
def test_other_exports_are_refused_in_one_line(tmp_path: Path, to: str) -> None:
    export(open_trace(ROOT / SOURCES[0]), to, tmp_path / "out")
    with pytest.raises(TraceError) as refused:
        formats.read(tmp_path / "out")
    assert "\n" not in str(refused.value)
