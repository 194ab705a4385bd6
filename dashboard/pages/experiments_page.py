"""The experiments page: all strategies of an experiment, also while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dash import dcc, html

from ddltrace.analyzer.formatting.units import printable
from ddltrace.dashboard import charts
from ddltrace.dashboard.address import EXPERIMENTS_PATH
from ddltrace.dashboard.experiments import MISSING
from ddltrace.dashboard.pages.experiment_table import strategies_card
from ddltrace.dashboard.pages.run_form import run_card, run_panel
from ddltrace.dashboard.widgets import card, empty, graph
from ddltrace.experiments.harness import figures
from ddltrace.experiments.harness.results_table import explanations, setting_lines

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.workspace import Workspace
    from ddltrace.experiments.harness.results import Results

_REFRESH_MS: Final = 2000

FIGURES: Final[dict[str, Callable[[OpenExperiment], go.Figure | None]]] = {
    "exp-steps": lambda experiment: figures.step_times(experiment.results),
    "exp-bytes": lambda experiment: figures.bytes_per_step(experiment.results),
    "exp-loss": lambda experiment: figures.loss_over_time(experiment.results),
    "exp-costs": lambda experiment: figures.costs_and_loss(experiment.results),
    "exp-breakdowns": lambda experiment: charts.breakdown_of_runs(
        list(experiment.breakdowns().items())
    ),
    "exp-timelines": lambda experiment: figures.step_timelines(experiment.steps()),
}

_CARDS: Final = (
    ("exp-steps", "Step time", "Median step with its 95 % interval."),
    ("exp-bytes", "Bytes per step", "Payload of the messages, and bytes that the sockets sent."),
    ("exp-loss", "Loss against time", "Training loss, against time since the first step."),
    (
        "exp-costs",
        "Step time against wire bytes, and against loss",
        "One point per strategy. Lower is better on every axis.",
    ),
    (
        "exp-breakdowns",
        "Where a step goes",
        "Means over ranks and steady steps of each strategy's first finished run.",
    ),
    (
        "exp-timelines",
        "One step of every strategy",
        "The median step on the lowest rank: compute, codec and network lanes on one axis.",
    ),
)


def experiments_page(workspace: Workspace, address: Address) -> Component:
    """The page of one experiment (key ``experiment`` of the address).

    Raises:
        TraceError: Its results cannot be read.
    """
    runs = workspace.runs
    results = html.Div(experiment_results(workspace, address), id="experiment-results")
    if runs is None:
        return html.Main(results, className="page")
    parts = [run_panel(runs), run_card(runs, workspace, address), results]
    return html.Main(parts, className="page")


def experiment_results(workspace: Workspace, address: Address) -> list[Any]:
    """The page without its form: the experiment in the address.

    Raises:
        TraceError: Its results cannot be read.
    """
    if not workspace.experiments:
        if workspace.runs is not None:
            return []
        return [
            empty(
                "No experiment is open",
                html.Span(
                    [
                        "Run one: ",
                        html.Code("ddltrace experiment run -o experiment -- torchrun train.py"),
                    ]
                ),
                html.Span(["Then open it: ", html.Code("ddltrace dashboard experiment")]),
                html.Span(["Or run one here: ", html.Code("ddltrace dashboard --allow-run TRACE")]),
            )
        ]
    experiment = workspace.experiment(address.number("experiment", 0))
    version = experiment.version  # before the results: a change in between is noticed later
    if version == MISSING and experiment.was_started_here:
        return [
            _choice(workspace, experiment, address),
            html.P(f"{experiment.title} has no results yet.", className="lead"),
            _refresh(version),
        ]
    results = experiment.results
    cards: list[Any] = []
    for name, title, hint in _CARDS:
        figure = FIGURES[name](experiment)
        if figure is not None:
            cards.append(card(title, graph(name, figure.layout.height), hint=hint, wide=True))
    parts: list[Any] = [
        _choice(workspace, experiment, address),
        _headline(experiment, results),
        strategies_card(results, experiment, workspace, address, EXPERIMENTS_PATH),
        html.Div(cards, className="cards"),
        card(
            "How to read the table",
            html.Ul([html.Li(printable(line)) for line in explanations(results)]),
        ),
    ]
    if results.status == "running":
        parts.append(_refresh(version))
    return parts


def _refresh(version: str) -> Component:
    """Polls for results that differ from a version."""
    return dcc.Interval(id={"type": "refresh", "version": version}, interval=_REFRESH_MS)


def has_changed(workspace: Workspace, address: Address, version: str) -> bool:
    """Whether the results of the experiment in the address have changed."""
    experiment = workspace.experiment(address.number("experiment", 0))
    return experiment.version != version


def _choice(workspace: Workspace, chosen: OpenExperiment, address: Address) -> Component | None:
    if len(workspace.experiments) < 2:
        return None
    return html.Div(
        [
            html.Span("experiment"),
            *(
                dcc.Link(
                    one.title,
                    href=address.link(EXPERIMENTS_PATH, experiment=one.number),
                    className="filter here" if one is chosen else "filter",
                )
                for one in workspace.experiments
            ),
        ],
        className="filters",
    )


def _headline(experiment: OpenExperiment, results: Results) -> Component:
    children: list[Any] = [
        html.P(" · ".join(setting_lines(results)), className="facts"),
        html.H1(results.headline()),
    ]
    if results.status == "running":
        done, total = results.progress.get("done"), results.progress.get("total")
        running = results.progress.get("running") or {}
        now = f", now {printable(str(running.get('strategy')))}" if running else ""
        children.append(html.P(f"Running: {done} of {total} runs are done{now}.", className="lead"))
    elif results.status != "complete":
        children.append(html.P(f"The experiment is {printable(results.status)}.", className="lead"))
    return html.Section(children, className="headline")
