"""Follows a trace that is still being written, at a cost proportional to the new events."""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    Columns,
    IntArray,
    changes,
    distinct,
)
from ddltrace.analyzer.events.interval_sets import (
    Spans,
    clip,
    intersect,
    length,
    union,
)
from ddltrace.analyzer.events.rank_activity import Activity, measure_activity
from ddltrace.analyzer.events.rank_messages import Messages, read_messages, read_waits
from ddltrace.analyzer.live.live_goodput import Seen, live_shares, moment
from ddltrace.analyzer.live.live_rank import LiveRank, complete
from ddltrace.analyzer.live.live_state import (
    LiveLane,
    LiveRow,
    LiveState,
    ProcessSigns,
    find_alerts,
)
from ddltrace.analyzer.live.stream_tail import CounterTail
from ddltrace.analyzer.trace.align import RankClock, align
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.launch.rank_ends import RankEnds
from ddltrace.tracer.timing.clocks import clock_domain
from ddltrace.tracer.trace.event_file import write_events
from ddltrace.tracer.trace.liveness import pid_namespace
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_files import STREAM_SUFFIX, counters_path, event_path

if TYPE_CHECKING:
    from ddltrace.tracer.launch.rank_ends import End

_SHORTEST_PAUSE_S: Final = 0.4
"""Minimum time between two reads, independent of the number of pages."""

_ROWS_IN_ALL: Final = 240_000
_MIN_ROWS: Final = 4_000
_ALIGN_EVERY_S: Final = 10.0
_SHOWN_STEPS: Final = 240
_LANE_STEPS: Final = 3
_LANE_RANKS: Final = 16
_LANE_PIXELS: Final = 600


class LiveTrace:
    """A trace directory that a job writes to.

    Safe for several threads. Only `state` does any work: a dashboard whose live page is closed
    costs nothing.

    Args:
        directory: The trace directory.

    Attributes:
        directory: The same.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._ranks: dict[str, LiveRank] = {}
        self._counters: dict[str, CounterTail] = {}
        self._heard: dict[str, tuple[int, float]] = {}
        self._ends_of: dict[Path, RankEnds] = {}
        self._notes: dict[str, str] = {}
        self._clocks: dict[str, RankClock] = {}
        self._aligned: tuple[int, float] = (0, 0.0)
        self._run = RunInfo()
        self._state = LiveState()
        self._checked_s = float("-inf")

    def state(self) -> LiveState:
        """The job as it is now; the same object if it has just been looked at.

        Raises:
            TraceError: The directory holds no trace, or none that this version reads.
        """
        with self._lock:
            if time.monotonic() - self._checked_s >= _SHORTEST_PAUSE_S:
                self._state = self._look()
                self._checked_s = time.monotonic()
            return self._state

    def processes(self) -> list[RankInfo]:
        """The newest process of each rank that was seen so far, by rank."""
        with self._lock:
            return [rank.info for rank in self._newest_of(self._ranks.values())]

    def goodput(self) -> dict[str, float]:
        """Shares of the job's time so far by what it went to; empty before its first step."""
        with self._lock:
            attempts: dict[int, list[Seen]] = {}
            for rank in self._ranks.values():
                attempts.setdefault(rank.info.attempt, []).append(self._seen(rank))
            begin, end = self._job_time()
        return live_shares([attempts[key] for key in sorted(attempts)], begin, end)

    def _seen(self, rank: LiveRank) -> Seen:
        info, clock = rank.info, self._clock(rank)
        end, silence = self._last_ends().get(info.segment), info.silence
        is_silent = silence is not None and (rank.last_ns or 0) <= silence["noticed_ns"]
        return rank.time.seen(clock)._replace(
            failed_ns=moment(clock, end.ended_ns) if end and end.exit_status != 0 else None,
            silent_ns=moment(clock, silence["since_ns"]) if silence and is_silent else None,
            is_off=info.is_off,
        )

    def _clock(self, rank: LiveRank) -> RankClock:
        return self._clocks.get(rank.info.segment, RankClock(rank.info.rank))

    def _job_time(self) -> tuple[int, int]:
        """When the job began, and now or its end, on rank 0's clock; 0 twice if not known."""
        created, ended = self._run.created_unix_ns, self._run.ended_unix_ns or time.time_ns()
        for rank in self._newest_of(self._ranks.values()):
            unix, monotonic = (rank.info.clock.get(name) for name in ("unix_ns", "monotonic_ns"))
            if created is not None and isinstance(unix, int) and isinstance(monotonic, int):
                clock, since = self._clock(rank), monotonic - unix
                return moment(clock, created + since), moment(clock, ended + since)
        return 0, 0

    def save_window(self, directory: Path) -> None:
        """Writes the events of the last seconds as a complete trace.

        Args:
            directory: An empty directory.

        Raises:
            OSError: It cannot be written.
        """
        infos = []
        with self._lock:
            for rank in self._newest_of(self._ranks.values()):
                info = replace(rank.info, status="complete", counters=None, silence=None)
                batches = (
                    batch
                    for part in rank.batches()
                    for batch in complete(pa.Table.from_batches([part])).to_batches()
                )
                info.events, info.checksum = write_events(directory, info.segment, batches)
                infos.append(info)
        write_run(directory, RunInfo(status="complete", ranks=infos))

    def close(self) -> None:
        """Closes all files and ends the observation of processes."""
        with self._lock:
            for rank in self._ranks.values():
                rank.close()
            for tail in self._counters.values():
                tail.close()
            self._stop_watching()

    def _look(self) -> LiveState:
        run = self._run = read_run(self.directory)
        running = run.status == "running"
        ends = self._watch(run) if running else self._last_ends()
        for info in run.ranks:
            self._follow(info)
        ranks = self._newest(run)
        self._align(run)
        signs = ProcessSigns(ends, self._silence_of(run), self._now())
        return LiveState(
            status=run.status,
            exit_status=run.exit_status,
            world_size=max((info.world_size for info in run.ranks), default=0),
            alerts=find_alerts(ranks, signs, running=running),
            off=tuple(rank.info.rank for rank in ranks if rank.info.is_off),
            notes=tuple(self._notes.values()),
            **self._measures(ranks, signs),
        )

    def _watch(self, run: RunInfo) -> dict[str, End]:
        """Observes the processes of this host; their ends so far."""
        folders = {event_path(self.directory, info.segment).parent for info in run.ranks}
        for folder in folders or {self.directory}:
            if folder not in self._ends_of:
                with contextlib.suppress(OSError, RuntimeError):
                    watch = RankEnds(folder)
                    watch.start()
                    self._ends_of[folder] = watch
        return self._last_ends()

    def _last_ends(self) -> dict[str, End]:
        return {segment: end for w in self._ends_of.values() for segment, end in w.ends.items()}

    def _stop_watching(self) -> None:
        for watch in self._ends_of.values():
            watch.stop()

    def _follow(self, info: RankInfo) -> None:
        """Reads the events that one process has written since the last read."""
        rank = self._ranks.get(info.segment)
        if rank is None:
            path = event_path(self.directory, info.segment)
            if path.suffix != STREAM_SUFFIX or not path.exists():
                return
            try:
                rank = LiveRank(info, path, max(_MIN_ROWS, _ROWS_IN_ALL // info.world_size))
            except OSError as error:
                self._notes[info.segment] = f"rank {info.rank}: {error}"
                return
            self._ranks[info.segment] = rank
            with contextlib.suppress(OSError):
                self._counters[info.segment] = CounterTail(
                    counters_path(self.directory, info.segment)
                )
        rank.info = info
        if info.segment in self._notes:
            return
        try:
            rank.read()
            if info.segment in self._counters:
                self._counters[info.segment].read()
        except TraceError as error:
            self._notes[info.segment] = f"rank {info.rank}: {error}"

    def _newest(self, run: RunInfo) -> list[LiveRank]:
        """The newest process of each rank, by rank."""
        segments = {info.segment for info in run.ranks}
        return self._newest_of(r for s, r in self._ranks.items() if s in segments)

    @staticmethod
    def _newest_of(ranks: Iterable[LiveRank]) -> list[LiveRank]:
        newest: dict[int, LiveRank] = {}
        for rank in sorted(ranks, key=lambda rank: (rank.info.attempt, rank.info.pid or 0)):
            newest[rank.info.rank] = rank
        return [newest[rank] for rank in sorted(newest)]

    def _align(self, run: RunInfo) -> None:
        """Finds the clocks from the exchanges with rank 0; messages are not looked at."""
        count, at_s = self._aligned
        if run.ranks and (len(run.ranks) != count or time.monotonic() - at_s > _ALIGN_EVERY_S):
            self._clocks = align(run)
            self._aligned = len(run.ranks), time.monotonic()

    def _now(self) -> dict[str, int]:
        """The present on the clock of each process that shares this host's clock."""
        own, now_ns = clock_domain(), time.monotonic_ns()
        return {
            segment: now_ns
            for segment, rank in self._ranks.items()
            if rank.info.clock_domain == own
        }

    def _silence_of(self, run: RunInfo) -> dict[str, float]:
        """Seconds since processes that cannot be observed from here last wrote their counters."""
        here = platform.node(), pid_namespace()
        unheard = {}
        for info in run.ranks:
            if info.is_off or (info.host, info.pid_namespace) == here:
                self._heard.pop(info.segment, None)
                continue
            try:
                size = counters_path(self.directory, info.segment).stat().st_size
            except OSError:
                continue
            known, since_s = self._heard.get(info.segment, (-1, 0.0))
            if size != known:
                since_s = time.monotonic()
                self._heard[info.segment] = size, since_s
            unheard[info.segment] = time.monotonic() - since_s
        return unheard

    def _measures(self, ranks: list[LiveRank], signs: ProcessSigns) -> dict[str, Any]:
        windows = [rank.window() for rank in ranks]
        messages = [read_messages(columns) for columns in windows]
        activities = [
            measure_activity(columns, its, read_waits(columns, its))
            for columns, its in zip(windows, messages, strict=True)
        ]
        clocks = [self._clock(rank) for rank in ranks]
        late = lateness(messages, clocks)
        rows = tuple(
            self._row(rank, columns, activity, signs, late.get(place))
            for place, (rank, columns, activity) in enumerate(
                zip(ranks, windows, activities, strict=True)
            )
        )
        steps = _whole_steps(ranks, clocks)
        lanes, lane_steps = _lanes(ranks, clocks, activities, steps)
        numbers = sorted(steps)[-_SHOWN_STEPS:]
        return {
            "rows": rows,
            "num_steps": min((rank.num_steps for rank in ranks), default=0),
            "steps": tuple(numbers),
            "step_us": tuple((steps[n][1] - steps[n][0]) / 1e3 for n in numbers),
            "lanes": lanes,
            "lane_steps": lane_steps,
        }

    def _row(
        self,
        rank: LiveRank,
        columns: Columns,
        activity: Activity,
        signs: ProcessSigns,
        late: tuple[float, float] | None,
    ) -> LiveRow:
        in_window = columns.rows("step")
        in_window = in_window[columns.end[in_window] != NULL_NS]
        durations = columns.end[in_window] - columns.start[in_window]
        comm_ns = length(activity.comm)
        now_ns = signs.now_ns.get(rank.info.segment)
        counters = self._counters.get(rank.info.segment)
        return LiveRow(
            rank=rank.info.rank,
            step=max(rank.steps, default=None),
            step_us=float(np.median(durations)) / 1e3 if len(durations) else None,
            overlap_ratio=(
                length(activity.both) / comm_ns
                if comm_ns and activity.compute is not None
                else None
            ),
            late_share=None if late is None else late[0],
            lateness_us=None if late is None else late[1],
            cpu_cores=None if counters is None else counters.last.get("process_cpu"),
            memory_bytes=None if counters is None else counters.last.get("process_memory"),
            silent_s=(
                None
                if now_ns is None or rank.last_ns is None
                else max(0.0, (now_ns - rank.last_ns) / 1e9)
            ),
        )


def lateness(messages: list[Messages], clocks: list[RankClock]) -> dict[int, tuple[float, float]]:
    """How often and by how much each rank came last to collectives in the window.

    Args:
        messages: The messages of each rank.
        clocks: The clock of each rank, in the same order.

    Returns:
        Place in the arguments -> share of the collectives to which the rank came last, and in those
        the median of its arrival minus the median arrival of the other ranks, in us. Collectives
        that not all of their known members entered are left out.
    """
    parts: list[tuple[IntArray, ...]] = []
    codes: dict[str, int] = {}
    for place, (its, clock) in enumerate(zip(messages, clocks, strict=True)):
        group_codes = np.array([codes.setdefault(name, len(codes)) for name in its.groups] + [-1])
        rows = np.flatnonzero((its.seq != NULL) & (its.peer == NULL) & (its.group != NULL))
        arrival = clock.apply(its.enqueue[rows])
        parts.append(
            (group_codes[its.group[rows]], its.seq[rows], arrival, np.full(len(rows), place))
        )
    if not parts:
        return {}
    group, seq, arrival, rank = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if not len(group):
        return {}
    order = np.lexsort((arrival, seq, group))
    group, seq, arrival, rank = group[order], seq[order], arrival[order], rank[order]
    first = np.flatnonzero(changes(group, seq))
    counts = np.diff(np.append(first, len(group)))
    sizes = np.zeros(len(codes), np.int64)
    np.maximum.at(sizes, group[first], counts)
    whole = (counts == sizes[group[first]]) & (counts > 1)
    first, counts = first[whole], counts[whole]
    last = first + counts - 1
    before, after = first + (counts - 2) // 2, first + (counts - 1) // 2
    by_ns = arrival[last] - (arrival[before] + (arrival[after] - arrival[before]) // 2)
    found = {}
    for place in distinct(rank[last]).tolist():
        mine = rank[last] == place
        found[place] = float(mine.mean()), float(np.median(by_ns[mine])) / 1e3
    for place in set(distinct(rank).tolist()) - found.keys() if len(last) else ():
        found[place] = 0.0, 0.0
    return found


def _whole_steps(ranks: list[LiveRank], clocks: list[RankClock]) -> dict[int, tuple[int, int]]:
    """Step -> its earliest start and latest end, of the steps that all ranks have completed."""
    if not ranks:
        return {}
    common = set.intersection(*(set(rank.steps) for rank in ranks))
    numbers = sorted(common)
    if not numbers:
        return {}
    starts, ends = [], []
    for rank, clock in zip(ranks, clocks, strict=True):
        times = np.array([rank.steps[n] for n in numbers], np.int64)
        starts.append(clock.apply(times[:, 0]))
        ends.append(clock.apply(times[:, 1]))
    start, end = np.min(starts, axis=0), np.max(ends, axis=0)
    return {n: (int(start[i]), int(end[i])) for i, n in enumerate(numbers)}


def _lanes(
    ranks: list[LiveRank],
    clocks: list[RankClock],
    activities: list[Activity],
    steps: dict[int, tuple[int, int]],
) -> tuple[tuple[LiveLane, ...], tuple[int, int] | None]:
    """The last steps of the first ranks, each activity reduced to the resolution of a screen."""
    shown = sorted(steps)[-_LANE_STEPS:]
    if not shown:
        return (), None
    origin, until = steps[shown[0]][0], max(steps[n][1] for n in shown)
    gap_ns = max(1, (until - origin) // _LANE_PIXELS)

    def reduced(spans: Spans, clock: RankClock) -> Spans:
        moved = Spans(clock.apply(spans.start) - origin, clock.apply(spans.end) - origin)
        inside = clip(moved, 0, until - origin)
        # Intervals that are closer than a pixel become one.
        merged = union(inside.start, inside.end + gap_ns)
        return Spans(merged.start, merged.end - gap_ns)

    lanes = []
    for rank, clock, activity in list(zip(ranks, clocks, activities, strict=True))[:_LANE_RANKS]:
        lanes.append(
            LiveLane(
                rank.info.rank,
                compute=reduced(activity.compute, clock) if activity.compute else Spans(*_none()),
                communication=reduced(activity.comm, clock),
                waiting=reduced(intersect(activity.blocked, activity.comm), clock),
            )
        )
    return tuple(lanes), (shown[0], shown[-1])


def _none() -> tuple[IntArray, IntArray]:
    return np.empty(0, np.int64), np.empty(0, np.int64)
