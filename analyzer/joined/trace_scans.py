"""Scans every rank of a trace, builds timelines, and describes critical paths along them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from ddltrace.analyzer.engine.engine import PartWithData, map_parts
from ddltrace.analyzer.events.event_columns import Columns
from ddltrace.analyzer.events.interval_sets import EMPTY, Spans
from ddltrace.analyzer.events.process_stops import times_with_a_stop
from ddltrace.analyzer.events.rank_scan import RankScan, RankScanner
from ddltrace.analyzer.events.rank_timeline import Gradients, Timeline, TimelineBuilder
from ddltrace.analyzer.importers.straggler_analysis.operations import WORKERS_LABEL
from ddltrace.analyzer.joined.critical_path import Pieces, describe_stretches

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_FEW_RANKS: Final = 16


def scan_ranks(trace: Trace) -> dict[int, RankScan]:
    """Scans every rank, on the engine of the trace."""
    task = partial(scan_part, with_timeline=len(trace.ranks) <= _FEW_RANKS)
    found = {scan.rank: scan for scan in trace.map_ranks(task, "reading ranks")}
    # Arrow keeps the memory of the windows, which is not needed any more.
    pa.default_memory_pool().release_unused()
    return found


def timeline_of(trace: Trace, scan: RankScan) -> Timeline:
    """A scanned rank's timeline; unless it was kept, its events have to be read again."""
    if scan.timeline is not None:
        return scan.timeline
    builder = TimelineBuilder()
    for table in trace.windows(scan.rank):
        builder.add(Columns(table))
    line = _finished(builder, scan)
    if line is None:
        builder = TimelineBuilder()
        builder.add(trace.columns(scan.rank))
        line = _finished(builder, scan)
    assert line is not None, "all events came at once"
    return line


def scan_part(trace: Trace, *, with_timeline: bool) -> RankScan:
    """Scans the rank of a trace of one rank."""
    (rank,) = trace.ranks
    scanner = RankScanner(
        rank, operations_only=_operations_only(trace), stopped=_stopped(trace, rank)
    )
    builder = TimelineBuilder() if with_timeline else None
    for table in trace.windows(rank):
        columns = Columns(table)
        scanner.add(columns)
        if builder is not None:
            builder.add(columns)
    scan = scanner.finish()
    line = None if builder is None else _finished(builder, scan)
    return scan if line is None else replace(scan, timeline=line)


def _operations_only(trace: Trace) -> bool | None:
    """Whether the trace has operations only; None where only the ranks' files show it."""
    return True if trace.run.labels.get(WORKERS_LABEL) else None


def _stopped(trace: Trace, rank: int) -> Spans:
    """Times in each of which the rank's process was stopped once."""
    # Between two processes of a rank no counters are read.
    if not trace.has_counters(rank) or len(trace.infos(rank)) > 1:
        return EMPTY
    return times_with_a_stop(trace.counters(rank))


def _finished(builder: TimelineBuilder, scan: RankScan) -> Timeline | None:
    first = scan.first if scan.events else None
    gradients = Gradients(first, scan.gradient_time, scan.gradient_tensor)
    return builder.finish(scan.rank, gradients, scan.activity)


@dataclass(frozen=True)
class _RankPart(PartWithData["Trace"]):
    """What a task needs to describe the stretches of one rank."""

    scan: RankScan
    stretches: Spans


def describe_ranks(
    trace: Trace, scans: Mapping[int, RankScan], stretches: Mapping[int, Spans]
) -> Iterator[Pieces]:
    """Describes the stretches of ranks along their timelines, on the engine of the trace.

    Args:
        stretches: Rank -> its stretches, ascending.

    Yields:
        The pieces of each rank, in the order of the ranks.
    """
    parts = [_RankPart(trace.of_rank(r), scans[r], found) for r, found in stretches.items()]
    return map_parts(trace, _describe, parts, "describing critical paths")


def _describe(part: _RankPart) -> Pieces:
    names = part.trace.tensor_names(part.scan.rank)
    return describe_stretches(timeline_of(part.trace, part.scan), part.stretches, names)
