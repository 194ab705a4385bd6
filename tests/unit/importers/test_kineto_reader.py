"""Kineto files, real ones and hand-made ones with the fields that newer versions write."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.chrome import trace_events
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.schema import EVENTS, OPS


def of_kind(table: pa.Table, kind: str) -> list[dict[str, Any]]:
    return table.filter(pc.equal(table["kind"], kind)).to_pylist()


def messages(trace: ImportedTrace) -> list[list[dict[str, Any]]]:
    found = []
    for table in trace.tables.values():
        rows = of_kind(table, "message")
        found.append(sorted(rows, key=lambda row: row["id"]))
    return found


def check(trace: ImportedTrace) -> None:
    """What holds for every imported trace."""
    assert [info.segment for info in trace.run.ranks] == list(trace.tables)
    for info in trace.run.ranks:
        table = trace.tables[info.segment]
        assert table.schema.equals(EVENTS, check_metadata=True)
        table.validate(full=True)
        assert info.events == table.num_rows


def event(name: str, category: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, **more}


def launched(
    name: str, number: int, *, ts: float, dur: float, stream: int = 7, **args: Any
) -> list[dict[str, Any]]:
    """A kernel and the call that launched it, 2 microseconds before."""
    call = event("cudaLaunchKernel", "cuda_runtime", ts - 2, 1, pid=9, tid=9)
    call["args"] = {"correlation": number}
    kernel = event(name, "kernel", ts, dur, pid=0, tid=stream)
    kernel["args"] = {"correlation": number, "stream": stream, "device": 0, **args}
    return [call, kernel]


def write(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events}, indent=1))
    return path


def test_real_cpu_job(foreign: Path) -> None:
    trace = formats.read(foreign / "kineto-cpu")
    check(trace)
    assert trace.run.source == "kineto"
    assert [info.rank for info in trace.run.ranks] == [0, 1]
    assert {info.backend for info in trace.run.ranks} == {"gloo"}
    assert trace.run.ranks[0].groups[0].ranks == (0, 1)
    # Both ran on one host, whose name Kineto writes down.
    assert trace.run.ranks[0].clock_domain == trace.run.ranks[1].clock_domain
    for table in trace.tables.values():
        assert [row["step"] for row in of_kind(table, "step")] == [2, 3]
        # What record.py does in each step.
        parameters = 64 * 128 + 128 + 128 * 10 + 10
        per_step = Counter(
            (row["op"], row["bytes"], row["out_bytes"]) for row in of_kind(table, "message")
        )
        pair = [key for key in per_step if key[0] in ("send", "recv")]
        assert per_step == {
            ("all_reduce", 4 * parameters, None): 2,
            ("all_reduce", 4000, None): 2,
            ("all_gather", 400, None): 2,
            ("broadcast", 4000, None): 2,
            pair[0]: 2,
        }
        phases = Counter((row["name"], row["step"]) for row in of_kind(table, "phase"))
        assert phases["backward", 2] == phases["backward", 3] == 1
        assert len(of_kind(table, "data")) == 2


def test_real_cpu_job_joins_ranks(foreign: Path) -> None:
    left, right = messages(formats.read(foreign / "kineto-cpu"))
    keys = [
        {(row["group"], row["seq"], row["op"]) for row in side if row["op"] not in ("send", "recv")}
        for side in (left, right)
    ]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 8
    sent = [(row["peer"], row["tag"], row["seq"]) for row in left if row["op"] == "send"]
    received = [(row["peer"], row["tag"], row["seq"]) for row in right if row["op"] == "recv"]
    assert sent == [(1, 0, 0), (1, 0, 1)]
    assert received == [(0, 0, 0), (0, 0, 1)]
    assert all(row["bytes"] == 77 * 4 for row in left if row["op"] == "send")
    assert all(row["out_bytes"] == 77 * 4 for row in right if row["op"] == "recv")
    # A message begins to execute after it was issued, in the phase that issued it.
    for row in left + right:
        assert row["enqueue_ns"] <= row["start_ns"] <= row["end_ns"]
        if row["bytes"] == 38440:
            assert row["phase"] == "backward"


def test_real_gpu_job(dlrm: Path) -> None:
    trace = formats.read(dlrm)
    check(trace)
    assert [info.rank for info in trace.run.ranks] == list(range(8))
    assert {info.clock_domain for info in trace.run.ranks} == {"one host"}
    sides = messages(trace)
    # The kernels of an all-to-all are named SendRecv; the library's span has the operation's name.
    expected = ["all_to_all"] * 4 + ["all_reduce", "all_to_all", "all_reduce", "all_reduce"]
    for side in sides:
        assert [row["op"] for row in side] == expected
        assert [row["seq"] for row in side] == list(range(8))
        assert {row["lane"] for row in side} == {"stream-84"}
        assert {row["step"] for row in side} == {10}
        assert side[4]["bytes"] == 394241 * 4
    assert trace.run.labels["kernel_classes"]["communication"] == 64
    assert trace.run.labels["kernel_classes"]["unknown"] == 0
    # From the reference: ends of one collective lie within 7 microseconds on all ranks.
    for number in range(8):
        ends = [side[number]["end_ns"] for side in sides]
        assert max(ends) - min(ends) <= 7000


@pytest.mark.parametrize("style", ["kineto", "compact", "spaced", "bare", "open"])
def test_writing_styles_read_alike(foreign: Path, tmp_path: Path, style: str) -> None:
    original = foreign / "kineto-cpu" / "rank-0.json.gz"
    content = gzip.decompress(original.read_bytes())
    value = json.loads(content)
    file = tmp_path / "rank-0.json"
    if style == "kineto":
        file.write_bytes(content)
    elif style == "compact":
        file.write_text(json.dumps(value, separators=(",", ":")))
    elif style == "spaced":
        file.write_text(json.dumps(value, indent=3))
    else:
        text = json.dumps(value["traceEvents"])
        file.write_text(text if style == "bare" else text.removesuffix("]") + ",\n")
    expected = next(iter(formats.read(original).tables.values()))
    found = next(iter(formats.read(file).tables.values()))
    if style in ("bare", "open"):
        # Without the head there is no base time and no group.
        assert found.num_rows == expected.num_rows
        assert found["end_ns"].to_pylist()[0] - found["start_ns"].to_pylist()[0] == (
            expected["end_ns"].to_pylist()[0] - expected["start_ns"].to_pylist()[0]
        )
    else:
        assert found.equals(expected)


def test_pieces_join_without_a_seam(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = foreign / "kineto-cpu" / "rank-0.json.gz"
    whole = next(iter(formats.read(file).tables.values()))
    pieces = []

    class Counted(trace_events.EventFile):
        def __iter__(self) -> Any:
            for chunk in super().__iter__():
                pieces.append(len(chunk))
                yield chunk

    monkeypatch.setattr(trace_events, "_CHUNK_BYTES", 5000)
    monkeypatch.setattr("ddltrace.analyzer.importers.kineto.decode.EventFile", Counted)
    monkeypatch.setattr("ddltrace.analyzer.importers.blocks.Blocks.__init__.__defaults__", (3000,))
    cut = next(iter(formats.read(file).tables.values()))
    assert len(pieces) > 10
    assert cut.equals(whole)


def test_fields_of_newer_kernels(tmp_path: Path) -> None:
    collective = {
        "Collective name": "_allgather_base",
        "In msg nelems": 1024,
        "Out msg nelems": 4096,
        "Group size": 4,
        "dtype": "BFloat16",
        "Process Group Name": "7",
        "Process Group Description": "fsdp",
        "Process Group Ranks": "[0, 2, 4, 6]",
        "Seq": 41,
    }
    name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = launched(name, 1, ts=100.125, dur=5.5, stream=20, **collective)
    events += launched("gemm", 2, ts=90, dur=30)
    base = 1_700_000_000_000_000_000
    file = write(
        tmp_path / "a.json",
        events,
        baseTimeNanoseconds=base,
        distributedInfo={"rank": 2, "world_size": 8, "backend": "nccl"},
    )
    trace = formats.read(file)
    check(trace)
    [[message]] = messages(trace)
    assert message["op"] == "all_gather"
    assert (message["bytes"], message["out_bytes"], message["dtype"]) == (2048, 8192, "bfloat16")
    assert (message["group"], message["seq"], message["lane"]) == ("7", 41, "stream-20")
    assert message["start_ns"] == base + 100_125
    assert message["end_ns"] == base + 105_625
    assert message["enqueue_ns"] == base + 98_125
    [info] = trace.run.ranks
    assert (info.rank, info.world_size) == (2, 8)
    assert info.groups[0].ranks == (0, 2, 4, 6)
    assert info.groups[0].description == "fsdp"


@pytest.mark.parametrize(
    ("splits", "sent"),
    [
        ("[1, 3, 0, 4]", [256, 768, 0, 1024]),  # rows of 64 elements
        ("[64, 192, 0, 256]", [256, 768, 0, 1024]),
        ("[1, 3, 0, ...]", None),  # shortened by the profiler
        ("[3, 4]", None),  # no whole number of bytes
        ("[]", None),
        (None, None),
    ],
)
def test_bytes_from_rank_to_rank(
    tmp_path: Path, splits: str | None, sent: list[int] | None
) -> None:
    fields = {"Collective name": "all_to_allv", "dtype": "Float", "In msg nelems": 512}
    fields |= {"Out msg nelems": 256, "Group size": 4, "In split size": splits}
    events = launched("ncclDevKernel_SendRecv", 1, ts=100, dur=5, **fields)
    [[message]] = messages(formats.read(write(tmp_path / "a.json", events)))
    assert (message["op"], message["bytes"], message["out_bytes"]) == ("all_to_all", 2048, 1024)
    assert message["split_bytes"] == sent


def test_send_and_receive_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for rank, (op, other) in enumerate([("send", 1), ("recv", 0)]):
        fields = {
            "Collective name": op,
            "In msg nelems": 8,
            "Out msg nelems": 8,
            "dtype": "Float",
            "Process Group Name": "0",
            "Dst Rank" if op == "send" else "Src Rank": other,
        }
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        events = [
            part
            for number in (1, 2)
            for part in launched(name, number, ts=100 * number, dur=5, **fields)
        ]
        write(folder / f"rank{rank}.json", events, distributedInfo={"rank": rank})
    [sends], [receives] = ([side] for side in messages(formats.read(folder)))
    assert [(row["op"], row["peer"], row["seq"]) for row in sends] == [
        ("send", 1, 0),
        ("send", 1, 1),
    ]
    assert [(row["op"], row["peer"], row["seq"]) for row in receives] == [
        ("recv", 0, 0),
        ("recv", 0, 1),
    ]
    assert [row["bytes"] for row in sends] == [32, 32]
    assert [row["bytes"] for row in receives] == [None, None]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)", "reduce_scatter"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_Generic"),
    ],
)
def test_operation_from_the_kernel_alone(tmp_path: Path, name: str, op: str) -> None:
    trace = formats.read(write(tmp_path / "a.json", launched(name, 1, ts=10, dur=1)))
    [[message]] = messages(trace)
    assert message["op"] == op
    assert message["bytes"] is None
    assert (op in OPS) == (op not in ("send_recv", "ncclDevKernel_Generic"))


def test_kernels_of_unknown_class_are_shown(tmp_path: Path) -> None:
    events = launched("my_allreduce_kernel<float>", 1, ts=10, dur=4)
    events += launched("gemm", 2, ts=20, dur=4)
    trace = formats.read(write(tmp_path / "a.json", events))
    assert trace.run.labels["kernel_classes"] == {
        "computation": 1,
        "communication": 0,
        "memory": 0,
        "unknown": 1,
    }
    assert trace.run.labels["kernels_of_unknown_class"] == {"my_allreduce_kernel<float>": 1}
    assert any("my_allreduce_kernel" in note for note in trace.run.notes)
    # Counted, reported, and still there.
    assert len(of_kind(next(iter(trace.tables.values())), "kernel")) == 2


def test_device_work_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    events = [
        event(f"ProfilerStep#{number}", "user_annotation", ts, 100, pid=9, tid=9)
        for number, ts in ((4, 0), (5, 100))
    ]
    events += launched("late", 1, ts=99, dur=50)
    events[-1]["ts"] = 120  # launched in step 4, runs in step 5
    trace = formats.read(write(tmp_path / "a.json", events))
    [kernel] = of_kind(next(iter(trace.tables.values())), "kernel")
    assert kernel["step"] == 4
    assert kernel["start_ns"] == 120_000


def test_orders_that_differ_between_ranks_are_told(tmp_path: Path) -> None:
    for rank, names in enumerate((["AllReduce", "AllGather"], ["AllGather", "AllReduce"])):
        events = [
            part
            for number, name in enumerate(names)
            for part in launched(f"ncclDevKernel_{name}_RING", number, ts=10 + 10 * number, dur=1)
        ]
        write(tmp_path / f"r{rank}.json", events, distributedInfo={"rank": rank})
    trace = formats.read(tmp_path)
    assert any("ranks disagree at collective 0" in note for note in trace.run.notes)


def test_numbering_by_order_begins_at_a_common_step(tmp_path: Path) -> None:
    """One rank's recording begins a step later: its messages must not shift."""
    for rank, steps in enumerate(((0, 1, 2), (1, 2))):
        events = []
        for step in steps:
            ts = 1000 * step
            events.append(event(f"ProfilerStep#{step}", "user_annotation", ts, 1000, pid=9, tid=9))
            events += launched("ncclDevKernel_AllReduce", step, ts=ts + 10, dur=1)
        write(tmp_path / f"r{rank}.json", events, distributedInfo={"rank": rank})
    left, right = messages(formats.read(tmp_path))
    assert {row["step"]: row["seq"] for row in left} == {0: 0, 1: 1, 2: 2}
    assert {row["step"]: row["seq"] for row in right} == {1: 1, 2: 2}


def test_rank_from_the_name_of_the_file(tmp_path: Path) -> None:
    for rank in (3, 11):
        write(tmp_path / f"worker{rank}.pt.trace.json", launched("gemm", 1, ts=1, dur=1))
    trace = formats.read(tmp_path)
    assert [info.rank for info in trace.run.ranks] == [3, 11]
    assert any("names of the files" in note for note in trace.run.notes)


def test_windows_of_one_rank_are_joined(tmp_path: Path) -> None:
    for number, ts in enumerate((10, 1000)):
        write(
            tmp_path / f"step-{number}.json",
            launched("gemm", 1, ts=ts, dur=1),
            distributedInfo={"rank": 0, "world_size": 1},
        )
    trace = formats.read(tmp_path)
    check(trace)
    [table] = trace.tables.values()
    assert len(of_kind(table, "kernel")) == 2
    write(
        tmp_path / "step-2.json",
        launched("gemm", 1, ts=500, dur=600),
        distributedInfo={"rank": 0, "world_size": 1},
    )
    assert any("left out" in note for note in formats.read(tmp_path).run.notes)


def test_a_cut_file_gives_what_stands_before_the_cut(foreign: Path, tmp_path: Path) -> None:
    original = foreign / "kineto-cpu" / "rank-0.json.gz"
    content = gzip.decompress(original.read_bytes())
    (tmp_path / "rank-0.json").write_bytes(content[: len(content) // 2])
    whole = next(iter(formats.read(original).tables.values())).num_rows
    trace = formats.read(tmp_path / "rank-0.json")
    check(trace)
    found = next(iter(trace.tables.values())).num_rows
    assert whole / 4 < found < whole
    assert trace.run.status == "partial"
    assert any("cut off" in note for note in trace.run.notes)
    (tmp_path / "rank-0.json.gz").write_bytes(original.read_bytes()[:-2000])
    trace = formats.read(tmp_path / "rank-0.json.gz")
    assert any("compressed file is cut off" in note for note in trace.run.notes)


def test_one_event_of_wrong_types_costs_only_itself(tmp_path: Path) -> None:
    events = launched("gemm", 1, ts=10, dur=1)
    events.append({"ph": "X", "name": ["a"], "cat": "kernel", "ts": 5, "dur": 1})
    events.append({"ph": "X", "name": "b", "cat": "kernel", "ts": "soon", "dur": 1})
    events.append({"ph": "X", "name": "c", "cat": "kernel", "ts": "12.5", "dur": "2"})
    events.append({"ph": "X", "name": "d", "cat": "kernel", "ts": 1e300, "dur": 1})
    events.append({"ph": "X", "name": "e", "cat": "kernel", "ts": 1, "dur": -4})
    trace = formats.read(write(tmp_path / "a.json", events))
    names = {row["name"] for row in of_kind(next(iter(trace.tables.values())), "kernel")}
    assert names == {"gemm", "c"}
    assert any("2 events are damaged" in note for note in trace.run.notes)
    assert any("2 intervals without a usable time" in note for note in trace.run.notes)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"   ",
        b"hello",
        b'{"traceEvents": []}',
        b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [] }',
        b'{"schemaVersion": 1, "deviceProperties": 4',
        b"[",
        b"\x1f\x8b\x08",
        b'{"deviceProperties": ' + b"[" * 100_000,
        b'{"deviceProperties": 1, "traceEvents": [' + b'{"args":' * 100_000,
    ],
)
def test_useless_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(TraceError) as error:
        formats.read(file)
    assert "\n" not in str(error.value)


def test_an_endless_event_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small compressed file that unpacks to something huge must not fill the memory."""
    monkeypatch.setattr(trace_events, "_MAX_PENDING_BYTES", 8 << 20)
    head = b'{"deviceProperties": 1, "traceEvents": [{"ph": "X", "name": "'
    file = tmp_path / "bomb.json.gz"
    file.write_bytes(gzip.compress(head + b"a" * (64 << 20)))
    with pytest.raises(TraceError, match="without an end of an event"):
        formats.read(file)


def test_the_work_on_a_long_event_is_linear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes of gzip are a gigabyte of spaces: each byte is looked at a few times."""
    looks: list[int] = []
    cut = trace_events.EventFile._cut
    monkeypatch.setattr(
        trace_events.EventFile,
        "_cut",
        lambda self, pending: looks.append(len(pending)) or cut(self, pending),
    )
    file = tmp_path / "bomb.json.gz"
    file.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (64 << 20) + b"]}", 1))
    with pytest.raises(TraceError, match="no interval"):
        formats.read(file)
    assert 0 < sum(looks) <= 2 * (64 << 20)


@pytest.mark.parametrize("kilobytes", [200, 300, 600, 1500])
def test_a_long_head_hides_no_events(tmp_path: Path, kilobytes: int) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    value = {"schemaVersion": 1, "comment": "x" * (kilobytes << 10), "traceEvents": [event] * 3}
    (tmp_path / "a.json").write_text(json.dumps(value))
    chunks = list(trace_events.EventFile(tmp_path / "a.json", 1))
    assert sum(map(len, chunks)) == 3


def test_hostile_names_are_kept_as_text(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "\x1b[2J", "a" * 1_000_000, "\u202e", 'q"\\']
    events = [
        part
        for number, name in enumerate(names)
        for part in launched(name, number + 1, ts=10 * number + 5, dur=1)
    ]
    trace = formats.read(write(tmp_path / "a.json", events))
    check(trace)
    found = {row["name"] for row in of_kind(next(iter(trace.tables.values())), "kernel")}
    assert {name[:4096] for name in names} == found


def test_many_lanes_share_an_entry(tmp_path: Path) -> None:
    events = [event("aten::mm", "cpu_op", number, 1, pid=1, tid=number) for number in range(40_000)]
    trace = formats.read(write(tmp_path / "a.json", events))
    check(trace)
    assert "(other)" in next(iter(trace.tables.values()))["lane"].unique().to_pylist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("duration", [1e6, 1e12, 1e18, 1e300])
def test_an_interval_far_longer_than_all_others_causes_no_overflow(
    tmp_path: Path, duration: float
) -> None:
    events = [*launched("gemm", 1, ts=10, dur=5), *launched("gemm", 2, ts=20, dur=duration)]
    trace = formats.read(write(tmp_path / "a.json", events))
    assert len(trace.run.ranks) == 1
