"""Hostile files end in an error that names a limit, or are read in linear time and memory."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from ddltrace.analyzer.exchange_commands import import_
from ddltrace.analyzer.importers import formats, plain_pickle
from ddltrace.analyzer.importers.kineto.kineto_reader import MAX_STEPS_AT_ONCE
from ddltrace.analyzer.importers.kineto.phases import Spans
from ddltrace.analyzer.importers.memory_limit import ENVIRONMENT, memory_limit
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import TraceError, UsageError

SEED = 4


def entry(number: int, **more: Any) -> dict[str, Any]:
    created = 10**18 + number * 1000
    return {
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "time_discovered_completed_ns": created + 500,
        "collective_seq_id": number,
        "process_group": ("0", "default"),
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        **more,
    }


def dump(path: Path, entries: Any, **more: Any) -> Path:
    path.write_bytes(pickle.dumps({"version": "2.1", "entries": entries, **more}, 4))
    return path


def shared(depth: int) -> list[Any]:
    """A list whose text would be 2^depth times as long."""
    value: list[Any] = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


def of_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nested(depth: int) -> bytes:
    """The opcodes of a list in a list, `depth` deep."""
    return b"]" * depth + b"a" * (depth - 1)


@pytest.mark.parametrize("value", [shared(60), of_itself()], ids=["shared", "of itself"])
@pytest.mark.parametrize(
    "field", ["input_sizes", "input_dtypes", "process_group", "state", "profiling_name"]
)
def test_lists_where_a_dump_has_none(field: str, value: Any, tmp_path: Path) -> None:
    path = dump(tmp_path / "a", [entry(0), entry(1, **{field: value})])
    [table] = formats.read(path).tables.values()
    kept = 1 if field == "profiling_name" else 2
    assert table["kind"].to_pylist().count("message") == kept
    assert max(len(text or "") for text in table["group"].to_pylist()) < 20
    expected = {"input_sizes": None, "input_dtypes": None}.get(field, 16)
    assert table["bytes"].to_pylist()[:kept] == [16, expected][:kept]


@pytest.mark.parametrize("value", [shared(60), of_itself()], ids=["shared", "of itself"])
def test_lists_beside_the_entries(value: Any, tmp_path: Path) -> None:
    groups = {"0": {"name": value, "desc": value, "ranks": value}}
    more = {"pg_config": groups, "pg_status": {"0": {"a": value}}, "nccl_version": value}
    [table] = formats.read(dump(tmp_path / "a", [entry(0)], **more)).tables.values()
    assert table.num_rows == 1
    with pytest.raises(TraceError, match="no collective"):
        formats.read(dump(tmp_path / "b", value))


def test_deep_nesting(tmp_path: Path) -> None:
    path = tmp_path / "a"
    name, created = b"\x8c\x0eprofiling_name\x8c\x0fnccl:all_reduce", b"\x8c\x0ftime_created_ns"
    time = b"\x8a\x08" + struct.pack("<q", 10**18)
    deep = b"\x8c\x0binput_sizes" + nested(200_000) + b"\x8c\x0cinput_dtypes](\x8c\x05Floate"
    path.write_bytes(b"\x80\x04}(\x8c\x07entries](}(" + name + created + time + deep + b"ueu.")
    [table] = formats.read(path).tables.values()
    assert table["bytes"].to_pylist() == [None]


@pytest.mark.parametrize("opcodes", [b"]\x94", b"}", b"K\x01\x94", b"\x8c\x02ab\x94", b"]K\x01a"])
def test_a_pickle_of_millions_of_objects_is_refused_before_they_are_made(
    opcodes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    monkeypatch.setattr("ddltrace.analyzer.importers.memory_limit.LEAST_BYTES", 1_000_000)
    monkeypatch.setattr(plain_pickle, "_Unpickler", None)  # it is never made
    path.write_bytes(b"\x80\x04}(\x8c\x07entries](" + opcodes * 400_000 + b"eu.")
    with pytest.raises(TraceError, match=r"limit of \d+ MB \(10 times its content"):
        plain_pickle.load(path)


def test_one_entry_named_millions_of_times(tmp_path: Path) -> None:
    path = tmp_path / "a"
    one = pickle.dumps(entry(0), 4)[2:-1]
    path.write_bytes(b"\x80\x04}(\x8c\x07entries](" + one + b"h\x00" * 200_000 + b"eu.")
    with pytest.raises(TraceError, match="200001 entries, more than the limit of one in 64 bytes"):
        formats.read(path)


def test_one_list_named_by_every_entry(tmp_path: Path) -> None:
    types = ["Float"] * 1000
    entries = [entry(number, input_dtypes=types) for number in range(1000)]
    with pytest.raises(TraceError, match=r"are 100\d000 items, more than the limit"):
        formats.read(dump(tmp_path / "a", entries))


def test_pickles_of_every_protocol_are_read(tmp_path: Path) -> None:
    value = {"entries": [entry(n, big=2**70, text="ä" * 300, f=1.5) for n in range(300)]}
    for protocol in range(2, 6):
        (tmp_path / "a").write_bytes(pickle.dumps(value, protocol))
        assert plain_pickle.load(tmp_path / "a") == value
    (tmp_path / "a").write_bytes(pickle.dumps(value, 0))
    assert plain_pickle.load(tmp_path / "a") == value


def kineto(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events}))
    return path


def mark(name: str, ts: int, dur: int, tid: int = 1) -> dict[str, Any]:
    place = {"cat": "user_annotation", "pid": 1, "tid": tid}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, **place}


def test_steps_that_overlap_are_annotations(tmp_path: Path) -> None:
    count = 20_000
    events = [mark(f"ProfilerStep#{n}", n * 10, 10 * count) for n in range(count)]
    path = kineto(tmp_path / "a.json", events)
    trace = formats.read(path)
    assert any(f"{count:,} profiler steps are read as annotations" in n for n in trace.run.notes)
    assert open_trace(path).analyze().trace.steps == 0
    few = [mark(f"ProfilerStep#{n}", n * 10, 10 * MAX_STEPS_AT_ONCE) for n in range(100)]
    assert open_trace(kineto(tmp_path / "b.json", few)).analyze().trace.steps == 100


@pytest.mark.long
def test_more_threads_and_groups_than_a_column_counts(tmp_path: Path) -> None:
    events = [mark("Optimizer.step#A", n * 10, 5, tid=n) for n in range(40_000)]
    facts = open_trace(kineto(tmp_path / "a.json", events)).analyze().trace
    # Each call ends a step, which is an event of its own.
    assert (facts.steps, facts.events) == (40_000, 80_000)
    kernels = [
        {
            **{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7},
            **{"ts": n * 10, "dur": 5},
            "args": {"stream": 7, "correlation": n, "Process Group Name": f"g{n}"},
        }
        for n in range(33_000)
    ]
    [table] = formats.read(kineto(tmp_path / "b.json", kernels)).tables.values()
    empty = table.slice(0, 0)
    assert len({*table["group"].to_pylist()}) == 32_767
    # A part of it and an empty table still have one dictionary.
    pa.concat_tables([empty, table]).unify_dictionaries()


def test_spans_by_thread_are_those_of_each_thread() -> None:
    random = np.random.default_rng(SEED)
    for _ in range(200):
        spans, times, threads = (int(random.integers(0, most)) for most in (30, 50, 4))
        start = random.integers(0, 100, spans)
        thread = random.integers(0, threads + 1, spans)
        length, label = random.integers(0, 20, spans), random.integers(0, 5, spans)
        found = Spans.of(start, start + length, label, thread)
        when, where = random.integers(-5, 130, times), random.integers(-1, threads + 2, times)
        expected = np.full(times, -1)
        for number in range(threads + 1):
            rows, mine = np.flatnonzero(where == number), found.thread == number
            part = (found.start[mine], found.end[mine], found.label[mine], found.thread[mine])
            expected[rows] = Spans(*part).at(when[rows])
        assert (found.at_in_thread(when, where) == expected).all()


def test_memory_of_an_import_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json.gz"
    events = b",".join([b'{"ph":"X","ts":1,"dur":1}'] * 100_000)
    path.write_bytes(gzip.compress(b'{"schemaVersion":1,"traceEvents":[' + events + b"]}", 1))
    output = ["-o", str(tmp_path / "out")]
    small = CliRunner().invoke(import_, [str(path), *output, "--memory-limit", "16MB"])
    assert isinstance(small.exception, TraceError)
    assert "limit of 16 MB" in str(small.exception)
    assert ENVIRONMENT in str(small.exception)
    wrong = CliRunner().invoke(import_, [str(path), *output, "--memory-limit", "much"])
    assert isinstance(wrong.exception, UsageError)
    monkeypatch.setenv(ENVIRONMENT, "16MB")
    with pytest.raises(TraceError, match=f"set by {ENVIRONMENT}"):
        open_trace(path)
    large = CliRunner().invoke(import_, [str(path), *output, "--memory-limit", "1GB"])
    assert large.exit_code == 0, large.output
    assert memory_limit(0) == 16_000_000
    monkeypatch.setenv(ENVIRONMENT, "much")
    with pytest.raises(UsageError, match="memory limit"):
        open_trace(path)


def test_a_long_head_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    head = b'{"schemaVersion":1,"deviceProperties":[' + b",".join([b"[]"] * 3_000_000)
    path.write_bytes(head + b'],"traceEvents":[{"ph":"X","cat":"cpu_op","ts":1,"dur":1}]}')
    trace = formats.read(path)
    assert sum(table.num_rows for table in trace.tables.values()) == 1
    assert any("left out: 'deviceProperties'" in note for note in trace.run.notes)
