"""Encodings and decodings as events."""

from __future__ import annotations

from ddltrace.tracer.codec_events import record_codec
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Recorder


def test_a_codecs_bytes_come_into_its_row() -> None:
    recorder = Recorder(100)
    recorder.add(recorder.site("codec", "encode", size=4000, out_size=125), 5, 9, 1)
    recorder.add(recorder.site("codec", "encode", size=80, out_size=8), 10, 11, 1)
    recorder.record("layer", "fc", 12, 13)
    batch = BatchBuilder(recorder.sites).build(recorder.take())
    assert batch is not None
    rows = batch.to_pylist()
    assert [row["kind"] for row in rows] == ["codec", "codec", "layer"]
    assert [(row["bytes"], row["out_bytes"]) for row in rows] == [
        (4000, 125),
        (80, 8),
        (None, None),
    ]


def test_a_process_that_is_not_traced_records_nothing() -> None:
    record_codec("encode", 0, 1, 1)  # finds no session, and does not fail
