"""When no thread of a process ran: it was stopped, or suspended with its host.

A thread of the tracer reads the counters at every full second. Where readings are missing, it did
not run when they were due. If the whole process used no more processor time than it uses in the
one interval in which it may have run, and its main thread did not wait for a processor, no thread
ran. Events give the instants: none begins or ends in a stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.counter_series import CounterSeries, counter_series
from ddltrace.analyzer.events.event_columns import NULL_NS, Columns, Gathered, IntArray
from ddltrace.analyzer.events.interval_sets import EMPTY, Spans, merge, union

STOPPED: Final = "process stopped"
"""The name of such a time on the critical path."""

READ_EVERY_NS: Final = 1_000_000_000
_MISSED_NS: Final = 2_500_000_000
"""Between two readings: at least one reading more is missing than a late one explains."""

_FEWEST_READINGS: Final = 3
_TICK_S: Final = 0.02
"""Resolution of processor times, with the reading's own."""

_STARVED: Final = 0.25


def stops_between_readings(series: Mapping[str, CounterSeries]) -> IntArray | None:
    """Which readings of the processor time come after a stop.

    Args:
        series: The counters of one process by name.

    Returns:
        Rows of ``process_cpu``; None if a counter that shows it was not recorded.
    """
    cpu, waited = series.get("process_cpu"), series.get("process_cpu_wait")
    if cpu is None or waited is None or len(cpu.value) < _FEWEST_READINGS:
        return None
    gaps = np.diff(cpu.time_ns)
    usual = float(np.median(cpu.value))
    used_s = cpu.value[1:] * gaps / 1e9
    # A process that uses little at all shows no difference.
    missing_s = usual * (gaps - READ_EVERY_NS) / 1e9
    stood_still = used_s <= usual * READ_EVERY_NS / 1e9 + _TICK_S
    rows = 1 + np.flatnonzero((gaps >= _MISSED_NS) & stood_still & (missing_s >= 5 * _TICK_S))
    waits = dict(zip(waited.time_ns.tolist(), waited.value.tolist(), strict=True))
    ran = [waits.get(int(cpu.time_ns[row]), 1.0) < _STARVED for row in rows.tolist()]
    found: IntArray = rows[np.array(ran, dtype=bool)]
    return found


def times_with_a_stop(table: pa.Table) -> Spans:
    """The times between two readings of a process's counters in which it was stopped.

    Args:
        table: Rows of schema `COUNTERS`.
    """
    series = {one.name: one for one in counter_series(table)}
    rows = stops_between_readings(series)
    if rows is None or not len(rows):
        return EMPTY
    time = series["process_cpu"].time_ns
    return Spans(time[rows - 1], time[rows])


class StopBuilder:
    """Finds the instants of stops from the events of a process, which are added in parts.

    Args:
        between: The times in each of which it was stopped once.
    """

    def __init__(self, between: Spans = EMPTY) -> None:
        self._between = between
        self._times = [Gathered(np.int64) for _ in between.start]

    def add(self, columns: Columns) -> None:
        """Adds a part of the events."""
        for begin, end, times in zip(
            self._between.start.tolist(), self._between.end.tolist(), self._times, strict=True
        ):
            for column in (columns.start, columns.end):
                times.add(column[(column > begin) & (column < end) & (column != NULL_NS)])

    def finish(self) -> Spans:
        """Returns the stops: the longest time without a begin or an end in each time given."""
        found = EMPTY
        for begin, end, times in zip(
            self._between.start.tolist(), self._between.end.tolist(), self._times, strict=True
        ):
            time = np.concatenate([[begin], np.sort(times.values()), [end]])
            place = int(np.argmax(np.diff(time)))
            if time[place + 1] - time[place] >= end - begin - READ_EVERY_NS:
                found = merge(found, union(time[place : place + 1], time[place + 1 : place + 2]))
        return found
