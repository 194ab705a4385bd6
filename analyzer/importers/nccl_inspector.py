"""Output of NVIDIA's NCCL Inspector: one JSON object per operation and rank, one per line.

Every record carries its communicator and process (`header`, `metadata`), or, from version 4.3
on, a ``dump_stats`` line carries them for the records behind it. A header's `rank` is the place
in that communicator: a process that is in several has a different one in each. The rank of a
process in the job is its place in the communicator that all processes are in.

`coll_start_ts` and `coll_stop_ts` are when the host handed the operation over; it ran from the
first `kernel_start_ts` to the last `kernel_stop_ts`. Without NCCL_INSPECTOR_DUMP_VERBOSE=1 a
record contains its duration only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.chrome.trace_events import UNDECODABLE
from ddltrace.analyzer.importers.communication import MAX_INT32, count, public_op
from ddltrace.analyzer.importers.imported import MAX_TIME_NS, ImportedTrace
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.nccl_operations import Operation, Process, bytes_of, trace_of
from ddltrace.analyzer.importers.rank_files import MAX_RANK
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace.run_info import RunInfo

NAME: Final = "nccl-inspector"

_MARKS: Final = re.compile(rb'"coll_perf"|"p2p_perf"|"inspector_output_format_version"')
_MAX_LINE: Final = 16 << 20


class _Header(msgspec.Struct):
    id: Any = None
    comm_name: Any = None
    rank: Any = None
    n_ranks: Any = None


class _Metadata(msgspec.Struct):
    dump_timestamp_us: Any = None
    hostname: Any = None
    pid: Any = None


class _Kernel(msgspec.Struct):
    kernel_start_ts: Any = None
    kernel_stop_ts: Any = None


class _Times(msgspec.Struct):
    coll_start_ts: Any = None
    p2p_start_ts: Any = None
    kernel_events: list[_Kernel] = msgspec.field(default_factory=list)


class _Collective(msgspec.Struct):
    coll: Any = None
    coll_sn: Any = None
    coll_msg_size_bytes: Any = None
    coll_exec_time_us: Any = None
    event_trace_ts: _Times | None = None


class _Pair(msgspec.Struct):
    p2p: Any = None
    p2p_peer: Any = None
    p2p_msg_size_bytes: Any = None
    p2p_exec_time_us: Any = None
    event_trace_ts: _Times | None = None


class _Stats(msgspec.Struct):
    coll_dropped_total: Any = None
    p2p_dropped_total: Any = None


class _Record(msgspec.Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _Pair | None = None
    dump_stats: _Stats | None = None
    record_type: Any = None


_RECORD: Final = msgspec.json.Decoder(_Record)


@dataclass
class _Found:
    """What the files hold."""

    operations: list[Operation] = field(default_factory=list)
    damaged: int = 0
    overwritten: dict[tuple[str, Process], int] = field(default_factory=dict)


def recognizes(head: bytes) -> bool:
    """Whether a file with this head was written by the Inspector."""
    return _MARKS.search(head) is not None


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads the Inspector's files of a job.

    Raises:
        TraceError: No operation is found.
    """
    run = RunInfo(status="complete", level="comm", source=NAME)
    found = _Found()
    for path in paths:
        blocks = Blocks(path)
        _read_file(blocks, found)
        if blocks.damage:
            run.notes.append(f"{path.name}: {blocks.damage}")
    if not found.operations:
        raise TraceError(f"{paths[0]} holds no operation that can be read")
    if found.damaged:
        run.notes.append(
            f"{counted(found.damaged, 'line')} without a record of an operation "
            f"{agreeing(found.damaged, 'is')} left out"
        )
    if lost := sum(found.overwritten.values()):
        run.notes.append(
            f"{counted(lost, 'operation', 'was')} overwritten in the Inspector's memory before it "
            "wrote them"
        )
    trace = trace_of(found.operations, run)
    if any(each.guessed for each in found.operations):
        run.notes.append(
            "records carry the time at which they were written out, not when the operation ran: "
            "durations are measured, positions in time are not; NCCL_INSPECTOR_DUMP_VERBOSE=1 "
            "records them"
        )
    return trace


def _read_file(blocks: Blocks, found: _Found) -> None:
    header, metadata = None, None
    for text in _objects(blocks):
        try:
            record = _RECORD.decode(text.strip().rstrip(b","))
        except UNDECODABLE:
            found.damaged += 1
            continue
        if record.dump_stats is not None:
            header, metadata = record.header, record.metadata
            _note_overwritten(record, found)
        elif record.record_type is None:
            operation = _operation(record, record.header or header, record.metadata or metadata)
            if operation is None:
                found.damaged += 1
            else:
                found.operations.append(operation)


def _note_overwritten(record: _Record, found: _Found) -> None:
    """The counts are of a communicator since its beginning: the largest is all."""
    if record.header is None or record.metadata is None or record.dump_stats is None:
        return
    stats = record.dump_stats
    lost = (count(stats.coll_dropped_total) or 0) + (count(stats.p2p_dropped_total) or 0)
    key = (clean(record.header.id, 100), _process_of(record.metadata))
    found.overwritten[key] = max(lost, found.overwritten.get(key, 0))


def _objects(blocks: Blocks) -> Iterator[bytes]:
    """The file's lines, without those that are empty."""
    pending = b""
    for block in blocks:
        lines = (pending + block).split(b"\n")
        pending = lines.pop()
        if len(pending) > _MAX_LINE:
            raise TraceError(
                f"a line of more than {_MAX_LINE >> 20} MB: not a file of NCCL Inspector"
            )
        yield from (line for line in lines if line.strip())
    if pending.strip():
        yield pending


def _operation(
    record: _Record, header: _Header | None, metadata: _Metadata | None
) -> Operation | None:
    if header is None or metadata is None:
        return None
    collective, pair = record.coll_perf, record.p2p_perf
    if collective is not None:
        name, size, duration = (
            collective.coll,
            collective.coll_msg_size_bytes,
            collective.coll_exec_time_us,
        )
        times = collective.event_trace_ts or _Times()
    elif pair is not None:
        name, size, duration = pair.p2p, pair.p2p_msg_size_bytes, pair.p2p_exec_time_us
        times = pair.event_trace_ts or _Times()
    else:
        return None
    place, ranks = count(header.rank, MAX_RANK), count(header.n_ranks) or 0
    if place is None or ranks > MAX_RANK or not isinstance(name, str):
        return None
    ran = _ran(times)
    span = ran or _before(_time(duration), _time(metadata.dump_timestamp_us))
    if span is None:
        return None
    op = public_op(name) or clean(name, 60)
    given, taken = bytes_of(op, count(size), ranks)
    return Operation(
        process=_process_of(metadata),
        place=place,
        size=max(ranks, place + 1),
        communicator=clean(header.id, 100),
        label=clean(header.comm_name, 100) if isinstance(header.comm_name, str) else "",
        op=op,
        seq=None if collective is None else count(collective.coll_sn),
        peer=None if pair is None else count(pair.p2p_peer),
        bytes=given,
        out_bytes=taken,
        start_ns=span[0],
        end_ns=span[1],
        enqueue_ns=None if ran is None else _time(times.coll_start_ts or times.p2p_start_ts),
        guessed=ran is None,
    )


def _ran(times: _Times) -> tuple[int, int] | None:
    """From the first channel's start to the last one's end; None if that was not recorded."""
    starts = [_time(each.kernel_start_ts) for each in times.kernel_events]
    ends = [_time(each.kernel_stop_ts) for each in times.kernel_events]
    known = [start for start in starts if start], [end for end in ends if end]
    if not all(known) or max(known[1]) < min(known[0]):
        return None
    return min(known[0]), max(known[1])


def _before(duration: int | None, end: int | None) -> tuple[int, int] | None:
    if duration is None or end is None or duration > end:
        return None
    return end - duration, end


def _process_of(metadata: _Metadata) -> Process:
    host = metadata.hostname
    name = clean(host, 200) if isinstance(host, str) else ""
    return (name, count(metadata.pid, MAX_INT32), None)


def _time(microseconds: Any) -> int | None:
    """Converts microseconds to nanoseconds; None for an invalid time."""
    if isinstance(microseconds, bool) or not isinstance(microseconds, (int, float)):
        return None
    if not 0 <= microseconds < MAX_TIME_NS // 1000:
        return None
    return round(microseconds * 1000)
