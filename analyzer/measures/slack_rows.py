"""Slack of the layers, phases and messages of each rank, over the steady steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.events.event_columns import KIND, Columns
from ddltrace.analyzer.joined.slack import event_slack
from ddltrace.analyzer.measures.operation_rows import Groups, grouped

if TYPE_CHECKING:
    from ddltrace.analyzer.events.event_columns import IntArray
    from ddltrace.analyzer.joined.analyzed import Analyzed
    from ddltrace.analyzer.trace.opened_trace import Trace

_KINDS: Final = ("phase", "layer", "message")
"""Events whose end can be delayed: waits and steps end when something else does."""
_KIND_NAMES: Final = {KIND[kind]: kind for kind in _KINDS}


@dataclass(frozen=True)
class SlackRow:
    """The slack of the events of one name on one rank.

    In a step, the slack of a name is the smallest slack of its events.

    Attributes:
        rank: Global rank.
        kind: ``phase``, ``layer`` or ``message``.
        name: Phase, layer or message; None if it has no name.
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
        trace: The trace.
        analyzed: Its analysis.
    """
    steady = np.array([row.step for row in analyzed.analysis.steps if row.steady], dtype=np.int64)
    rows = [row for rank in trace.ranks for row in _rows_of(trace, analyzed, rank, steady)]
    return tuple(sorted(rows, key=lambda row: (row.slack_us, -row.us)))


def _rows_of(trace: Trace, analyzed: Analyzed, rank: int, steady: IntArray) -> list[SlackRow]:
    columns = Columns(trace.events(rank))
    slack = event_slack(trace, analyzed, rank)
    names, texts = columns.codes("name")
    used = np.isin(columns.kind, list(_KIND_NAMES))
    used &= np.isin(columns.step, steady) & np.asarray(slack.is_valid())
    if not used.any():
        return []
    slack_ns = np.rint(slack.fill_null(0).to_numpy() * 1e3).astype(np.int64)[used]
    step, kind = columns.step[used], columns.kind[used].astype(np.int64)
    name, duration = names[used].astype(np.int64), (columns.end - columns.start)[used]
    in_step = grouped([step, name, kind], slack_ns)
    length = np.bincount(in_step.of_entry, weights=duration, minlength=len(in_step))
    kinds, names_in_step = kind[in_step.first], name[in_step.first]
    of_name = grouped([names_in_step, kinds], in_step.low)
    lengths = _medians(length, of_name) / 1e3
    slacks = _medians(in_step.low, of_name) / 1e3
    rows = []
    for number, entry in enumerate(of_name.first.tolist()):
        code = int(names_in_step[entry])
        rows.append(
            SlackRow(
                rank=rank,
                kind=_KIND_NAMES[int(kinds[entry])],
                name=texts[code] if code >= 0 else None,
                steps=int(of_name.count[number]),
                us=float(lengths[number]),
                slack_us=float(slacks[number]),
                smallest_us=int(of_name.low[number]) / 1e3,
            )
        )
    return rows


def _medians(values: IntArray, groups: Groups) -> IntArray:
    """The median of the values of each group."""
    ordered = values[np.lexsort((values, groups.of_entry))]
    begin = np.cumsum(groups.count) - groups.count
    lower, upper = begin + (groups.count - 1) // 2, begin + groups.count // 2
    return np.asarray((ordered[lower] + ordered[upper]) / 2)
