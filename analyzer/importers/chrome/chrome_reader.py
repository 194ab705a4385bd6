"""Reads Chrome traces of any tool, including those of ``ddltrace export``.

Their intervals are complete events, pairs of begin and end, and asynchronous events.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ddltrace.analyzer.importers.chrome.trace_events import (
    INTERVAL_BYTES,
    NO_ARGS,
    Args,
    AsyncBegin,
    AsyncEnd,
    Begin,
    Complete,
    End,
    EventFile,
    Instant,
    Metadata,
    args_of,
    input_shapes,
)
from ddltrace.analyzer.importers.communication import MAX_INT32, count, element_type, public_op
from ddltrace.analyzer.importers.imported import (
    MAX_TIME_NS,
    ImportedTrace,
    Row,
    table_of,
    without_time,
)
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.rank_files import MAX_RANK, assign_ranks
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import KINDS, PHASES, STATUSES
from ddltrace.tracer.trace.trace_files import segment_name

NAME: Final = "chrome"

_MARKS: Final = re.compile(rb'"traceEvents"\s*:\s*\[|"ph"\s*:\s*"[A-Za-z]"')
_RANK_PROCESS: Final = re.compile(r"rank[ _-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_MESSAGE_NAME: Final = re.compile(r"^(?:nccl|gloo|mpi|ucc|rccl|c10d|horovod)[:_]", re.IGNORECASE)
_GROUP: Final = "default"


def recognizes(head: bytes) -> bool:
    """Whether a file with this head is a Chrome trace."""
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") and bool(_MARKS.search(head))


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads Chrome traces: a process named ``rank N`` is a rank, else each file is one.

    Raises:
        TraceError: There is no interval in any of the files.
    """
    run = RunInfo(status="complete", level="op", source=NAME)
    rows: dict[int, list[Row]] = defaultdict(list)
    recordings = [_read_file(path, run.notes) for path in paths]
    for recording, ranks, rank_of_file in _with_ranks(recordings, paths, run.notes):
        for interval in recording.intervals + recording.instants:
            row = _row(interval, recording)
            row.start_ns += recording.epoch_ns
            row.end_ns = None if row.end_ns is None else row.end_ns + recording.epoch_ns
            rows[ranks.get(interval.track[0], rank_of_file)].append(row)
    if not any(rows.values()):
        raise TraceError(f"{paths[0]} holds no interval that can be read")
    tables = {}
    for rank in sorted(rows):
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=0),
            world_size=max(rows) + 1,
            status="complete",
            level="op",
            clock_domain=NAME,
            events=len(rows[rank]),
        )
        names = dict.fromkeys(row.group for row in rows[rank] if row.group is not None)
        info.groups = [
            GroupInfo(name, "", "", tuple(sorted(rows)) if name == _GROUP else ()) for name in names
        ]
        run.ranks.append(info)
        tables[info.segment] = table_of(rows[rank])
    if not any(row.kind == "step" for mine in rows.values() for row in mine):
        run.notes.append("a Chrome trace of unknown origin: it contains neither steps nor phases")
    return number_messages(run, tables)


def _read_file(path: Path, notes: list[str]) -> Recording:
    file = EventFile(path, INTERVAL_BYTES)
    recording = read_recording(file)
    written_by_us = file.meta.get("otherData")
    if isinstance(written_by_us, dict) and written_by_us.get("source") == "ddltrace":
        recording.epoch_ns = count(written_by_us.get("origin_ns")) or 0
    notes.extend(f"{path.name}: {note}" for note in file.losses())
    if recording.left_out:
        notes.append(
            f"{path.name}: {counted(recording.left_out, 'event')} without a usable time left out"
        )
    if recording.unmatched:
        notes.append(
            f"{path.name}: {counted(recording.unmatched, 'end')} without a beginning left out"
        )
    return recording


def _with_ranks(
    recordings: list[Recording], paths: Sequence[Path], notes: list[str]
) -> Iterator[tuple[Recording, dict[Any, int], int]]:
    """Each recording with the ranks of its processes, and with that of its other processes."""
    of_processes = [_ranks_of(recording) for recording in recordings]
    used = [{each.track[0] for each in one.intervals + one.instants} for one in recordings]
    # A file whose processes all name their ranks has them, whatever its name is.
    unnamed = [
        place
        for place, (pids, ranks) in enumerate(zip(used, of_processes, strict=True))
        if not pids <= ranks.keys()
    ]
    of_files = assign_ranks(
        [None] * len(unnamed), [paths[place] for place in unnamed], notes, several=True
    )
    rank_of = dict(zip(unnamed, of_files, strict=True))
    for place, recording in enumerate(recordings):
        yield recording, of_processes[place], rank_of.get(place, 0)


def _ranks_of(recording: Recording) -> dict[Any, int]:
    """Process -> rank, for processes whose name or id contains the rank."""
    ids = {each.track[0] for each in recording.intervals + recording.instants}
    names = {pid: pid for pid in ids if isinstance(pid, str)} | recording.processes
    return {
        pid: int(match.group(1))
        for pid, name in names.items()
        if (match := _RANK_PROCESS.search(name)) and int(match.group(1)) <= MAX_RANK
    }


def _row(interval: Interval, recording: Recording) -> Row:
    args = interval.args
    process, thread = interval.track
    lane = recording.threads.get(interval.track) or f"thread-{thread}"
    if process in recording.processes and not _RANK_PROCESS.search(recording.processes[process]):
        lane = f"{recording.processes[process]}/{lane}"
    # What ddltrace exports of GPU traces has Kineto's categories, and the kind as an argument.
    category = args.kind if isinstance(args.kind, str) and args.kind in KINDS else interval.category
    row = Row(
        start_ns=interval.start_ns,
        end_ns=interval.end_ns,
        kind=category if category in KINDS else "host",
        name=clean(interval.name),
        lane=clean(lane, 200),
        step=count(args.step, MAX_INT32),
    )
    if row.kind == "host":
        row.shapes = input_shapes(args.dims)
    if args.phase in PHASES:
        row.phase = args.phase
    op = args.op if isinstance(args.op, str) and args.op else None
    if op is None and category not in KINDS and _MESSAGE_NAME.match(interval.name):
        op = public_op(interval.name)
    if row.kind == "message" or op is not None:
        row.kind = "message"
        row.op = clean(op or public_op(interval.name) or interval.name, 60)
        row.group = clean(args.group, 200) if isinstance(args.group, str) else _GROUP
        row.seq = count(args.number)
        row.tag = count(args.tag, MAX_INT32)
        row.peer = count(args.peer, MAX_INT32)
        row.bytes = count(args.bytes)
        row.out_bytes = count(args.out_bytes)
        row.dtype = element_type(args.dtype)[0]
        row.status = "open" if interval.end_ns is None else "ok"
        if op is not None and args.status in STATUSES:
            # As ddltrace exports messages that did not end, or ended at an unknown time.
            row.status = args.status
            if row.status == "open" or row.end_ns == row.start_ns:
                row.end_ns = None
    elif interval.end_ns is None:
        row.end_ns = interval.start_ns
    return row


_MAX_DEPTH: Final = 4096

Track = tuple[Any, Any]
"""Process and thread."""


@dataclass(slots=True)
class Interval:
    """One interval; `end_ns` is None where its end is missing."""

    start_ns: int
    end_ns: int | None
    name: str
    category: str
    track: Track
    depth: int = 0
    args: Args = NO_ARGS


@dataclass
class Recording:
    """Contents of a file: intervals, instants, names of processes and threads.

    Attributes:
        epoch_ns: Unix time of the file's time 0, if the file contains it.
        unmatched: Ends without a beginning.
        left_out: Events without a usable time.
    """

    intervals: list[Interval] = field(default_factory=list)
    instants: list[Interval] = field(default_factory=list)
    processes: dict[Any, str] = field(default_factory=dict)
    threads: dict[Track, str] = field(default_factory=dict)
    epoch_ns: int = 0
    unmatched: int = 0
    left_out: int = 0


def read_recording(file: EventFile) -> Recording:
    """Reads all intervals of a file.

    Raises:
        TraceError: The file has no list of events.
    """
    builder = _Builder()
    for chunk in file:
        builder.add(chunk)
    return builder.finish()


class _Builder:
    def __init__(self) -> None:
        self._found = Recording()
        self._open: dict[Track, list[Interval]] = defaultdict(list)
        self._asynchronous: dict[tuple[Any, ...], list[Interval]] = defaultdict(list)

    def add(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, Metadata):
                self._name(event)
                continue
            time = _nanoseconds(getattr(event, "ts", None))
            if time is None:
                self._found.left_out += hasattr(event, "ts")
            elif isinstance(event, Complete):
                self._complete(event, time)
            elif isinstance(event, Begin):
                self._begin(event, time)
            elif isinstance(event, End):
                self._end(event, time)
            elif isinstance(event, AsyncBegin):
                key = (event.pid, event.cat, event.id)
                lane = f"async {event.cat}"
                interval = Interval(time, None, event.name, event.cat, (event.pid, lane))
                self._asynchronous[key].append(interval)
                self._found.intervals.append(interval)
            elif isinstance(event, AsyncEnd):
                self._close(self._asynchronous[event.pid, event.cat, event.id], time, NO_ARGS)
            elif isinstance(event, Instant):
                track = (event.pid, event.tid)
                self._found.instants.append(Interval(time, time, event.name, event.cat, track))

    def finish(self) -> Recording:
        found = self._found
        every = found.intervals + found.instants
        unknown = without_time(
            np.array([each.start_ns for each in every]),
            np.array([(each.end_ns or each.start_ns) - each.start_ns for each in every]),
            may_begin_at_0=True,
        )
        if unknown.any():
            known = [each for each, lost in zip(every, unknown.tolist(), strict=True) if not lost]
            instants = {id(each) for each in found.instants}
            found.left_out += len(every) - len(known)
            found.intervals = [each for each in known if id(each) not in instants]
            found.instants = [each for each in known if id(each) in instants]
        return found

    def _complete(self, event: Complete, time: int) -> None:
        duration = _nanoseconds(event.dur)
        if duration is None or duration < 0:
            self._found.left_out += 1
            return
        self._found.intervals.append(
            Interval(
                time,
                time + duration,
                event.name,
                event.cat,
                (event.pid, event.tid),
                len(self._open[event.pid, event.tid]),
                args_of(event.args),
            )
        )

    def _begin(self, event: Begin, time: int) -> None:
        track = (event.pid, event.tid)
        stack = self._open[track]
        if len(stack) >= _MAX_DEPTH:
            self._found.left_out += 1
            return
        interval = Interval(time, None, event.name, event.cat, track, len(stack))
        stack.append(interval)
        self._found.intervals.append(interval)

    def _end(self, event: End, time: int) -> None:
        self._close(self._open[event.pid, event.tid], time, args_of(event.args))

    def _close(self, stack: list[Interval], time: int, args: Args) -> None:
        if not stack:
            self._found.unmatched += 1
            return
        interval = stack.pop()
        interval.end_ns = max(time, interval.start_ns)
        interval.args = args

    def _name(self, event: Metadata) -> None:
        if event.args is None:
            return
        if isinstance(event.args.epoch_us, int) and 0 < event.args.epoch_us < MAX_TIME_NS // 1000:
            self._found.epoch_ns = event.args.epoch_us * 1000
        if isinstance(event.args.name, str):
            if event.name == "process_name":
                self._found.processes[event.pid] = event.args.name
            elif event.name == "thread_name":
                self._found.threads[event.pid, event.tid] = event.args.name


def _nanoseconds(microseconds: float | None) -> int | None:
    if microseconds is None or not abs(microseconds) < MAX_TIME_NS / 4000:
        return None
    whole = int(microseconds // 1)
    return whole * 1000 + round((microseconds - whole) * 1000)
