"""Determines when the processes of ranks ended, and until when their activity is known."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL_NS, Columns
from ddltrace.analyzer.events.rank_scan import RankScan

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_UNWRITTEN_NS: Final = 500_000_000
"""Events of a killed process that are younger than this may not have been written; usually half of
this time."""


class ProcessLifetimes:
    """When the processes of each rank ended, on rank 0's clock, if it was observed."""

    def __init__(self, trace: Trace) -> None:
        self._ends: dict[int, list[int]] = {}
        for info in trace.run.ranks:
            if info.ended_ns is not None:
                self._ends.setdefault(info.rank, []).append(trace.moment(info, info.ended_ns))

    def of(self, rank: int, at_ns: int) -> tuple[int, int | None]:
        """The process of a rank at a time: the end of the previous process, and its own end.

        Returns:
            Both times; the smallest integer and None, respectively, if there is none or it is
            unknown.
        """
        ends = self._ends.get(rank, [])
        before = max((end for end in ends if end < at_ns), default=NULL_NS)
        return before, min((end for end in ends if end >= at_ns), default=None)


class Until(NamedTuple):
    """Until when the activity of a rank is known to have continued.

    Attributes:
        ns: The time, on rank 0's clock; None if it is unknown.
        was_observed: Whether the activity ended or was looked at then. Otherwise nothing later was
            recorded, and the activity may have continued.
    """

    ns: int | None
    was_observed: bool


class KnownActivity:
    """Until when the activity of ranks is known: a killed rank does not write its last events.

    Args:
        trace: The job's.
        scans: The scans of the trace's ranks.
        lifetimes: The life spans of the trace's processes.
        end: The end of the trace.
    """

    def __init__(
        self,
        trace: Trace,
        scans: Mapping[int, RankScan],
        lifetimes: ProcessLifetimes,
        end: Until,
    ) -> None:
        self._lifetimes = lifetimes
        self._end = end
        self._written: dict[int, int] = {}  # ranks whose last process was killed
        for info in trace.run.ranks:
            self._written.pop(info.rank, None)
            if info.status == "killed" and info.rank in scans:
                scan = scans[info.rank]
                seen = [scan.last if scan.events else _last_event(trace, info.rank)]
                if info.silence is not None:
                    seen.append(trace.moment(info, info.silence["noticed_ns"]))
                self._written[info.rank] = max(seen)

    def until(self, rank: int, at_ns: int) -> Until:
        """Returns until when the activity of a rank at a given time is known to have continued."""
        _, ended = self._lifetimes.of(rank, at_ns)
        written = self._written.get(rank)
        if written is None:
            return self._end if ended is None else Until(ended, True)
        return Until(written if ended is None else max(written, ended - _UNWRITTEN_NS), False)

    def may_have_come(self, ranks: Iterable[int], since_ns: int) -> bool:
        """Whether the activity of one of the ranks after a given time is unknown."""
        return any(
            self._written.get(rank, since_ns) < since_ns
            and self._lifetimes.of(rank, since_ns)[1] is None
            for rank in ranks
        )


def _last_event(trace: Trace, rank: int) -> int:
    """When a rank recorded its last event, on rank 0's clock."""
    latest = NULL_NS
    for table in trace.last_windows(rank):
        columns = Columns(table)
        ends = np.maximum(columns.start, columns.end)
        latest = max(latest, int(ends.max(initial=NULL_NS)))
    return latest


def start_of_job(trace: Trace) -> int | None:
    """When the launcher started the job, on rank 0's clock; None if it is not known."""
    return _moment(trace, trace.run.created_unix_ns, trace.run.host)


def end_of_job(trace: Trace) -> int | None:
    """When the job ended, or now if it is running; None if it is not known."""
    run = trace.run
    if run.ended_unix_ns is None and run.status == "running":
        return _moment(trace, time.time_ns(), platform.node())
    return _moment(trace, run.ended_unix_ns, run.host)


def _moment(trace: Trace, unix_ns: int | None, host: str) -> int | None:
    """Converts a reading of a host's wall clock to rank 0's clock."""
    # Wall clocks of hosts differ: prefer a rank on the host whose clock was read.
    for info in sorted(trace.run.ranks, key=lambda info: info.host != host):
        unix, monotonic = info.clock.get("unix_ns"), info.clock.get("monotonic_ns")
        if unix_ns is not None and isinstance(unix, int) and isinstance(monotonic, int):
            return trace.moment(info, unix_ns - unix + monotonic)
    return None


def end_of_trace(trace: Trace, scans: Mapping[int, RankScan]) -> Until:
    """Returns when the job ended, or now if it is running.

    If the end was not observed, the time of the last event.
    """
    ended = end_of_job(trace)
    if ended is not None:
        return Until(ended, True)
    silences = [(info, info.silence) for info in trace.run.ranks if info.silence is not None]
    seen = [trace.moment(info, silence["noticed_ns"]) for info, silence in silences]
    # A rank without events has no last one.
    lasts = [scan.last for scan in scans.values() if scan.events]
    return Until(max([*seen, *lasts], default=None), False)
