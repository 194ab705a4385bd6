"""The events and counters of the processes of a run, as each recorded them, on its own clock.

Jobs that run beside each other in one trace, such as the roles of reinforcement learning, have a
default process group each, so each numbers its ranks from 0 and names its groups as the others do.
In the trace, the ranks of the second job follow those of the first, and so on. Groups that members
of several jobs created together are recognized by the store at which they met.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.trace.run_metadata import RunMetadata
from ddltrace.tracer.errors import TraceError, is_store_failure
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.counters import COUNTERS, read_counters
from ddltrace.tracer.trace.event_file import counters_match_checksum, grouped, matches_checksum
from ddltrace.tracer.trace.event_reader import EventReader
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import RUN_FILE, counter_files, counters_name

if TYPE_CHECKING:
    from ddltrace.tracer.trace.batch_facts import BatchFacts

_WINDOW_ROWS: Final = 1 << 16


class RecordedRun(RunMetadata):
    """What the processes of a run recorded, as far as it can be read; problems become notes.

    Attributes:
        on_read: Called with the number of events whenever some were read from a file.
    """

    def __init__(
        self, path: Location, run: RunInfo, tables: dict[str, pa.Table] | None = None
    ) -> None:
        super().__init__(path, run)
        self.on_read: Callable[[int], None] | None = None
        self._tables = tables
        self._last_starts: dict[str, int] = {}
        self._steps: range | None = None
        self._later_stepless = True
        self._places: dict[str, JobPlace] = {}
        self._number_roles_beside()
        if not self._places:
            self._leave_out_jobs_beside()

    def _number_roles_beside(self) -> None:
        """Numbers the ranks of jobs that run beside each other, if the trace knows roles."""
        jobs = jobs_of(self.run.ranks) if any(info.role for info in self.run.ranks) else []
        if not any(self._beside(former, later) for former, later in combinations(jobs, 2)):
            return
        infos, self._places = number_ranks(jobs)
        self.run = dataclasses.replace(self.run, ranks=infos)
        self.ranks = sorted({info.rank for info in infos})
        self._note(text_of_jobs(jobs))

    def _beside(self, former: Sequence[RankInfo], later: Sequence[RankInfo]) -> bool:
        """Whether two jobs exchanged messages, or overlapped in time."""
        if {info.rank for info in former}.isdisjoint(info.rank for info in later):
            return False  # one job, whose ranks know the address of its store by several names
        if meetings_of(former) & meetings_of(later):
            return True
        return self._overlap(former[0], later[0]) or self._overlap(later[0], former[0])

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
            self.ranks = sorted({info.rank for info in kept})

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
        with leaving_out_unreadable():
            facts = read_batch_facts(self.path, info.segment)
        return facts

    @property
    def is_stored(self) -> bool:
        """Whether the trace is a trace directory, whose events are read from its files."""
        return self._tables is None and (self.path / RUN_FILE).is_file()

    def has_counters(self, rank: int) -> bool:
        """Whether there is a file of counters of a rank."""
        if self._tables is not None:
            return False
        return any(counters_name(info.segment) in self._counter_files for info in self.infos(rank))

    @cached_property
    def _counter_files(self) -> set[str]:
        return counter_files(self.path)

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
            lost = counted(lost_bytes, "byte", "is")
            self._note_damage(f"rank {info.rank}: of its counters, the last {lost} unreadable")
        elif not counters_match_checksum(self.path, info):
            self._note_damage(f"rank {info.rank}: its counters are not those that were recorded")
        return table

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
        with leaving_out_unreadable():
            for batch in EventReader(self.path, info.segment, names):
                yield from self._named(info, pa.Table.from_batches([batch])).to_batches()

    def first_step(self, info: RankInfo) -> int:
        """Returns the number of the first step of a process in this trace."""
        generation = self._generations[info.segment]
        return self._first_steps[generation] if generation else 0

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
                yield self._named(info, table)
        except TraceError as error:
            if is_store_failure(error):
                raise
            self._note_damage(f"rank {info.rank}: {error}")
            return
        if reader.lost_bytes and not info.lost_bytes:
            self._note_damage(
                f"rank {info.rank}: the last {counted(reader.lost_bytes, 'byte', 'is')} unreadable"
            )
        if reader.checksum is not None and info.checksum not in (None, reader.checksum):
            self._note_other_file(info)

    def _named(self, info: RankInfo, events: pa.Table) -> pa.Table:
        """Some events of a process with the ranks and groups as the trace calls them."""
        place = self._places.get(info.segment)
        return events if place is None else place.placed(events)

    def own_rank(self, info: RankInfo) -> int:
        """The rank of a process in its job, which may be one of several in the trace."""
        place = self._places.get(info.segment)
        return info.rank if place is None else info.rank - place.first

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

    def generations_of(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The generation of each step: how often the job was started anew before it."""
        if not max(self._generations.values(), default=0):
            return np.zeros(len(steps), dtype=np.int64)
        return np.searchsorted(self._first_steps, steps, side="right") - 1

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
def leaving_out_unreadable() -> Iterator[None]:
    """Goes on without a file that cannot be read, but not without a store that does not answer."""
    try:
        yield
    except TraceError as error:
        if is_store_failure(error):
            raise


_MOST_NAMED: Final = 8
_MAX_RANKS: Final = 1 << 24

Meeting: TypeAlias = tuple[str, str]
"""The store at which the members of a group met, and the group's name."""


@dataclass(frozen=True)
class JobPlace:
    """How the ranks and groups of a process are called in the trace.

    Attributes:
        first: Rank 0 of its job.
        names: Group as the process recorded it -> its name.
        peers: Group that reaches beyond the job, as recorded -> for each of its members as
            recorded, the rank; -1 for one that recorded nothing.
    """

    first: int
    names: dict[str, str] = field(default_factory=dict)
    peers: dict[str, dict[int, int]] = field(default_factory=dict)

    def placed(self, events: pa.Table) -> pa.Table:
        """Some events of the process with the names and numbers of the trace."""
        if not {"group", "peer"} <= set(events.column_names):
            return events
        group = events["group"].combine_chunks()
        words = group.dictionary.to_pylist()
        codes = group.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
        recorded = events["peer"].fill_null(-1).to_numpy()
        peer = np.where(recorded < 0, -1, recorded + self.first)
        for code, word in enumerate(words):
            if word in self.peers:
                rows = codes == code
                members = self.peers[word]
                peer[rows] = [members.get(rank, -1) for rank in recorded[rows].tolist()]
        renamed = pa.array([self.names.get(word, word) for word in words], pa.string())
        columns = {
            "group": pa.DictionaryArray.from_arrays(group.indices, renamed),
            "peer": pa.array(peer, pa.int32(), mask=peer < 0),
        }
        for name, column in columns.items():
            at = events.schema.get_field_index(name)
            events = events.set_column(at, EVENTS.field(name), column)
        return events


def jobs_of(infos: Sequence[RankInfo]) -> list[list[RankInfo]]:
    """The processes of each job; without any if they cannot be numbered.

    The jobs stand in an order that is the same in each run of the command: by their first places in
    groups of several jobs, then by role, then by their starts.
    """
    jobs: dict[str, list[RankInfo]] = {}
    for info in sorted(infos, key=_began):
        if info.store is None:
            return []
        jobs.setdefault(info.store, []).append(info)
    if sum(map(_size, jobs.values())) > _MAX_RANKS:
        return []
    return sorted(jobs.values(), key=_order)


def meetings_of(job: Sequence[RankInfo]) -> set[Meeting]:
    """The groups that members of a job did not create by the job's own store."""
    return {
        (group.store, group.name)
        for info in job
        for group in info.groups
        if group.store is not None
    }


def number_ranks(
    jobs: Sequence[Sequence[RankInfo]],
) -> tuple[list[RankInfo], dict[str, JobPlace]]:
    """Numbers the ranks of all jobs, one job after the other.

    Returns:
        The processes as they are called in the trace, and their places by segment name.
    """
    firsts, total = [], 0
    for job in jobs:
        firsts.append(total)
        total += _size(job)
    members: dict[Meeting, dict[int, int]] = {}
    for first, job in zip(firsts, jobs, strict=True):
        for info in job:
            for group in info.groups:
                if group.store is not None and group.place is not None:
                    met = members.setdefault((group.store, group.name), {})
                    met[group.place] = first + info.rank
    home = _domain_of_rank_0(jobs[0])
    infos, places = [], {}
    known: dict[GroupInfo, GroupInfo] = {}
    for first, job in zip(firsts, jobs, strict=True):
        for info in job:
            place = places[info.segment] = JobPlace(first)
            groups = []
            for group in info.groups:
                if group.store is None:
                    moved = replace(
                        group,
                        name=f"{group.name} (ranks {_numbers(first, job)})",
                        ranks=tuple(rank + first for rank in group.ranks),
                    )
                else:
                    moved = _of_several_jobs(group, members)
                    met = members.get((group.store, group.name), {})
                    place.peers[group.name] = {
                        rank: met.get(number, -1) for number, rank in enumerate(group.ranks)
                    }
                place.names[group.name] = moved.name
                groups.append(known.setdefault(moved, moved))
            changed = replace(info, rank=info.rank + first, world_size=total, groups=groups)
            if _domain_of_rank_0(job) != home:
                # They compare with the clock of the job's own rank 0.
                changed.clock = {**info.clock, "samples": []}
            infos.append(changed)
    return infos, places


def text_of_jobs(jobs: Sequence[Sequence[RankInfo]]) -> str:
    """The note that says how the ranks of each job are numbered."""
    texts, first = [], 0
    for job in jobs[:_MOST_NAMED]:
        roles = sorted({info.role for info in job if info.role})
        texts.append(f"{_numbers(first, job)} ({', '.join(roles) or 'no role'})")
        first += _size(job)
    more = f" and {len(jobs) - _MOST_NAMED} more" if len(jobs) > _MOST_NAMED else ""
    return f"{len(jobs)} jobs beside each other: their ranks are {', '.join(texts)}{more} here"


def _numbers(first: int, job: Sequence[RankInfo]) -> str:
    last = first + _size(job) - 1
    return str(first) if first == last else f"{first}-{last}"


def _of_several_jobs(group: GroupInfo, members: dict[Meeting, dict[int, int]]) -> GroupInfo:
    assert group.store is not None
    met = members.get((group.store, group.name), {})
    size = group.size or len(group.ranks)
    several = len({store for store, name in members if name == group.name}) > 1
    complete = len(met) == size and max(met, default=-1) < size
    return replace(
        group,
        name=f"{group.name} at {group.store}" if several else group.name,
        ranks=tuple(met[number] for number in range(size)) if complete else (),
        size=size,
    )


def _order(job: Sequence[RankInfo]) -> tuple[int, str, tuple[int, str]]:
    places = [g.place for info in job for g in info.groups if g.place is not None]
    roles = [info.role for info in job if info.role]
    return min(places, default=_MAX_RANKS), min(roles, default=""), _began(job[0])


def _size(job: Sequence[RankInfo]) -> int:
    return max(max(info.world_size, info.rank + 1) for info in job)


def _domain_of_rank_0(job: Sequence[RankInfo]) -> str | None:
    return next((info.clock_domain for info in job if info.rank == 0), None)


def _began(info: RankInfo) -> tuple[int, str]:
    began = info.clock.get("unix_ns")
    return began if isinstance(began, int) else 0, info.segment
