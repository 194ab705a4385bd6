"""Resource counters as tracks of the timeline, each a small chart below the lanes of its rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddltrace.analyzer.events.counter_series import CounterSeries, counter_series
from ddltrace.analyzer.formatting.units import bytes_text, printable, share_text
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_MAX_POINTS: Final = 2000
_MAX_SERIES: Final = 512
_NOT_SHOWN: Final = frozenset(
    {"host_memory_total", "host_processors", "device_memory_total", "process_cpu_time"}
)
"""Constants, and the processor time, which ``process_cpu`` shows."""


def counter_tracks(trace: Trace) -> list[dict[str, Any]]:
    """The data of all counter tracks, by rank.

    Returns:
        For each track: ``rank``, ``label``, ``most`` (the top of its chart, as text), and for each
        sample ``time`` (ns since the trace's first event), ``level`` (0..1 of the top) and
        ``text``. A series of more than 2,000 samples is reduced to the largest of neighbors.
    """
    tracks = []
    for rank in trace.ranks:
        try:
            series = counter_series(trace.counters(rank))
        except TraceError:
            continue
        tracks += [
            _track(rank, one, trace.origin_ns) for one in series if one.name not in _NOT_SHOWN
        ]
    return tracks[:_MAX_SERIES]


def _text(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "bytes":
        return bytes_text(value)
    if unit == "bytes/s":
        return f"{bytes_text(value)}/s"
    if unit == "share":
        return share_text(value)
    return f"0x{int(value):x}" if unit == "bits" else f"{value:.3g} {unit}"


def _label(series: CounterSeries) -> str:
    """A label that is short enough for the margin of the timeline."""
    if series.name.startswith("device_"):
        return series.name.replace("_", " ")  # the device is known by its rank
    return printable(series.label.removeprefix("network "))


def _track(rank: int, series: CounterSeries, origin_ns: int) -> dict[str, Any]:
    time, value = series.time_ns - origin_ns, series.value
    if len(time) > _MAX_POINTS:
        first = np.linspace(0, len(time), _MAX_POINTS, endpoint=False).astype(np.int64)
        time, value = time[first], np.maximum.reduceat(value, first)
    # Shares have a natural top; other charts end at their largest value.
    top = 1.0 if series.unit == "share" else float(value.max(initial=0.0))
    level = np.clip(value / top, 0, 1) if top > 0 else np.zeros(len(value))
    return {
        "rank": rank,
        "label": _label(series),
        "most": _text(top, series.unit),
        "time": time.tolist(),
        "level": np.round(level, 3).tolist(),
        "text": [_text(v, series.unit) for v in value.tolist()],
    }
