"""The call of the host that launched an event on the device, and what a call launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import Columns
from ddltrace.analyzer.events.launches import is_runtime_call, launches_of
from ddltrace.analyzer.formatting.units import printable
from ddltrace.analyzer.joined.nccl_events import windows_with_nccl

if TYPE_CHECKING:
    from ddltrace.dashboard.timeline.lod import I64
    from ddltrace.dashboard.timeline.tracks import Row
    from ddltrace.dashboard.workspace import OpenTrace


@dataclass(frozen=True)
class Work:
    """What a call launched.

    Attributes:
        event: Row among the rank's events.
        title: Its operation or name.
        start_ns: Its start, as in the trace.
    """

    event: int
    title: str
    start_ns: int


@dataclass(frozen=True)
class Launch:
    """A call and what it launched.

    Attributes:
        call: Row of the call among the rank's events.
        title: Its name.
        start_ns: Its start, as in the trace.
        works: What it launched, by start.
    """

    call: int
    title: str
    start_ns: int
    works: list[Work]


def launch_of(opened: OpenTrace, rank: int, event: int, row: dict[str, Any]) -> Launch | None:
    """The launch that an event belongs to, as the call or as what was launched.

    Args:
        rank: The event's rank.
        event: Its row among the rank's events.
        row: Its columns.

    Returns:
        The launch; None if the trace does not hold both the call and what it launched.
    """
    time = row["start_ns"] if row["kind"] == "host" else row["enqueue_ns"]
    if time is None or not _calls_at(opened, rank, time - opened.trace.origin_ns):
        return None
    # The rank is read once for this: what a call launched is not known by the timeline.
    numbers, table = _related(opened, rank, time)
    call_of = launches_of(Columns(table))
    rows = table.to_pylist()
    own = int(np.flatnonzero(numbers == event)[0])
    call = own if row["kind"] == "host" else int(call_of[own])
    works = np.flatnonzero(call_of == call)
    if call < 0 or not len(works):
        return None
    found = [
        Work(int(numbers[at]), printable(name), rows[at]["start_ns"])
        for at in works
        if (name := rows[at]["op"] or rows[at]["name"] or rows[at]["kind"])
    ]
    found.sort(key=lambda work: work.start_ns)
    return Launch(int(numbers[call]), printable(rows[call]["name"]), time, found)


def _calls_at(opened: OpenTrace, rank: int, time: int) -> bool:
    """Whether a call of the device's runtime starts at a time since the trace's first event."""
    timeline = opened.timeline
    return any(
        is_runtime_call(timeline.names[name])
        for track in timeline.tracks
        if track.rank == rank and track.kind == "compute"
        for row in timeline.rows[track.first_row : track.first_row + track.num_rows]
        for name in _labels_at(row, time)
    )


def _labels_at(row: Row, time: int) -> list[int]:
    first, last = (int(np.searchsorted(row.index.start, time, side)) for side in ("left", "right"))
    labels: list[int] = row.label(np.arange(first, last, dtype=np.int64)).tolist()
    return labels


def _related(opened: OpenTrace, rank: int, time: int) -> tuple[I64, pa.Table]:
    """The events of the host that start at a time, and those that were enqueued at it."""
    tables, places, count = [], [], 0
    for window in windows_with_nccl(opened.trace, rank):
        is_host = pc.equal(window["kind"], "host")
        starts = pc.and_(is_host, pc.equal(window["start_ns"], time))
        wanted = pc.or_(starts, pc.fill_null(pc.equal(window["enqueue_ns"], time), False))
        found = pc.indices_nonzero(wanted)
        if len(found):
            tables.append(window.take(found))
            places.append(np.asarray(found).astype(np.int64) + count)
        count += window.num_rows
    place = np.concatenate(places)
    table = pa.concat_tables(tables).unify_dictionaries()
    recorded = opened.timeline.indexes[rank].recorded
    if recorded is None:
        return place, table
    kept = np.flatnonzero(np.isin(recorded, place))  # superseded rows have no number
    return kept, table.take(pa.array(np.searchsorted(place, recorded[kept])))
