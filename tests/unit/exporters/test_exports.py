"""Exports are read back by readers that are not ours, and hold what the trace held."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support.made_trace import HOSTILE, made_trace

from ddltrace.analyzer.exporters import FOLDER_FORMATS, FORMATS, export
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.trace.counters import COUNTERS, CounterRows, Reading
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import counters_name, segment_name

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"
FOREIGN = Path(__file__).resolve().parents[2] / "data" / "foreign"


@pytest.fixture
def trace() -> Trace:
    return made_trace()


@pytest.fixture
def trace_with_counters(tmp_path: Path) -> Trace:
    """A real trace, of whose second rank two counters were read at three times."""
    directory = Path(shutil.copytree(SAMPLE, tmp_path / "trace"))
    bare = open_trace(directory)
    segment = bare.run.ranks[1].segment
    stream = StreamWriter(directory / f"{counters_name(segment)}.arrows", COUNTERS)
    for since, memory, cpu in ((-1000, 1e8, 0.1), (1500, 2e8, 0.25), (2500, 3e8, 0.5)):
        readings = Reading("process_memory", memory), Reading("host_cpu", cpu)
        stream.write(CounterRows().batch([(bare.origin_ns + since, 0, each) for each in readings]))
    stream.close()
    return open_trace(directory)


def check_nesting(intervals: list[tuple[int, int]]) -> None:
    """Each interval lies inside or behind those before it."""
    stack: list[int] = []
    for start, end in intervals:
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def test_chrome(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert export(trace, "chrome", path) == 18
    value = json.loads(path.read_text())
    events = value["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 18
    by_thread: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for event in complete:
        start = nanoseconds(event["ts"])
        by_thread[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"])))
    for intervals in by_thread.values():
        check_nesting(intervals)
    # Messages that overlap are in lanes of their own, of one group.
    lanes = {threads[e["pid"], e["tid"]] for e in complete if e["cat"] == "message"}
    assert lanes == {"comm/0", "comm/0 (2)"}
    [first] = [e for e in complete if e["name"] == "bucket 0" and e["pid"] == 0]
    assert first["args"] == {
        "step": 0,
        "op": "all_reduce",
        "group": "0",
        "seq": 0,
        "bytes": 16,
        "dtype": "float32",
        "status": "ok",
        "tensors": "layer1.weight",
    }
    assert first["ts"] == 0.11
    check_arrows(events, complete)


def check_arrows(events: list[dict[str, Any]], complete: list[dict[str, Any]]) -> None:
    """Every arrow goes forward in time, from and to the intervals that it should."""

    def around(arrow: dict[str, Any]) -> str:
        inside = [
            e
            for e in complete
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
        ]
        shortest = min(inside, key=lambda e: e["dur"])
        return f"{shortest['cat']} {shortest['name']} {shortest['pid']}"

    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    pairs = {(around(begins[number]), around(ends[number])) for number in begins}
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)
    assert pairs == {
        ("message bucket 2 0", "message bucket 2 1"),
        ("gradient layer1.weight 0", "message bucket 0 0"),
        ("gradient layer1.weight 1", "message bucket 0 1"),
        (f"gradient {HOSTILE} 0", "message bucket 1 0"),
        (f"gradient {HOSTILE} 1", "message bucket 1 1"),
    }


def test_chrome_comes_back(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "out.json.gz"
    export(trace, "chrome", path)
    assert gzip.decompress(path.read_bytes()).startswith(b"{")
    again = formats.read(path)
    kept = ["start_ns", "kind", "name", "step", "phase", "op", "group", "seq", "peer", "bytes"]
    for info in again.run.ranks:
        before = trace.events(info.rank).select(kept).to_pylist()
        after = again.tables[info.segment].select(kept).to_pylist()
        assert sorted(map(str, after)) == sorted(map(str, before))


@pytest.mark.parametrize("source", ["kineto-cpu", "flight-recorder"])
def test_chrome_of_real_traces_nests(source: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    written = export(open_trace(FOREIGN / source), "chrome", path)
    complete = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == written
    by_thread: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for event in complete:
        start = nanoseconds(event["ts"])
        by_thread[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"])))
    for intervals in by_thread.values():
        check_nesting(intervals)


def perfetto_slices(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Reads a file with Perfetto's own definition of the format."""
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    content = protos.Trace()
    content.ParseFromString(path.read_bytes())
    tables: dict[str, dict[int, str]] = {
        "event_names": {},
        "event_categories": {},
        "debug_annotation_names": {},
    }
    tracks: dict[int, str] = {}
    stacks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    slices = []
    for packet in content.packet:
        for table, names in tables.items():
            names.update({entry.iid: entry.name for entry in getattr(packet.interned_data, table)})
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            parent = tracks.get(descriptor.parent_uuid, "")
            own = descriptor.name or descriptor.process.process_name
            tracks[descriptor.uuid] = f"{parent}/{own}" if parent else own
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        if event.type == protos.TrackEvent.TYPE_SLICE_END:
            ended = stacks[event.track_uuid].pop()
            ended |= {"end": packet.timestamp, "ends": list(event.terminating_flow_ids)}
            continue
        args = {
            tables["debug_annotation_names"][each.name_iid]: each.int_value
            if each.HasField("int_value")
            else each.string_value
            for each in event.debug_annotations
        }
        found = {
            "name": tables["event_names"][event.name_iid],
            "kind": tables["event_categories"][event.category_iids[0]],
            "track": tracks[event.track_uuid],
            "start": packet.timestamp,
            "args": args,
            "begins": list(event.flow_ids),
        }
        assert not event.terminating_flow_ids, "a flow that arrives at a begin may not have left"
        slices.append(found)
        stacks[event.track_uuid].append(found)
    assert not any(stacks.values()), "a slice never ends"
    return slices, tracks


def test_perfetto(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "out.pftrace"
    assert export(trace, "perfetto", path) == 18
    slices, tracks = perfetto_slices(path)
    assert len(slices) == 18
    assert {"rank 0/main", "rank 0/comm/0", "rank 1/comm/0 (2)"} <= set(tracks.values())
    [first] = [s for s in slices if s["name"] == "bucket 0" and s["track"].startswith("rank 0")]
    assert (first["start"], first["end"]) == (110, 500)
    assert first["args"]["bytes"] == 16
    assert first["args"]["tensors"] == "layer1.weight"
    begins = {number: s for s in slices for number in s["begins"]}
    ends = {number: s for s in slices for number in s["ends"]}
    assert begins.keys() == ends.keys()
    assert all(begins[number]["start"] <= ends[number]["end"] for number in begins)
    assert sorted((begins[n]["kind"], ends[n]["name"]) for n in begins) == [
        ("gradient", "bucket 0"),
        ("gradient", "bucket 0"),
        ("gradient", "bucket 1"),
        ("gradient", "bucket 1"),
        ("message", "bucket 2"),
    ]
    # Inside out: what is nested lies inside what is around it.
    main = [s for s in slices if s["track"] == "rank 0/main"]
    assert [s["kind"] for s in main][:3] == ["step", "phase", "layer"]
    check_nesting([(s["start"], s["end"]) for s in main])


def test_perfetto_of_a_real_trace(tmp_path: Path) -> None:
    trace = open_trace(FOREIGN / "kineto-cpu")
    path = tmp_path / "out.pftrace"
    written = export(trace, "perfetto", path)
    slices, _ = perfetto_slices(path)
    assert len(slices) == written == sum(trace.events(rank).num_rows for rank in trace.ranks)
    lengths = sorted(s["end"] - s["start"] for s in slices)
    expected = sorted(
        length
        for rank in trace.ranks
        for length in pc.subtract(
            trace.events(rank)["end_ns"], trace.events(rank)["start_ns"]
        ).to_pylist()
    )
    assert lengths == expected


def test_parquet(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    assert export(trace, "parquet", path) == 18
    table = pq.read_table(path)
    assert table.column_names == ["rank", *EVENTS.names, "tensor_names"]
    for rank in trace.ranks:
        part = table.filter(pc.equal(table["rank"], rank))
        assert part.select(EVENTS.names).to_pylist() == trace.events(rank).to_pylist()
        named = [names for names in part["tensor_names"].to_pylist() if names]
        assert named == [["layer1.weight"], ["layer1.weight"], [HOSTILE], [HOSTILE]]


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz"])
def test_csv(trace: Trace, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert export(trace, "csv", path) == 18
    content = path.read_bytes()
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode()
    found = list(csv.DictReader(text.splitlines()))
    assert len(found) == 18
    zero = [row for row in found if row["rank"] == "0"]
    expected = trace.events(0).to_pylist()
    assert [int(row["start_ns"]) for row in zero] == [row["start_ns"] for row in expected]
    assert [row["end_ns"] for row in zero if row["status"] == "open"] == [""]
    # A spreadsheet must not run a name as a formula.
    assert not any(value.startswith(("=", "+", "@")) for row in found for value in row.values())
    assert any(row["name"] == "'" + HOSTILE for row in found)


@pytest.mark.parametrize("to", [to for to in FORMATS if to not in FOLDER_FORMATS])
def test_nothing_is_overwritten_without_force(trace: Trace, tmp_path: Path, to: str) -> None:
    path = tmp_path / "out"
    path.write_text("precious")
    with pytest.raises(UsageError, match="--force"):
        export(trace, to, path)
    assert path.read_text() == "precious"
    export(trace, to, path, force=True)
    assert path.read_bytes() != b"precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_failed_export_leaves_nothing(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddltrace.analyzer.exporters.chrome_json.ends_of", fail)
    with pytest.raises(UsageError, match="No space left"):
        export(trace, "chrome", tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["missing/out.json", "."])
def test_places_that_cannot_be_written(trace: Trace, tmp_path: Path, place: str) -> None:
    with pytest.raises(UsageError):
        export(trace, "chrome", tmp_path / place)


@pytest.mark.parametrize("to", FORMATS)
def test_a_trace_without_events(tmp_path: Path, to: str) -> None:
    info = RankInfo(rank=0, segment=segment_name(rank=0, attempt=0, pid=0))
    empty = Trace(Path("empty"), RunInfo(ranks=[info]), {info.segment: EVENTS.empty_table()})
    assert export(empty, to, tmp_path / "out") == 0


def test_chrome_holds_the_resource_counters(trace_with_counters: Trace, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    trace = trace_with_counters
    rank = trace.ranks[1]
    export(trace, "chrome", path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "C"]
    assert events == [
        {"ph": "C", "name": name, "pid": rank, "ts": ts, "args": {unit: value}}
        for name, unit, values in (
            ("process memory", "bytes", [2e8, 3e8]),
            ("host cpu", "share", [0.25, 0.5]),
        )
        for ts, value in zip((1.5, 2.5), values, strict=True)
    ]
    again = formats.read(path)
    assert sum(table.num_rows for table in again.tables.values()) == sum(
        trace.events(each).num_rows for each in trace.ranks
    )
