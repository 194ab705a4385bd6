"""Resource counters of a rank as series: one per counter and interface or device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import places_by_value
from ddltrace.tracer.trace.counters import RESOURCE_COUNTERS

_NO_STEP: Final = -1


@dataclass(frozen=True)
class CounterSeries:
    """The values of one counter over time.

    Attributes:
        name: The counter, as in `RESOURCE_COUNTERS`.
        instance: The interface or device; empty for counters of a process or host.
        unit: Unit of the values. Cumulative counters are given as rates: ``bytes/s``.
        time_ns: When each value was read, ascending.
        step: The step at that time; -1 outside all steps.
        value: The values.
    """

    name: str
    instance: str
    unit: str
    time_ns: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]

    @property
    def label(self) -> str:
        """Its name for display."""
        words = self.name.replace("_", " ")
        return f"{words} {self.instance}" if self.instance else words


def counter_series(table: pa.Table) -> list[CounterSeries]:
    """All series of one rank's counters, in the order of `RESOURCE_COUNTERS`.

    Args:
        table: Rows of schema `COUNTERS`; others are left out.
    """
    names, words = _codes(table, "name")
    instances, interfaces = _codes(table, "instance")
    step = table["step"].combine_chunks().fill_null(_NO_STEP).to_numpy().astype(np.int64)
    time_ns = table["time_ns"].to_numpy().astype(np.int64)
    value = table["value"].to_numpy().astype(np.float64)
    found = []
    for counter in RESOURCE_COUNTERS:
        code = words.index(counter.name) if counter.name in words else None
        of_name = np.flatnonzero(names == code)
        for instance, places in places_by_value(instances[of_name]):
            rows = of_name[places]
            rows = rows[np.argsort(time_ns[rows], kind="stable")]
            rows = rows[np.isfinite(value[rows])]
            series = CounterSeries(
                counter.name,
                interfaces[instance] if instance >= 0 else "",
                counter.unit,
                time_ns[rows],
                step[rows],
                value[rows],
            )
            found.append(_rate(series) if counter.cumulative else series)
    return [series for series in found if len(series.time_ns)]


def _rate(series: CounterSeries) -> CounterSeries:
    """The growth of a cumulative counter per second; a counter that restarts has no rate there."""
    elapsed_s = np.diff(series.time_ns) / 1e9
    growth = np.diff(series.value)
    good = (elapsed_s > 0) & (growth >= 0)
    return CounterSeries(
        series.name,
        series.instance,
        f"{series.unit}/s",
        series.time_ns[1:][good],
        series.step[1:][good],
        growth[good] / elapsed_s[good],
    )


def _codes(table: pa.Table, column: str) -> tuple[npt.NDArray[np.int64], list[str]]:
    """A dictionary-coded column as codes, -1 for null, and words."""
    coded = table[column].combine_chunks()
    if isinstance(coded, pa.ChunkedArray):  # without rows
        return np.empty(0, np.int64), []
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, coded.dictionary.to_pylist()
