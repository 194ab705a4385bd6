"""From the recorder's buffers to Arrow batches: nothing invalid, whatever the job does."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ddltrace.tracer.record.background_thread import until_next
from ddltrace.tracer.record.batches import BatchBuilder, History, Vocabulary
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.record.watchdog import Watchdog, stack_of_job
from ddltrace.tracer.record.writer import WriterThread
from ddltrace.tracer.trace import arrow_arrays
from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.finalize import finalize_rank
from ddltrace.tracer.trace.protected_file import ProtectedFile
from ddltrace.tracer.trace.run_info import RankInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_writer import StreamWriter

SEGMENT = "rank-00000-0-1"


def built(recorder: Recorder) -> pa.RecordBatch:
    batch = BatchBuilder(recorder.sites).build(recorder.take())
    assert batch is not None
    batch.validate(full=True)
    return batch


def test_a_row_of_each_kind_comes_out_as_it_went_in() -> None:
    recorder = Recorder(1000)
    recorder.set_step(4, 5)
    recorder.enter_phase(2, 10)
    recorder.record("layer", "net.fc", 11, 19)
    message = recorder.new_message("all_reduce", "0", 12, "dispatcher")
    message.bytes, message.dtype, message.tensors, message.seq = 40, "float32", [3, 1], 7
    recorder.complete(message, 18, "gloo")
    recorder.new_message("send", "0", 15, "dispatcher")
    recorder.add_wait(14, 18, message.id, "w")
    rows = built(recorder).to_pylist()
    assert [(r["kind"], r["start_ns"], r["end_ns"], r["step"], r["phase"]) for r in rows] == [
        ("layer", 11, 19, 4, "backward"),
        ("message", 12, 18, 4, "backward"),
        ("message", 15, None, 4, "backward"),
        ("wait", 14, 18, 4, "backward"),
    ]
    assert rows[1]["tensors"] == [3, 1]
    assert (rows[1]["bytes"], rows[1]["dtype"], rows[1]["status"]) == (40, "float32", "ok")
    assert (rows[2]["status"], rows[2]["bytes"], rows[2]["tensors"]) == ("open", None, None)
    assert (rows[3]["parent"], rows[3]["lane"], rows[0]["lane"]) == (0, "main", "main")


def test_nothing_happened_is_no_batch() -> None:
    assert BatchBuilder([]).build(Recorder(10).take()) is None


def test_an_open_message_is_shown_once_and_again_when_it_is_done() -> None:
    recorder = Recorder(10)
    builder = BatchBuilder(recorder.sites)
    message = recorder.new_message("recv", "0", 1, "dispatcher")
    first = builder.build(recorder.take())
    assert first is not None
    assert first["status"].to_pylist() == ["open"]
    assert builder.build(recorder.take()) is None
    recorder.complete(message, 9, "gloo")
    recorder.complete(message, 99, "gloo")
    last = builder.build(recorder.take())
    assert last is not None
    assert (last["status"].to_pylist(), last["end_ns"].to_pylist()) == (["ok"], [9])


def test_more_words_than_a_column_can_number_share_one() -> None:
    words = Vocabulary("dtype")
    codes = [words.code(f"type-{n}") for n in range(300)]
    assert max(codes) == 127
    assert words.code("type-5") == 5
    assert words.array().to_pylist()[codes[200]] == "(too many names)"
    recorder = Recorder(10_000)
    for number in range(300):
        message = recorder.new_message(f"op-{number}", f"group-{number}", number, "dispatcher")
        message.dtype = f"type-{number}"
    batch = built(recorder)
    assert batch["group"].to_pylist()[299] == "group-299"
    assert batch["op"].to_pylist()[299] == "(too many names)"


def test_names_that_utf8_cannot_hold() -> None:
    recorder = Recorder(10)
    recorder.record("marker", "bad \ud800 name \x00", 1, 2)
    assert built(recorder)["name"].to_pylist() == ["bad ? name \x00"]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_arrays_from_buffers_are_what_pyarrow_makes(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.integers(-5, 100, count)
    others = np.abs(values)
    types = [pa.int16(), pa.int64()]
    columns = arrow_arrays.integer_columns(np.array([values, others]), types)
    assert columns[0].equals(pa.array(values.astype(np.int16), mask=values < 0))
    assert columns[1].equals(pa.array(others))
    words = [f"wört{n}" for n in range(count)]
    assert arrow_arrays.strings(words).equals(pa.array(words, pa.string()))
    lengths = rng.integers(0, 4, count)
    items = np.arange(lengths.sum())
    ends = np.cumsum(lengths)
    nested = [
        items[end - length : end].tolist() if length else None
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]
    type_ = pa.list_(pa.int32())
    assert arrow_arrays.lists(items, lengths, type_).equals(pa.array(nested, type_))


def test_history_gives_what_held() -> None:
    history = History(-1)
    history.extend([10, 1, 20, 2, 15, 7])
    times = np.array([0, 10, 14, 15, 19, 20, 10**9])
    assert history.at(times).tolist() == [-1, 1, 1, 7, 7, 2, 2]


def test_recording_does_not_import_pandas(tmp_path: Path) -> None:
    """A job pays for what it asked for: pandas would cost it seconds and megabytes."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ddltrace.tracer.record.recorder import Recorder\n"
        "from ddltrace.tracer.record.batches import BatchBuilder\n"
        "from ddltrace.tracer.trace.counters import CounterRows, Reading\n"
        "from ddltrace.tracer.trace.stream_writer import StreamWriter\n"
        "recorder = Recorder(10)\n"
        "recorder.record('layer', 'x', 1, 2)\n"
        "recorder.new_message('send', 'g', 1, 'dispatcher')\n"
        f"stream = StreamWriter(Path({str(tmp_path / (SEGMENT + '.arrows'))!r}))\n"
        "stream.write(BatchBuilder(recorder.sites).build(recorder.take()))\n"
        "stream.close()\n"
        "CounterRows().batch([(1, None, Reading('process_memory', 1.0))])\n"
        "assert 'pandas' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_events(tmp_path, SEGMENT)[0].num_rows == 2


class GatedStream:
    """A disk that answers on request."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.rows = self.missing = 0

    def write(self, batch: pa.RecordBatch | None) -> None:
        self.entered.set()
        self.gate.wait(60)
        self.rows += 0 if batch is None else batch.num_rows

    def is_losing(self) -> bool:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits for the writer's thread; the test's time limit ends a wait that is in vain."""
    while not holds():
        time.sleep(0.001)


class Disk:
    """What is written meets a full disk, on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.refused = 0
        write = ProtectedFile.write

        def write_or_fail(file: ProtectedFile, data: bytes) -> int:
            if self.is_full:
                self.refused += 1
                raise OSError(28, "No space left on device")
            return write(file, data)

        monkeypatch.setattr(ProtectedFile, "write", write_or_fail)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def writer_on(
    recorder: Recorder, stream: object, faults: list[str], interval_s: float = 0.001
) -> WriterThread:
    return WriterThread(
        recorder,
        stream,  # type: ignore[arg-type]
        interval_s,
        on_fault=lambda where, error: faults.append(f"{where}: {error}"),
        on_beat=lambda *, active: None,
        on_end=lambda _: None,
        watchdog=Watchdog(recorder, lambda _: None, lambda: None),
    )


def test_a_writer_that_cannot_keep_up_costs_events_and_every_one_is_counted(
    tmp_path: Path,
) -> None:
    recorder, stream = Recorder(50), GatedStream()
    writer = writer_on(recorder, stream, [])
    recorder.record("layer", "first", 0, 1)
    writer.start()
    assert stream.entered.wait(60)
    for number in range(1000):
        recorder.record("layer", "x", number, number + 1)
    messages = [recorder.new_message("send", "0", n, "dispatcher") for n in range(200)]
    for message in messages:
        recorder.complete(message, 1000, "gloo")
    assert len(recorder.flat) <= 51 * 4
    stream.gate.set()
    assert writer.stop(60)
    assert stream.rows == writer.rows
    assert stream.rows + recorder.dropped == 1 + 1000 + 200


def test_a_full_disk_is_told_once_and_what_it_could_not_take_is_counted(
    tmp_path: Path, disk: Disk
) -> None:
    recorder, faults = Recorder(1000), []
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    writer = writer_on(recorder, stream, faults)
    writer.start()
    for number in range(300):
        if number == 200:
            wait_until(lambda: writer.rows == 200)
            disk.is_full = True
        recorder.record("layer", f"layer-{number % 7}", number, number + 1)
    assert writer.stop(60)
    stream.close()
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost, recorder.dropped, writer.rows) == (200, 0, 100, 200)
    assert table["start_ns"].to_pylist() == list(range(200))
    assert table["name"].to_pylist() == [f"layer-{number % 7}" for number in range(200)]
    assert faults == ["write: [Errno 28] No space left on device"]
    info = RankInfo(rank=0, segment=SEGMENT, world_size=1)
    finalize_rank(tmp_path, info)
    assert (info.events, info.lost_bytes) == (200, 0)
    assert {path.name for path in tmp_path.iterdir()} == {f"{SEGMENT}.arrow"}


@pytest.mark.parametrize("limit", [4 << 20, 0], ids=["short", "long"])
def test_recording_goes_on_when_a_full_disk_has_space_again(
    tmp_path: Path, disk: Disk, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a long outage costs is counted; the dictionaries of the lost batches are not lost."""
    monkeypatch.setattr("ddltrace.tracer.trace.stream_writer._MOST_WAITING_BYTES", limit)
    recorder, faults = Recorder(10_000), []
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    writer = writer_on(recorder, stream, faults)
    writer.start()
    number = 0
    for outage in range(6):
        disk.is_full, refused = bool(outage % 2), disk.refused
        for _ in range(100):
            recorder.record("layer", f"layer-{outage}-{number % 7}", number, number + 1)
            number += 1
        if disk.is_full:
            wait_until(lambda: not recorder.flat and disk.refused > refused + 1)  # noqa: B023
            assert recorder.dropped >= 100
        else:
            wait_until(lambda: writer.rows + recorder.dropped == number)  # noqa: B023
    disk.is_full = False
    assert writer.stop(60)
    stream.close()
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows + recorder.dropped, lost) == (number, 0)
    assert (table.num_rows, writer.rows) == (number - recorder.dropped,) * 2
    starts, names = table["start_ns"].to_pylist(), table["name"].to_pylist()
    assert names == [f"layer-{start // 100}-{start % 7}" for start in starts]
    with pa.ipc.open_stream(tmp_path / f"{SEGMENT}.arrows") as reader:
        assert reader.read_all()["start_ns"].to_pylist() == starts
    if limit:
        assert (starts, recorder.dropped, faults) == (list(range(number)), 0, [])
    else:
        assert recorder.dropped > 0
        assert set(faults) == {"write: [Errno 28] No space left on device"}


def test_a_disk_that_is_full_when_the_stream_begins(tmp_path: Path, disk: Disk) -> None:
    disk.is_full = True
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    recorder = Recorder(10)
    recorder.record("layer", "x", 1, 2)
    builder = BatchBuilder(recorder.sites)
    with pytest.raises(OSError, match="No space"):
        stream.write(builder.build(recorder.take()))
    assert (stream.missing, stream.is_losing()) == (1, False)
    disk.is_full = False
    stream.write(None)
    assert stream.missing == 0
    stream.close()
    assert read_events(tmp_path, SEGMENT)[0]["name"].to_pylist() == ["x"]


def test_a_stream_written_by_the_thread_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder(100_000)
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    writer = writer_on(recorder, stream, [])
    writer.start()
    threads = [
        threading.Thread(
            target=lambda: [recorder.record("layer", f"l{n % 50}", n, n + 1) for n in range(3000)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.stop(60)
    stream.close()
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost, recorder.dropped) == (12_000, 0, 0)
    assert table.schema.equals(EVENTS)
    assert set(table["lane"].to_pylist()) <= {f"thread-{n}" for n in range(1, 5)}


class Clock:
    now = 0


def test_silence_is_noted_once_and_patience_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[dict[str, object]] = []
    monkeypatch.setattr("ddltrace.tracer.record.watchdog.time.monotonic_ns", lambda: Clock.now)
    Clock.now = 0
    recorder = Recorder(10)
    recorder.set_step(6, 0)
    recorder.enter_phase(1, 0)
    watchdog = Watchdog(recorder, notes.append, lambda: None)

    def second(number: float, active: bool = False) -> int:
        Clock.now = int(number * 1e9)
        watchdog.tick(active=active)
        return len(notes)

    assert second(1, active=True) == 0
    assert second(2.9) == 0
    assert second(3.1) == 1
    assert second(50) == 1
    assert (notes[0]["since_ns"], notes[0]["step"], notes[0]["phase"]) == (10**9, 6, "forward")
    assert second(60, active=True) == 1
    assert second(63.9) == 1
    assert second(64.1) == 2


def test_the_stack_names_the_function_that_runs() -> None:
    stack = stack_of_job(None)
    assert stack[0].endswith(" test_the_stack_names_the_function_that_runs")
    assert "test_writer.py:" in stack[0]
    assert len(stack) <= 24


def test_the_stack_is_that_of_the_thread_that_tells() -> None:
    goes_on = threading.Event()

    def communicate() -> None:
        # Code of this name, wherever it is.
        code = compile("goes_on.wait()", "/x/torch/distributed/x.py", "exec")
        exec(code, {"goes_on": goes_on})

    def train() -> None:
        goes_on.wait()

    threads = [threading.Thread(target=target) for target in (communicate, train)]
    for thread in threads:
        thread.start()
    try:
        unknown, known = stack_of_job(None), stack_of_job(threads[1].ident)
        gone = stack_of_job(-1)
    finally:
        goes_on.set()
    assert any(frame.endswith(" communicate") for frame in unknown)
    assert any(frame.endswith(" communicate") for frame in gone)
    assert any(frame.endswith(" train") for frame in known)


@pytest.mark.parametrize("lasts", [False, True])
def test_rows_for_which_there_is_no_memory_wait_for_some(
    lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, faults = Recorder(100), []
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    writer = writer_on(recorder, stream, faults)
    tried = threading.Semaphore(0)

    def no_memory(*_: object) -> None:
        tried.release()
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("ddltrace.tracer.record.writer.BatchBuilder.build", no_memory)
        recorder.set_step(4, 0)
        for number in range(30):
            recorder.record("layer", "x", number, number + 1)
        recorder.complete(recorder.new_message("send", "0", 1, "dispatcher"), 2, "gloo")
        recorder.add_wait(1, 2, 0, "send")
        writer.start()
        for _ in range(3):
            assert tried.acquire(timeout=60)
        if lasts:
            assert writer.stop(60)
    assert writer.stop(60)
    stream.close()
    kept = 0 if lasts else 32
    assert (recorder.dropped, writer.rows) == (32 - kept, kept)
    assert faults == ["build: no room"]
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost) == (kept, 0)
    assert set(table["step"].to_pylist()) <= {4}


def test_rows_without_memory_are_no_more_than_the_buffer_would_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, faults = Recorder(100), []
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    writer = writer_on(recorder, stream, faults)

    def no_memory(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("ddltrace.tracer.record.writer.BatchBuilder.build", no_memory)
    writer.start()
    for number in range(150):
        recorder.record("layer", "x", number, number + 1)
        if number % 50 == 49:
            wait_until(lambda: not recorder.flat)
    wait_until(lambda: recorder.dropped >= 100)
    assert len(writer._pending.flat) <= 4 * 50
    assert writer.stop(60)
    stream.close()
    assert (recorder.dropped, writer.rows) == (150, 0)


def test_a_buffer_that_fills_is_written_before_the_interval_ends(tmp_path: Path) -> None:
    recorder = Recorder(100)
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    writer = writer_on(recorder, stream, [])
    writer._interval_number = lambda: 0  # type: ignore[method-assign]
    used = [0.0]
    recorder.other_buffers.append(lambda: used[0])
    assert recorder.filled() == 0
    for number in range(30):
        recorder.record("layer", "x", number, number + 1)
    assert recorder.filled() == 0.3
    used[0] = 0.7
    assert recorder.filled() == 0.7
    writer.start()
    wait_until(lambda: writer.rows == 30)
    assert writer.stop(60)
    stream.close()


def test_steps_and_phases_are_unknown_where_there_was_no_room_to_note_them() -> None:
    recorder = Recorder(4)
    for number in range(100):
        recorder.set_step(number, number)
        recorder.enter_phase(1, number)
        recorder.leave_phase(number)
    assert len(recorder.step_changes) == len(recorder.phase_changes) == 16
    recorder.record("layer", "early", 6, 6)
    recorder.record("layer", "late", 50, 50)
    batch = built(recorder)
    assert batch["step"].to_pylist() == [6, None]
    assert batch["phase"].to_pylist()[1] == "other"
    recorder.set_step(101, 101)
    recorder.record("layer", "again", 102, 102)
    assert built(recorder)["step"].to_pylist() == [101]


def test_all_ranks_write_at_the_same_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for _ in range(1000):
        now_s = rng.uniform(1.7e9, 1.8e9)
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        left_s = until_next(0.24)
        beyond_s = (now_s + left_s) % 0.24
        assert min(beyond_s, 0.24 - beyond_s) < 1e-6
        assert 0.03 <= left_s <= 0.27  # a thread that was woken too early does not write twice


def test_all_ranks_begin_an_interval_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_on(Recorder(10), None, [])
    writer._interval_s = 0.8
    for offset_s, number in ((-0.21, 9), (-0.03, 9), (-0.01, 10), (0, 10), (0.19, 10), (0.79, 11)):
        monkeypatch.setattr(time, "time", lambda offset_s=offset_s: 8.0 + offset_s)
        assert writer._interval_number() == number, offset_s


def test_rows_that_come_many_at_a_time_are_counted_where_there_is_no_room() -> None:
    recorder = Recorder(5)
    site = recorder.site("gradient", "w", 0)
    recorder.record("layer", "x", 1, 2)
    rows = array("q", [cell for at in range(6) for cell in (site, at, at, 7)])
    recorder.add_rows(memoryview(rows))
    assert recorder.dropped == 2
    batch = built(recorder)
    assert batch["name"].to_pylist() == ["x", *["w"] * 4]
    assert batch["start_ns"].to_pylist() == [1, 0, 1, 2, 3]
    assert recorder.take().rows == 0
    recorder.close_after_fork()
    recorder.add_rows(memoryview(rows))
    assert recorder.take().rows == 0


def test_what_cannot_be_taken_for_want_of_memory_is_taken_later() -> None:
    recorder = Recorder(100)
    recorder.set_step(0, 1)
    recorder.record("layer", "x", 1, 2)
    recorder.complete(recorder.new_message("send", "0", 1, "dispatcher"), 3, "gloo")
    recorder.new_message("recv", "0", 2, "dispatcher")

    class NoMemory(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise MemoryError

    changes, recorder.phase_changes = recorder.phase_changes, NoMemory()
    with pytest.raises(MemoryError):
        recorder.take()
    recorder.phase_changes = changes
    taken = recorder.take()
    assert (len(taken.flat), len(taken.ended), len(taken.open)) == (4, 1, 1)
    assert list(taken.step_changes) == [1, 0]
    assert recorder.take().rows == 0


def test_a_requested_write_does_not_wait_for_the_interval(tmp_path: Path) -> None:
    recorder = Recorder(1000)
    stream = StreamWriter(tmp_path / f"{SEGMENT}.arrows")
    writer = writer_on(recorder, stream, [], interval_s=3600)
    writer.start()
    recorder.record("layer", "x", 0, 1)
    writer.write_now(60)
    assert writer.rows == 1
    assert writer.stop(60)
    writer.write_now(60)  # a thread that has ended is not waited for
    stream.close()
