"""Measures each rank in its steps and over its window, in one task per rank.

A task needs the scan of its rank and when its messages were released, and nothing of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import BoolArray, IntArray
from ddltrace.analyzer.events.interval_sets import (
    EMPTY,
    Spans,
    clip,
    intersect,
    length,
    subtract,
    union,
)
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined, Releases
from ddltrace.analyzer.measures.breakdown import (
    FIELDS,
    FloatArray,
    RankSets,
    measure_windows,
    rank_sets,
    ratio,
)
from ddltrace.analyzer.measures.collectives import in_steps
from ddltrace.analyzer.measures.idle import idle_row
from ddltrace.analyzer.measures.steps import Steps
from ddltrace.analyzer.model import CopyTimes, IdleRow, RankRow

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_COLUMNS = ("rank", "step", "start_ns", *FIELDS)


@dataclass(frozen=True)
class RankMeasures:
    """The measures of all ranks.

    Attributes:
        steps: Measures of every rank in each of its steps, in its whole window if there are none:
            ``rank``, ``step``, ``start_ns`` and `FIELDS`, sorted by rank.
        ranks: A row for each rank.
        idle: Idle time of each rank by cause.
    """

    steps: dict[str, FloatArray]
    ranks: tuple[RankRow, ...]
    idle: tuple[IdleRow, ...]


class _Task(NamedTuple):
    """What the measures of a rank depend on.

    Attributes:
        scan: The rank.
        releases: When its messages were released, and by whom.
        steps: Numbers of all steps.
        steady: Those that the summary counts.
        selected: Whether only these steps are analyzed.
        has_gaps: Whether the rank left steps unrecorded, to measure the overhead.
    """

    scan: RankScan
    releases: Releases
    steps: IntArray
    steady: IntArray
    selected: bool
    has_gaps: bool


class _Measured(NamedTuple):
    columns: dict[str, FloatArray]
    row: RankRow
    idle: IdleRow


def measure_ranks(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, steps: Steps, *, selected: bool
) -> RankMeasures:
    """Measures every rank, on the engine of the trace.

    Args:
        trace: The trace.
        scans: Rank -> its scan.
        joined: All messages.
        steps: All steps.
        selected: Whether only these steps are analyzed.
    """
    tasks = [
        _Task(
            # Timelines are large and not needed.
            replace(scan, timeline=None),
            joined.releases(rank),
            steps.number,
            steps.number[steps.steady],
            selected,
            any(info.cost for info in trace.infos(rank)),
        )
        for rank, scan in scans.items()
    ]
    found = list(map(_measure, tasks))
    return RankMeasures(
        steps={
            name: np.concatenate([one.columns[name] for one in found]) if found else np.empty(0)
            for name in _COLUMNS
        },
        ranks=tuple(one.row for one in found),
        idle=tuple(one.idle for one in found),
    )


def _measure(task: _Task) -> _Measured:
    sets = rank_sets(task.scan, task.releases)
    columns = _in_steps(sets, task.steps)
    window = _window(task, columns)
    return _Measured(
        columns,
        _rank_row(task, sets, columns, window),
        idle_row(task.scan, task.releases, sets.exposed_waiting, window, _totals(sets, window)),
    )


def _in_steps(sets: RankSets, steps: IntArray) -> dict[str, FloatArray]:
    """Measures of a rank in each of its steps; in its whole window if there are none."""
    scan = sets.scan
    if len(steps):
        mine = in_steps(scan.step, steps)
        number, start, end = scan.step[mine], scan.step_start[mine], scan.step_end[mine]
    else:
        some = slice(0, 1 if scan.events else 0)
        number = np.array([-1])[some]
        start, end = np.array([scan.first])[some], np.array([scan.last])[some]
    return {
        "rank": np.full(len(number), scan.rank),
        "step": number,
        "start_ns": start,
        **measure_windows(sets, start, end),
    }


def _rank_row(
    task: _Task, sets: RankSets, columns: Mapping[str, FloatArray], window: Spans
) -> RankRow:
    scan, activity = sets.scan, sets.scan.activity
    counted = in_steps(columns["step"].astype(np.int64), task.steady)
    walls = columns["wall_ns"][counted] / 1e3
    chosen = np.ones(len(scan.messages), dtype=bool)
    if task.selected:
        total = {name: float(columns[name].sum()) for name in FIELDS}
        chosen = in_steps(scan.messages.step, task.steps)
    else:
        total = _totals(sets, Spans(np.array([scan.first]), np.array([scan.last])))
    span = length(window)
    known = activity.compute is not None
    return RankRow(
        rank=scan.rank,
        step_us_p50=float(np.median(walls)) if len(walls) else None,
        step_us_p95=float(np.percentile(walls, 95)) if len(walls) else None,
        span_us=span / 1e3 if known or activity.device else None,
        compute_us=_us(total["compute_ns"]),
        comm_us=total["comm_ns"] / 1e3,
        overlap_us=_us(total["overlap_ns"]),
        overlap_ratio=ratio(total["overlap_ns"], total["comm_ns"]),
        exposed_comm_us=_us(total["exposed_ns"]),
        copy_us=length(intersect(activity.copies, window)) / 1e3,
        copies=CopyTimes(
            *(length(intersect(spans, window)) / 1e3 for spans in activity.copies_by_direction)
        ),
        idle_us=(span - length(intersect(activity.work, window))) / 1e3 if known else None,
        wait_us=_us(total["waiting_ns"]),
        transfer_us=_us(total["transfer_ns"]),
        host_wait_us=total["blocked_ns"] / 1e3,
        data_us=total["data_ns"] / 1e3,
        update_us=total["update_ns"] / 1e3,
        bytes_sent=_bytes_sent(scan, chosen),
        messages=int(chosen.sum()),
        open_messages=int((chosen & scan.messages.unfinished).sum()),
    )


def _window(task: _Task, columns: Mapping[str, FloatArray]) -> Spans:
    """From the first start to the last end of a rank's device work.

    Steps that were left unrecorded to measure the overhead do not count.

    Args:
        task: The rank.
        columns: Its measures in each step.
    """
    work = task.scan.activity.work
    if task.selected:
        begins = columns["start_ns"]
        ends = begins + columns["wall_ns"]
        work = clip(work, int(begins.min()), int(ends.max())) if len(begins) else EMPTY
    if not len(work.start):
        return EMPTY
    whole = union(work.start[:1], work.end[-1:])
    return subtract(whole, subtract(_left_out(task), work))


def _left_out(task: _Task) -> Spans:
    """The steps that a rank left unrecorded between others, to measure the overhead."""
    if not task.has_gaps:
        return EMPTY
    scan = task.scan
    jumps = np.flatnonzero(np.diff(scan.step) > 1)
    return union(scan.step_end[jumps], scan.step_start[jumps + 1])


def _totals(sets: RankSets, windows: Spans) -> dict[str, float]:
    """A rank's measures in some windows together."""
    # An empty window shows which measures the trace does not contain.
    start, end = (np.append(times, 0) for times in windows)
    measured = measure_windows(sets, start, end)
    return {name: float(values.sum()) for name, values in measured.items()}


def _bytes_sent(scan: RankScan, chosen: BoolArray) -> int:
    """Input bytes of a rank's messages; received bytes do not count."""
    messages = scan.messages
    size = np.where(messages.wire_bytes >= 0, messages.wire_bytes, messages.bytes)
    names = np.array([*messages.ops, ""])[messages.op]
    given = (names == "recv") | (
        np.isin(names, ("broadcast", "scatter"))
        & (messages.peer >= 0)
        & (messages.peer != scan.rank)
    )
    return int(np.maximum(size[chosen & ~given], 0).sum())


def _us(ns: float) -> float | None:
    """A time in microseconds; None if it is unknown."""
    return None if np.isnan(ns) else ns / 1e3
