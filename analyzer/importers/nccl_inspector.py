"""Output of NVIDIA's NCCL Inspector: one JSON object per collective and rank, one per line."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.communication import count, public_op
from ddltrace.analyzer.importers.imported import MAX_TIME_NS, ImportedTrace
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.rank_files import MAX_RANK
from ddltrace.analyzer.importers.rows import Row, table_of
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.analyzer.importers.trace_events import UNDECODABLE
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.store import GroupInfo, RankInfo, RunInfo, segment_name

NAME: Final = "nccl-inspector"

_MARKS: Final = re.compile(rb'"coll_perf"|"p2p_perf"|"inspector_output_format_version"')
_MAX_LINE: Final = 16 << 20


class _Header(msgspec.Struct):
    id: Any = None
    rank: Any = None
    n_ranks: Any = None


class _Metadata(msgspec.Struct):
    dump_timestamp_us: Any = None
    hostname: Any = None
    pid: Any = None


class _Times(msgspec.Struct):
    coll_start_ts: Any = None
    coll_stop_ts: Any = None


class _Performance(msgspec.Struct):
    coll: Any = None
    coll_sn: Any = None
    coll_msg_size_bytes: Any = None
    coll_exec_time_us: Any = None
    event_trace_ts: _Times | None = None


class _Record(msgspec.Struct):
    header: _Header
    coll_perf: _Performance
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    event_trace_ts: _Times | None = None


_RECORD: Final = msgspec.json.Decoder(_Record)


@dataclass(frozen=True)
class _Collective:
    rank: int
    size: int
    communicator: str
    op: str
    seq: int | None
    bytes: int | None
    start_ns: int
    end_ns: int
    host: str
    pid: int | None
    guessed: bool


def recognizes(head: bytes) -> bool:
    """Whether a file that begins so is the Inspector's."""
    return _MARKS.search(head) is not None


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads the Inspector's files of a job; each record tells its rank.

    Raises:
        TraceError: No collective is found.
    """
    run = RunInfo(status="complete", level="comm", source=NAME)
    damaged = 0
    found: dict[int, list[_Collective]] = defaultdict(list)
    for path in paths:
        blocks = Blocks(path)
        for text in _objects(blocks):
            collective = _collective(text)
            if collective is None:
                damaged += 1
            else:
                found[collective.rank].append(collective)
        if blocks.damage:
            run.notes.append(f"{path.name}: {blocks.damage}")
    if not found:
        raise TraceError(f"{paths[0]} holds no collective that can be read")
    if damaged:
        run.notes.append(f"{damaged} lines are no record of a collective and are left out")
    if any(each.guessed for mine in found.values() for each in mine):
        run.notes.append(
            "records carry the time at which they were written out, not when the collective ran: "
            "durations are measured, positions in time are not"
        )
    world = max(max(found) + 1, *(each.size for mine in found.values() for each in mine))
    if len(found) < world:
        run.notes.append(f"{world - len(found)} of {world} ranks have no record")
    if run.notes:
        run.status = "partial"
    groups = _group_names(found)
    tables = {}
    for rank in sorted(found):
        mine = found[rank]
        rows = [_row(each, groups[each.communicator, each.op]) for each in mine]
        first = min(row.start_ns for row in rows)
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=mine[0].pid or 0),
            world_size=world,
            pid=mine[0].pid,
            host=mine[0].host,
            clock_domain=mine[0].host or f"host of rank {rank}",
            clock={"monotonic_ns": first, "unix_ns": first, "samples": []},
            status="complete",
            level="comm",
            backend="nccl",
            device="cuda",
            groups=_group_infos(mine, groups, found),
            events=len(rows),
        )
        run.ranks.append(info)
        tables[info.segment] = table_of(rows)
    ranks = {info.segment: info.rank for info in run.ranks}
    return ImportedTrace(run, number_messages(tables, ranks, run.notes))


def _objects(blocks: Blocks) -> Iterator[bytes]:
    """The file's lines, without those that are empty."""
    pending = b""
    for block in blocks:
        lines = (pending + block).split(b"\n")
        pending = lines.pop()
        if len(pending) > _MAX_LINE:
            raise TraceError(f"a line of more than {_MAX_LINE >> 20} MB: this is no Inspector file")
        yield from (line for line in lines if line.strip())
    if pending.strip():
        yield pending


def _collective(text: bytes) -> _Collective | None:
    try:
        record = _RECORD.decode(text.strip().rstrip(b","))
    except UNDECODABLE:
        return None
    performance = record.coll_perf
    rank = count(record.header.rank)
    size = count(record.header.n_ranks) or 0
    if rank is None or rank > MAX_RANK or size > MAX_RANK or not isinstance(performance.coll, str):
        return None
    times = performance.event_trace_ts or record.event_trace_ts or _Times()
    start, end = _time(times.coll_start_ts), _time(times.coll_stop_ts)
    guessed = start is None or end is None or end < start
    if guessed:
        duration = _time(performance.coll_exec_time_us)
        end = _time(record.metadata.dump_timestamp_us)
        if end is None or duration is None or duration > end:
            return None
        start = end - duration
    assert start is not None
    assert end is not None
    op = public_op(performance.coll) or clean(performance.coll, 60)
    host, pid = record.metadata.hostname, count(record.metadata.pid)
    return _Collective(
        rank=rank,
        size=size,
        communicator=clean(record.header.id, 100),
        op=op,
        seq=count(performance.coll_sn),
        bytes=_input_bytes(op, count(performance.coll_msg_size_bytes), size),
        start_ns=start,
        end_ns=end,
        host=clean(host, 200) if isinstance(host, str) else "",
        pid=pid if pid is not None and pid < 1 << 31 else None,
        guessed=guessed,
    )


def _input_bytes(op: str, size: int | None, ranks: int) -> int | None:
    """Bytes of one rank's input. NCCL counts a reduce-scatter by its output."""
    if size is not None and op == "reduce_scatter":
        return count(size * max(ranks, 1))
    return size


def _row(each: _Collective, group: str) -> Row:
    return Row(
        start_ns=each.start_ns,
        end_ns=each.end_ns,
        kind="message",
        name=each.op,
        lane=f"comm/{each.communicator}",
        op=each.op,
        group=group,
        seq=each.seq,
        bytes=each.bytes,
        status="ok",
    )


def _group_names(found: dict[int, list[_Collective]]) -> dict[tuple[str, str], str]:
    """Names under which a number means one collective.

    NCCL counts per communicator and function, so the same number can come up for two of them.
    """
    ops: dict[str, Counter[str]] = defaultdict(Counter)
    for mine in found.values():
        for each in mine:
            ops[each.communicator][each.op] += 1
    return {
        (communicator, op): communicator if len(counts) == 1 else f"{communicator}/{op}"
        for communicator, counts in ops.items()
        for op in counts
    }


def _group_infos(
    mine: list[_Collective],
    names: dict[tuple[str, str], str],
    found: dict[int, list[_Collective]],
) -> list[GroupInfo]:
    """The communicators of a rank; their members are known if all of them left records."""
    members: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for rank, records in found.items():
        for each in records:
            members[each.communicator].add(rank)
            sizes[each.communicator] = each.size
    infos = {}
    for each in mine:
        name = names[each.communicator, each.op]
        ranks = sorted(members[each.communicator])
        whole = len(ranks) == sizes[each.communicator]
        infos[name] = GroupInfo(name, each.communicator, "nccl", tuple(ranks) if whole else ())
    return list(infos.values())


def _time(microseconds: Any) -> int | None:
    """Microseconds as nanoseconds; None if they are no time."""
    if isinstance(microseconds, bool) or not isinstance(microseconds, (int, float)):
        return None
    if not 0 <= microseconds < MAX_TIME_NS // 1000:
        return None
    return round(microseconds * 1000)
