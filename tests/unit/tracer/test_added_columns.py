"""Traces that were written before a column was added to the schema."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.event_reader import EventReader, read_events
from ddltrace.tracer.trace.schema import ADDED, EVENTS

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "sample_traces" / "straggler"
SEGMENT = next(path.stem for path in sorted(SAMPLE.glob("*.arrow")))


def test_the_sample_is_older_than_a_column() -> None:
    stored = pa.ipc.open_file(SAMPLE / f"{SEGMENT}.arrow").schema
    assert set(EVENTS.names) - set(stored.names) == ADDED


def test_missing_columns_are_null() -> None:
    table, lost = read_events(SAMPLE, SEGMENT)
    assert table.schema.equals(EVENTS, check_metadata=True)
    assert lost == 0
    for name in ADDED:
        assert table[name].null_count == table.num_rows
    [batch, *_] = EventReader(SAMPLE, SEGMENT, ["shapes", "start_ns"])
    assert batch.schema.names == ["start_ns", "shapes"]
    trace = open_trace(SAMPLE)
    assert not trace.damage
    assert trace.events(trace.ranks[0]).schema.equals(EVENTS)


def test_damaged_names_of_columns(tmp_path: Path) -> None:
    content = (SAMPLE / f"{SEGMENT}.arrow").read_bytes()
    place = content.index(b"out_bytes")
    (tmp_path / f"{SEGMENT}.arrow").write_bytes(content[:place] + b"\xe5" + content[place + 1 :])
    with pytest.raises(TraceError, match="read it with the version"):
        list(EventReader(tmp_path, SEGMENT))


def test_other_columns_are_not_optional(tmp_path: Path) -> None:
    table, _ = read_events(SAMPLE, SEGMENT)
    less = table.drop_columns(["bytes"])
    with (
        pa.OSFile(str(tmp_path / f"{SEGMENT}.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, less.schema) as writer,
    ):
        writer.write_table(less)
    with pytest.raises(TraceError, match="read it with the version of ddltrace that wrote it"):
        list(EventReader(tmp_path, SEGMENT))
