"""Slack: by how much each event could end later without a later end of its step.

On one rank, a delay after an instant first consumes the times in which the rank is blocked anyway.
It affects other ranks if the rank is then the last to arrive at a collective, or to end its
step. So with B(t) the time for which the rank has been blocked up to t, and the *margin* of an
arrival the last arrival minus this one (of a step's end: its latest end on any rank minus this
rank's),

    slack(t) = min over arrivals and step ends at x >= t of (margin(x) + B(x) - B(t)).

This is a lower bound: other ranks may absorb a delay that reaches them. A message in flight can end
later by the time until the rank is next blocked, plus the slack of that instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import KIND, NULL, NULL_NS, Columns, IntArray
from ddltrace.analyzer.events.interval_sets import length_before, union
from ddltrace.analyzer.events.rank_scan import scan_rank
from ddltrace.analyzer.joined.analyzed import Analyzed
from ddltrace.analyzer.joined.trace_scans import timeline_of

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace


def event_slack(trace: Trace, analyzed: Analyzed, rank: int) -> pa.Array:
    """Slack of every event of a rank, microseconds.

    Args:
        trace: The trace.
        analyzed: Its analysis.
        rank: The rank of the events.

    Returns:
        One number per row of ``trace.events(rank)``: null for events of no completed step and
        for those whose end is not known; 0 on what a delay of any length would show.

    Raises:
        TraceError: The trace has nothing of that rank.
    """
    columns = Columns(trace.events(rank))
    scan = scan_rank(rank, columns)
    line = timeline_of(trace, scan)
    blocked = union(line.block_start, line.block_end)
    time, margin = _margins(analyzed, scan.step, scan.step_end, rank)
    end = columns.end.astype(np.int64)
    message = columns.kind == KIND["message"]
    # A message ends when the rank next is, or still is, blocked, at no cost.
    following = np.searchsorted(blocked.end, end, side="right")
    at = np.where(
        message & (following < len(blocked.end)),
        np.append(blocked.end, 0)[np.minimum(following, len(blocked.end))],
        end,
    )
    after = np.searchsorted(time, at, side="left")
    held = length_before(blocked, time)
    best = np.minimum.accumulate((margin + held)[::-1])[::-1]
    known = (end != NULL_NS) & (columns.step != NULL) & (after < len(time))
    known &= np.isin(columns.step, scan.step)
    slack = np.zeros(len(end), dtype=np.int64)
    slack[known] = best[after[known]] - length_before(blocked, at[known])
    slack = np.maximum(slack, 0) + (at - end)
    return pa.array(slack / 1e3, mask=~known)


def _margins(
    analyzed: Analyzed, step: IntArray, step_end: IntArray, rank: int
) -> tuple[IntArray, IntArray]:
    """When the rank arrives at collectives and ends steps, and how much before the others."""
    joined = analyzed.joined
    rows = joined.rows(rank)
    start, of = joined.messages.start[rows], joined.collective[rows]
    entered = (of != NULL) & (joined.released[rows] != NULL_NS)
    arrival = start[entered]
    margins = joined.collectives.last[of[entered]] - arrival
    ends = {row.step: analyzed.paths[row.step].end[-1] for row in analyzed.analysis.steps}
    latest = np.array([ends.get(number, NULL_NS) for number in step.tolist()], dtype=np.int64)
    some = latest != NULL_NS
    time = np.concatenate([arrival, step_end[some]])
    margin = np.concatenate([margins, latest[some] - step_end[some]])
    order = np.argsort(time, kind="stable")
    return time[order], margin[order]
