"""A trace opened for reading: events per rank, sorted, on one clock.

Reading is lazy: opening a trace reads the metadata of the run, not the events.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.engine.engine import EmbeddedEngine, Engine
from ddltrace.analyzer.engine.part_tasks import Notes, map_parts
from ddltrace.analyzer.engine.shared_files import check_shared
from ddltrace.analyzer.events.event_columns import Columns
from ddltrace.analyzer.events.superseded import drop_superseded, is_open
from ddltrace.analyzer.recent_cache import RecentCache
from ddltrace.analyzer.trace.align import RankClock, align
from ddltrace.analyzer.trace.clock_bounds import CLOCK_COLUMNS, ProcessTimes, process_times
from ddltrace.analyzer.trace.run_validation import check_run
from ddltrace.tracer.errors import TraceError, UsageError, is_store_failure
from ddltrace.tracer.storage.local_copy import local_copy
from ddltrace.tracer.storage.location import Location, location_of, matches
from ddltrace.tracer.trace.counters import COUNTERS, read_counters
from ddltrace.tracer.trace.event_file import counters_match_checksum, grouped, matches_checksum
from ddltrace.tracer.trace.event_reader import EventReader
from ddltrace.tracer.trace.run_files import CHANGED
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import RUN_FILE, counter_files, counters_name

if TYPE_CHECKING:
    from ddltrace.analyzer.model import Analysis
    from ddltrace.analyzer.trace.step_selection import StepSelection
    from ddltrace.tracer.storage.remote_path import RemotePath
    from ddltrace.tracer.trace.batch_facts import BatchFacts

_CACHE_BYTES: Final = 512 << 20
_WINDOW_ROWS: Final = 1 << 16
_TIME_COLUMNS: Final = ("start_ns", "end_ns", "enqueue_ns")
_GENERATION_MARK: Final = "@"
_MAX_NAMED: Final = 8
Result = TypeVar("Result")

_OF_ALL_RANKS: Final = (
    *("clocks", "step_selection", "origin_ns", "_counter_files"),
    *("_groups", "_infos", "_generations", "_first_steps"),
)
"""Cached properties that are computed from all ranks."""


def open_trace(path: str | PathLike[str] | RemotePath, engine: Engine | None = None) -> Trace:
    """Opens a trace directory, or a file or folder of a format that can be imported.

    Args:
        path: A directory written by ``ddltrace run`` (finished, still being written, or left
            by a job that died), or an importable file or folder. A URL, such as
            ``s3://bucket/run``, names one in a store.
        engine: Executes the tasks of reading and analyzing it; by default this process.

    Returns:
        The trace; events load when asked for.

    Raises:
        TraceError: There is nothing there, or it cannot be read as a trace.
        UsageError: The URL holds credentials or unknown parameters.
        EngineError: A worker of the engine does not see the files of the trace.
    """
    location = location_of(path)
    if (location / RUN_FILE).is_file():
        if engine is not None:
            check_shared(engine, location / RUN_FILE)
        return Trace(location, _read_run(location), engine=engine)
    if not location.exists():
        raise TraceError(f"{location} does not exist")
    from ddltrace.analyzer.importers import formats

    with local_copy(location, formats.MAX_FILES) as files:
        if formats.recognizes(files):
            # Copies of files from a store are on this machine only.
            imported = formats.read(files, engine if files == location else None)
            return Trace(location, check_run(imported.run), imported.tables, engine)
        unread = formats.describe_unread(files)
    if location.is_dir():
        _check_holds_none(location)
        if unread is not None:
            raise TraceError(unread)
        read_run(location)  # raises, and says what is missing
    raise TraceError(
        unread or f"{location} is neither a trace directory nor of a format that can be imported"
    )


def open_files(paths: Sequence[Path], engine: Engine | None = None) -> Trace:
    """Opens several importable files or folders as the ranks of one job.

    Args:
        paths: The files or folders, on this machine.
        engine: See `open_trace`.

    Raises:
        TraceError: They cannot be read.
    """
    from ddltrace.analyzer.importers import formats

    imported = formats.read(paths, engine)
    place = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    return Trace(place, check_run(imported.run), imported.tables, engine)


def _check_holds_none(path: Location) -> None:
    """Raises if a directory that is not a trace holds some, as an experiment's does."""
    inside = [run.parent for run in matches(path, f"*/{RUN_FILE}")]
    if not inside:
        return
    shown = " ".join(shlex.quote(str(trace)) for trace in inside[:_MAX_NAMED])
    count = "a trace" if len(inside) == 1 else f"{len(inside)} traces"
    which = f"the first {_MAX_NAMED}" if len(inside) > _MAX_NAMED else "them"
    raise TraceError(
        f"{path} is not a trace, but holds {count} (show {which} with: ddltrace dashboard {shown})"
    )


def _read_run(path: Location) -> RunInfo:
    try:
        return check_run(read_run(path))
    except (OverflowError, RecursionError, AttributeError) as error:
        raise TraceError(f"{path / RUN_FILE} is damaged: {error!s:.120}") from error


def _check_consecutive(steps: range) -> None:
    if not isinstance(steps, range) or steps.step != 1:
        raise UsageError(
            f"steps are a range of consecutive numbers, such as range(10, 20), not {steps!r:.80}"
        )


class Trace:
    """One run's events, tensors and process groups, on rank 0's clock.

    A rank that was restarted, or whose job made several processes of the same rank one after
    the other, has several *generations*. Their events stand in one table; from the second
    generation on, steps continue counting where the former stopped on any rank, and the names of
    process groups carry ``@2``, ``@3``, so that a step number or a (group, sequence number)
    means one thing only.

    Attributes:
        path: Where it was opened.
        name: How reports call it: the last part of the path.
        run: Metadata of the run.
        ranks: The ranks of which something was recorded, ascending.
        notes: Problems that affect the numbers; grows while reading.
        damage: The notes that report damage of what was read so far: a wrong checksum or
            unreadable bytes.
        on_read: Called with the number of events whenever some were read from a file.
        memory_limit: Memory that what an analysis keeps of its steps may take, about; None for
            4 GiB. If the trace needs more, the last steps are analyzed. Set it first.
        engine: Executes the tasks of an analysis, such as those per rank.
        verified: Segment name -> whether the file of that process has its checksum, once compared.
    """

    def __init__(
        self,
        path: Location,
        run: RunInfo,
        tables: dict[str, pa.Table] | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.path = path
        self.name = path.resolve().name or str(path)
        self.run = run
        self.notes = list(dict.fromkeys(str(note) for note in run.notes))
        self.on_read: Callable[[int], None] | None = None
        self.memory_limit: int | None = None
        self.engine: Engine = EmbeddedEngine() if engine is None else engine
        self._tables = tables
        self.verified: dict[str, bool] = {}
        self._last_starts: dict[str, int] = {}
        self.damage = [note for note in self.notes if note == CHANGED]
        self._leave_out_jobs_beside()
        self.ranks = sorted({info.rank for info in self.run.ranks})
        self._steps: range | None = None
        self._later_stepless = True
        self._cache = self._new_cache()

    def _leave_out_jobs_beside(self) -> None:
        """Leaves out processes that formed a smaller job while one of their host was at work.

        A helper that evaluates, for example: its groups and ranks have the names of the job's.
        """
        largest = max((info.world_size for info in self.run.ranks), default=0)
        beside = [
            info
            for info in self.run.ranks
            if info.world_size < largest
            and any(
                other.world_size > info.world_size
                and other.attempt == info.attempt
                and self._overlap(other, info)
                for other in self.run.ranks
            )
        ]
        for info in beside:
            self._note(
                f"process {info.pid} was rank {info.rank} of {info.world_size} in a job of its own "
                "beside the others: left out"
            )
        if beside:
            kept = [info for info in self.run.ranks if info not in beside]
            self.run = dataclasses.replace(self.run, ranks=kept)

    def _overlap(self, former: RankInfo, later: RankInfo) -> bool:
        """Whether a process still recorded something when another one of its host had begun."""
        first, began = former.clock.get("monotonic_ns"), later.clock.get("monotonic_ns")
        if former.clock_domain != later.clock_domain:
            return False
        if not isinstance(first, int) or not isinstance(began, int) or first > began:
            return False
        if former.segment not in self._last_starts:
            starts = (
                pc.max(b["start_ns"]).as_py() for b in self.read_columns(former, ["start_ns"])
            )
            self._last_starts[former.segment] = max((s for s in starts if s is not None), default=0)
        return self._last_starts[former.segment] > began

    def _new_cache(self) -> RecentCache[int, pa.Table]:
        return RecentCache(self._load, lambda table: int(table.nbytes), _CACHE_BYTES)

    def within(self, steps: range) -> Trace:
        """The same trace with the events of some steps only.

        Events of no step come with them where they were recorded after the first of these
        steps.

        Args:
            steps: Numbers of consecutive steps, as events of this trace have them.

        Raises:
            UsageError: They are not consecutive.
        """
        _check_consecutive(steps)
        view = copy.copy(self)
        # These are of the whole trace.
        view.__dict__["clocks"] = self.clocks
        if max(self._generations.values(), default=0):
            view.__dict__["_first_steps"] = self._first_steps
        view._steps = steps
        view._cache = view._new_cache()
        return view

    @property
    def size(self) -> int:
        """How many events its files have; very many if a process has not counted them yet."""
        counts = [info.events for info in self.run.ranks]
        return sys.maxsize if None in counts else sum(filter(None, counts))

    def of_rank(self, rank: int) -> Trace:
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

    def of_steps(self, steps: range, *, later_stepless: bool) -> Trace:
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

    def _of_processes(self, infos: list[RankInfo]) -> Trace:
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

    def add_notes(self, part: Notes) -> None:
        """Adds the notes of a part of the trace, see `of_rank`, without those that it has."""
        for note in part.notes:
            self._note(note)
        for note in part.damage:
            self._note_damage(note)
        self.verified.update(part.verified)

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

    @property
    def is_local(self) -> bool:
        """Whether the events are in memory or in files of this machine, not in a store."""
        return self._tables is not None or isinstance(self.path, Path)

    def batch_facts(self, info: RankInfo) -> list[BatchFacts] | None:
        """The facts about each batch of a process's file in a store.

        Returns:
            The facts, in the order of the file; None for a local trace, and if the file lacks
            them, as a stream does.
        """
        if self.is_local:
            return None
        from ddltrace.tracer.trace.event_reader import read_batch_facts

        facts = None
        with _leaving_out_unreadable():
            facts = read_batch_facts(self.path, info.segment)
        return facts

    @property
    def is_stored(self) -> bool:
        """Whether the trace is a trace directory, whose events are read from its files."""
        return self._tables is None and (self.path / RUN_FILE).is_file()

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

    def infos(self, rank: int) -> list[RankInfo]:
        """Returns the metadata of each process of a rank, in the order of generations.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        if rank not in self._infos:
            raise TraceError(f"{self.name} has no rank {rank}")
        return list(self._infos[rank])

    @cached_property
    def _infos(self) -> dict[int, list[RankInfo]]:
        """Rank -> the metadata of its processes, in the order of generations."""
        found: dict[int, list[RankInfo]] = {}
        for info in sorted(self.run.ranks, key=lambda info: self._generations[info.segment]):
            found.setdefault(info.rank, []).append(info)
        return found

    def events(self, rank: int) -> pa.Table:
        """Returns all events of a rank.

        Returns:
            A table of schema `EVENTS`, sorted by ``start_ns``, times on rank 0's clock. Of a
            message that was seen in flight and later completed, only the final row.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        return self._cache.get(rank)

    def has_counters(self, rank: int) -> bool:
        """Whether there is a file of counters of a rank."""
        if self._tables is not None:
            return False
        return any(counters_name(info.segment) in self._counter_files for info in self.infos(rank))

    @cached_property
    def _counter_files(self) -> set[str]:
        return counter_files(self.path)

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

    def _read_counters(self, info: RankInfo) -> pa.Table:
        if self._tables is not None:
            return COUNTERS.empty_table()
        try:
            table, lost_bytes = read_counters(self.path, info.segment)
        except TraceError as error:
            if is_store_failure(error):
                raise
            self._note_damage(f"rank {info.rank}: {error}")
            return COUNTERS.empty_table()
        if lost_bytes:
            self._note_damage(
                f"rank {info.rank}: the last {lost_bytes} bytes of its counters are unreadable"
            )
        elif not counters_match_checksum(self.path, info):
            self._note_damage(f"rank {info.rank}: its counters are not those that were recorded")
        return table

    def tensors(self, rank: int) -> list[TensorInfo]:
        """Returns the parameters that a rank's events refer to by id."""
        for info in reversed(self.infos(rank)):
            if info.tensors:
                return info.tensors
        return []

    def tensor_names(self, rank: int) -> dict[int, str]:
        """Returns the names of a rank's parameters by id."""
        return {info.id: info.name for info in self.tensors(rank)}

    def group_ranks(self, name: str, rank: int | None = None) -> tuple[int, ...]:
        """Global ranks of the members of a process group; empty if the trace does not say.

        Args:
            name: The group's name in the events.
            rank: Ask this rank: ranks may use one name for different groups.
        """
        for known in (None,) if rank is None else (rank, None):
            group = self._groups.get((name, known))
            if group is not None and group.ranks:
                return group.ranks
        return ()

    def group_size(self, name: str) -> int | None:
        """How many members a process group has whose members are unknown; None if unknown too."""
        group = self._groups.get((name, None))
        return None if group is None else group.size

    def group_backend(self, name: str) -> str:
        """Backend of a process group; empty if the trace does not say."""
        group = self._groups.get((name, None))
        return "" if group is None else group.backend

    def group_description(self, name: str, rank: int) -> str:
        """What the job calls a process group, on one rank; empty if the trace does not say."""
        group = self._groups.get((name, rank)) or self._groups.get((name, None))
        return "" if group is None else group.description

    def generations_of(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The generation of each step: how often the job was started anew before it."""
        if not max(self._generations.values(), default=0):
            return np.zeros(len(steps), dtype=np.int64)
        return np.searchsorted(self._first_steps, steps, side="right") - 1

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

    def analyze(self, steps: range | None = None) -> Analysis:
        """Measures the trace.

        Args:
            steps: Only these consecutive steps, such as ``range(10, 20)``; by default the whole
                trace, summarized over its steady steps.

        Returns:
            The analysis, see `ddltrace.analyzer.model.Analysis`.

        Raises:
            TraceError: The trace has none of those steps.
            UsageError: The steps are not consecutive.
        """
        if steps is not None:
            _check_consecutive(steps)
        from ddltrace.analyzer.analysis import analyze

        return analyze(self, steps)

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
            rank: The rank.
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
            with _leaving_out_unreadable():
                for batch in EventReader(self.path, info.segment, most=batches):
                    some = pa.Table.from_batches([batch.slice(0, rows)], schema=EVENTS)
                    yield self._place(some, info, 0)

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

    def read_columns(self, info: RankInfo, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of a process's events as it recorded them, as much as can be read.

        Args:
            info: The process.
            names: Names of the columns; a few are read many times faster than all.
        """
        if self._tables is not None:
            yield from self._tables[info.segment].select(list(names)).to_batches()
            return
        self._verify(info)
        with _leaving_out_unreadable():
            yield from EventReader(self.path, info.segment, names)

    def first_step(self, info: RankInfo) -> int:
        """Returns the number of the first step of a process in this trace."""
        generation = self._generations[info.segment]
        return self._first_steps[generation] if generation else 0

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

    def stored(self, info: RankInfo) -> pa.Table:
        """A process's events as they are stored, on its own clock."""
        return self._read(info)

    def _read(self, info: RankInfo) -> pa.Table:
        windows = list(self._read_windows(info))
        if not windows:
            return EVENTS.empty_table()
        return windows[0] if len(windows) == 1 else pa.concat_tables(windows).unify_dictionaries()

    def _read_windows(self, info: RankInfo) -> Iterator[pa.Table]:
        """Reads a process's events on its own clock, as far as possible; notes unreadable parts."""
        if self._steps is None:
            yield from self._read_all(info)
            return
        first, began, passed = self.first_step(info), False, False
        for table in self._read_all(info):
            step = table["step"].to_numpy()  # NaN where an event is of no step
            inside = (step >= self._steps.start - first) & (step < self._steps.stop - first)
            later = step >= self._steps.stop - first
            until = 0 if passed else int(np.argmax(later)) if later.any() else len(step)
            if self._later_stepless:
                until = len(step)
            if began or inside.any():
                since = 0 if began else int(np.argmax(inside))
                inside[since:until] |= np.isnan(step[since:until])
                began = True
                yield table.filter(pa.array(inside))
            passed |= bool(later.any())

    def _read_all(self, info: RankInfo) -> Iterator[pa.Table]:
        if self._tables is not None:
            yield self._tables[info.segment]
            return
        self._verify(info)
        first = 0 if self._steps is None else self.first_step(info)
        steps = self._steps and range(self._steps.start - first, self._steps.stop - first)
        reader = EventReader(
            self.path, info.segment, steps=steps, later_stepless=self._later_stepless
        )
        try:
            for group in grouped(iter(reader), _WINDOW_ROWS):
                table = pa.Table.from_batches(group, schema=EVENTS).unify_dictionaries()
                if self.on_read is not None:
                    self.on_read(table.num_rows)
                yield table
        except TraceError as error:
            if is_store_failure(error):
                raise
            self._note_damage(f"rank {info.rank}: {error}")
            return
        if reader.lost_bytes and not info.lost_bytes:
            self._note_damage(
                f"rank {info.rank}: the last {reader.lost_bytes} bytes are unreadable"
            )
        if reader.checksum is not None and info.checksum not in (None, reader.checksum):
            self._note_other_file(info)

    def _verify(self, info: RankInfo) -> None:
        """Compares a process's final file with its checksum, once, before it is first read."""
        if info.segment not in self.verified:
            self.verified[info.segment] = matches_checksum(self.path, info)
        if not self.verified[info.segment]:
            self._note_other_file(info)

    def _note_other_file(self, info: RankInfo) -> None:
        self._note_damage(
            f"rank {info.rank}: its file is not what was recorded, but damaged or another "
            "rank's: its numbers may be wrong"
        )

    def _note_damage(self, text: str) -> None:
        self._note(text)
        if text not in self.damage:
            self.damage.append(text)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @cached_property
    def _groups(self) -> dict[tuple[str, int | None], GroupInfo]:
        """Name and rank -> the group; with None for the rank, that of any rank."""
        groups: dict[tuple[str, int | None], GroupInfo] = {}
        for info in self.run.ranks:
            for group in info.groups:
                # Each generation has its own groups: a job may be restarted with fewer ranks.
                name = _name_in(self._generations[info.segment], group.name)
                groups[name, info.rank] = group
                groups.setdefault((name, None), group)
        return groups

    @cached_property
    def _generations(self) -> dict[str, int]:
        """Segment name -> generation of the job that it belongs to, from 0."""
        processes: dict[int, dict[int, list[RankInfo]]] = {}
        for info in sorted(self.run.ranks, key=_age):
            processes.setdefault(info.attempt, {}).setdefault(info.rank, []).append(info)
        keys: dict[str, tuple[int, int]] = {}
        for attempt, of_rank in processes.items():
            for infos, ordinals in zip(of_rank.values(), _ordinals(of_rank), strict=True):
                keys |= {
                    info.segment: (attempt, ordinal)
                    for info, ordinal in zip(infos, ordinals, strict=True)
                }
        order = {key: number for number, key in enumerate(sorted(set(keys.values())))}
        return {segment: order[key] for segment, key in keys.items()}

    @cached_property
    def _first_steps(self) -> list[int]:
        """Number of each generation's first step: after the last one of the former."""
        counts = [0] * (max(self._generations.values()) + 1)
        for info in self.run.ranks:
            generation = self._generations[info.segment]
            for table in self._read_windows(info):
                last = pc.max(table["step"]).as_py()
                counts[generation] = max(counts[generation], 0 if last is None else last + 1)
        return [sum(counts[:number]) for number in range(len(counts))]


@contextlib.contextmanager
def _leaving_out_unreadable() -> Iterator[None]:
    """Goes on without a file that cannot be read, but not without a store that does not answer."""
    try:
        yield
    except TraceError as error:
        if is_store_failure(error):
            raise


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


def _ordinals(processes: dict[int, list[RankInfo]]) -> Iterator[list[int]]:
    """For each rank, which of the successive jobs of one attempt each of its processes is of.

    Worlds may shrink and grow: the rank with most processes says how large the jobs were, and each
    process of another rank is of the next job of its size.

    Args:
        processes: Rank -> its processes, in the order of time.
    """
    sizes = [info.world_size for info in max(processes.values(), key=len)]
    for infos in processes.values():
        ordinals: list[int] = []
        for info in infos:
            after = ordinals[-1] + 1 if ordinals else 0
            same = (n for n in range(after, len(sizes)) if sizes[n] == info.world_size)
            ordinals.append(next(same, after))
        yield ordinals


def _age(info: RankInfo) -> tuple[int, int, int]:
    started = info.clock.get("unix_ns")
    return info.attempt, started if isinstance(started, int) else 0, info.pid or 0


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


def _name_in(generation: int, group: str) -> str:
    """A group's name in the trace: groups of the second job and later ones are marked."""
    return f"{group}{_GENERATION_MARK}{generation + 1}" if generation else group


def _mark_groups(table: pa.Table, generation: int) -> pa.Table:
    column = table["group"].combine_chunks()
    names = [_name_in(generation, name) for name in column.dictionary.to_pylist()]
    marked = pa.DictionaryArray.from_arrays(column.indices, pa.array(names, pa.string()))
    return _replace(table, "group", marked)


def _replace(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), EVENTS.field(name), column)
