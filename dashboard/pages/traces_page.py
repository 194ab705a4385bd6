"""The start page: every trace and experiment of this dashboard."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from dash import dcc, html

from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, time_text
from ddltrace.dashboard.widgets import card, empty, table
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.workspace import OpenTrace, Workspace

PATH: Final = "/traces"


def traces_page(workspace: Workspace) -> Component:
    """Lists all traces and experiments, with links to their pages."""
    cards: list[Any] = []
    if workspace.traces:
        cards.append(
            card(
                "Traces",
                table(
                    ("trace", "command", "started", "ranks", "step, median", ""),
                    [_trace(opened) for opened in workspace.traces],
                    text_columns=3,
                ),
                hint="The step time appears once a trace has been analyzed.",
            )
        )
    if workspace.experiments:
        cards.append(
            card(
                "Experiments",
                table(
                    ("experiment", "status", "strategies"),
                    [_experiment(experiment) for experiment in workspace.experiments],
                    text_columns=2,
                ),
            )
        )
    if not cards:
        cards.append(empty("There is nothing to show"))
    head = html.Section([html.H1("Traces and experiments")], className="headline")
    return html.Main([head, *cards], className="page")


def _trace(opened: OpenTrace) -> tuple[Any, ...]:
    run = opened.trace.run
    command = printable(" ".join(run.command or ()))
    started = run.created_unix_ns
    analysis = opened.analysis_if_made
    return (
        dcc.Link(opened.title, href=f"/?trace={opened.number}"),
        html.Span(command, title=command),
        NOT_KNOWN
        if not started
        else time.strftime("%Y-%m-%d %H:%M", time.localtime(started / 1e9)),
        str(len(opened.trace.ranks)),
        NOT_KNOWN if analysis is None else time_text(analysis.summary.step_us.p50),
        dcc.Link("timeline", href=f"/timeline?trace={opened.number}"),
    )


def _experiment(experiment: OpenExperiment) -> tuple[Any, ...]:
    link = dcc.Link(experiment.title, href=f"/experiments?experiment={experiment.number}")
    try:
        results = experiment.results
    except TraceError as error:
        return link, printable(str(error)), NOT_KNOWN
    return link, printable(results.status), str(len(results.rows))
