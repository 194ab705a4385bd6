"""A trace whose steps are replaced by the annotations of one name, or by a window of time.

An analysis then computes its measures of steps (critical path, breakdown, waiting) for these.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.superseded import drop_superseded
from ddltrace.analyzer.trace.opened_trace import Trace, TraceT
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.trace.schema import EVENTS

_TIMES: Final = re.compile(r"(\d{1,15}(?:\.\d+)?):(\d{1,15}(?:\.\d+)?)")
_ROUNDS: Final = 4
Times = npt.NDArray[np.int64]


def with_window(trace: TraceT, window: str) -> TraceT:
    """Returns the trace with other steps.

    Args:
        window: ``A:B``, microseconds from the trace's first event; or the name of annotations
            (markers, phases or other host intervals): the n-th on a rank is its step n.

    Raises:
        UsageError: There is no such annotation, or the window is empty, or the trace is too
            long to be held as a whole.
    """
    if trace.step_selection is not None:
        raise UsageError(f"--window needs the whole trace: {trace.name} is too long for that")
    times = _TIMES.fullmatch(window)
    tables: dict[str, pa.Table] = {}
    found = 0
    if len(trace.run.ranks) > len(trace.ranks):
        raise UsageError(f"--window needs a job without restarts, which {trace.name} is not")
    for info in trace.run.ranks:
        table = drop_superseded(trace.stored(info))
        if times is None:
            start, end = _named(table, window)
        else:
            moments = [trace.origin_ns + round(float(text) * 1000) for text in times.groups()]
            start, end = (_on_own_clock(trace, info.segment, [each]) for each in moments)
        found += int((end > start).sum())
        tables[info.segment] = _with_steps(table, start, end, _lane(table, window))
    if not found:
        what = "is empty: write A:B with A < B" if times else "is the name of no annotation"
        raise UsageError(f"--window {window!r:.60} {what} of {trace.name}")
    kind = "the window from A to B" if times else "annotations"
    note = f"steps are {kind} that --window names: {window:.200}"
    run = dataclasses.replace(trace.run, notes=[*trace.run.notes, note])
    return type(trace)(trace.path, run, tables, trace.engine)


def _named(table: pa.Table, name: str) -> tuple[Times, Times]:
    kind = table["kind"].cast(pa.string())
    host = pc.is_in(kind, value_set=pa.array(["marker", "phase", "host", "data", "layer", "step"]))
    wanted = pc.and_(pc.equal(table["name"].cast(pa.string()), name), host)
    rows = table.filter(pc.and_(pc.fill_null(wanted, False), table["end_ns"].is_valid()))
    rows = rows.sort_by("start_ns")
    start, end = (rows[column].to_numpy() for column in ("start_ns", "end_ns"))
    # One inside or beside another of the same name (a recursive call) is not a window of its own.
    before = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]])[: len(end)]
    return start[start >= before], end[start >= before]


def _on_own_clock(trace: Trace, segment: str, moments: list[int]) -> Times:
    """Times on rank 0's clock as times of the process of a segment."""
    clock, wanted = trace.clocks[segment], np.array(moments, dtype=np.int64)
    own: Times = wanted.copy()
    for _ in range(_ROUNDS):
        own = np.asarray(own - (clock.apply(own) - wanted), dtype=np.int64)
    return own


def _lane(table: pa.Table, name: str) -> str:
    """The thread of the annotations, else that with the most host events: a path follows it."""
    lanes = table["lane"].cast(pa.string())
    named = pc.fill_null(pc.equal(table["name"].cast(pa.string()), name), False)
    kind = table["kind"].cast(pa.string())
    host = pc.is_in(kind, value_set=pa.array(["phase", "host", "layer", "marker", "data"]))
    for rows in (pc.and_(named, host), host):
        counts = pc.value_counts(lanes.filter(rows).drop_null())
        if len(counts):
            return str(max(counts.to_pylist(), key=lambda each: each["counts"])["values"])
    return "main"


def _with_steps(table: pa.Table, start: Times, end: Times, lane: str) -> pa.Table:
    """Makes markers of the steps of a table, and adds others."""
    kinds = table["kind"].cast(pa.string())
    kinds = pc.if_else(pc.equal(kinds, "step"), "marker", kinds)
    # Device work and messages belong to the window in which they were launched.
    time = pc.coalesce(table["enqueue_ns"], table["start_ns"]).to_numpy()
    place = np.searchsorted(start, time, side="right") - 1
    inside = place >= 0
    inside[inside] = time[inside] < end[place[inside]]
    steps = pa.array(place.astype(np.int32), mask=~inside)
    columns: dict[str, Any] = {name: table[name] for name in EVENTS.names}
    columns |= {"kind": kinds.cast(EVENTS.field("kind").type), "step": steps}
    former = pa.table([columns[name] for name in EVENTS.names], schema=EVENTS)
    rows = [
        {
            **dict.fromkeys(EVENTS.names),
            **{"start_ns": int(first), "end_ns": int(last), "kind": "step", "name": "window"},
            **{"lane": lane, "step": number},
        }
        for number, (first, last) in enumerate(zip(start, end, strict=True))
    ]
    added = pa.Table.from_pylist(rows, schema=EVENTS)
    return pa.concat_tables([former, added]).unify_dictionaries().combine_chunks()
