"""A trace opened for reading: events per rank, sorted, on one clock.

Reading is lazy: opening a trace reads the metadata of the run, not the events. What a process
recorded is read by `ddltrace.analyzer.trace.recorded_run`; `ddltrace.analyzer.open_trace` opens
traces and can analyze them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.engine.engine import EmbeddedEngine, Engine, map_parts
from ddltrace.analyzer.events.event_columns import Columns
from ddltrace.analyzer.events.superseded import drop_superseded, is_open
from ddltrace.analyzer.recent_cache import RecentCache
from ddltrace.analyzer.trace.align import RankClock, align
from ddltrace.analyzer.trace.clock_bounds import CLOCK_COLUMNS, ProcessTimes, process_times
from ddltrace.analyzer.trace.recorded_run import RecordedRun, leaving_out_unreadable
from ddltrace.analyzer.trace.run_metadata import name_in
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.counters import COUNTERS
from ddltrace.tracer.trace.event_reader import EventReader
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import counters_name

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.step_selection import StepSelection

_CACHE_BYTES: Final = 512 << 20
_TIME_COLUMNS: Final = ("start_ns", "end_ns", "enqueue_ns")
Result = TypeVar("Result")
TraceT = TypeVar("TraceT", bound="Trace")

_OF_ALL_RANKS: Final = (
    *("clocks", "step_selection", "origin_ns", "_counter_files"),
    *("_groups", "_infos", "_generations", "_first_steps"),
)
"""Cached properties that are computed from all ranks."""


def check_consecutive(steps: range) -> None:
    """Refuses steps that are not consecutive.

    Raises:
        UsageError: They are not.
    """
    if not isinstance(steps, range) or steps.step != 1:
        raise UsageError(
            f"steps are a range of consecutive numbers, such as range(10, 20), not {steps!r:.80}"
        )


class Trace(RecordedRun):
    """One run's events on rank 0's clock; `ddltrace.analyzer.open_trace.Trace` describes it.

    Attributes:
        memory_limit: Memory that what an analysis keeps of its steps may take, about; None for
            4 GiB. If the trace needs more, the last steps are analyzed. Set it first.
        peak_tflops: Peak of each rank's device in 10^12 floating-point operations per second, for
            the utilization; None if it is not known.
        engine: Executes the tasks of an analysis, such as those per rank.
    """

    def __init__(
        self,
        path: Location,
        run: RunInfo,
        tables: dict[str, pa.Table] | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(path, run, tables)
        self.memory_limit: int | None = None
        self.peak_tflops: float | None = None
        self.engine: Engine = EmbeddedEngine() if engine is None else engine
        self._cache = self._new_cache()

    def _new_cache(self) -> RecentCache[int, pa.Table]:
        return RecentCache(self._load, lambda table: int(table.nbytes), _CACHE_BYTES)

    def within(self: TraceT, steps: range) -> TraceT:
        """The same trace with the events of some steps only.

        Events of no step come with them where they were recorded after the first of these
        steps.

        Args:
            steps: Numbers of consecutive steps, as events of this trace have them.

        Raises:
            UsageError: They are not consecutive.
        """
        check_consecutive(steps)
        view = copy.copy(self)
        # These are of the whole trace.
        view.__dict__["clocks"] = self.clocks
        if max(self._generations.values(), default=0):
            view.__dict__["_first_steps"] = self._first_steps
        view._steps = steps
        view._cache = view._new_cache()
        return view

    def of_rank(self: TraceT, rank: int) -> TraceT:
        """One rank of the trace: what a task of an engine needs to read that rank's events.

        It can be pickled, has no notes yet, and reads what the trace would read.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        # The members of all groups, for every rank, would be quadratic in the ranks.
        infos = [dataclasses.replace(info, groups=[]) for info in self.infos(rank)]
        view = self._of_processes(infos)
        known = view.__dict__
        known["clocks"] = {info.segment: self.clocks[info.segment] for info in infos}
        known["step_selection"] = self.step_selection
        if self._tables is None:
            # Listed once: a listing by each rank would be quadratic in the ranks.
            own = {counters_name(info.segment) for info in infos}
            known["_counter_files"] = own & self._counter_files
        if max(view._generations.values(), default=0):
            known["_first_steps"] = self._first_steps
        return view

    def of_steps(self: TraceT, steps: range, *, later_stepless: bool) -> TraceT:
        """Some steps of the trace: what a task of an engine needs to analyze them.

        It can be pickled, has no notes yet, and reads what `within` would read.

        Args:
            steps: Numbers of steps, as events of this trace have them.
            later_stepless: Whether events of no step that were recorded after these steps come
                with them.
        """
        view = self._of_processes(self.run.ranks)
        known = view.__dict__
        known["clocks"], known["step_selection"] = self.clocks, self.step_selection
        if max(self._generations.values(), default=0):
            known["_first_steps"] = self._first_steps
        view._steps, view._later_stepless = steps, later_stepless
        return view

    def _of_processes(self: TraceT, infos: list[RankInfo]) -> TraceT:
        """Some processes of the trace, as `of_rank`, whose clocks are not aligned yet."""
        view = copy.copy(self)
        for name in _OF_ALL_RANKS:
            view.__dict__.pop(name, None)
        # A worker of a cluster may have another working directory.
        view.path = self.path.absolute()
        view.run = dataclasses.replace(self.run, ranks=infos, notes=[])
        view.ranks = sorted({info.rank for info in infos})
        segments = [info.segment for info in infos]
        view.__dict__["_generations"] = {name: self._generations[name] for name in segments}
        view.notes, view.damage = [], []
        view.engine = EmbeddedEngine()
        view.verified = {name: self.verified[name] for name in segments if name in self.verified}
        view._last_starts = {}
        if self._tables is not None:
            view._tables = {name: self._tables[name] for name in segments}
        view._cache = view._new_cache()
        return view

    def map_ranks(
        self,
        task: Callable[[Trace], Result],
        doing: str,
        ranks: Sequence[int] | None = None,
        *,
        one_at_a_time: bool = False,
    ) -> Iterator[Result]:
        """Executes a task for each rank on the engine of the trace.

        Args:
            task: A function of a module, or a `functools.partial` of one; called with `of_rank`.
            doing: What the tasks do, see `Engine.map`.
            ranks: Only for these ranks.
            one_at_a_time: See `Engine.map`.

        Yields:
            One result for each rank, in order.
        """
        parts = [self.of_rank(rank) for rank in (self.ranks if ranks is None else ranks)]
        return map_parts(self, task, parts, doing, one_at_a_time=one_at_a_time)

    def map_processes(
        self, task: Callable[[Trace], Result], infos: Sequence[RankInfo], doing: str
    ) -> Iterator[Result]:
        """Executes a task for each of some processes, as `map_ranks`, without aligned clocks."""
        return map_parts(self, task, [self._of_processes([info]) for info in infos], doing)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: neither the events that were read nor the caller's hooks."""
        state = {**vars(self), "_cache": None, "on_read": None}
        if self._tables is not None and self._steps is not None:
            state["_tables"] = {info.segment: self._read(info) for info in self.run.ranks}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cache = self._new_cache()

    @cached_property
    def clocks(self) -> dict[str, RankClock]:
        """Segment name -> how that process's times were aligned.

        Reads the events if the trace has several clocks, because messages bound their offsets.
        """
        notes: list[str] = []
        clocks = align(self.run, self._process_times, notes)
        for note in notes:
            self._note(note)
        return clocks

    def _process_times(self, infos: Sequence[RankInfo]) -> Iterator[ProcessTimes]:
        return self.map_processes(_process_times, infos, "reading messages to align clocks")

    def _read_clock_windows(self, info: RankInfo) -> Iterator[pa.Table]:
        """A process's events on its own clock; from a store, only the columns for clocks."""
        if self.is_local:
            yield from self._read_windows(info)
            return
        for batch in self.read_columns(info, CLOCK_COLUMNS):
            yield pa.Table.from_batches([batch])

    def moment(self, info: RankInfo, ns: int) -> int:
        """Converts a time of one process's clock to rank 0's clock.

        Args:
            info: The process.
            ns: When it was there.
        """
        return int(self.clocks[info.segment].apply(np.array([ns], np.int64))[0])

    @cached_property
    def step_selection(self) -> StepSelection | None:
        """The steps that are analyzed at once if the trace is too long for all; else None."""
        from ddltrace.analyzer.trace.step_selection import select_steps

        return select_steps(self, self.memory_limit)

    def events(self, rank: int) -> pa.Table:
        """Returns all events of a rank.

        Returns:
            A table of schema `EVENTS`, sorted by ``start_ns``, times on rank 0's clock. Of a
            message that was seen in flight and later completed, only the final row.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        return self._cache.get(rank)

    def counters(self, rank: int) -> pa.Table:
        """Returns the resource counters of a rank.

        Returns:
            A table of schema `COUNTERS`, times on rank 0's clock; without rows if the rank
            recorded none.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        tables = []
        for info in self.infos(rank):
            table = self._read_counters(info)
            times = self.clocks[info.segment].apply(table["time_ns"].to_numpy())
            table = table.set_column(0, COUNTERS.field(0), pa.array(times, pa.int64()))
            steps = pc.add(table["step"], pa.scalar(self.first_step(info), pa.int32()))
            tables.append(table.set_column(3, COUNTERS.field(3), steps))
        return pa.concat_tables(tables).unify_dictionaries().combine_chunks()

    @cached_property
    def origin_ns(self) -> int:
        """The earliest start of any event on rank 0's clock; 0 in a trace without events."""
        if self._steps is None and self._tables is None:
            firsts = self.map_ranks(_first_start, "reading when ranks start")
            return min((first for first in firsts if first is not None), default=0)
        starts = [
            events["start_ns"][0].as_py()
            for events in map(self.events, self.ranks)
            if events.num_rows
        ]
        return min(starts, default=0)

    def columns(self, rank: int) -> Columns:
        """A rank's events as numpy columns, in the order of recording: for the measures.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        if rank in self._cache:
            return Columns(self._cache.get(rank))
        return Columns(pa.concat_tables(self._aligned(rank)).unify_dictionaries())

    def windows(self, rank: int) -> Iterator[pa.Table]:
        """A rank's events some ten thousand at a time, in the order of recording.

        What walks over them needs memory for one window, however long the trace is. Of a
        message that was seen in flight and later completed, both rows come; see
        `drop_superseded`.

        Returns:
            Tables of schema `EVENTS`, times on rank 0's clock.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        last_id = 0
        infos = self.infos(rank)
        for info in infos:
            highest = 0
            for table in self._read_windows(info):
                placed = self._place(table, info, last_id)
                if len(infos) > 1:
                    highest = max(highest, pc.max(placed["id"]).as_py() or 0)
                yield placed
            last_id += highest + 1

    def last_windows(self, rank: int) -> Iterator[pa.Table]:
        """The windows of a rank's last steps.

        These may be before the steps of this view: a killed rank has not written its last events.

        Returns:
            See `windows`.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        view, selection = self, self.step_selection
        if self._steps is not None and selection is not None:
            known = [selection.last_steps.get(info.segment) for info in self.infos(rank)]
            last = max((step for step in known if step is not None), default=self._steps.start)
            if last < self._steps.start:
                view = self.within(range(last, self._steps.stop))
        yield from view.windows(rank)

    def sample(self, rank: int, batches: int, rows: int) -> Iterator[pa.Table]:
        """Some of a rank's events, from batches that are evenly spread over its files.

        For a first impression of a long trace: neither checksums nor damage are looked at.

        Args:
            batches: How many batches to read of each process.
            rows: How many events to take from the beginning of each batch.

        Returns:
            Tables of schema `EVENTS`, times on rank 0's clock, in the order of recording.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        for info in self.infos(rank):
            if self._tables is not None:
                yield self._place(self._tables[info.segment], info, 0)
                continue
            with leaving_out_unreadable():
                for batch in EventReader(self.path, info.segment, most=batches):
                    some = pa.Table.from_batches([batch.slice(0, rows)], schema=EVENTS)
                    yield self._place(self._named(info, some), info, 0)

    def event_tables(self, rank: int) -> Iterator[pa.Table]:
        """Yields the rows of `events`: all at once, sorted, or in parts if the trace is too long.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        if self.step_selection is None:
            yield self.events(rank)
        else:
            yield from self.event_windows(rank)

    def event_windows(self, rank: int) -> Iterator[pa.Table]:
        """The rows of `events`, some ten thousand at a time, in the order of recording.

        For users of all events of a trace that is too long for memory: events are read twice.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        seen_open = np.empty(0, np.int64)
        completed = [seen_open]
        for table in self.windows(rank):
            ids = table["id"].fill_null(-1).to_numpy()
            in_flight = is_open(table) & (ids >= 0)
            completed.append(ids[~in_flight & np.isin(ids, seen_open)])
            seen_open = np.concatenate([seen_open, ids[in_flight]])
        superseded = np.concatenate(completed)
        for window in self.windows(rank):
            table = drop_superseded(window)
            ids = table["id"].fill_null(-1).to_numpy()
            yield table.filter(pa.array(~(is_open(table) & np.isin(ids, superseded))))

    def _load(self, rank: int) -> pa.Table:
        return _sort(pa.concat_tables(self._aligned(rank)).unify_dictionaries())

    def _aligned(self, rank: int) -> list[pa.Table]:
        tables = []
        last_id = 0
        for info in self.infos(rank):
            table = self._place(drop_superseded(self._read(info)), info, last_id)
            last_id += (pc.max(table["id"]).as_py() or 0) + 1
            tables.append(table)
        return tables

    def _place(self, table: pa.Table, info: RankInfo, last_id: int) -> pa.Table:
        """Brings some of a process's events onto the trace's clock, steps, ids and groups."""
        table = _align_times(table, self.clocks[info.segment])
        generation = self._generations[info.segment]
        if generation:
            table = _shift(table, "step", self.first_step(info))
            table = _shift(_shift(table, "id", last_id), "parent", last_id)
            table = _mark_groups(table, generation)
        return table


def _process_times(trace: Trace) -> ProcessTimes:
    """The times of a trace of one process, on its own clock."""
    (info,) = trace.run.ranks
    return process_times(info, trace._read_clock_windows(info), trace._generations[info.segment])


def _first_start(trace: Trace) -> int | None:
    """The earliest start of any event of a trace's processes; None without events."""
    firsts = (
        int(trace.clocks[info.segment].apply(numbers.min(keepdims=True))[0])
        for info in trace.run.ranks
        for batch in trace.read_columns(info, ("start_ns",))
        if len(numbers := batch["start_ns"].to_numpy())
    )
    return min(firsts, default=None)


def _align_times(table: pa.Table, clock: RankClock) -> pa.Table:
    if clock.offset_ns == 0 and clock.drift == 0.0:
        return table
    for name in _TIME_COLUMNS:
        column = table[name].combine_chunks()
        times = column.fill_null(clock.reference_ns).to_numpy(zero_copy_only=False)
        missing = column.is_null().to_numpy(zero_copy_only=False)
        table = _replace(table, name, pa.array(clock.apply(times), pa.int64(), mask=missing))
    return table


def _sort(table: pa.Table) -> pa.Table:
    starts = table["start_ns"].combine_chunks().to_numpy(zero_copy_only=False)
    if len(starts) < 2 or bool(np.all(starts[1:] >= starts[:-1])):
        return table.combine_chunks()
    return table.combine_chunks().take(pa.array(np.argsort(starts, kind="stable")))


def _shift(table: pa.Table, name: str, by: int) -> pa.Table:
    column = pc.add(table[name], pa.scalar(by, EVENTS.field(name).type))
    return _replace(table, name, column)


def _mark_groups(table: pa.Table, generation: int) -> pa.Table:
    column = table["group"].combine_chunks()
    names = [name_in(generation, name) for name in column.dictionary.to_pylist()]
    marked = pa.DictionaryArray.from_arrays(column.indices, pa.array(names, pa.string()))
    return _replace(table, "group", marked)


def _replace(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), EVENTS.field(name), column)
