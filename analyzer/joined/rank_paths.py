"""Describes the parts of critical paths on each rank: one task per visited rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddltrace.analyzer.engine.part_tasks import PartWithData, map_parts
from ddltrace.analyzer.events.interval_sets import Spans
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.critical_path import Pieces, describe_stretches
from ddltrace.analyzer.joined.trace_scans import timeline_of

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace


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
        trace: The trace.
        scans: Rank -> its scan.
        stretches: Rank -> its stretches, ascending.

    Yields:
        The pieces of each rank, in the order of the ranks.
    """
    parts = [_RankPart(trace.of_rank(r), scans[r], found) for r, found in stretches.items()]
    return map_parts(trace, _describe, parts, "describing critical paths")


def _describe(part: _RankPart) -> Pieces:
    names = part.trace.tensor_names(part.scan.rank)
    return describe_stretches(timeline_of(part.trace, part.scan), part.stretches, names)
