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

from dataclasses import dataclass

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    KIND,
    NULL,
    NULL_NS,
    BoolArray,
    Columns,
    IntArray,
)
from ddltrace.analyzer.events.interval_sets import length_before, union
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.analyzed import Analyzed


@dataclass(frozen=True)
class Margins:
    """How much before the others a rank arrives at collectives, and when its steps end.

    Attributes:
        arrival: When it arrives at each collective, ns.
        before: How much before the last rank to arrive.
        step: Numbers of the trace's steps, ascending.
        latest: Latest end of each on any rank, ns.
    """

    arrival: IntArray
    before: IntArray
    step: IntArray
    latest: IntArray


def find_margins(analyzed: Analyzed, rank: int) -> Margins:
    """The margins of a rank in an analyzed trace."""
    joined = analyzed.joined
    rows = joined.rows(rank)
    start, of = joined.messages.start[rows], joined.collective[rows]
    entered = (of != NULL) & (joined.released[rows] != NULL_NS)
    arrival = start[entered]
    steps = sorted(row.step for row in analyzed.analysis.steps)
    return Margins(
        arrival=arrival,
        before=joined.collectives.last[of[entered]] - arrival,
        step=np.array(steps, dtype=np.int64),
        latest=np.array([analyzed.paths[step].end[-1] for step in steps], dtype=np.int64),
    )


class RankSlack:
    """Slack of the events of one rank.

    Args:
        margins: The margins of the rank.
        scan: Its scan.
    """

    def __init__(self, margins: Margins, scan: RankScan) -> None:
        self._blocked = union(*scan.path_blocks()[:2])
        self._steps = scan.step
        _, own, place = np.intersect1d(
            scan.step, margins.step, assume_unique=True, return_indices=True
        )
        end = scan.step_end[own]
        time = np.concatenate([margins.arrival, end])
        margin = np.concatenate([margins.before, margins.latest[place] - end])
        order = np.argsort(time, kind="stable")
        self._time, margin = time[order], margin[order]
        held = length_before(self._blocked, self._time)
        self._best = np.minimum.accumulate((margin + held)[::-1])[::-1]

    def of(self, columns: Columns) -> tuple[IntArray, BoolArray]:
        """Slack of each of some events of the rank.

        Returns:
            Nanoseconds, 0 on what a delay of any length would show; and whether the slack is known:
            not for events of no completed step and for those whose end is not known.
        """
        blocked = self._blocked
        end = columns.end.astype(np.int64)
        message = columns.kind == KIND["message"]
        # A message ends when the rank next is, or still is, blocked, at no cost.
        following = np.searchsorted(blocked.end, end, side="right")
        at = np.where(
            message & (following < len(blocked.end)),
            np.append(blocked.end, 0)[np.minimum(following, len(blocked.end))],
            end,
        )
        after = np.searchsorted(self._time, at, side="left")
        known = (end != NULL_NS) & (columns.step != NULL) & (after < len(self._time))
        known &= np.isin(columns.step, self._steps)
        slack = np.zeros(len(end), dtype=np.int64)
        slack[known] = self._best[after[known]] - length_before(blocked, at[known])
        return np.maximum(slack, 0) + (at - end), known
