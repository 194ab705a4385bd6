"""Chakra execution traces that others wrote: with start times, with durations only, damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.chakra_files import chakra_file, chakra_node

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import TraceError

COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
START = 1_700_000_000_000_000
"""Microseconds since 1970."""

JSON = """{
  "version": "0.0.4"
}{
  "id": "5",
  "name": "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)",
  "type": "COMM_COLL_NODE",
  "dataDeps": ["4"],
  "startTimeMicros": "200",
  "durationMicros": "40",
  "attr": [
    {"name": "is_cpu_op", "boolVal": false},
    {"name": "comm_type", "int64Val": "2"},
    {"name": "comm_size", "int64Val": "4096"},
    {"name": "pg_name", "stringVal": "tp"}
  ]
}{
  "id": "4",
  "name": "gemm",
  "type": "COMP_NODE",
  "startTimeMicros": "100",
  "durationMicros": "60",
  "attr": [{"name": "stream", "int64Val": "7"}]
}"""


def rows(trace: ImportedTrace, rank: int = 0) -> list[dict[str, Any]]:
    [info] = [info for info in trace.run.ranks if info.rank == rank]
    return [
        {key: value for key, value in row.items() if value is not None}
        for row in trace.tables[info.segment].to_pylist()
    ]


def pair(rank: int) -> bytes:
    peer = {"comm_dst": 1} if rank == 0 else {"comm_src": 0}
    return chakra_file(
        [
            chakra_node(1, "root", 1),
            chakra_node(2, "aten::mm", COMP, start=START, duration=7,
                        attributes={"is_cpu_op": True, "tid": 3}),
            chakra_node(3, "x", SEND if rank == 0 else RECV, start=START + 9, duration=2,
                        attributes={"comm_size": 64, "comm_tag": 5, "pg_name": "pp", **peer}),
            chakra_node(4, "y", COLLECTIVE, start=START + 20, duration=3,
                        attributes={"comm_type": 0, "comm_size": 128}),
            chakra_node(5, "untimed", COMP, duration=3),
        ]
    )  # fmt: skip


def test_protobuf_with_start_times(tmp_path: Path) -> None:
    # Rank 1's file has a name that sorts before rank 0's.
    (tmp_path / "b.0.et").write_bytes(pair(0))
    (tmp_path / "a.1.et").write_bytes(gzip.compress(pair(1)))
    trace = formats.read(tmp_path)
    assert trace.run.source == "chakra"
    assert [info.rank for info in trace.run.ranks] == [0, 1]
    compute, sent, reduced = rows(trace, 0)
    assert compute == {
        "start_ns": START * 1000,
        "end_ns": START * 1000 + 7000,
        "kind": "host",
        "name": "aten::mm",
        "lane": "thread-3",
    }
    got = [(row["op"], row["group"], row["peer"], row["tag"]) for row in (sent, rows(trace, 1)[1])]
    assert got == [("send", "pp", 1, 5), ("recv", "pp", 0, 5)]
    assert sent["bytes"] == rows(trace, 1)[1]["out_bytes"] == 64
    assert (reduced["op"], reduced["bytes"], reduced["group"]) == ("all_reduce", 128, "0")
    assert reduced["end_ns"] - reduced["start_ns"] == 3000
    assert reduced["seq"] == rows(trace, 1)[2]["seq"]
    assert "2 nodes without a start time left out" in trace.run.notes


def test_json_as_chakra_jsonizer_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(JSON)
    kernel, message = rows(formats.read(path))
    assert (kernel["kind"], kernel["lane"], kernel["end_ns"]) == ("kernel", "stream-7", 160_000)
    assert (message["op"], message["bytes"], message["group"]) == ("all_gather", 4096, "tp")
    assert (message["start_ns"], message["end_ns"]) == (200_000, 240_000)


def test_durations_are_laid_out_by_dependencies(tmp_path: Path) -> None:
    path = tmp_path / "trace.0.et"
    path.write_bytes(
        chakra_file(
            [
                chakra_node(9, "last", COMP, duration=1, deps=[2, 3]),
                chakra_node(2, "short", COMP, duration=4, deps=[1]),
                chakra_node(3, "long", COLLECTIVE, duration=30, deps=[1, 77]),
                chakra_node(1, "first", COMP, duration=10),
                chakra_node(5, "circle", COMP, duration=10, deps=[6]),
                chakra_node(6, "circle", COMP, duration=10, deps=[5]),
            ]
        )
    )
    trace = formats.read(path)
    times = {row["name"]: (row["start_ns"], row["end_ns"]) for row in rows(trace)}
    assert times == {
        "first": (0, 10_000),
        "short": (10_000, 14_000),
        "long": (10_000, 40_000),
        "last": (40_000, 41_000),
    }
    assert any("positions in time" in note for note in trace.run.notes)
    assert "2 nodes in circles of dependencies left out" in trace.run.notes


def test_the_calling_operator_is_not_waited_for(tmp_path: Path) -> None:
    """Chakra's converter writes it as a control dependency; data dependencies may contradict it."""
    path = tmp_path / "trace.0.et"
    nodes = [
        chakra_node(1, "caller", COMP, duration=10, deps=[2]),
        chakra_node(2, "callee", COMP, duration=4, parents=[1]),
    ]
    path.write_bytes(chakra_file(nodes))
    trace = formats.read(path)
    times = {row["name"]: (row["start_ns"], row["end_ns"]) for row in rows(trace)}
    assert times == {"callee": (0, 4_000), "caller": (4_000, 14_000)}
    assert not any("circle" in note for note in trace.run.notes)
    path.write_bytes(chakra_file([chakra_node(1, "caller", COMP, duration=10), nodes[1]]))
    times = {row["name"]: (row["start_ns"], row["end_ns"]) for row in rows(formats.read(path))}
    assert times == {"caller": (0, 10_000), "callee": (10_000, 14_000)}


def test_workload_graph(tmp_path: Path) -> None:
    """The JSON that Chakra's feeder reads."""
    graph = [
        {"Id": 2, "Name": "gemm", "NodeType": 4, "data_deps": [1], "runtime": 9},
        {"Id": 1, "Name": "aten::mm", "NodeType": 4, "data_deps": [], "runtime": 5},
        {"Id": 3, "Name": "x", "NodeType": 7, "data_deps": [2], "runtime": 7},
        {"Name": "no number", "NodeType": 4},
        {"Id": 5, "NodeType": "y" * 99},
        "no node",
    ]
    graph[1]["is_cpu_op"] = True  # type: ignore[index]
    graph[2] |= {"comm_type": 0, "comm_size": 64, "is_cpu_op": False}  # type: ignore[operator]
    path = tmp_path / "chakra.0.json"
    path.write_text(json.dumps({"workload_graph": graph}, indent=1))
    trace = formats.read(path)
    assert [
        (row["kind"], row.get("op"), row.get("bytes"), row["start_ns"], row["end_ns"])
        for row in rows(trace)
    ] == [
        ("host", None, None, 0, 5_000),
        ("kernel", None, None, 5_000, 14_000),
        ("message", "all_reduce", 64, 14_000, 21_000),
    ]
    assert any("3 nodes are damaged" in note for note in trace.run.notes)


def test_an_execution_trace_without_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_et.json"
    path.write_text(json.dumps({"schema": "1.0.2-chakra.0.0.4", "pid": 1, "nodes": [{"id": 2}]}))
    with pytest.raises(TraceError, match="ExecutionTraceObserver, which records no times"):
        formats.read(path)


@pytest.mark.parametrize(
    ("starts", "with_duration", "expected"),
    [
        (True, (4, 4), (400, 160)),
        (True, (4, 0), (400, None)),
        (True, (0, 4), (None, 160)),
        (True, (0, 0), (None, None)),
        (False, (4, 4), (400, 160)),
        (False, (4, 0), (None, None)),
        (False, (4, 2), (None, 80)),
    ],
)
def test_times_without_durations_are_unknown(
    tmp_path: Path,
    starts: bool,
    with_duration: tuple[int, int],
    expected: tuple[float | None, float | None],
) -> None:
    """Of four computations of 100 us and four messages of 40 us, some have a duration."""
    computations, messages = with_duration
    (tmp_path / "files").mkdir()
    for rank in range(2):
        nodes = []
        for i in range(4):
            first, begin = 2 * i + 1, START + 200 * i
            size = {"comm_type": 0, "comm_size": 4096}
            nodes.append(
                chakra_node(first, "mm", COMP, start=begin if starts else 0, deps=[first - 1],
                            duration=100 if i < computations else 0)
            )  # fmt: skip
            nodes.append(
                chakra_node(first + 1, "sum", COLLECTIVE, start=begin + 100 if starts else 0,
                            deps=[first], duration=40 if i < messages else 0, attributes=size)
            )  # fmt: skip
        (tmp_path / "files" / f"x.{rank}.et").write_bytes(chakra_file(nodes))
    save(formats.read(tmp_path / "files"), tmp_path / "trace", force=False)
    analysis = analyze(open_trace(tmp_path / "trace"))
    row = analysis.ranks[0]
    assert (row.compute_us, row.comm_us) == expected
    known = computations == messages == 4
    assert (analysis.summary.compute_share is None) == (row.compute_us is None)
    assert (analysis.summary.exposed_comm_share is not None) == known
    assert (row.idle_us is not None) == known
    [collective] = analysis.collectives
    assert (collective.count, collective.bytes) == (4, 4096)
    assert (collective.transfer_us is None) == (messages == 0)
    json.dumps(analysis.to_json(), allow_nan=False)


def test_a_workload_without_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.0.et"
    path.write_bytes(chakra_file([chakra_node(1, "a", COMP, attributes={"num_ops": 5})]))
    with pytest.raises(TraceError, match=r"no node has a start time or a duration"):
        formats.read(path)
    path.write_bytes(chakra_file([chakra_node(1, "a", 1)]))
    with pytest.raises(TraceError, match=r"holds no node of computation or communication"):
        formats.read(path)


def test_a_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    content = pair(0)
    path = tmp_path / "trace.0.et"
    found = set()
    errors = []
    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            trace = formats.read(path)
        except TraceError as error:
            errors.append(str(error))
            continue
        found.add(len(rows(trace)))
        whole = not any("ends inside a message" in note for note in trace.run.notes)
        assert whole == (trace.run.status == "complete")
    assert found == {1, 2, 3}
    assert errors
    assert not any("\n" in error for error in errors)


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    for name in ("a.et", "b.et"):
        nodes = [chakra_node(1, "a", COMP, start=5, duration=1)]
        (tmp_path / name).write_bytes(chakra_file(nodes, {"rank": 1}))
    with pytest.raises(TraceError, match="several files are of one rank"):
        formats.read(tmp_path)


@pytest.mark.parametrize("first", [3_600_000_000, START])
def test_a_node_at_0_far_before_all_others_has_no_start(tmp_path: Path, first: int) -> None:
    nodes = [
        chakra_node(1, "lost", COMP, duration=3),
        chakra_node(2, "a", COMP, start=first, duration=7),
        chakra_node(3, "b", COMP, start=first + 20, duration=7),
    ]
    path = tmp_path / "trace.0.et"
    path.write_bytes(chakra_file(nodes))
    trace = formats.read(path)
    assert [row["name"] for row in rows(trace)] == ["a", "b"]
    assert "1 node without a start time left out" in trace.run.notes


@pytest.mark.parametrize("second", [4, 5_000_000])
def test_a_node_at_0_where_the_clock_begins_is_kept(tmp_path: Path, second: int) -> None:
    nodes = [
        chakra_node(1, "first", COMP, start=0, duration=3),
        chakra_node(2, "second", COMP, start=second, duration=7),
    ]
    path = tmp_path / "trace.0.et"
    path.write_bytes(chakra_file(nodes))
    assert [row["name"] for row in rows(formats.read(path))] == ["first", "second"]
