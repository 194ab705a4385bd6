"""Chrome, Horovod, Flight Recorder and NCCL Inspector files.

The Flight Recorder's dumps are real, but of Gloo. What NCCL adds to them, and Horovod's and the
Inspector's files, are written out here as the sources of these writers lay them down.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.importers import formats, plain_pickle
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.schema import EVENTS

MEMCPY = "MEMCPY_IN_FUSION_BUFFER"


def rows(trace: ImportedTrace, rank: int = 0) -> list[dict[str, Any]]:
    for info in trace.run.ranks:
        table: pa.Table = trace.tables[info.segment]
        assert table.schema.equals(EVENTS, check_metadata=True)
        table.validate(full=True)
    [segment] = [info.segment for info in trace.run.ranks if info.rank == rank]
    return sorted(trace.tables[segment].to_pylist(), key=lambda row: row["start_ns"])


def test_chrome_begin_end_and_asynchronous(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    events = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "worker"}},
        {"ph": "B", "name": "outer", "pid": 1, "tid": 2, "ts": 10},
        {"ph": "B", "name": "inner", "pid": 1, "tid": 2, "ts": 11.5},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 12},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 20},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 21},
        {"ph": "b", "name": "request", "cat": "net", "id": "0x1", "pid": 1, "ts": 5},
        {"ph": "e", "name": "request", "cat": "net", "id": "0x1", "pid": 1, "ts": 50},
        {"ph": "X", "name": "nccl:all_reduce", "pid": 1, "tid": 3, "ts": 30, "dur": 4},
    ]
    file.write_text(json.dumps({"traceEvents": events}))
    trace = formats.read(file)
    assert trace.run.source == "chrome"
    found = {row["name"]: row for row in rows(trace)}
    assert (found["outer"]["start_ns"], found["outer"]["end_ns"]) == (10_000, 20_000)
    assert (found["inner"]["start_ns"], found["inner"]["end_ns"]) == (11_500, 12_000)
    assert (found["request"]["start_ns"], found["request"]["end_ns"]) == (5_000, 50_000)
    assert found["inner"]["lane"] == "worker"
    message = found["nccl:all_reduce"]
    assert (message["kind"], message["op"], message["seq"]) == ("message", "all_reduce", 0)
    assert any("1 end without a beginning" in note for note in trace.run.notes)


def timeline(path: Path, *, closed: bool) -> None:
    """Two tensors, reduced twice; rank 1 is late the first time, and remembered the second."""
    events: list[dict[str, Any]] = [
        {
            "name": "process_name",
            "ph": "M",
            "pid": 0,
            "args": {"start_time_since_epoch_in_micros": 1_700_000_000_000_000},
        }
    ]
    for pid, name in ((1, "layer1.weight"), (2, "layer2.weight")):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        begin = 100 * pid
        events += [
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": begin, "pid": pid},
            {"ph": "X", "name": "0", "ts": begin, "pid": pid, "dur": 0},
            {"ph": "X", "name": "1", "ts": begin + 30, "pid": pid, "dur": 0},
            {"ph": "E", "ts": begin + 31, "pid": pid},
        ]
        for again in (0, 1000):
            events += [
                {"ph": "B", "name": "ALLREDUCE", "ts": begin + 32 + again, "pid": pid},
                {
                    "ph": "B",
                    "name": "MEMCPY_IN_FUSION_BUFFER",
                    "ts": begin + 33 + again,
                    "pid": pid,
                },
                {"ph": "E", "ts": begin + 35 + again, "pid": pid},
                {"ph": "B", "name": "GLOO_ALLREDUCE", "ts": begin + 35 + again, "pid": pid},
                {"ph": "E", "ts": begin + 60 + again, "pid": pid},
                {
                    "ph": "E",
                    "ts": begin + 61 + again,
                    "pid": pid,
                    "args": {"dtype": "float32", "shape": "[10, 20]"},
                },
            ]
    events.append({"ph": "i", "name": "CYCLE_START", "ts": 5000, "s": "g"})
    text = ",\n".join(json.dumps(event) for event in events)
    path.write_text("[\n" + text + ("]" if closed else ",\n"))


def transfers(trace: ImportedTrace, rank: int) -> list[dict[str, Any]]:
    return [
        row for row in rows(trace, rank) if row["kind"] == "message" and row["op"] != "negotiate"
    ]


def negotiations(trace: ImportedTrace, rank: int) -> list[dict[str, Any]]:
    return [row for row in rows(trace, rank) if row["op"] == "negotiate"]


@pytest.mark.parametrize("closed", [True, False])
def test_horovod_timeline(tmp_path: Path, closed: bool) -> None:
    timeline(tmp_path / "timeline.json", closed=closed)
    trace = formats.read(tmp_path / "timeline.json")
    assert trace.run.source == "horovod"
    assert [info.rank for info in trace.run.ranks] == [0, 1]
    epoch = 1_700_000_000_000_000_000
    waits = [negotiations(trace, rank) for rank in (0, 1)]
    zero, one = transfers(trace, 0), transfers(trace, 1)
    assert [row["name"] for row in zero] == ["layer1.weight", "layer2.weight"] * 2
    assert [row["bytes"] for row in zero] == [800] * 4
    assert [row["seq"] for row in zero] == [row["seq"] for row in one] == [0, 1, 2, 3]
    # Rank 1 was ready 30 microseconds behind rank 0; of the second round nothing is known.
    assert [row["seq"] for row in waits[0]] == [row["seq"] for row in waits[1]] == [0, 1]
    assert waits[1][0]["start_ns"] - waits[0][0]["start_ns"] == 30_000
    assert waits[0][0]["start_ns"] == epoch + 100_000
    assert {side[0]["end_ns"] for side in waits} == {epoch + 131_000}
    # What Gloo did, without the copy into the fusion buffer.
    for row in (zero[0], one[0]):
        assert (row["start_ns"], row["end_ns"]) == (epoch + 135_000, epoch + 160_000)
    tensors = trace.run.ranks[0].tensors
    assert [tensor.shape for tensor in tensors] == [(10, 20), (10, 20)]
    assert zero[0]["tensors"] == [tensors[0].id]
    assert sum(row["kind"] == "copy" for row in rows(trace, 0)) == 4
    assert any("only rank 0 writes" in note for note in trace.run.notes)
    assert any("2 of 4 operations were known to Horovod's cache" in n for n in trace.run.notes)


def test_horovod_operations_that_change_shape(tmp_path: Path) -> None:
    """A timeline gives the output's shape, and operations may end within a microsecond."""
    events: list[dict[str, Any]] = []
    for pid, op in enumerate(("ALLGATHER", "ADASUM", "BARRIER"), start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{op}.1"}})
        for _ in range(2):
            events += [
                {"ph": "B", "name": f"NEGOTIATE_{op}", "ts": 7, "pid": pid},
                {"ph": "X", "name": "1", "ts": 7, "pid": pid, "dur": 0},
                {"ph": "X", "name": "0", "ts": 7, "pid": pid, "dur": 0},
                {"ph": "E", "ts": 7, "pid": pid},
                {"ph": "B", "name": op, "ts": 7, "pid": pid},
                {"ph": "B", "name": "WAIT_FOR_DATA", "ts": 7, "pid": pid},
                {"ph": "E", "ts": 7, "pid": pid},
            ]
            end: dict[str, Any] = {"ph": "E", "ts": 7, "pid": pid}
            if op != "BARRIER":
                end["args"] = {"dtype": "float16", "shape": "[4, 3]"}
            events.append(end)
    (tmp_path / "timeline.json").write_text(json.dumps(events))
    trace = formats.read(tmp_path / "timeline.json")
    for rank in (0, 1):
        messages = transfers(trace, rank)
        assert [(row["op"], row["bytes"], row["out_bytes"]) for row in messages] == [
            *[("all_gather", None, 24)] * 2,
            *[("all_reduce", 24, 24)] * 2,
            *[("barrier", None, None)] * 2,
        ]
        assert all(row["status"] == "ok" for row in messages)
    waits = [row["name"] for row in rows(trace, 0) if row["kind"] == "host"]
    assert waits == ["WAIT_FOR_DATA"] * 6


def test_horovod_tensors_in_one_fusion_buffer_are_one_message(tmp_path: Path) -> None:
    """As a real timeline has it: two tensors are copied in together, the third goes by itself."""
    events: list[dict[str, Any]] = []
    for pid in (1, 2, 3):
        events += [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"t{pid}"}},
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 10 + pid, "pid": pid},
            {"ph": "X", "name": "1", "ts": 20 + pid, "pid": pid, "dur": 0},
            {"ph": "X", "name": "0", "ts": 30 + pid, "pid": pid, "dur": 0},
            {"ph": "E", "ts": 30 + pid, "pid": pid},
        ]
    for batch, start in (((1, 2), 40), ((3,), 70)):
        events += [{"ph": "B", "name": "ALLREDUCE", "ts": start, "pid": pid} for pid in batch]
        for offset, name in enumerate((MEMCPY, "MPI_ALLREDUCE", MEMCPY.replace("IN", "OUT", 1))):
            at = start + 5 * offset
            events += [{"ph": "B", "name": name, "ts": at + 1, "pid": pid} for pid in batch]
            events += [{"ph": "E", "ts": at + 5, "pid": pid} for pid in batch]
        end = {"dtype": "float32", "shape": "[8]"}
        events += [{"ph": "E", "ts": start + 20, "pid": pid, "args": end} for pid in batch]
    (tmp_path / "timeline.json").write_text(json.dumps(events))
    trace = formats.read(tmp_path / "timeline.json")
    for rank, ready in ((0, 30), (1, 20)):
        fused, alone = transfers(trace, rank)
        assert (fused["name"], fused["bytes"], fused["tensors"]) == ("t1 + 1", 64, [0, 1])
        assert (alone["name"], alone["bytes"], alone["tensors"]) == ("t3", 32, [2])
        # The last of its tensors is ready then; MPI works between the copies.
        assert negotiations(trace, rank)[0]["start_ns"] == (ready + 2) * 1000
        assert (fused["start_ns"], fused["end_ns"]) == (46_000, 50_000)
        assert [fused["seq"], alone["seq"]] == [0, 1]


def broadcasts(path: Path, *, queue_us: int, again: bool = False, cut: bool = False) -> None:
    """Three broadcasts of 100 us that wait for rank 1, and then one behind the other."""
    events: list[dict[str, Any]] = []
    for pid in (1, 2, 3):
        name = {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"w{pid}"}}
        begin = {"ph": "B", "name": "NEGOTIATE_BROADCAST", "ts": pid, "pid": pid}
        ready = {"ph": "X", "name": "0", "ts": pid, "pid": pid, "dur": 0}
        events += [name, begin, ready, *([name, begin, ready] if again else [])]
    for pid in (1, 2, 3):
        ready = {"ph": "X", "name": "1", "ts": 1000 + pid, "pid": pid, "dur": 0}
        events += [ready, {"ph": "E", "ts": 1000 + pid, "pid": pid}]
    for pid in (1, 2, 3):
        at = 1010 + queue_us * pid + 200 * pid
        events += [
            {"ph": "B", "name": "BROADCAST", "ts": at, "pid": pid},
            {"ph": "B", "name": "WAIT_FOR_OTHER_TENSOR_DATA", "ts": at, "pid": pid},
            {"ph": "E", "ts": at + 40, "pid": pid},
            {"ph": "B", "name": "MPI_BCAST", "ts": at + 40, "pid": pid},
            {"ph": "E", "ts": at + 140, "pid": pid},
            {"ph": "E", "ts": at + 145, "pid": pid},
        ]
    text = ",\n".join(json.dumps(event) for event in (events[:-2] if cut else events))
    path.write_text("[\n" + text + ",\n")


@pytest.mark.parametrize("queue_us", [0, 5000])
def test_horovod_queueing_is_no_transfer(tmp_path: Path, queue_us: int) -> None:
    broadcasts(tmp_path / "timeline.json", queue_us=queue_us)
    analysis = analyzed(tmp_path / "timeline.json", tmp_path / "trace")
    by_op = {row.op: row for row in analysis.collectives}
    broadcast, negotiation = by_op["broadcast"], by_op["negotiate"]
    assert (broadcast.count, broadcast.transfer_us_total) == (3, 300)
    assert (broadcast.transfer_us, broadcast.wait_us) == (100, 0)
    assert (negotiation.count, negotiation.arrival_skew_us) == (3, 1000)


def test_horovod_timeline_that_is_cut_off_in_an_operation(tmp_path: Path) -> None:
    broadcasts(tmp_path / "timeline.json", queue_us=0, cut=True)
    trace = formats.read(tmp_path / "timeline.json")
    for rank in (0, 1):
        assert [row["status"] for row in transfers(trace, rank)] == ["ok", "ok", "open"]
        assert transfers(trace, rank)[-1]["end_ns"] is None


def test_horovod_timeline_of_two_writers_is_damaged_and_no_hang(tmp_path: Path) -> None:
    broadcasts(tmp_path / "timeline.json", queue_us=0, again=True)
    analysis = analyzed(tmp_path / "timeline.json", tmp_path / "trace")
    assert analysis.hangs == ()
    assert analysis.trace.status == "partial"
    assert any("several processes wrote into this file" in each for each in analysis.trace.notes)
    [row] = [row for row in analysis.collectives if row.op == "broadcast"]
    assert (row.count, row.transfer_us_total) == (3, 300)


def analyzed(path: Path, target: Path) -> Analysis:
    save(formats.read(path), target, force=False)
    return analyze(open_trace(target))


def test_flight_recorder_of_a_real_job(foreign: Path) -> None:
    trace = formats.read(foreign / "flight-recorder")
    assert trace.run.source == "flight-recorder"
    assert [info.rank for info in trace.run.ranks] == [0, 1]
    sides = [rows(trace, rank) for rank in (0, 1)]
    for side in sides:
        # What record.py does in each of its four steps, behind what DDP does at its start.
        assert [row["op"] for row in side][-5:-1].count("all_reduce") == 2
        assert sum(row["op"] == "all_gather" and row["bytes"] == 400 for row in side) == 4
        assert sum(row["op"] == "all_reduce" and row["bytes"] == 38440 for row in side) == 4
        assert all(row["group"] == "0" and row["status"] == "ok" for row in side)
    assert [(row["seq"], row["op"]) for row in sides[0]] == [
        (row["seq"], row["op"]) for row in sides[1]
    ]
    assert trace.run.ranks[0].groups[0].ranks == (0, 1)
    assert "0" in trace.run.labels["flight_recorder_status"]


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000 + 1000 * number,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 8]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        **more,
    }


@pytest.mark.parametrize("text", [False, True])
def test_flight_recorder_of_a_hang(tmp_path: Path, text: bool) -> None:
    done = {"time_discovered_completed_ns": 1_700_000_000_000_009_000, "state": "completed"}
    pair = {"profiling_name": "nccl:send 0->1", "is_p2p": True}
    dump = {
        "version": "2.10",
        "nccl_version": "2.27.3",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "entries": [entry(1, **done), entry(2, **pair), entry(3), "junk", {"profiling_name": 4}],
    }
    content = json.dumps(dump).encode() if text else pickle.dumps(dump)
    (tmp_path / "trace_rank_0").write_bytes(content)
    trace = formats.read(tmp_path)
    first, send, hanging = rows(trace)
    assert (first["status"], first["end_ns"]) == ("ok", 1_700_000_000_000_009_000)
    assert (first["bytes"], first["dtype"], first["seq"]) == (64, "bfloat16", 1)
    assert (send["op"], send["peer"], send["seq"]) == ("send", 1, 0)
    assert (hanging["status"], hanging["end_ns"]) == ("open", None)
    assert any("2 entries" in note for note in trace.run.notes)
    assert any("1 of 2 ranks has no dump" in note for note in trace.run.notes)


def dump(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
            "1": {"name": "1", "desc": "pipeline", "ranks": "[2, 3]"},
        },
        "entries": entries,
    }


def test_flight_recorder_of_calls_that_were_issued_as_one(tmp_path: Path) -> None:
    """As PyTorch writes them: only the last entry of a coalesced call is ever completed."""
    done = {"time_discovered_completed_ns": 1_700_000_000_000_900_000, "state": "completed"}
    nothing = {"input_sizes": [], "input_dtypes": [], "output_sizes": [], "output_dtypes": []}
    for place in (0, 1):
        pairs = {
            "process_group": ("1", "pipeline"),
            "collective_seq_id": 0,
            "p2p_seq_id": 1,
            "is_p2p": True,
        }
        gathered = {"profiling_name": "nccl:_all_gather_base", "collective_seq_id": 2}
        entries = [
            entry(1, **done),
            entry(2, profiling_name=f"nccl:send {place}->{1 - place}", **pairs),
            entry(3, profiling_name=f"nccl:recv {place}<-{1 - place}", **pairs),
            entry(4, profiling_name="nccl:coalesced", **pairs, **nothing, **done),
            entry(5, **gathered),
            entry(6, **gathered, input_dtypes=["Float"]),
            entry(7, profiling_name="nccl:coalesced", collective_seq_id=2, **nothing, **done),
            entry(8, collective_seq_id=3),
        ]
        content = pickle.dumps(dump(entries))
        (tmp_path / f"nccl_trace_rank_{2 + place}").write_bytes(content)
    trace = formats.read(tmp_path)
    for rank in (2, 3):
        first, send, receive, gather, hanging = rows(trace, rank)
        assert (first["op"], first["seq"], first["status"]) == ("all_reduce", 1, "ok")
        # The other side is named by its place in the group of ranks 2 and 3.
        assert (send["op"], send["peer"], send["status"]) == ("send", 5 - rank, "ok")
        assert (receive["op"], receive["peer"], receive["status"]) == ("recv", 5 - rank, "ok")
        assert (gather["op"], gather["seq"], gather["status"]) == ("all_gather", 2, "ok")
        assert gather["bytes"] == 32 * 2 + 32 * 4
        assert gather["dtype"] is None
        assert (hanging["seq"], hanging["status"]) == (3, "open")


def test_flight_recorder_of_an_older_version(tmp_path: Path) -> None:
    old = entry(1, state="completed")
    old["seq_id"] = old.pop("collective_seq_id")
    del old["p2p_seq_id"]
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps(dump([old])))
    [row] = rows(formats.read(tmp_path))
    assert (row["seq"], row["status"], row["end_ns"]) == (1, "ok", None)


class Malicious:
    """Unpickled by a careless reader, this makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, protocol: int) -> None:
    proof = tmp_path / "proof"
    bad = pickle.dumps({"entries": [Malicious(proof)], "version": "2"}, protocol)
    pickle.loads(bad)  # it works on a careless reader
    assert proof.exists()
    proof.unlink()
    (tmp_path / "trace_rank_0").write_bytes(bad)
    with pytest.raises(TraceError, match="not a pickle of plain containers"):
        formats.read(tmp_path / "trace_rank_0")
    assert not proof.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo entry number 2**31 - 1
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # bytes of 2**63 - 1
        b"\x80\x04" + b"(" * 100_000,
        b"\x80\x02PX\n.",
        b"\x80",
    ],
)
def test_hostile_pickles_end_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "entries"
    file.write_bytes(content)
    with pytest.raises(TraceError) as error:
        plain_pickle.load(file)
    assert "\n" not in str(error.value)


def test_a_deep_pickle_is_no_dump(tmp_path: Path) -> None:
    file = tmp_path / "entries"
    file.write_bytes(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".version")
    with pytest.raises(TraceError):
        formats.read(file)


def header(rank: int, communicator: str = "0x9e7a", size: int = 2) -> dict[str, Any]:
    return {"id": communicator, "comm_name": "unknown", "rank": rank, "n_ranks": size, "nnodes": 1}


def metadata(process: int, number: int) -> dict[str, Any]:
    return {
        "inspector_output_format_version": "v4.0",
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1_700_000_000_000_000 + 1000 * number,
        "hostname": "node-a",
        "pid": 100 + process,
    }


def ran(kind: str, number: int) -> dict[str, Any]:
    """A verbose record's times: the host hands the operation over in 5 us, kernels run later."""
    begin = 1_700_000_000_000_000 + 1000 * number
    channels = [
        {"channel_id": 0, "kernel_start_ts": begin + 120, "kernel_stop_ts": begin + 500},
        {"channel_id": 1, "kernel_start_ts": begin + 130, "kernel_stop_ts": begin + 520},
    ]
    trace = {f"{kind}_start_ts": begin, f"{kind}_stop_ts": begin + 5, "kernel_events": channels}
    return {"event_trace_ts": trace}


def collective(number: int, coll: str = "AllReduce", **more: Any) -> dict[str, Any]:
    return {
        "coll": coll,
        "coll_sn": number,
        "coll_msg_size_bytes": 65536,
        "coll_exec_time_us": 110,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 1.19,
        "coll_busbw_gbs": 0.6,
        **more,
    }


def record(rank: int, number: int, coll: str = "AllReduce", **more: Any) -> dict[str, Any]:
    return {
        "header": header(rank),
        "metadata": metadata(rank, number),
        "coll_perf": collective(number, coll, **more),
    }


def inspector_files(folder: Path, processes: list[list[Any]]) -> None:
    """One file per process, as the Inspector names them, one record a line."""
    for process, records in enumerate(processes):
        text = "\n".join(json.dumps(each) for each in records)
        (folder / f"node-a-pid{100 + process}.log").write_text(text + "\n")


def test_nccl_inspector(tmp_path: Path) -> None:
    inspector_files(
        tmp_path,
        [
            [
                record(rank, 1, **ran("coll", 1)),
                record(rank, 2),
                record(rank, 1, "ReduceScatter"),
                record(rank, 1, "All2All", coll_exec_time_us=12.5),
                "no record",
            ]
            for rank in (0, 1)
        ],
    )
    trace = formats.read(tmp_path)
    assert trace.run.source == "nccl-inspector"
    sides = [rows(trace, rank) for rank in (0, 1)]
    for side in sides:
        by_key = {(row["op"], row["seq"]): row for row in side}
        first, second = by_key.pop(("all_reduce", 1)), by_key.pop(("all_reduce", 2))
        assert set(by_key) == {("reduce_scatter", 1), ("all_to_all", 1)}
        # From the first channel's kernel to the last one's, not when the host handed it over.
        assert first["end_ns"] - first["start_ns"] == 400_000
        assert first["start_ns"] - first["enqueue_ns"] == 120_000
        assert second["end_ns"] - second["start_ns"] == 110_000
        # The Inspector counts a reduce-scatter by its output; a rank puts in all shares.
        assert by_key["reduce_scatter", 1]["bytes"] == 2 * 65536
        assert by_key["all_to_all", 1]["end_ns"] - by_key["all_to_all", 1]["start_ns"] == 12_500
        # NCCL numbers each function for itself: the same number must not join two of them.
        assert first["group"] != by_key["reduce_scatter", 1]["group"]
    assert trace.run.ranks[1].groups[0].ranks == (0, 1)
    # Of ranks whose positions in time are made up nothing may be said to come late.
    assert trace.run.ranks[0].clock_domain != trace.run.ranks[1].clock_domain
    assert any("positions in time are not" in note for note in trace.run.notes)
    assert any("2 lines without a record" in note for note in trace.run.notes)


@pytest.mark.parametrize(
    ("coll", "op", "parts"),
    [
        ("AllReduce", "all_reduce", (1, 1, 2 * 3 / 4)),
        ("Broadcast", "broadcast", (1, 1, 1)),
        ("Reduce", "reduce", (1, 1, 1)),
        ("AllGather", "all_gather", (1, 4, 3 / 4)),
        ("ReduceScatter", "reduce_scatter", (4, 4, 3 / 4)),
        ("AlltoAll", "all_to_all", (4, 4, 3 / 4)),
        ("Gather", "gather", (1, 4, 3 / 4)),
        ("Scatter", "scatter", (4, 4, 3 / 4)),
    ],
)
def test_nccl_inspector_bandwidths(
    tmp_path: Path, coll: str, op: str, parts: tuple[int, int, float]
) -> None:
    """The traffic and factors of `inspectorComputeCollBw`; of the last three, of nccl-tests."""
    given, traffic, factor = parts
    size, us = 65536, 400
    records = [
        {**record(rank, 1, coll, **ran("coll", 1)), "header": header(rank, size=4)}
        for rank in range(4)
    ]
    (tmp_path / "logs").mkdir()
    inspector_files(tmp_path / "logs", [[each] for each in records])
    [row] = analyzed(tmp_path / "logs", tmp_path / "trace").collectives
    algorithm = traffic * size * 8 / (us * 1e3)
    assert (row.op, row.bytes) == (op, given * size)
    assert row.algbw_gbps == pytest.approx(algorithm)
    assert row.busbw_gbps == pytest.approx(algorithm * factor)


def test_nccl_inspector_with_several_communicators(tmp_path: Path) -> None:
    """A header's rank is the place in its communicator, not in the job."""

    def pair(place: int, process: int, number: int) -> dict[str, Any]:
        perf = {
            "p2p": "Send" if place == 0 else "Recv",
            "p2p_sn": number,
            "p2p_peer": 1 - place,
            "p2p_msg_size_bytes": 4096,
            "p2p_exec_time_us": 7,
            **ran("p2p", number),
        }
        head = header(place, f"0xpair{process % 2}")
        return {"header": head, "metadata": metadata(process, number), "p2p_perf": perf}

    def everyone(process: int, number: int) -> dict[str, Any]:
        perf = collective(number, **ran("coll", number))
        head = header(process, "0xworld", 4)
        return {"header": head, "metadata": metadata(process, number), "coll_perf": perf}

    # Ranks 0 and 2 are one pair, 1 and 3 the other.
    files = [[everyone(rank, 1), pair(rank // 2, rank, 5)] for rank in range(4)]
    inspector_files(tmp_path, files)
    trace = formats.read(tmp_path)
    assert [info.rank for info in trace.run.ranks] == [0, 1, 2, 3]
    assert {info.world_size for info in trace.run.ranks} == {4}
    for rank in range(4):
        reduced, sent = rows(trace, rank)
        assert (reduced["op"], reduced["group"], reduced["seq"]) == ("all_reduce", "0xworld", 1)
        assert (sent["op"], sent["peer"]) == ("send" if rank < 2 else "recv", (rank + 2) % 4)
        assert sent["seq"] == 0
        assert (sent["bytes"], sent["out_bytes"]) == ((4096, None) if rank < 2 else (None, 4096))
    assert {group.name: group.ranks for group in trace.run.ranks[3].groups} == {
        "0xworld": (0, 1, 2, 3),
        "0xpair1": (1, 3),
    }
    assert trace.run.status == "complete"
    assert {info.clock_domain for info in trace.run.ranks} == {"node-a"}
    for file in tmp_path.iterdir():
        file.write_text("\n".join(line for line in file.read_text().splitlines()[1:]))
    trace = formats.read(tmp_path)
    assert [info.rank for info in trace.run.ranks] == [0, 1, 2, 3]
    assert any("no communicator has a record of every process" in note for note in trace.run.notes)


def test_nccl_inspector_whose_records_share_a_header(tmp_path: Path) -> None:
    """From version 4.3 on a line in front of a communicator's records names its rank."""
    files: list[list[Any]] = []
    for rank in (0, 1):
        lost = {"coll_records": 2, "coll_dropped_total": 40 * rank, "p2p_dropped_total": 0}
        marker = {"header": header(rank), "metadata": metadata(rank, 9), "dump_stats": lost}
        proxy = {"record_type": "proxy_op", "rank": rank, "parent_type": "coll", "parent_sn": 1}
        records = [{"coll_perf": collective(n, **ran("coll", n))} for n in (1, 2)]
        files.append([marker, *records, proxy, marker])
    inspector_files(tmp_path, files)
    trace = formats.read(tmp_path)
    assert [[row["seq"] for row in rows(trace, rank)] for rank in (0, 1)] == [[1, 2], [1, 2]]
    assert trace.run.ranks[1].groups[0].ranks == (0, 1)
    [note] = trace.run.notes
    assert note.startswith("40 operations were overwritten")


def test_nccl_inspector_of_a_process_with_two_devices(tmp_path: Path) -> None:
    both = [
        {**record(rank, number), "metadata": metadata(0, number)}
        for number in (1, 2)
        for rank in (0, 1)
    ]
    inspector_files(tmp_path, [both])
    trace = formats.read(tmp_path)
    assert [info.rank for info in trace.run.ranks] == [0, 1]
    assert [len(rows(trace, rank)) for rank in (0, 1)] == [2, 2]


def test_a_folder_of_several_formats(foreign: Path, tmp_path: Path) -> None:
    for number in range(2):
        content = (foreign / "kineto-cpu" / f"rank-{number}.json.gz").read_bytes()
        (tmp_path / f"rank-{number}.json.gz").write_bytes(content)
    timeline(tmp_path / "timeline.json", closed=True)
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "notes.txt").write_text("hello")
    trace = formats.read(tmp_path)
    assert trace.run.source == "kineto"
    assert any("1 file of another format left out" in note for note in trace.run.notes)
    assert any("'empty.json'" in note for note in trace.run.notes)


def test_what_is_no_trace_is_not_recognized(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert not formats.recognizes(tmp_path)
    assert not formats.recognizes(tmp_path / "notes.txt")
    assert not formats.recognizes(tmp_path / "missing")
    with pytest.raises(TraceError, match="not in a format that can be imported"):
        formats.read(tmp_path)


@pytest.mark.parametrize(("first", "kept"), [(3_600_000_000.0, False), (40.0, True)])
def test_a_chrome_event_at_0_far_before_all_others_has_no_time(
    tmp_path: Path, first: float, kept: bool
) -> None:
    events = [
        {"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": 5}
        for name, ts in (("lost", 0), ("a", first), ("b", first + 30))
    ]
    events.append({"ph": "i", "name": "mark", "pid": 1, "tid": 1, "ts": 0})
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    trace = formats.read(tmp_path / "a.json")
    names = {row["name"] for row in rows(trace)}
    assert names == ({"lost", "a", "b", "mark"} if kept else {"a", "b"})
    said = any("2 events without a usable time left out" in note for note in trace.run.notes)
    assert said is not kept
