"""The comparison as one HTML file that needs no network."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Final

from ddltrace.analyzer.report.html_page import page_environment, page_parts, write_page
from ddltrace.experiments.transport_benchmark import figures
from ddltrace.experiments.transport_benchmark.comparison import Comparison
from ddltrace.experiments.transport_benchmark.settings import OPERATIONS
from ddltrace.experiments.transport_benchmark.table import render as render_table

_PACKAGE: Final = "ddltrace.experiments.transport_benchmark"
_CHARTS: Final = {
    "time": figures.time_against_size,
    "bandwidth": figures.bandwidth_against_size,
    "processor time": figures.processor_time,
}


def write_html(comparison: Comparison, path: Path) -> None:
    """Writes the report as one self-contained HTML file.

    Raises:
        DdltraceError: The file cannot be written.
    """
    write_page(render(comparison), path)


def render(comparison: Comparison) -> str:
    """The report's text."""
    measured = [
        operation
        for operation in OPERATIONS
        if any(result.of(operation) for result in comparison.results)
    ]
    drawn = {
        f"{operation}: {chart}": draw(comparison, operation)
        for operation in measured
        for chart, draw in _CHARTS.items()
    }
    data = {"figures": {name: json.loads(figure.to_json()) for name, figure in drawn.items()}}
    template = page_environment(_PACKAGE).get_template("transports.html.jinja")
    return template.render(
        **page_parts(data),
        operations={name: OPERATIONS[name] for name in measured},
        charts=list(_CHARTS),
        table=render_table(comparison),
        version=metadata.version("ddltrace"),
    )
