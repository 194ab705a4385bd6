"""The tail of a stream: whatever moment a rank dies at, all that was written down is read."""

from __future__ import annotations

import random
import resource
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Message, Recorder, Taken
from ddltrace.tracer.record.tail import _HEADER, _MAGIC, TailWriter, read_tail
from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.finalize import finalize
from ddltrace.tracer.trace.run_files import write_run, write_sidecar
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS, STATUSES
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import FILE_SUFFIX, STREAM_SUFFIX, TAIL_SUFFIX, segment_name

SEGMENT = segment_name(rank=0, attempt=0, pid=7)


def record_something(recorder: Recorder, rng: random.Random, now: int) -> int:
    """Some events of every sort, in an order of their own; returns the time after them."""
    for _ in range(rng.randrange(12)):
        now += rng.randrange(1, 1000)
        sort = rng.randrange(7)
        if sort == 0:
            site = recorder.site("layer", f"layer-{rng.randrange(9)}", rng.choice([-1, 3]))
            recorder.add(site, now, now + 5, rng.choice([11, 22, -1]))
        elif sort == 1:
            message = recorder.new_message("all_reduce", f"{rng.randrange(3)}", now)
            message.bytes, message.dtype, message.seq = 40, "float32", now
            message.tensors = rng.choice([None, [1, 2]])
            message.name = f"message {rng.randrange(5)} \ud800"
        elif sort == 2 and recorder.open:
            recorder.complete(rng.choice(list(recorder.open.values())), now, "failed")
        elif sort == 3:
            recorder.add_wait(now - 3, now, rng.choice([-1, 3]), f"waits {rng.randrange(4)}")
        elif sort == 4:
            recorder.set_step(rng.choice([None, now]), now)
        elif sort == 5:
            add_repeat(recorder, rng, now)
        else:
            recorder.enter_phase(rng.randrange(4), now)
            recorder.leave_phase(now + 10)
    return now


def add_repeat(recorder: Recorder, rng: random.Random, now: int) -> None:
    """A repeated message, of a new pattern or one of those there are."""
    if len(recorder.patterns) < 3:
        pattern = Message(now, "broadcast", f"{rng.randrange(3)}", 1)
        pattern.name, pattern.dtype = f"message {rng.randrange(5)}", "float64"
        pattern.tag = rng.choice([None, 3])
        pattern.tensors = rng.choice([None, [4, 2, 7]])
        recorder.patterns.append(pattern)
    number, peer = rng.randrange(len(recorder.patterns)), rng.choice([-1, 1])
    end, status = rng.choice([(now, "ok"), (now, "failed"), (-1, "open")])
    row = [number, -1, now - 5, now - 2, end, 8, rng.choice([-1, 16]), 8, peer]
    recorder.add_repeats(np.array([[*row, STATUSES.index(status)]]))


def taken_anew(taken: Taken) -> Taken:
    """The same lists again: `Taken.extend` would make two holders of one."""
    return Taken(**{name: value[:] for name, value in vars(taken).items()})


class Rank:
    """A recorder and a writer's files, one write at a time."""

    def __init__(self, directory: Path) -> None:
        self.recorder = Recorder(10_000)
        self.stream = StreamWriter(directory / (SEGMENT + STREAM_SUFFIX))
        self.tail = TailWriter(directory / (SEGMENT + TAIL_SUFFIX), self.recorder)
        self.builder = BatchBuilder(self.recorder.sites, self.recorder.patterns)
        self.tail.begin(0, self.builder.context())
        self.pending = Taken()
        self.batches = 0

    def note(self) -> None:
        taken = self.recorder.take()
        self.pending.extend(taken_anew(taken))
        self.tail.append(taken)

    def write_batch(self, *, begin: bool = True) -> None:
        self.pending.extend(self.recorder.take())
        batch = self.builder.build(self.pending)
        self.pending = Taken()
        if batch is not None:
            self.stream.write(batch)
            self.batches += 1
        if begin:
            self.tail.begin(self.batches, self.builder.context())


def rows(table: pa.Table) -> list[dict[str, object]]:
    """What is known in the end: the newest row of a message."""
    found = table.to_pylist()
    newest = {row["id"]: row for row in found if row["kind"] == "message"}
    others = [row for row in found if row["kind"] != "message"]
    return sorted([*others, *newest.values()], key=repr)


def recorded(directory: Path, seed: int, *, closes: bool) -> list[dict[str, object]]:
    """What is read of a rank that was killed after some writes, or closed its stream."""
    directory.mkdir()
    rank, rng, now = Rank(directory), random.Random(seed), 0
    for _ in range(rng.randrange(1, 12)):
        now = record_something(rank.recorder, rng, now)
        if rng.random() < 0.2:
            rank.write_batch()
        else:
            rank.note()
    if closes:
        rank.write_batch()
    table, lost = read_events(directory, SEGMENT)
    assert lost == 0
    return rows(table)


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_dies_leaves_what_one_that_lives_writes(tmp_path: Path, seed: int) -> None:
    left = recorded(tmp_path / "dies", seed, closes=False)
    assert left == recorded(tmp_path / "lives", seed, closes=True)


class EndsMeanwhile(Message):
    """One that ends while somebody makes a row of it."""

    recorder: Recorder

    @property
    def tag(self) -> int:
        """Is asked for after when it ended, and before how."""
        self.recorder.complete(self, 2000)
        return 3

    @tag.setter
    def tag(self, value: int | None) -> None:
        """Is of no interest."""


def ends_meanwhile(recorder: Recorder) -> None:
    recorder.new_message("all_reduce", "0", 5)
    message = EndsMeanwhile(1, "all_reduce", "0", 1000)
    message.recorder = recorder
    recorder.open[1] = message


@pytest.mark.parametrize("noted", [True, False])
def test_a_message_that_ends_while_it_is_written_is_one(tmp_path: Path, noted: bool) -> None:
    rank = Rank(tmp_path)
    ends_meanwhile(rank.recorder)
    rank.note() if noted else rank.write_batch()
    for closes in (False, True):
        table, lost = read_events(tmp_path, SEGMENT)
        found = sorted((row["id"], row["status"], row["end_ns"]) for row in table.to_pylist())
        assert lost == 0
        assert found == ([(0, "open", None), (1, "ok", 2000)] if closes else [(0, "open", None)])
        rank.write_batch()


def test_a_tail_that_is_in_the_stream_already_counts_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.recorder.record("layer", "x", 1, 2)
    rank.note()
    assert read_events(tmp_path, SEGMENT)[0].num_rows == 1
    rank.write_batch(begin=False)  # and dies
    assert read_events(tmp_path, SEGMENT)[0].num_rows == 1


def test_a_batch_that_was_not_written_whole_is_in_the_tail(tmp_path: Path) -> None:
    rank, path = Rank(tmp_path), tmp_path / (SEGMENT + STREAM_SUFFIX)
    rank.recorder.record("layer", "first", 1, 2)
    rank.write_batch()
    before = path.stat().st_size
    rank.recorder.record("layer", "second", 3, 4)
    rank.note()
    rank.write_batch(begin=False)
    whole = path.read_bytes()
    for size in range(before, len(whole), 5):
        path.write_bytes(whole[:size])
        table, _ = read_events(tmp_path, SEGMENT)
        assert table["name"].to_pylist() == ["first", "second"]
        assert table["start_ns"].to_pylist() == [1, 3]


def test_every_cut_of_a_tail_keeps_what_was_written_before(tmp_path: Path) -> None:
    rank, path = Rank(tmp_path), tmp_path / (SEGMENT + TAIL_SUFFIX)
    sizes = []
    for number in range(4):
        rank.recorder.record("layer", f"x{number}", number, number + 1)
        rank.note()
        sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in {*range(0, len(whole), 7), *sizes}:
        path.write_bytes(whole[:cut])
        table, lost = read_events(tmp_path, SEGMENT)
        assert table["start_ns"].to_pylist() == list(range(sum(cut >= size for size in sizes)))
        assert (lost == 0) == (cut in (0, *sizes))


def test_what_a_full_disk_cuts_leaves_what_was_noted_before(tmp_path: Path) -> None:
    rank, path = Rank(tmp_path), tmp_path / (SEGMENT + TAIL_SUFFIX)
    rank.recorder.record("layer", "x", 0, 1)
    rank.note()
    size = path.stat().st_size
    for number in range(1, 100):
        rank.recorder.record("layer", "x", number, number + 1)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, former[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            rank.note()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert path.stat().st_size == size
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost) == (1, 0)


def test_a_tail_grows_no_longer_than_its_readers_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddltrace.tracer.record.tail._MAX_BYTES", 20_000)
    rank = Rank(tmp_path)
    rank.recorder.record("layer", "x", 0, 1)
    rank.note()
    for number in range(1000):
        rank.recorder.record("layer", "x", number, number + 1)
    with pytest.raises(OSError, match="longer"):
        rank.note()
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost) == (1, 0)


def test_damage_to_a_tail_is_never_a_traceback(tmp_path: Path) -> None:
    rank, rng, now = Rank(tmp_path), random.Random(1), 0
    for _ in range(6):
        now = record_something(rank.recorder, rng, now)
        rank.note()
    path = tmp_path / (SEGMENT + TAIL_SUFFIX)
    whole = path.read_bytes()
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        table, _ = read_events(tmp_path, SEGMENT)
        table.validate(full=True)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"batches": "x"}',
        b'{"batches": 0, "threads": [], "context": [[], []], "sites": [[1, 99, "x", 0]]}',
        b'{"batches": 0, "threads": [[1e999, "x"]], "context": [[], []], "sites": []}',
        b'{"batches": 0, "threads": [], "context": [[], []], "sites": [[1, 2, "x", 0]], '
        b'"patterns": [[0, ["x"]]]}',
    ],
)
def test_a_hostile_tail_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / (SEGMENT + TAIL_SUFFIX)
    body = np.array([1, 2, 3, 4], np.int64).tobytes() + text
    path.write_bytes(_HEADER.pack(_MAGIC, 4, 0, 0, 0, 0, len(text), zlib.crc32(body)) + body)
    with pytest.raises(ValueError, match="the tail is damaged"):
        read_tail(path.read_bytes(), 0, {})
    StreamWriter(tmp_path / (SEGMENT + STREAM_SUFFIX)).close()
    table, lost = read_events(tmp_path, SEGMENT)
    assert (table.num_rows, lost) == (0, path.stat().st_size)


def test_a_link_in_the_place_of_a_tail_is_not_followed(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.recorder.record("layer", "x", 1, 2)
    rank.note()
    path = tmp_path / (SEGMENT + TAIL_SUFFIX)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    table, lost = read_events(tmp_path, SEGMENT)
    assert table.num_rows == 0
    assert lost > 0


def test_what_lay_in_a_tail_is_in_the_final_file(tmp_path: Path) -> None:
    write_run(tmp_path, RunInfo())
    write_sidecar(tmp_path, RankInfo(rank=0, segment=SEGMENT))
    rank = Rank(tmp_path)
    for number in range(3):
        rank.recorder.record("layer", f"batch {number}", number, number + 1)
        rank.write_batch()
    rank.recorder.record("marker", "tail", 9, 9)
    rank.note()
    run = finalize(tmp_path, RunInfo())
    assert (run.ranks[0].events, run.ranks[0].status, run.ranks[0].lost_bytes) == (4, "killed", 0)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run.json", SEGMENT + FILE_SUFFIX}
    table, _ = read_events(tmp_path, SEGMENT)
    assert table.schema.equals(EVENTS)
    assert table["name"].to_pylist() == ["batch 0", "batch 1", "batch 2", "tail"]
