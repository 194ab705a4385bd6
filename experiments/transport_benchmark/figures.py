"""The charts of the comparison, one curve for each transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ddltrace.analyzer.report.figures import base_figure
from ddltrace.experiments.transport_benchmark.comparison import Comparison, Point

if TYPE_CHECKING:
    import plotly.graph_objects as go

_HEIGHT = 360
_SERIES = 6


def time_against_size(comparison: Comparison, operation: str) -> go.Figure:
    """Time of one operation against the message's size, both logarithmic (us, bytes)."""
    return _curves(comparison, operation, "us", lambda point: point.one_way_us)


def bandwidth_against_size(comparison: Comparison, operation: str) -> go.Figure:
    """Bytes over time of one operation against the message's size (Gbit/s)."""
    return _curves(
        comparison, operation, "Gbit/s", lambda point: point.bytes * 8e-3 / point.one_way_us
    )


def processor_time(comparison: Comparison, operation: str) -> go.Figure:
    """Processor time over all ranks for each byte of the message (ns)."""
    return _curves(
        comparison, operation, "ns/byte", lambda point: max(point.cpu_us, 1e-3) * 1e3 / point.bytes
    )


def _curves(
    comparison: Comparison, operation: str, unit: str, value: Callable[[Point], float]
) -> go.Figure:
    figure = base_figure(height=_HEIGHT)
    for number, result in enumerate(comparison.results):
        points = result.of(operation)
        if points:
            figure.add_scatter(
                x=[point.bytes for point in points],
                y=[value(point) for point in points],
                mode="lines+markers",
                name=result.name,
                meta={"role": f"series-{number % _SERIES}"},
                hovertemplate=f"%{{x}} bytes: %{{y:.4g}} {unit}",
            )
    figure.update_xaxes(title="bytes", type="log")
    figure.update_yaxes(title=unit, type="log")
    return figure
