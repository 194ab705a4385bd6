"""The experiments page: all strategies of an experiment, also while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dash import dcc, html

from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bytes_text,
    printable,
    share_text,
    time_text,
)
from ddltrace.dashboard import charts
from ddltrace.dashboard.experiments import MISSING
from ddltrace.dashboard.pages.run_form import run_card, run_panel
from ddltrace.dashboard.widgets import card, empty, graph, table
from ddltrace.experiments.harness import figures
from ddltrace.experiments.harness.results_table import explanations, label, setting_lines

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.workspace import Workspace
    from ddltrace.experiments.harness.results import Results, Row
    from ddltrace.experiments.harness.step_intervals import Difference, Speedup

PATH: Final = "/experiments"
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
        card("Strategies", _strategies(results, experiment, workspace), wide=True),
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
                    href=address.link(PATH, experiment=one.number),
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
        html.H1(_verdict(results)),
    ]
    if results.status == "running":
        done, total = results.progress.get("done"), results.progress.get("total")
        running = results.progress.get("running") or {}
        now = f", now {printable(str(running.get('strategy')))}" if running else ""
        children.append(html.P(f"Running: {done} of {total} runs are done{now}.", className="lead"))
    elif results.status != "complete":
        children.append(html.P(f"The experiment is {printable(results.status)}.", className="lead"))
    return html.Section(children, className="headline")


def _verdict(results: Results) -> str:
    """One sentence: the fastest strategy against well-tuned DDP, or against the baseline."""
    reference = results.tuned_ddp() or results.row(results.baseline)
    timed = [row for row in results.rows if row.step_time is not None]
    if reference is None or reference.step_time is None or len(timed) < 2:
        return "No two strategies have finished yet." if timed else "No strategy has finished yet."
    fastest = min(timed, key=lambda row: row.step_time.us if row.step_time else float("inf"))
    name, other = printable(label(fastest)), printable(label(reference))
    if fastest is reference:
        return f"No strategy is faster than {other}."
    speedup = results.speedups(reference)[results.rows.index(fastest)]
    if speedup is None:
        return f"{name} has the shortest step; too few steps to compare it with {other}."
    if speedup.verdict == "noise":
        return f"{name} has the shortest step, but its lead over {other} may be noise."
    return f"{name} is {speedup.ratio:.2f} times as fast as {other}."


def _strategies(results: Results, experiment: OpenExperiment, workspace: Workspace) -> Component:
    plain, tuned = results.plain(), results.tuned_ddp()
    rows = [
        (
            _name(row, experiment, workspace),
            _step(row),
            _change(row, results, difference),
            _speedup(row, plain, over_plain),
            _speedup(row, tuned, over_tuned),
            share_text(row.overlap_ratio),
            time_text(row.exposed_us),
            _bytes(row.payload_bytes),
            _bytes(row.wire_bytes),
            _codec(row),
            _bytes(row.peak_memory_bytes),
            NOT_KNOWN if row.train_loss is None else f"{row.train_loss:.4f}",
            share_text(row.test_accuracy),
            time_text(row.time_to_loss_us),
        )
        for row, difference, over_plain, over_tuned in zip(
            results.rows,
            results.differences(),
            results.speedups(plain),
            results.speedups(tuned),
            strict=True,
        )
    ]
    return table(
        (
            "strategy",
            "step, 95 % interval",
            "against the baseline",
            "vs plain",
            "vs tuned DDP",
            "overlap",
            "exposed",
            "payload",
            "wire",
            "encode + decode",
            "peak memory",
            "loss",
            "accuracy",
            "time to loss",
        ),
        rows,
    )


def _name(row: Row, experiment: OpenExperiment, workspace: Workspace) -> Component:
    """The strategy, with a link to its first trace if there is one."""
    name = printable(label(row))
    path = experiment.directory / row.trace if row.trace else None
    number = None if path is None else workspace.show_trace(path, experiment)
    text = html.Span(name, title=name)
    return text if number is None else dcc.Link(text, href=f"/?trace={number}")


def _step(row: Row) -> str:
    time = row.step_time
    if time is None:
        reason = f": {printable(row.reason)}" if row.reason else ""
        return f"{row.status}{reason}"[:120]
    if time.low_us is None or time.high_us is None:
        return time_text(time.us)
    return f"{time_text(time.us)} [{time_text(time.low_us)}, {time_text(time.high_us)}]"


def _change(row: Row, results: Results, difference: Difference | None) -> Any:
    if row.strategy == results.baseline:
        return "baseline"
    if difference is None:
        return NOT_KNOWN
    text = f"{difference.relative:+.1%} [{difference.low:+.1%}, {difference.high:+.1%}]"
    if not difference.is_clear:
        return f"{text} ~"
    return html.Span(text, className="gain" if difference.relative < 0 else "loss")


def _speedup(row: Row, reference: Row | None, found: Speedup | None) -> str:
    if row is reference:
        return "1"
    if found is None:
        return NOT_KNOWN
    return f"{found.ratio:.2f}x" + (" ~" if found.verdict == "noise" else "")


def _codec(row: Row) -> str:
    if row.encode_us is None and row.decode_us is None:
        return NOT_KNOWN
    return time_text((row.encode_us or 0) + (row.decode_us or 0))


def _bytes(value: float | None) -> str:
    return NOT_KNOWN if value is None else bytes_text(round(value))
