"""The traces of one dashboard, loaded once and shared by concurrent requests.

Modules that a stored trace does not need are imported on first use: the server answers earlier.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.formatting.units import printable
from ddltrace.analyzer.joined.nccl_events import windows_with_nccl
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.result_tables import OF_TRACE, EventStream, columns_of
from ddltrace.analyzer.query.sql import QueryLimits, run_query
from ddltrace.analyzer.recent_cache import RecentCache
from ddltrace.analyzer.report.notes import notes_of, state_text
from ddltrace.dashboard.experiments import OpenExperiment
from ddltrace.dashboard.rank_breakdowns import Breakdown, rank_breakdowns
from ddltrace.dashboard.stored.growing import GrowingTimeline
from ddltrace.dashboard.stored.stored_trace import Stored, is_worth_storing, shortened
from ddltrace.dashboard.timeline.frame import Window, encode_frame
from ddltrace.dashboard.timeline.lod import I64, RowIndex
from ddltrace.dashboard.timeline.path_lane import NO_RANK, PathLane, build_path_lane
from ddltrace.dashboard.timeline.rank_groups import rank_groups
from ddltrace.dashboard.timeline.tracks import Bools, Role, Row, Timeline
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.trace_files import RUN_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    import plotly.graph_objects as go

    from ddltrace.analyzer.live.live_trace import LiveTrace
    from ddltrace.analyzer.measures.tensors import TensorRow
    from ddltrace.analyzer.model import Analysis, Analyzed
    from ddltrace.analyzer.open_trace import Trace
    from ddltrace.analyzer.slack import SlackRow
    from ddltrace.analyzer.whatif.questions import WhatIf
    from ddltrace.dashboard.runs.allowed_runs import AllowedRuns

T = TypeVar("T")

_MAX_HITS: Final = 1000
_KEPT_SEARCHES: Final = 4
_QUERY_LIMITS: Final = QueryLimits(memory_bytes=500_000_000, timeout_s=30.0)
_KEPT_QUERY_BYTES: Final = 64_000_000
_KEPT_STATEMENTS: Final = 1000
"""Statements that count as run from the page."""
_KEPT_TENSORS: Final = 100_000
"""Rows of tensors of single steps that are kept."""
_STEP_QUERY: Final = re.compile(r"step\s*(\d{1,9})\Z")


NOTHING_UNDER_WAY: Final[dict[str, Any]] = {"reading": None, "measuring": None}
"""The progress of a trace for which nothing is built."""


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        rows: For each row of the timeline, the matching events; None if there are none.
        total: Number of matching events.
        hits: The first matches in time, as dicts that the timeline component understands.
    """

    rows: list[Row | None]
    total: int
    hits: list[dict[str, Any]]


class once(Generic[T]):
    """A property that is computed once, on first use; other threads wait until it is computed.

    `functools.cached_property` computes it in several threads at a time, or, before Python 3.12,
    for one object at a time. Both keep the value in the object's ``__dict__``.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._name = make.__name__
        self.__doc__ = make.__doc__

    def __get__(self, owner: Any, kind: type) -> T:
        values: dict[str, Any] = vars(owner)
        with values.setdefault(f"lock of {self._name}", threading.Lock()):
            if self._name not in values:
                values[self._name] = self._make(owner)
        value: T = values[self._name]
        return value


class OpenTrace:
    """One trace of the dashboard: its events, its timeline, its analysis.

    Each of these is created on first use, independently: the timeline responds while a long
    analysis is running.

    Attributes:
        number: Position on the command line, from 0; identifies the trace in URLs.
        title: Name in the dashboard, unique among its traces.
        trace: The trace.
    """

    def __init__(self, number: int, title: str, trace: Trace) -> None:
        self.number = number
        self.title = title
        self.trace = trace
        self._growing = GrowingTimeline(trace, lambda: self._stored)
        self._figures: dict[str, go.Figure | None] = {}
        self._drawing: dict[str, threading.Lock] = {}
        self._searches: RecentCache[str, Search] = RecentCache(
            self._search, lambda _: 1, _KEPT_SEARCHES
        )
        self._queries: RecentCache[str, pa.Table] = RecentCache(
            lambda sql: run_query(trace, sql, _QUERY_LIMITS, lambda: self.analyzed),
            lambda result: int(result.nbytes),
            _KEPT_QUERY_BYTES,
        )
        self._tensors: RecentCache[int, tuple[TensorRow, ...]] = RecentCache(
            self._tensors_in, len, _KEPT_TENSORS
        )
        self._columns: dict[str, list[str]] = {}
        self._asked: deque[str] = deque(maxlen=_KEPT_STATEMENTS)

    @once
    def _stored(self) -> Stored | None:
        """The stored files of a large trace; None for a small one, or if no folder is writable."""
        if is_worth_storing(self.trace):
            with contextlib.suppress(OSError):
                return Stored(self.trace)
        return None

    def _release(self) -> None:
        """Releases pages of stored files from memory, before and after large reads."""
        if self._stored is not None:
            self._stored.release()

    @once
    def what_if(self) -> WhatIf:
        """Answers questions about the trace's steps.

        Raises:
            TraceError: It has no steps that can be replayed.
        """
        from ddltrace.analyzer.whatif.questions import what_if

        return what_if(shortened(self.trace))

    @property
    def timeline(self) -> Timeline:
        """The whole timeline."""
        return self._growing.whole()

    def stages(self) -> dict[str, Any]:
        """How far the timeline is built: the number of its stages, and whether one is the whole.

        Raises:
            TraceError: The trace cannot be read.
        """
        return self._growing.stages()

    def stage(self, number: int | None) -> Timeline:
        """A stage of the timeline; None for the whole.

        Raises:
            ValueError: There is no such stage.
        """
        return self.timeline if number is None else self._growing.stage(number)

    def progress(self) -> dict[str, Any]:
        """How far the trace is read for the timeline and for the analysis, if someone waits."""
        stored: Stored | None = vars(self).get("_stored")
        if stored is None:
            return NOTHING_UNDER_WAY
        return {"reading": stored.reading.to_json(), "measuring": stored.measuring.to_json()}

    @once
    def analyzed(self) -> Analyzed:
        """The analysis, with the critical paths and the joined messages."""
        if self._stored is not None:
            return self._stored.analyzed()
        from ddltrace.analyzer.analysis import analyze_in_full

        return analyze_in_full(shortened(self.trace))

    @property
    def analysis(self) -> Analysis:
        """The analysis."""
        return self.analyzed.analysis

    @once
    def slack(self) -> tuple[SlackRow, ...]:
        """Slack over the steady steps; of a large trace, all events are read for it once.

        Raises:
            TraceError: The trace cannot be read.
        """
        analyzed = self.analyzed
        if self._stored is not None:
            return self._stored.slack()
        from ddltrace.analyzer.slack import slack_rows

        return slack_rows(shortened(self.trace), analyzed)

    @property
    def slack_if_soon(self) -> tuple[SlackRow, ...] | None:
        """The same if it is at hand or the trace is small; requires the analysis."""
        if self._stored is None:
            return self.slack
        return vars(self).get("slack") or self._stored.slack_if_stored()

    @property
    def analysis_if_made(self) -> Analysis | None:
        """The analysis if it has been computed already."""
        analyzed: Analyzed | None = vars(self).get("analyzed")
        return None if analyzed is None else analyzed.analysis

    def tensors_of(self, step: int | None) -> tuple[TensorRow, ...]:
        """The lives of the tensors in one step; None for medians over the steady steps.

        Raises:
            TraceError: The trace has no such step.
        """
        return self.analysis.tensors if step is None else self._tensors.get(step)

    def _tensors_in(self, step: int) -> tuple[TensorRow, ...]:
        # A step more on both sides: ranks are not in the same step at the same time.
        view = self.trace.within(range(step - 1, step + 2))
        return view.analyze(range(step, step + 1)).tensors

    def query(self, sql: str) -> pa.Table:
        """The rows of a SELECT over the trace's tables; the last results are kept.

        Raises:
            UsageError: The statement is not a SELECT, is wrong, or needs more than 500 MB or 30 s.
        """
        return self._queries.get(sql)

    def ask(self, sql: str) -> None:
        """Notes that someone ran a statement from the page: an address alone runs none."""
        if sql not in self._asked:
            self._asked.append(sql)

    def was_asked(self, sql: str) -> bool:
        """Whether a statement of an address was run from the page before."""
        return sql in self._asked

    def columns_of(self, table: str) -> list[str]:
        """The columns of a table that `query` can read."""
        if table not in self._columns:
            stream = EventStream(self.trace)
            if table == "events":
                self._columns[table] = stream.schema.names
            elif table in OF_TRACE:
                self._columns[table] = OF_TRACE[table](self.trace).column_names
            else:
                self._columns[table] = columns_of(table, self.analyzed)
        return self._columns[table]

    @property
    def notes(self) -> list[str]:
        """Limitations of the trace that affect its numbers; requires the analysis."""
        trace = self.analysis.trace
        notes = notes_of(self.analysis)
        if trace.status != "complete" or trace.exit_status:
            notes.insert(0, f"the trace is {state_text(trace)}")
        return [printable(note) for note in notes]

    @once
    def path_lane(self) -> PathLane:
        """The lane of the critical paths; requires the analysis."""
        paths, timeline = self.analyzed.paths, self.timeline
        self._release()
        lane = build_path_lane(paths, timeline, self.trace.origin_ns)
        self._release()
        return lane

    def row(self, number: int) -> Row:
        """A row of the timeline, or, after those, of the lane of the critical paths.

        Raises:
            ValueError: The row does not exist.
        """
        count = len(self.timeline.rows)
        if 0 <= number < count:
            return self.timeline.rows[number]
        rows = self.path_lane.rows if number >= count else []
        if not 0 <= number - count < len(rows):
            raise ValueError(f"the timeline has {count + len(rows)} rows")
        return rows[number - count]

    def row_of_event(self, rank: int, event: int) -> tuple[int, int] | None:
        """The row that shows an event, and the event's position in it.

        For `NO_RANK` an event is a piece of a critical path.
        """
        if rank != NO_RANK:
            return self.timeline.row_of_event(rank, event)
        lane = self.path_lane
        for number, row in enumerate(lane.rows, start=lane.first_row):
            found = np.flatnonzero(row.event == event)
            if len(found):
                return number, int(found[0])
        return None

    @once
    def breakdowns(self) -> list[Breakdown]:
        """The breakdown of each rank's steady steps, for ranks that have any."""
        return rank_breakdowns(self.analyzed)

    def figure(self, name: str, make: Callable[[OpenTrace], go.Figure | None]) -> go.Figure | None:
        """A figure of this trace; None if the trace has no data for it."""
        with self._drawing.setdefault(name, threading.Lock()):
            if name not in self._figures:
                self._figures[name] = make(self)
            return self._figures[name]

    def event(self, rank: int, number: int) -> dict[str, Any]:
        """All columns of one event. Of events other than messages, the rank is read up to there.

        Raises:
            TraceError: The rank or the event does not exist.
        """
        index = self.timeline.indexes.get(rank)
        if index is None:
            raise TraceError(f"{self.title} has no rank {rank}")
        if not 0 <= number < len(index):
            raise TraceError(f"rank {rank} has {len(index)} events")
        message = index.message(number)
        if message is not None:
            return message
        place = index.place(number)
        for table in windows_with_nccl(self.trace, rank):
            if place < table.num_rows:
                row: dict[str, Any] = table.slice(place, 1).to_pylist()[0]
                return row
            place -= table.num_rows
        raise TraceError(f"rank {rank} has changed since it was read")

    def frame(
        self, window: Window, rows: list[int], query: str = "", stage: int | None = None
    ) -> bytes:
        """The intervals to draw in a window of some rows.

        Args:
            window: Time range and width.
            rows: Row numbers.
            query: Adds the matching events as a second layer.
            stage: Stage of the timeline; None for the complete one. Only the complete one can be
                searched.

        Raises:
            ValueError: A row or the stage does not exist.
        """
        if stage is None:
            layers = [[(number, self.row(number)) for number in rows]]
        else:
            shown = self.stage(stage).rows
            if any(not 0 <= number < len(shown) for number in rows):
                raise ValueError(f"the timeline has {len(shown)} rows")
            layers = [[(number, shown[number]) for number in rows]]
        if query and stage is None:
            found = self.search(query).rows
            events = (n for n in rows if n < len(found))
            layers.append([(n, row) for n in events if (row := found[n]) is not None])
        if self._stored is None:
            return encode_frame(window, layers)
        return encode_frame(window, layers, self._stored.trim)

    def search(self, query: str) -> Search:
        """Finds events whose label or tensor names contain a text."""
        return self._searches.get(query.strip().casefold())

    def _search(self, query: str) -> Search:
        timeline = self.timeline
        named: Bools = np.array([query in name.casefold() for name in timeline.names], dtype=bool)
        step = _STEP_QUERY.match(query)
        rows: list[Row | None] = [None] * len(timeline.rows)
        total = 0
        hits: list[tuple[int, int, int, int, int]] = []
        for rank in self.trace.ranks:
            touched = self._events_with_tensor(rank, query)
            for track in (t for t in timeline.tracks if t.rank == rank):
                for number in range(track.first_row, track.first_row + track.num_rows):
                    row = timeline.rows[number]
                    if track.kind == "steps":
                        match = row.name == (int(step[1]) if step else -1)
                    else:
                        match = (named if row.labels is None else named[row.labels])[row.name]
                    if touched is not None:
                        match = match | touched[row.event]
                    found = np.flatnonzero(match)
                    if not len(found):
                        continue
                    total += len(found)
                    rows[number] = _only(row, found)
                    first = found[:_MAX_HITS]
                    start, end = row.index.start[first], row.index.end(first)
                    event = row.event[first]
                    hits += [
                        (int(s), int(e), rank, number, int(n))
                        for s, e, n in zip(start, end, event, strict=True)
                    ]
                    self._release()
        self._release()
        hits.sort()
        keys = ("start", "end", "rank", "row", "event")
        return Search(rows, total, [dict(zip(keys, h, strict=True)) for h in hits[:_MAX_HITS]])

    def _events_with_tensor(self, rank: int, query: str) -> Bools | None:
        """Marks the events of a rank that concern a tensor whose name contains a text."""
        wanted = [t.id for t in self.trace.tensors(rank) if query in t.name.casefold()]
        if not wanted:
            return None
        return self.timeline.indexes[rank].with_tensors(wanted)

    def names(self, numbers: list[int], stage: int | None = None) -> dict[int, str]:
        """Labels by their numbers, escaped for display.

        Raises:
            ValueError: A label or the stage of the timeline does not exist.
        """
        names = self.stage(stage).names
        if any(not 0 <= number < len(names) for number in numbers):
            raise ValueError(f"the timeline has {len(names)} labels")
        return {number: printable(names[number]) for number in numbers}

    def neighbor(self, row_number: int, event: int, direction: int) -> dict[str, Any] | None:
        """The event before (-1) or after (1) another one in its row.

        Raises:
            ValueError: The row does not exist, or the event is not in it.
        """
        row = self.row(row_number)
        here = np.flatnonzero(row.event == event)
        if not len(here):
            raise ValueError(f"event {event} is not in row {row_number}")
        position = int(here[0]) + direction
        if not 0 <= position < len(row.index):
            return None
        at: I64 = np.array([position], dtype=np.int64)
        return {
            "row": row_number,
            "event": int(row.event[position]),
            "start": int(row.index.start[position]),
            "end": int(row.index.end(at)[0]),
        }

    def layout(self, stage: int | None = None) -> dict[str, Any]:
        """The data that the timeline component needs before its first frame.

        Raises:
            ValueError: The stage does not exist.
        """
        timeline = self.stage(stage)
        return {
            "title": printable(self.title),
            "notes": [printable(note) for note in self.trace.notes],
            "span": timeline.span_ns,
            "events": timeline.num_events,
            "rows": len(timeline.rows),
            "roles": [role.name.lower() for role in Role],
            "used": sorted(Role(role).name.lower() for role in timeline.roles),
            "path": any(track.kind == "steps" for track in timeline.tracks),
            "ranks": list(self.trace.ranks),
            "unread": timeline.unread,
            "groups": [
                {
                    "title": printable(group.title),
                    "ranks": group.ranks,
                    "outliers": group.is_outliers,
                }
                for group in rank_groups(timeline, self._hosts())
            ],
            "tracks": [
                {
                    "rank": track.rank,
                    "kind": track.kind,
                    "label": printable(track.label),
                    "row": track.first_row,
                    "rows": track.num_rows,
                    "crowded": track.crowded,
                }
                for track in timeline.tracks
            ],
        }

    def _hosts(self) -> dict[int, str]:
        return {info.rank: info.host for info in self.trace.run.ranks}

    def path_layout(self) -> dict[str, Any]:
        """The data that the component needs about the lane of the critical paths."""
        lane = self.path_lane
        return {"row": lane.first_row, "rows": len(lane.rows), "used": _roles_in(lane.rows)}

    def minimap(self, pixels: int, stage: int | None = None) -> dict[str, Any]:
        """The activity of each rank over the whole trace.

        Args:
            pixels: Number of columns.
            stage: Stage of the timeline; None for the complete one.

        Returns:
            Values of 0..255 per column: ``compute`` and ``communication``, one list per rank, in
            the order of ``ranks``.
        """
        timeline = self.stage(stage)
        edges = Window(0, max(1, timeline.span_ns), pixels).edges()
        ranks = [rank for rank in self.trace.ranks if rank in timeline.busy]
        busy = [timeline.busy[rank] for rank in ranks]
        return {
            "ranks": ranks,
            "compute": [_shares(compute, edges) for compute, _ in busy],
            "communication": [_shares(communication, edges) for _, communication in busy],
        }


class Workspace:
    """All traces and experiments of one dashboard.

    Attributes:
        traces: In the order of the command line.
        experiments: In the order of the command line, then those that were started here.
        runs: The permission to start experiments; None without --allow-run.
    """

    def __init__(
        self,
        traces: list[Trace],
        experiments: Sequence[OpenExperiment] = (),
        runs: AllowedRuns | None = None,
    ) -> None:
        self.runs = runs
        self.experiments = list(experiments)
        self._live: dict[int, LiveTrace] = {}
        self._live_lock = threading.Lock()
        self._adding = threading.Lock()
        titles = _unique_titles(traces)
        self.traces = [
            OpenTrace(number, title, trace)
            for number, (title, trace) in enumerate(zip(titles, traces, strict=True))
        ]

    def live(self, number: int) -> LiveTrace:
        """Follows a trace that may still be written.

        Raises:
            TraceError: The trace does not exist, or was not recorded by ddltrace.
        """
        path = self.get(number).trace.path
        if not isinstance(path, Path) or not (path / RUN_FILE).is_file():
            raise TraceError("only a trace that ddltrace records can be followed live")
        from ddltrace.analyzer.live.live_trace import LiveTrace

        with self._live_lock:
            if number not in self._live:
                self._live[number] = LiveTrace(path)
            return self._live[number]

    def is_running(self, number: int) -> bool:
        """Whether the job of a local trace was running when the trace was opened."""
        trace = self.get(number).trace
        return isinstance(trace.path, Path) and trace.run.status == "running"

    def reopen(self, number: int) -> None:
        """Opens a trace again, with what has been written since.

        Raises:
            TraceError: The trace does not exist, or cannot be read any more.
        """
        former = self.get(number)
        self.traces[number] = OpenTrace(
            number, former.title, open_trace(former.trace.path, former.trace.engine)
        )

    def reopen_if_empty(self, number: int) -> None:
        """Opens a trace again if no rank had recorded anything when it was opened.

        Raises:
            TraceError: The trace does not exist, or cannot be read any more.
        """
        if self.is_running(number) and not self.get(number).trace.ranks:
            self.reopen(number)

    def get(self, number: int) -> OpenTrace:
        """A trace by its number.

        Raises:
            TraceError: The trace does not exist.
        """
        if not self.traces:
            raise TraceError("this dashboard shows no trace")
        if not 0 <= number < len(self.traces):
            raise TraceError(f"this dashboard has no trace {number}: it shows {len(self.traces)}")
        return self.traces[number]

    @property
    def command(self) -> str:
        """The command that shows what this dashboard shows. Safe to print."""
        experiments = [experiment.directory.absolute() for experiment in self.experiments]
        paths = [opened.trace.path for opened in self.traces]
        traces = [path.absolute() if isinstance(path, Path) else path for path in paths]
        # Traces of an experiment come with it.
        own = [path for path in traces if path.parent not in experiments]
        shown = [printable(path) for path in (*own, *experiments)]
        return shlex.join(["ddltrace", "dashboard", *shown])

    def experiment(self, number: int) -> OpenExperiment:
        """An experiment by its number.

        Raises:
            TraceError: There is no such experiment.
        """
        if not 0 <= number < len(self.experiments):
            count = len(self.experiments)
            raise TraceError(f"this dashboard has no experiment {number}: it shows {count}")
        return self.experiments[number]

    def add_experiment(self, directory: Path) -> int:
        """Adds an experiment, whose results may still be missing; returns its number."""
        with self._adding:
            number = len(self.experiments)
            title = printable(directory.resolve().name)
            self.experiments.append(OpenExperiment(number, title, directory, was_started_here=True))
        return number

    def show_trace(self, path: Path, experiment: OpenExperiment) -> int | None:
        """The number of a trace of an experiment, which is opened if it is not shown yet.

        Returns:
            None if there is no trace, or it is not in the experiment's directory.
        """
        inside, wanted = experiment.directory.resolve(), path.resolve()
        with self._adding:
            for opened in self.traces:
                if opened.trace.path.resolve() == wanted:
                    return opened.number
            if not wanted.is_relative_to(inside) or not (path / RUN_FILE).is_file():
                return None
            try:
                trace = open_trace(path)
            except TraceError:
                return None
            title = printable(trace.name)
            if any(title == opened.title for opened in self.traces):
                title = f"{experiment.title}/{title}"
            self.traces.append(OpenTrace(len(self.traces), title, trace))
            return len(self.traces) - 1

    @property
    def may_grow(self) -> bool:
        """Whether traces may come that were not there when the dashboard was started."""
        return self.runs is not None or bool(self.experiments)

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Loads everything, so that the first pages open at once; reports errors.

        A stored analysis is read when a page needs it: that takes a third of a second in Python,
        in which the timeline would not be answered.

        Args:
            report: Called with the message of each error.
        """
        for opened in list(self.traces):
            stored = opened._stored
            with contextlib.suppress(TraceError):
                opened.stages()  # before the analysis takes processor time
            with ThreadPoolExecutor(2) as pool:
                work: list[Future[Any]] = [pool.submit(opened._growing.whole)]
                if stored is None or not stored.has_analysis:
                    work.append(pool.submit(getattr, opened, "breakdowns"))
            for loaded in work:
                error = loaded.exception()
                if isinstance(error, TraceError):
                    report(str(error))
                elif error is not None:
                    raise error


def _unique_titles(traces: list[Trace]) -> list[str]:
    titles = [printable(trace.name) for trace in traces]
    if len(set(titles)) == len(titles):
        return titles
    return [f"{title} ({number})" for number, title in enumerate(titles, start=1)]


def _roles_in(rows: list[Row]) -> list[str]:
    """The names of the roles that occur in some rows."""
    present = sum((np.bincount(row.role, minlength=len(Role)) for row in rows), np.zeros(len(Role)))
    return sorted(role.name.lower() for role in Role if present[role])


def _only(row: Row, positions: I64) -> Row:
    index = RowIndex(row.index.start[positions], row.index.end(positions))
    return Row(index, row.event[positions], row.label(positions), row.role[positions])


def _shares(busy: RowIndex, edges: I64) -> list[int]:
    share = np.diff(busy.covered_until(edges)) / np.diff(edges)
    return [int(value) for value in np.rint(255 * np.clip(share, 0, 1))]
