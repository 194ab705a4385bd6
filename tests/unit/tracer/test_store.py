"""The trace on disk: what is written is read back, and damage ends in a marked partial result."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import Location, location_of
from ddltrace.tracer.trace import event_file
from ddltrace.tracer.trace.batch_facts import facts_metadata
from ddltrace.tracer.trace.completeness import NOTHING_RECORDED
from ddltrace.tracer.trace.event_file import write_events
from ddltrace.tracer.trace.event_reader import EventReader, read_events
from ddltrace.tracer.trace.finalize import finalize
from ddltrace.tracer.trace.run_files import read_run_file, write_run, write_sidecar
from ddltrace.tracer.trace.run_info import (
    PARTS_LABEL,
    GroupInfo,
    RankInfo,
    RunInfo,
    TensorInfo,
    check_run,
    rank_from_json,
)
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_frames import FILE_START, metadata_of_message, scan_stream
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import segment_name

SEGMENT = segment_name(rank=0, attempt=0, pid=7)
LZ4_FRAME = b"\x04\x22\x4d\x18"  # how every compressed buffer of a stream begins
ZSTD_FRAME = b"\x28\xb5\x2f\xfd"  # and of a final file
ROWS = 40
HUGE_COST = {"ratio": 10**400, "low": 1.0, "high": 1.0, "steps": 1}
TENSOR = {"id": 0, "name": "w", "shape": [2], "dtype": "f", "bytes": 8}


def events(rows: int, first: int = 0) -> pa.RecordBatch:
    """Rows that all differ, with a word that no batch before had."""
    columns = []
    for field in EVENTS:
        if pa.types.is_dictionary(field.type):
            words = [f"{field.name}-{n}" for n in range(first // rows + 1)]
            codes = pa.array([n % len(words) for n in range(rows)], field.type.index_type)
            columns.append(pa.DictionaryArray.from_arrays(codes, pa.array(words)))
        elif pa.types.is_list(field.type):
            columns.append(pa.array([[n, n + 1] for n in range(rows)], field.type))
        else:
            columns.append(pa.array(range(first, first + rows), field.type))
    return pa.RecordBatch.from_arrays(columns, schema=EVENTS)


def write_stream(directory: Path, batches: int, *, close: bool = True) -> list[int]:
    """Writes a stream; returns its size after each batch."""
    path = directory / f"{SEGMENT}.arrows"
    stream = StreamWriter(path)
    sizes = []
    for number in range(batches):
        stream.write(events(ROWS, number * ROWS))
        sizes.append(path.stat().st_size)
    stream.close() if close else stream.abandon()
    return sizes


def starts(table: pa.Table) -> list[int]:
    return table["start_ns"].to_pylist()


# The steps of the events in each batch of a file.
BATCHES: list[list[int | None]] = [
    [0],
    [None],
    [0, 1],
    [None],
    [0, None],
    [1, 2],
    [2, None],
    [1],
    [None],
    [2],
]
STEP = range(1, 2)
WITH_STEP = [2, 3, 4, 5, 6, 7, 8]  # with the later events of no step


def write_file(directory: Path, *, facts: bool = True) -> Path:
    """Writes a final file of `BATCHES`, each of which brings new words of the dictionaries."""
    path = directory / f"{SEGMENT}.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, EVENTS, options=options) as file:
        for number, steps in enumerate(BATCHES):
            column = pa.array((steps * ROWS)[:ROWS], pa.int32())
            place = EVENTS.get_field_index("step")
            batch = events(ROWS, number * ROWS).set_column(place, EVENTS.field(place), column)
            file.write_batch(batch, facts_metadata(batch) if facts else None)
    return path


def damage_bodies(path: Path, numbers: Iterable[int]) -> None:
    """Damages the bodies of some batches, so that they can be scanned, but not decoded."""
    content = bytearray(path.read_bytes())
    ends = [FILE_START]
    for end, is_batch in scan_stream(memoryview(content), FILE_START).messages:
        if is_batch:
            ends.append(end)
    for number in numbers:
        at = content.rindex(ZSTD_FRAME, ends[number], ends[number + 1])
        content[at : at + len(ZSTD_FRAME)] = bytes(len(ZSTD_FRAME))
    path.write_bytes(content)


def numbers_of(batches: Iterable[pa.RecordBatch]) -> list[int]:
    """The place in `BATCHES` of each."""
    return [batch["start_ns"][0].as_py() // ROWS for batch in batches]


def in_place(place: str, path: Path) -> Location:
    """The directory of a file: itself, or a copy in a store."""
    if place == "local":
        return path.parent
    filesystem = pytest.importorskip("fsspec").filesystem("memory")
    filesystem.pipe_file(f"/steps/{path.name}", path.read_bytes())
    return location_of("memory://steps")


def write_trace(directory: Path, **changes: object) -> dict[str, object]:
    """A trace of one rank whose `run.json` has some values changed."""
    info = RankInfo(rank=0, segment=SEGMENT, pid=7, tensors=[TensorInfo(0, "w", (2,), "f", 8)])
    write_run(directory, RunInfo(ranks=[info]))
    path = directory / "run.json"
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(value))
    return value


@pytest.mark.parametrize("suffix", ["arrows", "arrow"])
def test_every_cut_keeps_whole_batches(tmp_path: Path, suffix: str) -> None:
    sizes = write_stream(tmp_path, 3)
    path = tmp_path / f"{SEGMENT}.{suffix}"
    if suffix == "arrow":
        table, _ = read_events(tmp_path, SEGMENT)
        write_events(tmp_path, SEGMENT, iter(table.to_batches()))
    whole = path.read_bytes()
    complete, lost = read_events(tmp_path, SEGMENT)
    assert (complete.num_rows, lost) == (3 * ROWS, 0)
    for cut in {*range(0, len(whole), 211), *sizes, *(s - 1 for s in sizes), 1, 4, 7, 8, 9}:
        path.write_bytes(whole[:cut])
        table, lost = read_events(tmp_path, SEGMENT)
        assert starts(table) == list(range(table.num_rows))
        assert table.num_rows % ROWS == 0
        if suffix == "arrows":
            assert table.num_rows == ROWS * sum(cut >= size for size in sizes)
            assert (lost > 0) or cut + 1 not in sizes
        else:
            assert lost > 0 or table.num_rows == 3 * ROWS


def test_a_stream_without_its_end_is_whole(tmp_path: Path) -> None:
    write_stream(tmp_path, 2, close=False)
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost) == (2 * ROWS, 0)


def test_an_empty_stream_has_no_events(tmp_path: Path) -> None:
    (tmp_path / f"{SEGMENT}.arrows").touch()
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost) == (0, 0)
    assert table.schema.equals(EVENTS)


def test_flipped_bits_never_get_past_the_reader_as_a_traceback(tmp_path: Path) -> None:
    write_stream(tmp_path, 3)
    path = tmp_path / f"{SEGMENT}.arrows"
    whole = path.read_bytes()
    rng = random.Random(5)
    read = refused = 0
    for _ in range(250):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            table, _ = read_events(tmp_path, SEGMENT)
        except TraceError:
            refused += 1
            continue
        read += 1
        # Whatever came back can be used without a crash: no index points outside.
        table.validate(full=True)
        table.to_pydict()
    assert read > 0
    assert refused > 0


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"{SEGMENT}.arrows"
    schema = EVENTS.with_metadata({b"ddltrace.schema": b"ddltrace.trace/99"})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema):
        pass
    with pytest.raises(TraceError, match="trace/99"):
        read_events(tmp_path, SEGMENT)


def damaged_batch(change: Callable[[list[pa.Array]], None]) -> pa.RecordBatch:
    columns = events(ROWS).columns
    change(columns)
    return pa.RecordBatch.from_arrays(columns, schema=EVENTS)


def _index_out_of_range(columns: list[pa.Array]) -> None:
    at = EVENTS.get_field_index("name")
    codes = pa.array([10_000] * ROWS, pa.int32())
    columns[at] = pa.DictionaryArray.from_arrays(codes, pa.array(["one"]), safe=False)


def _null_start(columns: list[pa.Array]) -> None:
    columns[EVENTS.get_field_index("start_ns")] = pa.nulls(ROWS, pa.int64())


def _bad_utf8(columns: list[pa.Array]) -> None:
    at = EVENTS.get_field_index("name")
    words = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    columns[at] = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), words)


@pytest.mark.parametrize("change", [_index_out_of_range, _null_start, _bad_utf8])
def test_a_batch_that_lies_is_left_out(
    tmp_path: Path, change: Callable[[list[pa.Array]], None]
) -> None:
    path = tmp_path / f"{SEGMENT}.arrows"
    good, bad = events(ROWS), damaged_batch(change)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, EVENTS) as writer:
        writer.write_batch(good)
        writer.write_batch(bad)
    table, lost = read_events(tmp_path, SEGMENT)
    assert table.num_rows == ROWS
    assert lost > 0


def test_a_buffer_that_declares_a_terabyte_is_not_unpacked(tmp_path: Path) -> None:
    write_stream(tmp_path, 2)
    path = tmp_path / f"{SEGMENT}.arrows"
    data = bytearray(path.read_bytes())
    # The uncompressed size of the second batch's start_ns: 40 rows of 8 bytes.
    at = data.rfind(struct.pack("<q", ROWS * 8) + LZ4_FRAME)
    if at < 0:
        at = data.rfind(LZ4_FRAME) - 8
    data[at : at + 8] = struct.pack("<q", 1 << 40)
    path.write_bytes(data)
    table, lost = read_events(tmp_path, SEGMENT)
    assert table.num_rows == ROWS
    assert lost > 0


def test_a_bomb_of_zeros_stops_at_the_believable(tmp_path: Path) -> None:
    rows = 1 << 18
    columns = []
    for field in EVENTS:
        if pa.types.is_dictionary(field.type):
            codes = pa.array([0] * rows, field.type.index_type)
            columns.append(pa.DictionaryArray.from_arrays(codes, pa.array(["x"])))
        elif pa.types.is_list(field.type):
            columns.append(pa.nulls(rows, field.type))
        else:
            zeros = pa.py_buffer(bytes(rows * field.type.bit_width // 8))
            columns.append(pa.Array.from_buffers(field.type, rows, [None, zeros]))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, EVENTS, options=options) as writer:
        batch = pa.RecordBatch.from_arrays(columns, schema=EVENTS)
        writer.write_batch(batch)
        before = sink.tell()
        writer.write_batch(batch)
        after = sink.tell()
    data = sink.getvalue().to_pybytes()
    bomb = data[:after] + data[before:after] * 200
    size = after - before
    assert batch.nbytes > 1000 * size, "the bomb does not compress well enough to be one"
    scan = scan_stream(memoryview(bomb), 0)
    taken = scan.end // size
    assert taken * batch.nbytes <= (256 << 20) + 1000 * scan.end + batch.nbytes
    assert taken < 202
    (tmp_path / f"{SEGMENT}.arrows").write_bytes(bomb)
    table, lost = read_events(tmp_path, SEGMENT)
    assert table.num_rows <= taken * rows
    assert lost > 0


@pytest.mark.parametrize("place", ["local", "store"])
@pytest.mark.parametrize(
    ("later_stepless", "numbers"), [(True, WITH_STEP), (False, [2, 3, 4, 5, 7])]
)
def test_batches_without_some_steps_are_not_decoded(
    tmp_path: Path, place: str, later_stepless: bool, numbers: Sequence[int]
) -> None:
    path = write_file(tmp_path)
    whole = {number: batch for number, batch in enumerate(EventReader(tmp_path, SEGMENT))}
    damage_bodies(path, whole.keys() - set(numbers))
    reader = EventReader(in_place(place, path), SEGMENT, steps=STEP, later_stepless=later_stepless)
    read = list(reader)
    assert numbers_of(read) == numbers
    # Their words as well: some came with batches that were left out.
    assert [batch.to_pylist() for batch in read] == [whole[n].to_pylist() for n in numbers]
    assert "name-1" in read[0]["name"].to_pylist()
    assert reader.lost_bytes == 0
    assert next(iter(EventReader(tmp_path, SEGMENT)), None) is None


@pytest.mark.parametrize("place", ["local", "store"])
@pytest.mark.parametrize("steps", [range(1), range(2, 3), range(1, 3), range(3, 9), range(9)])
def test_events_of_steps_are_those_of_the_whole_file(
    tmp_path: Path, place: str, steps: range
) -> None:
    path = write_file(tmp_path)
    every = [row for row in read_events(tmp_path, SEGMENT)[0].to_pylist() if row["step"] in steps]
    for later_stepless in (True, False):
        reader = EventReader(
            in_place(place, path), SEGMENT, steps=steps, later_stepless=later_stepless
        )
        rows = [row for batch in reader for row in batch.to_pylist()]
        assert [row for row in rows if row["step"] in steps] == every
        assert reader.lost_bytes == 0


def test_some_columns_of_some_steps(tmp_path: Path) -> None:
    write_file(tmp_path)
    read = list(EventReader(tmp_path, SEGMENT, ["start_ns", "name"], steps=STEP))
    assert numbers_of(read) == WITH_STEP
    assert read[0].schema.names == ["start_ns", "name"]


@pytest.mark.parametrize("place", ["local", "store"])
def test_some_steps_of_a_sample(tmp_path: Path, place: str) -> None:
    directory = in_place(place, write_file(tmp_path))
    assert numbers_of(EventReader(directory, SEGMENT, most=5)) == [0, 2, 4, 7, 9]
    assert numbers_of(EventReader(directory, SEGMENT, most=5, steps=STEP)) == [2, 4, 7]


@pytest.mark.parametrize("facts", ["missing", "damaged"])
def test_a_file_without_facts_is_read_as_a_whole(tmp_path: Path, facts: str) -> None:
    path = write_file(tmp_path, facts=facts != "missing")
    if facts == "damaged":
        content = path.read_bytes()
        at = content.rindex(b'"rows"')
        path.write_bytes(content[:at] + b"?" + content[at + 1 :])
    reader = EventReader(tmp_path, SEGMENT, steps=STEP, later_stepless=False)
    assert numbers_of(reader) == list(range(len(BATCHES)))
    assert reader.lost_bytes == 0


def test_a_stream_is_read_as_a_whole(tmp_path: Path) -> None:
    write_stream(tmp_path, 3)
    assert numbers_of(EventReader(tmp_path, SEGMENT, steps=range(1))) == [0, 1, 2]


def test_bytes_are_lost_whichever_steps_are_read(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 1009):
        path.write_bytes(whole[:cut])
        every, some = (EventReader(tmp_path, SEGMENT, steps=steps) for steps in (None, STEP))
        intact = numbers_of(every)
        assert numbers_of(some) == [number for number in intact if number in WITH_STEP]
        assert some.lost_bytes == every.lost_bytes
        assert every.lost_bytes or len(intact) == len(BATCHES)
    path.write_bytes(whole)
    damage_bodies(path, [5])
    every, some = (EventReader(tmp_path, SEGMENT, steps=steps) for steps in (None, STEP))
    assert (numbers_of(every), numbers_of(some)) == ([0, 1, 2, 3, 4], [2, 3, 4])
    assert some.lost_bytes == every.lost_bytes > 0


def header_with_metadata(entries: int, text: bytes) -> bytes:
    """A message's header whose entries of custom metadata are all the same one."""
    root = struct.pack("<I7H2xiI", 20, 14, 8, 0, 0, 0, 0, 4, 16, 4)
    # After the vector of offsets: where the fields of the entry are, the entry, and its text.
    offsets = [4 * (entries - number) + 8 for number in range(entries)]
    vector = struct.pack(f"<{entries + 1}I", entries, *offsets)
    entry = struct.pack("<4HiII", 8, 12, 4, 8, 8, 8, 4)
    return bytes(8) + root + vector + entry + struct.pack("<I", len(text)) + text


def test_metadata_is_no_longer_than_its_header() -> None:
    assert metadata_of_message(header_with_metadata(1, b"text")) == {b"text": b"text"}
    with pytest.raises(ValueError, match="metadata"):
        metadata_of_message(header_with_metadata(1000, b"x" * 1000))


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_only_plain_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{SEGMENT}.arrow"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(TraceError, match="not a plain file"):
        read_events(tmp_path, SEGMENT)
    run = tmp_path / "run.json"
    run.symlink_to("/dev/zero")
    with pytest.raises(TraceError):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "ddltrace.trace/2"},
        {"schema": None},
        {"ranks": None},
        {"ranks": [[]]},
        {"ranks": [{"rank": 0, "segment": "../../etc/passwd", "tensor_table": 0}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT + "/../x", "tensor_table": 0}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT + "\n", "tensor_table": 0}]},
        {"ranks": [{"rank": -1, "segment": SEGMENT, "tensor_table": 0}]},
        {"ranks": [{"rank": 10**30, "segment": SEGMENT, "tensor_table": 0}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 7}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "world_size": 10**12}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "groups": 3}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "clock": []}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "cost": HUGE_COST}]},
        {"ranks": [{"rank": True, "segment": SEGMENT, "tensor_table": 0}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "host": 5}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "events": -1}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "versions": ["torch"]}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "windows": [{"first": 0}]}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0, "silence": {"step": 1}}]},
        {"ranks": [{"rank": 0, "segment": SEGMENT, "tensor_table": 0}] * 2},
        {"ended_unix_ns": 1 << 62},
        {"tensor_tables": [[{**TENSOR, "id": 1 << 31}]]},
        {"tensor_tables": [[{"id": 0}]]},
        {"tensor_tables": [[{**TENSOR, "bytes": math.inf}]]},
        {"tensor_tables": 5},
        {"notes": "x"},
        {"command": {}},
    ],
)
def test_a_hostile_run_file_is_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    write_trace(tmp_path, **changes)
    with pytest.raises(TraceError) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nul",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"schema": ' + "9" * 10_000 + "}",
        "\udcff",
        '{"schema": "ddltrace.trace/1"}',
    ],
)
def test_a_run_file_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TraceError) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [{"cost": HUGE_COST}, {"tensors": [{**TENSOR, "id": math.inf}]}])
def test_a_number_that_nothing_can_hold_is_damage(
    tmp_path: Path, damage: dict[str, object]
) -> None:
    entry = RankInfo(rank=2, segment="rank-00002-0-9").to_json() | damage
    with pytest.raises(ValueError, match=r"Number out of range|Expected `int`"):
        rank_from_json(entry)
    write_run(tmp_path, RunInfo())
    (tmp_path / "rank-00002-0-9.json").write_text(json.dumps(entry))
    run = read_run(tmp_path)
    assert run.ranks == []
    assert "its rank is left out" in run.notes[0]


def test_a_copy_of_a_record_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, RunInfo())
    info = RankInfo(rank=0, segment=SEGMENT, pid=7)
    for name in (SEGMENT, "rank-00001-0-8"):
        (tmp_path / f"{name}.json").write_text(json.dumps(info.to_json()))
    run = read_run(tmp_path)
    assert run.ranks == [info]
    assert f"rank-00001-0-8.json cannot be read (it is a copy of {SEGMENT}.json)" in run.notes[0]


@pytest.mark.parametrize(
    "info",
    [
        RankInfo(rank=1 << 25, segment=SEGMENT),
        RankInfo(rank=0, segment="../x"),
        RankInfo(rank=0, segment=SEGMENT, groups=[GroupInfo("0", "", "gloo", (-1,))]),
    ],
)
def test_an_imported_run_is_checked(info: RankInfo) -> None:
    run = RunInfo(ranks=[RankInfo(rank=0, segment=segment_name(rank=1, attempt=0, pid=8))])
    assert check_run(run) is run
    run.ranks.append(info)
    with pytest.raises(TraceError, match="the trace is damaged"):
        check_run(run)


def test_damaged_sidecars_are_left_out_and_told(tmp_path: Path) -> None:
    write_run(tmp_path, RunInfo())
    write_sidecar(tmp_path, RankInfo(rank=1, segment=segment_name(rank=1, attempt=0, pid=8)))
    (tmp_path / "rank-00002-0-9.json").write_text('{"rank": 2')
    (tmp_path / "rank-00003-0-9.json").write_text("[" * 10_000)
    run = read_run(tmp_path)
    assert [info.rank for info in run.ranks] == [1]
    assert len(run.notes) == 2


def test_what_is_damaged_is_kept_for_somebody_to_dig_in(tmp_path: Path) -> None:
    sizes = write_stream(tmp_path, 3)
    path = tmp_path / f"{SEGMENT}.arrows"
    path.write_bytes(path.read_bytes()[: sizes[1] + 10])
    write_sidecar(tmp_path, RankInfo(rank=0, segment=SEGMENT, pid=7))
    run = finalize(tmp_path, RunInfo())
    assert run.status == "partial"
    assert run.ranks[0].lost_bytes == 10
    assert run.ranks[0].status == "killed"
    assert path.with_suffix(".damaged").stat().st_size == sizes[1] + 10
    table, _ = read_events(tmp_path, SEGMENT)
    assert table.num_rows == 2 * ROWS


def test_finalizing_holds_a_piece_at_a_time(tmp_path: Path) -> None:
    """The memory that Arrow takes does not grow with the stream."""
    peaks = []
    for batches in (20, 60):
        folder = tmp_path / str(batches)
        folder.mkdir()
        stream = StreamWriter(folder / f"{SEGMENT}.arrows")
        batch = events(10_000)
        for _ in range(batches):
            stream.write(batch)
        stream.close()
        write_sidecar(folder, RankInfo(rank=0, segment=SEGMENT, pid=7))
        peak = 0
        real = event_file.grouped

        def watched(source, rows, real=real):
            nonlocal peak
            for group in real(source, rows):
                peak = max(peak, pa.total_allocated_bytes())
                yield group

        before = pa.total_allocated_bytes()
        event_file.grouped = watched
        try:
            run = finalize(folder, RunInfo())
        finally:
            event_file.grouped = real
        assert run.ranks[0].events == batches * 10_000
        peaks.append(peak - before)
    assert peaks[1] < 1.5 * peaks[0]
    assert peaks[1] < 64 << 20


def wide_run(size: int) -> RunInfo:
    """A run in which each rank is in two groups: of all ranks, and of every eighth."""
    infos = []
    for rank in range(size):
        groups = [
            GroupInfo("0", "default_pg", "gloo", tuple(range(size))),
            GroupInfo("1", "replicas", "gloo", tuple(range(rank % 8, size, 8))),
        ]
        segment = segment_name(rank=rank, attempt=0, pid=7)
        infos.append(RankInfo(rank, segment, world_size=size, status="complete", groups=groups))
    return RunInfo(status="complete", ranks=infos)


def test_the_record_of_many_ranks_grows_in_proportion(tmp_path: Path) -> None:
    sizes = []
    for ranks in (512, 1024):
        run = wide_run(ranks)
        write_run(tmp_path, run)
        assert read_run_file(tmp_path) == run
        sizes.append((tmp_path / "run.json").stat().st_size)
    assert sizes[1] < 2.1 * sizes[0]
    # Ranks that share their members share them in memory as well.
    read = read_run_file(tmp_path).ranks
    assert read[0].groups[0].ranks is read[1].groups[0].ranks
    # Earlier versions, which would find no members, refuse the file by its schema.
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == "ddltrace.trace/2"


def test_the_record_of_few_ranks_can_be_read_by_earlier_versions(tmp_path: Path) -> None:
    write_run(tmp_path, wide_run(64))
    value = json.loads((tmp_path / "run.json").read_text())
    assert value["schema"] == "ddltrace.trace/1"
    assert value["ranks"][63]["groups"][1]["ranks"] == list(range(7, 64, 8))
    assert "member_tables" not in value


def test_ranks_share_their_groups_in_memory(tmp_path: Path) -> None:
    """From the ranks' own records, and from the parts of a trace."""
    write_run(tmp_path, RunInfo(labels={PARTS_LABEL: True}))
    for number, info in enumerate(wide_run(4).ranks):
        part = tmp_path / f"part-{number % 2}"
        part.mkdir(exist_ok=True)
        write_run(part, RunInfo())
        write_sidecar(part, info)
    members = [info.groups[0].ranks for info in read_run(tmp_path).ranks]
    assert len(members) == 4
    assert all(each is members[0] for each in members)


@pytest.mark.parametrize("members", [None, [], [3], ["x"]])
def test_a_record_of_many_ranks_without_its_members_is_damaged(
    tmp_path: Path, members: object
) -> None:
    write_run(tmp_path, wide_run(512))
    value = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**value, "member_tables": members}))
    with pytest.raises(TraceError, match="damaged"):
        read_run(tmp_path)


def test_a_run_without_ranks_is_never_complete(tmp_path: Path) -> None:
    write_run(tmp_path, RunInfo(status="complete"))
    run = read_run(tmp_path)
    assert (run.status, run.notes) == ("partial", [NOTHING_RECORDED])
