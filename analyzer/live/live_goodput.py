"""What the time of a running job goes to, as `ddltrace.analyzer.measures.goodput` defines it.

What is kept of a process does not grow with its steps. So the steps that are executed again after a
restart are not known here: they count as training, as does the loading of a checkpoint between
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, Columns, named
from ddltrace.analyzer.events.interval_sets import Growing, Spans, merge
from ddltrace.analyzer.measures.goodput import shares_of, spans_of
from ddltrace.tracer.trace.schema import CHECKPOINT_SAVE, EVALUATION

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.align import RankClock

_FEW: Final = 64


class ProcessTime:
    """When a process was in each part, on its clock; its events are added in parts.

    Args:
        began_ns: When it began to record.

    Attributes:
        first_ns: When its first step began, or recording might have missed it; None before.
    """

    def __init__(self, began_ns: int) -> None:
        self.first_ns: int | None = None
        self._began_ns = self._ended_ns = began_ns
        self._number = -1
        self._lane = "main"
        names = ("checkpoint", "evaluation", "training", "unrecorded")
        self._parts = {name: Growing(_FEW) for name in names}

    def add(self, columns: Columns) -> None:
        """Adds some events."""
        self._add_steps(columns)
        rows = columns.rows("marker")
        rows = rows[columns.end[rows] != NULL_NS]
        saves = rows[named(columns, lambda name: name.startswith(CHECKPOINT_SAVE), rows)]
        leads = np.array([*(lane == self._lane for lane in columns.lanes), False])
        for part, its in (
            ("evaluation", rows[named(columns, EVALUATION.__eq__, rows)]),
            ("checkpoint", saves[leads[columns.lane[saves]]]),
        ):
            self._parts[part].add(columns.start[its], columns.end[its])

    def _add_steps(self, columns: Columns) -> None:
        rows = columns.rows("step")
        rows = rows[(columns.end[rows] != NULL_NS) & (columns.step[rows] != NULL)]
        if not len(rows):
            return
        number, start, end = columns.step[rows], columns.start[rows], columns.end[rows]
        if self.first_ns is None:
            self.first_ns = int(start[0]) if number[0] == 0 else self._began_ns
        if columns.lane[rows[-1]] != NULL:
            self._lane = columns.lanes[columns.lane[rows[-1]]]
        self._parts["training"].add(start, end)
        gaps = np.flatnonzero(np.diff(np.append(self._number, number)) > 1)
        self._parts["unrecorded"].add(np.append(self._ended_ns, end)[gaps], start[gaps])
        self._number, self._ended_ns = int(number[-1]), int(end[-1])

    def seen(self, clock: RankClock) -> Seen:
        """The same on the clock of rank 0."""

        def moved(spans: Spans) -> Spans:
            return Spans(clock.apply(spans.start), clock.apply(spans.end))

        first_ns = None if self.first_ns is None else moment(clock, self.first_ns)
        parts = {name: moved(part.spans()) for name, part in self._parts.items()}
        return Seen(first_ns, moment(clock, self._ended_ns), parts)


class Seen(NamedTuple):
    """What is known of the time of a process, on rank 0's clock.

    Attributes:
        first_ns: See `ProcessTime`.
        stepped_ns: The end of its last step.
        parts: When it was in each part.
        failed_ns: When it failed; None if it did not, or if that was not observed.
        silent_ns: Since when it has recorded nothing, if the tracer has noticed it.
        is_off: Whether its recording is switched off.
    """

    first_ns: int | None
    stepped_ns: int
    parts: dict[str, Spans]
    failed_ns: int | None = None
    silent_ns: int | None = None
    is_off: bool = False


def live_shares(attempts: Sequence[Sequence[Seen]], begin: int, end: int) -> dict[str, float]:
    """Shares of the job's time so far; empty before its first step.

    Args:
        attempts: The processes of each attempt, in order.
        begin: When the job began.
        end: Until when.
    """
    every = [one for attempt in attempts for one in attempt]
    if end <= begin or all(one.first_ns is None for one in every):
        return {}
    until = [*(_failed(attempt) for attempt in attempts[:-1]), end]
    first = [
        min((one.first_ns for one in attempt if one.first_ns is not None), default=at_ns)
        for attempt, at_ns in zip(attempts, until, strict=True)
    ]
    silent = [
        (max(one.silent_ns or 0 for one in attempt), at_ns)
        for attempt, at_ns in zip(attempts, until, strict=True)
        if all(one.silent_ns is not None for one in attempt)
    ]
    off = [
        (one.stepped_ns, at_ns)
        for attempt, at_ns in zip(attempts, until, strict=True)
        for one in attempt
        if one.is_off
    ]
    parts = {name: merge(*(one.parts[name] for one in every)) for name in every[0].parts}
    return shares_of(
        begin,
        end,
        {
            "start": spans_of([(begin, first[0])]),
            "restart": spans_of(zip(until[:-1], first[1:], strict=True)),
            "hang": spans_of(silent),
            **parts,
            "unrecorded": merge(parts["unrecorded"], spans_of(off)),
        },
    )


def _failed(attempt: Sequence[Seen]) -> int:
    """When an attempt that is over failed, or else the end of its last step."""
    failed = [one.failed_ns for one in attempt if one.failed_ns is not None]
    return min(failed, default=max(one.stepped_ns for one in attempt))


def moment(clock: RankClock, ns: int) -> int:
    """A time of a process on rank 0's clock."""
    return int(clock.apply(np.array([ns], np.int64))[0])
