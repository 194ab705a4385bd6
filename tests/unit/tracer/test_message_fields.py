"""What is known of a message is declared once: the rest follows from the columns and the header."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddltrace.tracer.native import build, layout
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import REPEAT_FIELDS, Message, Recorder
from ddltrace.tracer.trace.schema import (
    CLOCKS,
    COLUMNS,
    EVENTS,
    MESSAGE_FIELDS,
    OWN_FIELDS,
    SHARED_FIELDS,
    STATUSES,
)

VALUES = {
    "start_ns": 12,
    "end_ns": 34,
    "name": "fc",
    "step": 3,
    "phase": 2,
    "id": 7,
    "op": "broadcast",
    "group": "g",
    "seq": 5,
    "peer": 1,
    "tag": 9,
    "bytes": 40,
    "out_bytes": 80,
    "dtype": "float16",
    "enqueue_ns": 11,
    "status": "failed",
    "clock": "polling",
    "seam": "method",
    "buffer": 4096,
    "tensors": [4, 2],
}


def rows_of(recorder: Recorder) -> list[dict[str, object]]:
    builder = BatchBuilder(recorder.sites, recorder.patterns, recorder.splits)
    batch = builder.build(recorder.take())
    assert batch is not None
    return batch.to_pylist()


def test_every_field_of_a_message_has_a_role() -> None:
    assert [column.name for column in COLUMNS] == EVENTS.names
    assert set(MESSAGE_FIELDS) == set(VALUES)
    assert set(OWN_FIELDS) | set(SHARED_FIELDS) | {"step", "phase"} == set(MESSAGE_FIELDS)
    assert all(hasattr(Message(0, "send", "g", 1, "dispatcher"), name) for name in MESSAGE_FIELDS)


def test_every_field_of_a_message_gets_into_its_row() -> None:
    recorder = Recorder(10)
    message = recorder.new_message("send", "g", 1, "dispatcher")
    recorder.open.clear()
    for name, value in VALUES.items():
        setattr(message, name, value)
    recorder.finished.append(message)
    (row,) = rows_of(recorder)
    expected = VALUES | {"phase": "backward", "kind": "message", "lane": "comm/g"}
    unset = ("parent", "wire_bytes", "shapes", "samples", "tokens", "flops", "split_bytes")
    assert row == expected | dict.fromkeys(unset)


def test_every_field_of_a_repeated_message_gets_into_its_row() -> None:
    recorder = Recorder(10)
    pattern = Message(0, "send", "g", 1, "dispatcher")
    for name in SHARED_FIELDS:
        setattr(pattern, name, VALUES[name])
    recorder.patterns.append(pattern)
    own = VALUES | {"pattern": 0, "status": STATUSES.index("failed")}
    own["clock"] = CLOCKS.index("polling")
    recorder.set_step(3, 0)
    recorder.enter_phase(2, 0)
    recorder.add_repeats(np.array([[own[name] for name in REPEAT_FIELDS]], np.int64))
    (row,) = rows_of(recorder)
    assert {name: row[name] for name in MESSAGE_FIELDS} == VALUES | {"phase": "backward"}


def test_the_sizes_of_an_all_to_all_are_kept_until_it_has_ended() -> None:
    recorder = Recorder(1)
    message = recorder.new_message("all_to_all", "g", 1, "dispatcher")
    recorder.keep_splits(message.id, [4, 8])
    lost = recorder.new_message("all_to_all", "g", 2, "dispatcher")  # the buffer is full
    recorder.keep_splits(lost.id, [5, 6])
    assert [row["split_bytes"] for row in rows_of(recorder)] == [[4, 8]]
    recorder.complete(message, 3, "host")
    assert [row["split_bytes"] for row in rows_of(recorder)] == [[4, 8]]
    assert recorder.splits == {}


def test_the_sizes_of_a_repeated_all_to_all_get_into_its_row() -> None:
    recorder = Recorder(1)
    recorder.patterns.append(Message(0, "all_to_all", "g", 1, "method"))
    first = dict.fromkeys(REPEAT_FIELDS, 0) | {"id": recorder.new_id()}
    second = first | {"id": recorder.new_id()}
    recorder.splits |= {first["id"]: [1, 2], second["id"]: [3, 4]}
    rows = [[own[name] for name in REPEAT_FIELDS] for own in (first, second)]
    recorder.add_repeats(np.array(rows, np.int64))  # the buffer has room for one
    assert [row["split_bytes"] for row in rows_of(recorder)] == [[1, 2]]
    assert recorder.splits == {}


def test_the_layout_is_read_from_the_header() -> None:
    header = Path(layout.__file__).with_name("layout.h").read_text(encoding="utf-8")
    for structure in (layout.CONTROL, layout.SLOT, layout.MESSAGE, layout.OFFER, layout.GRADIENT):
        assert len(structure) > 3
        assert [structure[name] for name in structure] == list(range(len(structure)))
        assert all(f"FIELD({name})" in header for name in structure)
    assert layout.TEXT.count("MESSAGE what enqueue_ns ") == 1


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler on this machine")
def test_a_library_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401 - the library is linked to it

    from ddltrace.tracer.native import library

    path = build.installed() or build.build()
    assert path is not None
    loaded = library.NativeLibrary(path)
    assert len(loaded.offered()) == len(layout.OFFER)
    assert len(loaded.control) == len(layout.CONTROL)
    monkeypatch.setattr(library, "TEXT", layout.TEXT.replace("enqueue_ns", "begun_ns"))
    with pytest.raises(OSError, match="another layout"):
        library.NativeLibrary(path)
