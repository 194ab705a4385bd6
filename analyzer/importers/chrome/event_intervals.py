"""Reads the intervals of a Chrome trace: complete, begin and end, and asynchronous events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ddltrace.analyzer.importers.chrome.trace_events import (
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
)
from ddltrace.analyzer.importers.imported import MAX_TIME_NS
from ddltrace.analyzer.importers.lost_times import without_time

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
