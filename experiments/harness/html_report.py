"""An experiment as one HTML file that needs no network: ``ddltrace experiment run --html FILE``."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Final

from ddltrace.analyzer.report.html_page import page_environment, page_parts, write_page
from ddltrace.experiments.harness import figures
from ddltrace.experiments.harness.results import Results, label
from ddltrace.experiments.harness.results_table import (
    clock_cells,
    clocked,
    explanations,
    setting_lines,
)
from ddltrace.experiments.harness.step_timeline import StepTimeline, median_step_timeline

_PACKAGE: Final = "ddltrace.experiments.harness"


def write_html(results: Results, path: Path, directory: Path | None) -> None:
    """Writes the report as one self-contained HTML file.

    Args:
        results: The results to report.
        path: The file; replaced whole if it exists.
        directory: The experiment's directory, whose traces give the timelines; None for
            results of several experiments, which have none.

    Raises:
        DdltraceError: The file cannot be written.
    """
    write_page(render(results, directory), path)


def render(results: Results, directory: Path | None) -> str:
    """The report's text; arguments as those of `write_html`."""
    steps = {} if directory is None else _timelines(results, directory)
    drawn = {
        name: figure
        for name, figure in (
            ("step_times", figures.step_times(results)),
            ("bytes_per_step", figures.bytes_per_step(results)),
            ("loss_over_time", figures.loss_over_time(results)),
            ("staleness", figures.staleness(results)),
            ("tokens_by_expert", figures.tokens_by_expert(results)),
            ("step_timelines", figures.step_timelines(steps)),
        )
        if figure is not None
    }
    data = {"figures": {name: json.loads(figure.to_json()) for name, figure in drawn.items()}}
    template = page_environment(_PACKAGE).get_template("experiment.html.jinja")
    return template.render(
        **page_parts(data),
        figures=drawn,
        results=results,
        headline=results.headline(),
        rows=[(label(row), row, found) for row, found in results.compared()],
        plain=results.plain(),
        tuned=results.tuned_ddp(),
        clocked=[
            (label(row), clock_cells(row, results.row(results.baseline)))
            for row in clocked(results)
        ],
        troubles=[(label(row), row) for row in results.rows if not row.is_sound],
        setting_lines=setting_lines(results),
        explanations=explanations(results),
        left_out=sum(step.left_out for step in steps.values()),
        version=metadata.version("ddltrace"),
    )


def _timelines(results: Results, directory: Path) -> dict[str, StepTimeline]:
    found: dict[str, StepTimeline] = {}
    for row in results.rows:
        run = next((run for run in row.runs if run.is_finished and run.trace), None)
        step = None if run is None else median_step_timeline(run, directory)
        if step is not None:
            found[label(row)] = step
    return found
