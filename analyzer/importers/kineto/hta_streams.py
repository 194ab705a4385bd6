"""Idle time of streams, lengths of queues and bandwidth of copies as HTA 0.5.0 computes them.

The figures of ``get_idle_time_breakdown``, ``get_queue_length_summary`` and
``get_memory_bw_summary``, and the series of ``get_queue_length_time_series`` and
``get_memory_bw_time_series``, from the numbers that stand in a Kineto file. HTA's conventions:

- Work whose launch is not in the file counts as launched when the first event of the file began,
  if that event is an interval.
- Queues count works that a call in `LAUNCHES` launched.
- The bandwidth of a copy is what Kineto wrote. A copy without one has bandwidth 0. Bandwidths of
  copies of one kind that run at the same time are added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import places_by_value
from ddltrace.analyzer.events.stream_gaps import (
    KERNEL_WAIT_US,
    queue_lengths,
    stream_gaps,
)
from ddltrace.analyzer.importers.kineto.hta_series import Series, SeriesTables
from ddltrace.analyzer.importers.names import clean

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

WORK: Final = frozenset({"kernel", "Kernel", "gpu_memset", "Memset", "gpu_memcpy", "Memcpy"})
"""Categories of the events that HTA counts as work on a stream."""

Tables = dict[str, dict[str, list[float | None]]]
"""Name of a table -> stream or kind of copy -> figures."""

_MAX_STREAMS: Final = 4096
_NOT_MEMORY: Final = re.compile(r"nccl.*Kernel")
_MEMORY: Final = re.compile(r"Memcpy|Memset|dma")
_DIRECTION_LETTERS: Final = len("Memcpy HtoD")


@dataclass(frozen=True)
class HtaEvents:
    """The events of a file that HTA keeps, in its order.

    Attributes:
        start: Microseconds, in the type of HTA's column.
        end: Microseconds, of the same type.
        stream: Number of the stream; -1 for none.
        correlation: Number that work shares with its launch; -1 for none.
        bandwidth: Bandwidth of copies, GB/s.
        is_work: Whether the category is in `WORK`.
        is_launch: Whether the name is in `LAUNCHES`.
        is_memory: Whether HTA counts it as a copy or fill, if it has a stream.
        name: Index into `names`.
        names: Names.
        launched: Start of the call that launched each work.
        is_launched: Whether HTA knows it.
        linked: Whether an event on the other side has the same correlation.
    """

    start: npt.NDArray[Any]
    end: npt.NDArray[Any]
    stream: Counts
    correlation: Counts
    bandwidth: Floats
    is_work: Mask
    is_launch: Mask
    is_memory: Mask
    name: npt.NDArray[Any]
    names: list[str]
    launched: npt.NDArray[Any]
    is_launched: Mask
    linked: Mask


def is_memory(name: str) -> bool:
    """Whether HTA counts device work of this name as a copy or fill."""
    return _NOT_MEMORY.match(name) is None and _MEMORY.match(name) is not None


def hta_streams(events: HtaEvents) -> tuple[Tables, SeriesTables]:
    """The three tables of a rank, and its series.

    Returns:
        ``idle``: stream -> host wait, kernel wait and other, microseconds. ``queue``: stream ->
        count, mean, standard deviation, minimum, quartiles, maximum; empty where HTA fails,
        because a call and its work cannot be distinguished. ``bandwidth``: kind of copy -> the same
            of
        GB/s. The series ``queue`` and ``bandwidth`` have the same keys.
    """
    idle: dict[str, list[float | None]] = {}
    works = np.flatnonzero(events.is_work & (events.stream != -1))
    for stream, places in islice(places_by_value(events.stream[works]), _MAX_STREAMS):
        rows = works[places]
        gaps = stream_gaps(
            events.start[rows],
            events.end[rows],
            events.launched[rows],
            events.is_launched[rows],
            KERNEL_WAIT_US,
        )
        idle[str(stream)] = [round(gap, 2) for gap in gaps]
    queues, bandwidths = _queues(events), _bandwidths(events)
    copying = {name: series.value[series.value > 0] for name, series in bandwidths.items()}
    tables = {
        "idle": idle,
        "queue": {stream: _described(series.value) for stream, series in queues.items()},
        "bandwidth": {name: _described(values) for name, values in copying.items() if len(values)},
    }
    return tables, {"queue": queues, "bandwidth": bandwidths}


def _queues(events: HtaEvents) -> dict[str, Series]:
    calls = np.flatnonzero(events.is_launch & events.linked)
    works = np.flatnonzero((events.stream != -1) & (events.correlation != -1))
    works = works[np.isin(events.correlation[works], events.correlation[calls])]
    # Each call once for each work that it launched, the works of one call in their order.
    order = works[np.argsort(events.correlation[works], kind="stable")]
    key = events.correlation[order]
    first = np.searchsorted(key, events.correlation[calls], side="left")
    count = np.searchsorted(key, events.correlation[calls], side="right") - first
    if int(count.sum()) != len(works) or not count.all():
        return {}
    nth = np.arange(len(works)) - np.repeat(np.cumsum(count) - count, count)
    launched_on = events.stream[order[np.repeat(first, count) + nth]]
    lengths = queue_lengths(
        np.repeat(events.start[calls], count),
        launched_on,
        events.start[works],
        events.stream[works],
    )
    return {str(stream): _series(*columns) for stream, columns in islice(lengths, _MAX_STREAMS)}


def _bandwidths(events: HtaEvents) -> dict[str, Series]:
    rows = np.flatnonzero(events.is_memory & (events.stream != -1))
    if not len(rows):
        return {}
    start, length = events.start[rows], events.end[rows] - events.start[rows]
    times = np.concatenate([start, start + np.where(length == 0, 1, length)])
    change = np.concatenate([events.bandwidth[rows], -events.bandwidth[rows]])
    kinds = [_kind_of_copy(events.names[code]) for code in events.name[rows].tolist()]
    names = sorted(set(kinds))
    number = {name: place for place, name in enumerate(names)}
    code = np.array([number[kind] for kind in (*kinds, *kinds)])
    order = np.argsort(times)
    found = {}
    for which, places in islice(places_by_value(code[order]), _MAX_STREAMS):
        mine = order[places]
        found[clean(names[which], 60)] = _series(times[mine], np.cumsum(change[mine]))
    return found


def _series(time: npt.NDArray[Any], value: npt.NDArray[Any]) -> Series:
    return Series(time.astype(np.float64), value.astype(np.float64))


def _kind_of_copy(name: str) -> str:
    if name.startswith("Memset"):
        return "Memset"
    return name[:_DIRECTION_LETTERS] if name.startswith("Memcpy") else "Memcpy Unknown"


def _described(values: npt.NDArray[Any]) -> list[float | None]:
    """Count, mean, standard deviation (None for one value), minimum, quartiles and maximum."""
    spread = float(values.std(ddof=1)) if len(values) > 1 else None
    quartiles = np.percentile(values, [0, 25, 50, 75, 100]).tolist()
    return [float(len(values)), float(values.mean()), spread, *quartiles]
