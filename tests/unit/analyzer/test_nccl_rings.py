"""Rings of NCCL's events: read, imported, and merged with a trace by hand-made files."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
from support import ring_writer
from support.ring_writer import RingWriter

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.importers.imported import Row, table_of
from ddltrace.analyzer.joined.nccl_events import nccl_events
from ddltrace.analyzer.nccl import ring_file
from ddltrace.analyzer.nccl.ring_file import read_ring
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo

COMM = 0xC0FFEE


def ring_of(rank: int, shift: int = 0) -> RingWriter:
    """Two all-reduces of 1000 floats with kernels and proxies, and a send, in ns."""
    ring = RingWriter(rank, 100 + rank)
    comm = ring.comm(COMM, rank, 2)
    for seq, start in enumerate((1000, 5000)):
        at = start + shift
        coll = ring.coll(comm, at, at + 50, seq, 1000)
        ring.add("kernel_ch", at + 100, at + 1100, comm=comm, parent=coll, sequence=7, value=1007)
        op = ring.add("proxy_op", at + 90, at + 900, comm=comm, parent=coll, peer=1 - rank, flags=1)
        ring.add(
            "proxy_step",
            at + 100,
            at + 800,
            comm=0,
            parent=op,
            value=4000,
            states=(at + 100, at + 200, at + 300),
        )
    peer = {"func": "Send" if rank == 0 else "Recv", "peer": 1 - rank}
    ring.add("p2p", 9000, 9010, comm=comm, datatype="ncclInt8", count=8, **peer)
    return ring


def test_reads_every_column(tmp_path: Path) -> None:
    ring = read_ring(ring_of(0).write(tmp_path))
    rows = ring.events.to_pylist()
    coll, kernel, op, step = rows[:4]
    assert (coll["func"], coll["bytes"], coll["seq"], coll["algo"]) == (
        "AllReduce",
        4000,
        0,
        "RING",
    )
    assert (coll["comm"], coll["comm_rank"], coll["comm_size"]) == (f"{COMM:016x}", 0, 2)
    assert (kernel["gpu_start_ns"], kernel["gpu_end_ns"]) == (7, 1007)
    assert (op["peer"], op["is_send"], step["bytes"]) == (1, True, 4000)
    # A step has the communicator of its operation.
    assert step["comm"] == coll["comm"]
    assert ring.notes == []


def test_a_ring_that_is_written_to(tmp_path: Path) -> None:
    writer = ring_of(0)
    writer.records[2]["stamp"] += 1
    numbers = read_ring(writer.write(tmp_path)).events["event"].to_pylist()
    assert numbers == [1, 2, 4, 5, 6, 7, 8, 9]


def test_open_ends_and_wrong_times_are_null(tmp_path: Path) -> None:
    writer = RingWriter(0, 1)
    comm = writer.comm(COMM, 0, 2)
    writer.add("coll", 1000, None, comm=comm)
    writer.add("coll", 1000, 900, comm=comm)
    assert read_ring(writer.write(tmp_path)).events["end_ns"].to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"magic": b"NOTARING"}, "no ring"),
        ({"version": 2}, "version 2; this ddltrace reads version 1"),
        ({"record_bytes": 8}, "version"),
        ({"capacity": 0}, "damaged"),
        ({"capacity": 0xFFFFFFFF}, "damaged"),
        ({"records_at": 8}, "damaged"),
        ({"opened_ns": 1 << 63}, "damaged"),
    ],
)
def test_other_files_are_refused(
    overrides: dict[str, object], message: str, tmp_path: Path
) -> None:
    writer = ring_of(0)
    writer.overrides = overrides
    with pytest.raises(TraceError, match=message) as caught:
        read_ring(writer.write(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 100, 5000, 100_000, 126_975])
def test_a_ring_without_a_whole_head_is_refused(size: int, tmp_path: Path) -> None:
    path = ring_of(0).write(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TraceError):
        read_ring(path)


def test_a_truncated_ring_is_read_in_part(tmp_path: Path) -> None:
    path = ring_of(0).write(tmp_path)
    path.write_bytes(path.read_bytes()[: 126_976 + 3 * 152 + 5])
    ring = read_ring(path)
    assert len(ring.events) == 3
    assert ring.notes == ["it is cut off: 3 of 64 records are there"]


def test_records_that_no_plugin_writes_are_left_out(tmp_path: Path) -> None:
    writer = ring_of(0)
    writer.records[0]["stamp"] = 2 * 40
    writer.records[1]["kind"] = 99
    writer.records[2]["comm"] = 5000
    writer.records[3]["start_ns"] = 1 << 63
    writer.records[4]["stamp"] = 2 * (5 + 64)  # more than were given out
    ring = read_ring(writer.write(tmp_path))
    assert len(ring.events) == 4
    assert ring.notes == ["5 records are damaged and left out"]


def test_any_content_gives_a_table_or_one_line(tmp_path: Path) -> None:
    whole = ring_of(0).bytes()
    noise = random.Random(7)
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(noise.randrange(1, 400)):
            low, high = noise.choice([(8, 210), (4096, 12400), (126_976, len(content))])
            content[noise.randrange(low, high)] = noise.randrange(256)
        path = tmp_path / "nccl-0-1.ring"
        path.write_bytes(content)
        try:
            table = read_ring(path).events
        except TraceError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            table.validate(full=True)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_records_are_analyzed_or_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    at = ring_writer._RECORDS_AT
    size = ring_file._RECORD.itemsize
    for rank in range(2):
        ring = RingWriter(rank, 10 + rank, host=f"host{rank}", capacity=256)
        comm = ring.comm(0xABC, rank, 2, 2)
        for number in range(chance.randint(1, 12)):
            begin = 1000 * number
            count = chance.choice([0, 1, 250, 1 << 40])
            coll = ring.coll(comm, begin + 1, begin + chance.choice([2, 900]), number, count)
            inner = {"comm": comm, "parent": coll, "channel": chance.randrange(4)}
            clock = [chance.randrange(1, 10**6) for _ in range(2)]
            ring.add("kernel_ch", begin + 2, begin + 3, **inner, sequence=clock[0], value=clock[1])
            op = ring.add("proxy_op", begin + 5, begin + 900, **inner, peer=chance.randint(-2, 3))
            for step in range(chance.randrange(3)):
                states = (begin + 6, begin + 7, begin + 8)
                ring.add(
                    "proxy_step", begin + 6, begin + 800, comm=comm, parent=op, steps=step,
                    value=chance.randrange(1 << 20), states=states,
                )  # fmt: skip
        content = bytearray(ring.bytes())
        for _ in range(chance.randint(1, 60)):
            place = at + chance.randrange(60) * size + chance.randrange(size)
            if chance.random() < 0.15:
                place = chance.randrange(at)
            content[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        (tmp_path / f"nccl-{rank}-{10 + rank}.ring").write_bytes(content)
    with contextlib.suppress(TraceError):
        json.dumps(analyze(open_trace(tmp_path)).to_json(), allow_nan=False)


def test_names_of_strangers_are_printable(tmp_path: Path) -> None:
    writer = RingWriter(0, 1)
    writer.coll(writer.comm(COMM, 0, 2), 1, 2, 0, 8, func="All\x1b[2J\nReduce")
    assert read_ring(writer.write(tmp_path)).events["func"].to_pylist() == ["All?[2J?Reduce"]


# --- a folder of rings alone ---


def test_a_folder_of_rings_is_a_trace(tmp_path: Path) -> None:
    for rank in range(2):
        ring_of(rank, shift=300 * rank).write(tmp_path)
    trace = open_trace(tmp_path)
    assert trace.ranks == [0, 1]
    rows = trace.events(0).to_pylist()
    # From the first channel's start to the last one's end; the send when it was enqueued.
    assert [(row["op"], row["start_ns"], row["end_ns"]) for row in rows] == [
        ("all_reduce", 1100, 2100),
        ("all_reduce", 5100, 6100),
        ("send", 9000, 9010),
    ]
    assert [row["enqueue_ns"] for row in rows] == [1000, 5000, 9000]
    assert any("2 messages end when NCCL has enqueued" in note for note in trace.notes)
    analysis = analyze(trace)
    assert analysis.trace.source == "nccl-ring"
    (row,) = analysis.collectives
    assert (row.op, row.count, row.bytes) == ("all_reduce", 2, 4000)
    # Rank 1 comes 300 ns later: rank 0 waits for it. The last one ends 1000 ns after that.
    assert (row.arrival_skew_us, row.transfer_us) == (pytest.approx(0.3), pytest.approx(1.0))


def test_sizes_of_communicators_that_nccl_does_not_tell(tmp_path: Path) -> None:
    """As in version 3 of the interface."""
    for rank in range(3):
        writer = RingWriter(rank, 100 + rank)
        comm = writer.comm(COMM, rank, -1)
        writer.coll(comm, 1000, 1010, 0, 10, func="AllGather")
        writer.write(tmp_path)
    trace = open_trace(tmp_path)
    assert trace.run.ranks[0].world_size == 3
    assert [trace.events(rank)["out_bytes"].to_pylist() for rank in range(3)] == [[120]] * 3


def test_messages_without_kernels_end_with_their_proxies(tmp_path: Path) -> None:
    writer = ring_of(0)
    writer.records = [each for each in writer.records if each["kind"] != 6]
    for number, record in enumerate(writer.records, 1):
        record["stamp"] = 2 * number
    writer.records[1]["parent"], writer.records[4]["parent"] = 1, 4
    (rank,) = open_trace(writer.write(tmp_path)).ranks
    rows = open_trace(tmp_path).events(rank).to_pylist()
    assert [(row["start_ns"], row["end_ns"]) for row in rows[:2]] == [(1090, 1900), (5090, 5900)]


def test_a_damaged_ring_beside_others_is_noted(tmp_path: Path) -> None:
    ring_of(0).write(tmp_path)
    bad = ring_of(1)
    bad.overrides = {"version": 9}
    bad.write(tmp_path)
    trace = open_trace(tmp_path)
    assert trace.ranks == [0]
    assert any("version 9" in note for note in trace.notes)
    assert trace.run.status == "partial"


# --- merged with a trace ---


def traced(folder: Path, buffers: tuple[int | None, ...] = (None, None, None)) -> Trace:
    """A traced rank whose messages NCCL's ring has too; the clock of the trace is its own."""
    info = RankInfo(
        rank=0,
        segment="rank-00000-0-100",
        world_size=2,
        pid=100,
        host="host",
        clock_domain="boot",
        tensors=[TensorInfo(0, "a.weight", (4,), "float32", 16), TensorInfo(1, "b", (4,), "f", 16)],
        groups=[GroupInfo("0", "", "nccl", (0, 1))],
    )

    def message(number: int, launched: int, tensors: tuple[int, ...], **more: object) -> Row:
        return Row(
            launched + 5, launched + 2000, "message", "all_reduce", "comm/0", step=number,
            id=number, op="all_reduce", group="0", seq=number, enqueue_ns=launched,
            status="ok", tensors=tensors, bytes=4000, buffer=buffers[number], **more,
        )  # fmt: skip

    rows = [message(0, 900, (0,)), message(1, 4900, (1, 0)), message(2, 20_000, (0,))]
    run = RunInfo(status="complete", ranks=[info])
    return Trace(folder, run, {info.segment: table_of(rows)})


def test_events_carry_the_names_of_tensors(tmp_path: Path) -> None:
    ring_of(0).write(tmp_path)
    rows = nccl_events(traced(tmp_path)).to_pylist()
    assert [(row["kind"], row["message"], row["step"], row["tensors"]) for row in rows] == [
        *[(kind, 0, 0, ["a.weight"]) for kind in ("coll", "kernel_ch", "proxy_op", "proxy_step")],
        *[(k, 1, 1, ["b", "a.weight"]) for k in ("coll", "kernel_ch", "proxy_op", "proxy_step")],
        ("p2p", None, None, None),
    ]


def test_messages_of_one_group_call_are_told_apart(tmp_path: Path) -> None:
    """All are launched before NCCL takes the first of them over."""
    writer = RingWriter(0, 100)
    comm = writer.comm(COMM, 0, 2)
    for seq in range(2):
        writer.coll(comm, 5000 + seq, 5010, seq, 1000)
    writer.write(tmp_path)
    rows = nccl_events(traced(tmp_path)).to_pylist()
    assert [row["message"] for row in rows] == [0, 1]


@pytest.mark.parametrize("of_output", [False, True])
def test_the_address_tells_which_of_two_messages_it_is(tmp_path: Path, of_output: bool) -> None:
    """Two threads launch equal messages of two groups; NCCL takes the later one over first."""
    writer = RingWriter(0, 100)
    for place, address in enumerate((0xB0, 0xA0)):
        comm = writer.comm(COMM + place, 0, 2)
        buffers = {"send_buffer": 0xC0, "recv_buffer": address} if of_output else {
            "send_buffer": address, "recv_buffer": 0xC0
        }  # fmt: skip
        writer.coll(comm, 5000 + place, 5010, 0, 1000, **buffers)
    writer.coll(comm, 20_000, 20_010, 1, 1000, send_buffer=0xD0)
    writer.write(tmp_path)
    rows = nccl_events(traced(tmp_path, (0xA0, 0xB0, 0xE0))).to_pylist()
    # The last one's address is a copy's, which no message has.
    assert [row["message"] for row in rows] == [1, 0, 2]
    # It could be of a message whose address is not known.
    rows = nccl_events(traced(tmp_path, (0xA0, 0xB0, None))).to_pylist()
    assert [row["message"] for row in rows] != [1, 0, 2]


def test_contradictions_give_no_name(tmp_path: Path) -> None:
    """A size that was never sent; an order that is not the group's; a call before all others."""
    writer = RingWriter(0, 100)
    comm = writer.comm(COMM, 0, 2)
    writer.coll(comm, 1000, 1010, 5, 1000)
    writer.coll(comm, 5000, 5010, 4, 1000)
    writer.coll(comm, 5020, 5030, 6, 999)
    writer.coll(comm, 100, 110, 7, 1000)
    writer.write(tmp_path)
    rows = nccl_events(traced(tmp_path)).to_pylist()
    assert [row["message"] for row in rows] == [None, 1, None, None]


def test_a_ring_of_another_process_is_left_out(tmp_path: Path) -> None:
    writer = ring_of(0)
    writer.pid = 77
    writer.write(tmp_path)
    trace = traced(tmp_path)
    assert len(nccl_events(trace)) == 0
    assert trace.notes == ["nccl-0-77.ring is left out: the trace has no process 77 of it"]
