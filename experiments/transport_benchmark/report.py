"""The comparison of transports as text, as charts, and as one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.analyzer.formatting.terminal import wrapped
from ddltrace.analyzer.formatting.text_table import aligned
from ddltrace.analyzer.formatting.units import NOT_KNOWN, bytes_text
from ddltrace.analyzer.report.figures import base_figure
from ddltrace.analyzer.report.html_page import page_environment, page_parts, write_page
from ddltrace.experiments.transport_benchmark.comparison import (
    OPERATIONS,
    Comparison,
    Point,
    TransportResult,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go


_COLUMNS = 80
_HEADS = (
    ("", "transport"),
    ("smallest", "us"),
    ("largest", "Gbit/s"),
    ("fitted", "latency us"),
    ("fitted", "Gbit/s"),
    ("processor", "ns/byte"),
)


def render(comparison: Comparison) -> str:
    """One table for each operation, followed by explanations of the columns."""
    settings = comparison.settings
    where = (
        "this machine's own network"
        if settings.hosts is None
        else f"{settings.hosts} emulated hosts at {settings.bandwidth}"
    )
    parts = [f"{settings.ranks} ranks on {where}; messages of {_range(settings.sizes)}"]
    for operation, meaning in OPERATIONS.items():
        rows = [_row(result, operation) for result in comparison.results if result.of(operation)]
        if rows:
            parts += [
                "",
                *wrapped(f"{operation}: {meaning}", _COLUMNS),
                *aligned([*zip(*_HEADS, strict=True), *rows], _COLUMNS),
            ]
    parts += [
        f"\n{result.name}: {result.status}: {result.reason}"
        for result in comparison.results
        if result.status != "complete"
    ]
    parts += [
        f"\n{result.name}:\n  {result.planned['messages']} messages to rank 0 took "
        f"{result.planned['taken_us'] / result.planned['planned_us']:.3f} times as long as\n  "
        f"planned, {result.planned['late']} over 5 % longer"
        for result in comparison.results
        if result.planned is not None and result.planned["messages"]
    ]
    parts.append(
        "\nus: median round of the smallest message. Gbit/s: bytes of the largest message\n"
        "over its time. Fitted: time = latency + bytes / bandwidth over all sizes.\n"
        "Processor: time of all ranks, threads of the library included, for one byte of\n"
        "the largest message."
    )
    return "\n".join(parts)


def _row(result: TransportResult, operation: str) -> tuple[str, ...]:
    points = result.of(operation)
    fit = result.fit(operation)
    large = points[-1]
    return (
        result.name,
        f"{points[0].one_way_us:.1f}",
        f"{large.gbit_s:.2f}",
        NOT_KNOWN if fit is None else f"{fit.latency_us:.1f}",
        NOT_KNOWN if fit is None or fit.gbit_s is None else f"{fit.gbit_s:.2f}",
        f"{large.cpu_ns_per_byte:.2f}",
    )


def _range(sizes: tuple[int, ...]) -> str:
    return f"{bytes_text(sizes[0])} to {bytes_text(sizes[-1])}"


_PACKAGE: Final = "ddltrace.experiments.transport_benchmark"
_HEIGHT: Final = 360
_SERIES: Final = 6
_CHARTS: Final[dict[str, tuple[str, Callable[[Point], float]]]] = {
    "time": ("us", lambda point: point.one_way_us),
    "bandwidth": ("Gbit/s", lambda point: point.gbit_s),
    # On a logarithmic axis, zero has no place.
    "processor time": ("ns/byte", lambda point: max(point.cpu_us, 1e-3) * 1e3 / point.bytes),
}
"""Chart of an operation -> unit and value of a point."""


def write_html(comparison: Comparison, path: Path) -> None:
    """Writes the report as one self-contained HTML file.

    Raises:
        DdltraceError: The file cannot be written.
    """
    write_page(page(comparison), path)


def page(comparison: Comparison) -> str:
    """The HTML of the report."""
    measured = [
        operation
        for operation in OPERATIONS
        if any(result.of(operation) for result in comparison.results)
    ]
    drawn = {
        f"{operation}: {chart}": _curves(comparison, operation, unit, value)
        for operation in measured
        for chart, (unit, value) in _CHARTS.items()
    }
    data = {"figures": {name: json.loads(figure.to_json()) for name, figure in drawn.items()}}
    template = page_environment(_PACKAGE).get_template("transports.html.jinja")
    return template.render(
        **page_parts(data),
        operations={name: OPERATIONS[name] for name in measured},
        charts=list(_CHARTS),
        table=render(comparison),
        version=metadata.version("ddltrace"),
    )


def _curves(
    comparison: Comparison, operation: str, unit: str, value: Callable[[Point], float]
) -> go.Figure:
    """A value of one operation against the message's size, one curve for each transport."""
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
