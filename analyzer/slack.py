"""Slack: by how much each event could end later without a later end of its step.

On one rank, a delay after an instant first consumes the times in which the rank is blocked anyway.
It affects other ranks if the rank is then the last to arrive at a collective, or to end its
step. So with B(t) the time for which the rank has been blocked up to t, and the *margin* of an
arrival the last arrival minus this one (of a step's end: its latest end on any rank minus this
rank's),

    slack(t) = min over arrivals and step ends at x >= t of (margin(x) + B(x) - B(t)).

This is a lower bound: other ranks may absorb a delay that reaches them. A message in flight can end
later by the time until the rank is next blocked, plus the slack of that instant.

A rank's events are read twice, in windows: once for the times at which it is blocked, then for the
slack of each event, of which a few numbers are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.engine.engine import PartWithData, map_parts
from ddltrace.analyzer.events.event_columns import (
    KIND,
    NULL,
    NULL_NS,
    BoolArray,
    Columns,
    Gathered,
    IntArray,
    changes,
)
from ddltrace.analyzer.events.interval_sets import length_before, union
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.trace_scans import scan_part
from ddltrace.analyzer.model import Analyzed

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_KINDS: Final = ("phase", "layer", "message")
"""Events whose end can be delayed: waits and steps end when something else does."""
_KIND_NAMES: Final = {KIND[kind]: kind for kind in _KINDS}


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


@dataclass(frozen=True)
class SlackRow:
    """The slack of the events of one name on one rank.

    In a step, the slack of a name is the smallest slack of its events.

    Attributes:
        rank: Global rank.
        kind: ``phase``, ``layer`` or ``message``.
        name: Phase, layer, or operation of the message; None if it has no name.
        steps: Number of steady steps in which the name occurs.
        us: Median duration of its events in a step, summed, microseconds.
        slack_us: Median slack, microseconds.
        smallest_us: Smallest slack of any steady step, microseconds.
    """

    rank: int
    kind: str
    name: str | None
    steps: int
    us: float
    slack_us: float
    smallest_us: float


def slack_rows(trace: Trace, analyzed: Analyzed) -> tuple[SlackRow, ...]:
    """The slack of each name on each rank, smallest first, the longest of equal ones first.

    Args:
        analyzed: Its analysis.
    """
    steady = np.array([row.step for row in analyzed.analysis.steps if row.steady], dtype=np.int64)
    parts = [_RankPart(trace.of_rank(r), find_margins(analyzed, r), steady) for r in trace.ranks]
    found = map_parts(trace, _rows_of, parts, "finding slack", one_at_a_time=True)
    rows = chain.from_iterable(found)
    return tuple(sorted(rows, key=lambda row: (row.slack_us, -row.us)))


@dataclass(frozen=True)
class _RankPart(PartWithData["Trace"]):
    """What a task needs to find the slack of one rank."""

    margins: Margins
    steady: IntArray


def _rows_of(part: _RankPart) -> list[SlackRow]:
    (rank,) = part.trace.ranks
    slack = RankSlack(part.margins, scan_part(part.trace, with_timeline=False))
    found = _Found(part.steady)
    for table in part.trace.windows(rank):
        found.add(Columns(table), slack)
    return found.rows(rank)


class _Found:
    """The slack of a rank's events, collected in parts.

    Args:
        steady: Numbers of the steady steps.
    """

    def __init__(self, steady: IntArray) -> None:
        self._steady = steady
        self._names: dict[str | None, int] = {None: 0}
        self._key = Gathered(np.int64)
        self._slack = Gathered(np.int64)
        self._duration = Gathered(np.int64)

    def add(self, columns: Columns, slack: RankSlack) -> None:
        """Adds a part of the events."""
        slack_ns, known = slack.of(columns)
        used = np.isin(columns.kind, list(_KIND_NAMES)) & np.isin(columns.step, self._steady)
        used &= known
        if not used.any():
            return
        place = np.searchsorted(self._steady, columns.step[used])
        name = np.where(
            columns.kind == KIND["message"],
            self._codes(*columns.codes("op")),
            self._codes(columns.name, columns.names),
        )
        of_name = name[used] * len(KIND) + columns.kind[used]
        self._key.add(of_name * len(self._steady) + place)
        self._slack.add(slack_ns[used])
        self._duration.add((columns.end - columns.start)[used])

    def _codes(self, of_window: IntArray, words: list[str]) -> IntArray:
        """Codes of a window as codes of all windows."""
        names: list[str | None] = [*words, None]  # `NULL` is -1: the last
        codes = np.array([self._names.setdefault(name, len(self._names)) for name in names])
        return np.asarray(codes[of_window])

    def rows(self, rank: int) -> list[SlackRow]:
        """One row for each kind and name."""
        key = self._key.take_values()
        if not len(key):
            return []
        order = np.argsort(key, kind="stable")
        key = key[order]
        begin = np.flatnonzero(changes(key))
        slack = np.minimum.reduceat(self._slack.take_values()[order], begin)
        length = np.add.reduceat(self._duration.take_values()[order], begin)
        of_name = key[begin] // len(self._steady)
        first = np.flatnonzero(changes(of_name))
        count = np.diff(np.append(first, len(of_name)))
        number = np.repeat(np.arange(len(first)), count)
        lengths, slacks = (_medians(each, number, first, count) for each in (length, slack))
        smallest = np.minimum.reduceat(slack, first)
        texts = list(self._names)
        return [
            SlackRow(
                rank=rank,
                kind=_KIND_NAMES[code % len(KIND)],
                name=texts[code // len(KIND)],
                steps=int(count[place]),
                us=float(lengths[place]) / 1e3,
                slack_us=float(slacks[place]) / 1e3,
                smallest_us=int(smallest[place]) / 1e3,
            )
            for place, code in enumerate(of_name[first].tolist())
        ]


def _medians(values: IntArray, number: IntArray, first: IntArray, count: IntArray) -> IntArray:
    """The median of the values of each group; groups lie side by side."""
    ordered = values[np.lexsort((values, number))]
    lower, upper = first + (count - 1) // 2, first + count // 2
    return np.asarray((ordered[lower] + ordered[upper]) / 2)
