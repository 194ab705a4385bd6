"""Overlap and breakdown of a Kineto file as Holistic Trace Analysis (HTA) 0.5.0 computes them.

The figures are computed from the numbers that stand in a file, in HTA's own arithmetic (64-bit
floats of microseconds), before times are converted to nanoseconds or aligned. HTA's conventions:

- Device work is each event with a stream other than -1 in its arguments: kernels, copies,
  synchronization records and also annotations that have one.
- If a file writes any time with a fraction, starts are rounded up and ends rounded down.
- If the job's files have events of several distinct names with ``ProfilerStep``, the last step
  is dropped. It begins at the latest start of such an event on the host, or of an annotation on
  the device that has no stream. Device work with a correlation is kept if an event with the same
  correlation began on the host before; device work without one if it began before itself. So
  work whose launch was not recorded is dropped, unless the job has one step or none.
- A kernel is communication if its name matches ``^nccl.*Kernel``, memory if ``^Memcpy``,
  ``^Memset`` or ``^dma``, nothing of these if it holds ``Memcpy`` or ``Sync`` or begins with
  ``Memset``, and computation otherwise.

Two differences remain. HTA sorts with a sort that is not stable, so its figures are not defined
where two events begin in the same microsecond and rounding gave one of them a negative length.
Times with more than 15 digits are kept as 64-bit floats by both, but HTA keeps whole ones as
integers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import distinct
from ddltrace.analyzer.events.stream_gaps import LAUNCHES
from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.kineto.decode import Decoded
from ddltrace.analyzer.importers.kineto.decoded_events import NOT_EVENTS, column
from ddltrace.analyzer.importers.kineto.hta_series import SeriesTables, to_text
from ddltrace.analyzer.importers.kineto.hta_streams import (
    WORK,
    HtaEvents,
    Tables,
    hta_streams,
    is_memory,
)

HTA_LABEL: Final = "hta_figures"
"""The entry of a run's labels that holds the result of `hta_figures`."""

HTA_STREAMS_LABEL: Final = "hta_streams"
"""The entry of a run's labels that holds the result of `streams_by_rank`."""

HTA_SERIES_LABEL: Final = "hta_series"
"""The entry of a run's labels that holds the result of `series_by_rank`."""

_MOST_COPIES: Final = 4
"""HTA multiplies work whose correlation several calls have; the most events that this may give."""

_MOST_INTEGER: Final = float(1 << 63)
"""From here on, times are not 64-bit integers."""

_COMMUNICATION: Final = re.compile(r"nccl.*Kernel")
_MEMORY: Final = re.compile(r"Memcpy|Memset|dma")
_NOT_COMPUTATION: Final = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|.*Sync")
_DEVICE_SYNCS: Final = ("Event Sync", "Context Sync")
_FRACTION: Final = re.compile(rb'"ts"\s*:\s*-?\d+[.eE]')
_LONGEST_TIME: Final = 64
"""Bytes of a key and its time: that much of a block is looked at again with the next one."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HtaBreakdown:
    """Results of HTA's ``get_comm_comp_overlap`` and ``get_temporal_breakdown`` for one rank.

    Attributes:
        rank: Global rank.
        overlap_percent: 100 |communication n computation| / |communication|; None without
            communication.
        idle_us: Time without any device work, between the first start and the last end.
        compute_us: Union of computation.
        kernel_time_us: From the first start of device work to its last end.
    """

    rank: int
    overlap_percent: float | None
    idle_us: float
    compute_us: float
    kernel_time_us: float

    @property
    def non_compute_us(self) -> float:
        """Time that is neither idle nor computation."""
        return self.kernel_time_us - self.compute_us - self.idle_us


_Figures = tuple[Any, ...]
_StreamFigures = tuple[Tables, SeriesTables]


@dataclass(frozen=True)
class HtaFile:
    """The figures of one file, for both cases that all files of the job together decide.

    Attributes:
        steps: Distinct names with ``ProfilerStep``.
        whole: Figures of all device work, in the order of `HtaBreakdown` behind the rank; None
            without any.
        without_last_step: The same of the device work that was launched before the last step.
        whole_streams: Tables of streams and copies, and their series, see `hta_streams`.
        streams_without_last_step: The same without the last step.
        first: When the first event begins, microseconds as in the file; the series begin there.
        begins_with_interval: Whether the first event in the file is an interval that HTA reads.
    """

    steps: tuple[str, ...]
    whole: _Figures | None
    without_last_step: _Figures | None
    whole_streams: _StreamFigures | None = None
    streams_without_last_step: _StreamFigures | None = None
    first: float = math.inf
    begins_with_interval: bool = False


def hta_figures(files: Sequence[tuple[int, HtaFile]]) -> dict[str, list[float | None]]:
    """Chooses the figures of a job's ranks.

    Args:
        files: Each file with its rank.

    Returns:
        For each rank's number, as text, the figures in the order of `HtaBreakdown`. Left out are
        ranks without device work, and ranks with several files: HTA reads one file per rank.
    """
    ranks = [rank for rank, _ in files]
    many_steps = len({step for _, file in files for step in file.steps}) > 1
    chosen = [(rank, file.without_last_step if many_steps else file.whole) for rank, file in files]
    return {
        str(rank): list(figures)
        for rank, figures in chosen
        if figures is not None and ranks.count(rank) == 1
    }


def streams_by_rank(files: Sequence[tuple[int, HtaFile]]) -> dict[str, Tables]:
    """Chooses the tables of a job's ranks, as `hta_figures` chooses the figures."""
    return {str(rank): figures[0] for rank, _, figures in _stream_figures(files)}


def series_by_rank(files: Sequence[tuple[int, HtaFile]]) -> dict[str, dict[str, dict[str, str]]]:
    """The series of a job's ranks as text, with times since the first event of all ranks."""
    first = min((file.first for _, file in files), default=0.0)
    return {
        str(rank): {
            name: {key: to_text(each.since(first - file.first)) for key, each in series.items()}
            for name, series in figures[1].items()
        }
        for rank, file, figures in _stream_figures(files)
    }


def _stream_figures(
    files: Sequence[tuple[int, HtaFile]],
) -> list[tuple[int, HtaFile, _StreamFigures]]:
    """Ranks, files and figures of streams that count."""
    ranks = [rank for rank, _ in files]
    many_steps = len({step for _, file in files for step in file.steps}) > 1
    chosen = [
        (rank, file, file.streams_without_last_step if many_steps else file.whole_streams)
        for rank, file in files
    ]
    return [
        (rank, file, figures)
        for rank, file, figures in chosen
        if figures is not None and ranks.count(rank) == 1
    ]


def hta_file(path: Path, decoded: Decoded) -> HtaFile:
    """Computes the figures of one file.

    Args:
        path: The file, whose text shows whether times are written with a fraction.
        decoded: Its intervals.
    """
    events = _Events(decoded)
    steps = events.named(lambda name: "ProfilerStep" in name, events.wanted)
    step_names = tuple(decoded.names[code] for code in distinct(events.name[steps]).tolist())
    on_device = events.wanted & (events.stream != -1)
    if not on_device.any():
        fractional = bool(np.any(events.start % 1 != 0))
        return HtaFile(step_names, None, None, first=_first_event(events, fractional=fractional))
    fractional = _has_fractions(path, events, lacks_times=decoded.lacks_times)
    if fractional:
        start, end = np.ceil(events.start), np.floor(events.start + events.duration)
    else:
        # HTA adds the length to times since the first event.
        start = events.start - events.start[events.wanted].min()
        end = start + events.duration
    copies = _copies_before_last_step(events, start, steps)
    kept = np.where(on_device, copies, 0)
    streams = _Streams(events, decoded, start, end)
    return HtaFile(
        step_names,
        _figures(events, start, end, on_device.astype(np.int64)),
        _figures(events, start, end, kept) if kept.any() else None,
        streams.tables(events.wanted.astype(np.int64), in_order=True),
        streams.tables(copies, in_order=False) if kept.any() else None,
        first=_first_event(events, fractional=fractional),
        begins_with_interval=decoded.begins_with_interval and bool(events.wanted[0]),
    )


def _first_event(events: _Events, *, fractional: bool) -> float:
    """When the first event begins for HTA; infinite without any."""
    first = float(events.start[events.wanted].min(initial=np.inf))
    return math.ceil(first) if fractional and math.isfinite(first) else first


class _Events:
    """The columns of a file's intervals that HTA looks at.

    Attributes:
        start: Microseconds, as they stand in the file.
        duration: Microseconds.
        name: Index into the names.
        stream: Number in the arguments; -1 without one.
        correlation: Number in the arguments; -1 without one.
        wanted: Which rows HTA reads.
    """

    def __init__(self, decoded: Decoded) -> None:
        self._names = decoded.names
        self.start: Floats = column(decoded, "ts", np.float64)
        self.duration: Floats = column(decoded, "dur", np.float64)
        self.name: npt.NDArray[np.int32] = column(decoded, "name", np.int32)
        linked = column(decoded, "linked", np.int64)
        self.stream = np.full(len(self.start), -1)
        self.stream[linked] = column(decoded, "stream", np.int64)
        self.correlation = np.full(len(self.start), -1)
        self.correlation[linked] = column(decoded, "correlation", np.int64)
        unread = np.array([name in ("", NOT_EVENTS) for name in decoded.categories] or [False])
        usable = np.isfinite(self.start) & np.isfinite(self.duration)
        self.wanted: Mask = usable & ~unread[column(decoded, "category", np.int32)]

    def is_work(self) -> Mask:
        """Which rows are device work for HTA."""
        is_sync = self.named(_DEVICE_SYNCS.__contains__, self.wanted)
        found: Mask = self.wanted & ((self.stream >= 0) & (self.correlation >= 0) | is_sync)
        return found

    def named(self, is_wanted: Callable[[str], object], among: Mask) -> Mask:
        """Which of some rows have a name that fulfils a condition."""
        codes = np.array([bool(is_wanted(name)) for name in self._names] or [False])
        found: Mask = codes[self.name] & among
        return found


class _Streams:
    """What HTA's tables of streams and copies need of a file."""

    def __init__(self, events: _Events, decoded: Decoded, start: Floats, end: Floats) -> None:
        self._events, self._decoded = events, decoded
        # HTA's column is of whole numbers unless an event has no time.
        kind = np.dtype(np.float64)
        start, end = (np.where(events.wanted, times, 0.0) for times in (start, end))
        fits = all(np.abs(times).max(initial=0.0) < _MOST_INTEGER for times in (start, end))
        if not decoded.lacks_times and fits:
            kind = _least_type(np.ceil(events.start[events.wanted]))
        self._first = float(start[events.wanted].min())
        self._start = start.astype(kind)
        whole = fits and not np.any(end % 1 != 0)
        self._end = end.astype(np.promote_types(kind, _least_type(end))) if whole else end
        self._work = events.is_work()
        category = column(decoded, "category", np.int32)
        is_work = np.array([name in WORK for name in decoded.categories] or [False])
        self._is_work: Mask = is_work[category] & events.wanted & (events.stream != -1)
        self._is_launch = events.named(LAUNCHES.__contains__, events.wanted)
        self._is_memory = events.named(is_memory, events.wanted & (events.stream != -1))
        self._call = self._partner(events.wanted & self._work, events.wanted & ~self._work)
        self._of_call = self._partner(events.wanted & ~self._work, events.wanted & self._work)
        self._bandwidth = np.zeros(len(events.start))
        rows = list(decoded.bandwidths)
        self._bandwidth[rows] = list(decoded.bandwidths.values())

    def _partner(self, rows: Mask, others: Mask) -> Counts:
        """For some rows the last of the others with the same correlation; -1 for none."""
        correlation = self._events.correlation
        found = np.full(len(correlation), -1)
        mine = np.flatnonzero(rows & (correlation != -1))
        partners = np.flatnonzero(others & (correlation != -1))
        if len(mine) and len(partners):
            order = partners[np.argsort(correlation[partners], kind="stable")]
            place = np.searchsorted(correlation[order], correlation[mine], side="right") - 1
            hit = (place >= 0) & (correlation[order[place]] == correlation[mine])
            found[mine[hit]] = order[place[hit]]
        return found

    def tables(self, copies: Counts, *, in_order: bool) -> _StreamFigures | None:
        """The tables and series of some rows; None where HTA has far more rows than the file.

        Args:
            copies: How often HTA keeps each row.
            in_order: Whether it keeps the order of the file, or puts device work first.
        """
        events = self._events
        useful = self._is_work | self._is_memory | self._is_launch
        useful |= (events.stream != -1) & (events.correlation != -1)
        counts = np.where(useful, copies, 0)
        if int(counts.sum()) > _MOST_COPIES * len(counts):
            return None
        rows = np.repeat(np.arange(len(counts)), counts)
        if not in_order:
            rows = np.concatenate([rows[self._work[rows]], rows[~self._work[rows]]])
        call = self._call[rows]
        # HTA refers to a call that it does not find as the first event of the file.
        first = 0 if self._decoded.begins_with_interval else -1
        call = np.where((call == -1) & (events.correlation[rows] >= 0), first, call)
        other = self._of_call[rows]
        tables, series = hta_streams(
            HtaEvents(
                start=self._start[rows],
                end=self._end[rows],
                stream=events.stream[rows],
                correlation=events.correlation[rows],
                bandwidth=self._bandwidth[rows],
                is_work=self._is_work[rows],
                is_launch=self._is_launch[rows],
                is_memory=self._is_memory[rows],
                name=events.name[rows],
                names=self._decoded.names,
                launched=self._start[np.maximum(call, 0)],
                is_launched=(call != -1) & (copies[np.maximum(call, 0)] > 0),
                linked=(other != -1) & ((other != 0) | (first != 0)),
            )
        )
        return tables, {
            name: {key: each.since(self._first) for key, each in rows.items()}
            for name, rows in series.items()
        }


def _least_type(values: Floats) -> np.dtype[Any]:
    """The smallest type of integers that holds all values; equal times sort as in HTA then."""
    low, high = float(values.min()), float(values.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.dtype(kind)
    return np.dtype(np.int64)


def _has_fractions(path: Path, events: _Events, *, lacks_times: bool) -> bool:
    """Whether HTA rounds a file's times: it does if it reads the column of starts as floats.

    One start with a fraction is enough, also ``5.0``, that of an event without a length, or
    metadata without a start. The file is read again for these rare cases, which matter only
    where lengths have fractions and no interval's start has.
    """
    if np.any(events.start % 1 != 0):
        return True
    if not np.any(events.duration % 1 != 0):
        return False
    if lacks_times:
        return True
    rest = b""
    for block in Blocks(path):
        text = rest + block
        if _FRACTION.search(text):
            return True
        rest = text[-_LONGEST_TIME:]
    return False


def _copies_before_last_step(events: _Events, start: Floats, steps: Mask) -> Counts:
    """How often HTA keeps each row when it drops the last step.

    HTA keeps device work once for each event on the host that has its correlation.
    """
    work = events.is_work()
    # For HTA all else is host work: also device work without a correlation.
    host = events.wanted & ~work
    last = start[host & steps].max(initial=-np.inf)
    before = host & (start < last)
    copies: Counts = before.astype(np.int64)
    if before.any():
        numbers, counts = np.unique(events.correlation[before], return_counts=True)
        wanted = events.correlation[work]
        place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        copies[work] = np.where(numbers[place] == wanted, counts[place], 0)
    return copies


def _figures(events: _Events, start: Floats, end: Floats, copies: Counts) -> _Figures:
    """Overlap, idle, compute and kernel time, in the order of `HtaBreakdown`.

    Args:
        events: The file's events.
        start: Microseconds.
        end: Microseconds.
        copies: How often each row counts; 0 for those that do not. At least one does.
    """
    rows = copies > 0

    def union(which: Mask) -> _Union:
        return _union(start[which], end[which], copies[which])

    busy = union(rows)
    comm = union(events.named(_COMMUNICATION.match, rows))
    comp = union(events.named(_is_computation, rows))
    kernel_time = float(busy.end[-1] - busy.start[0])
    comm_us = comm.length()
    found = HtaBreakdown(
        rank=-1,
        overlap_percent=100 * _overlap(comm, comp) / comm_us if comm_us else None,
        idle_us=kernel_time - busy.length(),
        compute_us=comp.length(),
        kernel_time_us=kernel_time,
    )
    return astuple(found)[1:]


def _is_computation(name: str) -> bool:
    return not (_COMMUNICATION.match(name) or _MEMORY.match(name) or _NOT_COMPUTATION.match(name))


@dataclass(frozen=True)
class _Union:
    """Intervals that neither overlap nor touch, and how often each counts."""

    start: Floats
    end: Floats
    copies: Counts

    def length(self) -> float:
        return float(((self.end - self.start) * self.copies).sum())


def _union(start: Floats, end: Floats, copies: Counts) -> _Union:
    """Merges intervals that overlap or touch.

    Rounding can leave an interval with an end before its start. Like HTA, this keeps such an
    interval, with its negative length, where no other one covers it; and as often as it has
    copies, because they do not touch each other.
    """
    order = np.argsort(start, kind="stable")
    start, end, copies = start[order], end[order], copies[order]
    if not len(start):
        return _Union(start, end, copies)
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.r_[True, start[1:] > reach[:-1]])
    start, end, copies = start[first], np.maximum.reduceat(end, first), copies[first]
    return _Union(start, end, np.where(end < start, copies, 1))


def _overlap(left: _Union, right: _Union) -> float:
    """Length of the intersection of two unions, by a sweep over all their edges."""
    times = np.concatenate([left.start, left.end, right.start, right.end])
    sizes = [len(left.start)] * 2 + [len(right.start)] * 2
    change = np.repeat([1, -1, 2, -2], sizes)
    order = np.argsort(times, kind="stable")
    both = np.flatnonzero(np.cumsum(change[order]) == 3)
    both = both[both + 1 < len(times)]
    times = times[order]
    return float((times[both + 1] - times[both]).sum())
