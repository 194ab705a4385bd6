"""Compares any number of traces: a matrix of step times, and the largest differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from dash import dcc, html

from ddltrace.analyzer.compare.comparison import compare_steps
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bytes_text,
    change_text,
    printable,
    time_text,
)
from ddltrace.dashboard import charts
from ddltrace.dashboard.timeline.links import timeline_link
from ddltrace.dashboard.widgets import card, graph, table
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.analyzer.model import Analysis
    from ddltrace.dashboard.workspace import OpenTrace, Workspace

MAX_TRACES: Final = 12
"""Maximum number of traces in the matrix and its figures."""

_MAX_DIFFERENCES: Final = 25
_NS_PER_US: Final = 1e3

FIGURES: Final[dict[str, Callable[[Workspace], go.Figure | None]]] = {
    "compare-all-steps": lambda workspace: charts.step_distributions(
        [
            (opened.title, [row.wall_us for row in opened.analysis.steps if row.steady])
            for opened in workspace.traces[:MAX_TRACES]
        ]
    ),
    "compare-all-breakdown": lambda workspace: charts.breakdown_of_runs(
        [(opened.title, opened.breakdowns) for opened in workspace.traces[:MAX_TRACES]]
    ),
}
"""Name of a figure -> the function that makes it; None if the traces have no data for it."""


def matrix_cards(workspace: Workspace) -> list[Component]:
    """A matrix of the step times of all traces, and their breakdowns; for three or more traces.

    Raises:
        TraceError: A trace cannot be analyzed.
    """
    if len(workspace.traces) < 3:
        return []
    traces = workspace.traces[:MAX_TRACES]
    more = len(workspace.traces) - len(traces)
    rows = [
        [
            _title(row.title),
            time_text(row.analysis.summary.step_us.mean),
            *(_cell(row, column) for column in traces),
        ]
        for row in traces
    ]
    heads = ["trace", "step, mean", *(_title(f"against {column.title}") for column in traces)]
    hint = (
        "Mean step of the row less that of the column, with its 95 % interval; a link compares the "
        "two. Where ranks begin a step while others are in the one before, it is the step on one "
        "rank. ~ not decided: runs of the same job differ by as much."
    )
    if more:
        hint += f" {counted(more, 'further trace', 'is')} not shown."
    matrix = html.Div(table(heads, rows), className="matrix")
    cards = [card("All traces", matrix, hint=hint, wide=True)]
    for name, title in (
        ("compare-all-steps", "Step times of all traces"),
        ("compare-all-breakdown", "Where a step of each trace goes"),
    ):
        figure = FIGURES[name](workspace)
        if figure is not None:
            cards.append(card(title, graph(name, figure.layout.height), wide=True))
    return cards


def _title(text: str) -> Component:
    """A title, shortened where it is longer than its column."""
    return html.Span(printable(text), title=printable(text), className="clipped")


def _cell(row: OpenTrace, column: OpenTrace) -> Any:
    if row is column:
        return ""
    found = compare_steps([column.analysis], [row.analysis])
    if found.change is None or found.low is None or found.high is None:
        return NOT_KNOWN
    style = {"less": "gain", "more": "loss"}.get(found.verdict, "")
    change = change_text(found.change) if style else f"{change_text(found.change)} ~"
    return dcc.Link(
        [
            f"{change} ",
            html.Small(f"[{change_text(found.low)}, {change_text(found.high)}]"),
        ],
        href=f"/compare?a={column.number}&b={row.number}",
        className=style,
    )


def differences_card(first: OpenTrace, second: OpenTrace) -> Component | None:
    """The largest differences between two traces, each with a link into both timelines."""
    before, after = _times(first.analysis), _times(second.analysis)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    keys.sort(key=lambda key: -abs(after.get(key, 0.0) - before.get(key, 0.0)))
    if not keys:
        return None
    cells = [
        (
            kind,
            html.Span(printable(name), title=printable(name)),
            time_text(old),
            time_text(new),
            "only in B" if old is None else "only in A" if new is None else change_text(new - old),
            html.Span(
                [
                    _link(first, query, "A") if old is not None else None,
                    " ",
                    _link(second, query, "B") if new is not None else None,
                ]
            ),
        )
        for (kind, name, query), old, new in (
            (key, before.get(key), after.get(key)) for key in keys[:_MAX_DIFFERENCES]
        )
    ]
    more = len(keys) - len(cells)
    return card(
        "What differs",
        table(("of", "name", "A", "B", "difference", "timelines"), cells, text_columns=2),
        hint="Largest first, not tested for noise. Categories and layers: on the critical path, "
        "mean per step. Ranks: median step. Tensors: exposed per step. Collectives: wait and "
        "transfer of one." + (f" {more} smaller differences are not shown." if more else ""),
        wide=True,
    )


_Key = tuple[str, str, str]


def _times(analysis: Analysis) -> dict[_Key, float]:
    """(kind, name, search text of the timeline) -> time, microseconds."""
    times: dict[_Key, float] = {}
    steady = [row for row in analysis.steps if row.steady]
    for name in CATEGORIES:
        if steady:
            values = [getattr(row.critical_path, f"{name}_us") for row in steady]
            times["category", name, ""] = float(np.mean(values))
    for rank in analysis.ranks:
        if rank.step_us_p50 is not None:
            times["rank", f"rank {rank.rank}", ""] = rank.step_us_p50
    for part in analysis.critical_path:
        if part.category == "compute" and part.name:
            key = ("layer", part.name, part.name)
            times[key] = times.get(key, 0.0) + part.us
    for tensor in analysis.tensors:
        if tensor.exposed_us is not None:
            times["tensor", tensor.name, tensor.name] = tensor.exposed_us
    for row in analysis.collectives:
        size = "" if row.bytes is None else f", {bytes_text(row.bytes)}"
        name = f"{row.op} of group {row.group}{size}"
        for what, value in (("wait", row.wait_us), ("transfer", row.transfer_us)):
            if value is not None:
                times["collective", f"{name}: {what}", row.op] = value
    return times


def _link(opened: OpenTrace, query: str, text: str) -> Component:
    """The timeline at the trace's median steady step, with a search for the name."""
    steady = sorted(
        (row for row in opened.analysis.steps if row.steady), key=lambda row: row.wall_us
    )
    if not steady:
        return html.Span(text)
    step = steady[(len(steady) - 1) // 2]
    start, end = (round(us * _NS_PER_US) for us in (step.start_us, step.start_us + step.wall_us))
    return dcc.Link(
        text,
        href=timeline_link(opened.number, start, end, query=query),
        title=f"Timeline of {printable(opened.title)}",
    )
