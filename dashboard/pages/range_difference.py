"""What ran in a range of two traces on one axis, and the difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dash import Input, Output, State, html, no_update

from ddltrace.analyzer.formatting.units import NOT_KNOWN, change_text, printable, time_text
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.pages.comparison_page import (
    Pair,
    aligned_steps,
    pair_of,
    span_of_step,
)
from ddltrace.dashboard.timeline.range_summary import differences, events_inside, summarize
from ddltrace.dashboard.widgets import LONGEST_TABLE, GridColumn, grid, table
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    import dash
    from dash.development.base_component import Component

    from ddltrace.dashboard.timeline.range_summary import RangeDifference
    from ddltrace.dashboard.workspace import Workspace

_MOST_EVENTS: Final = 2_000_000
"""More are summed only for a range that was measured: the range that is shown changes often."""

_MAX_NAMES: Final = 2000
_HEADS: Final = ("A", "B", "B \N{MINUS SIGN} A")


def add_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    """Adds the callback that fills the panel beside the timelines of the compare page."""

    def show(measured: list[int] | None, shown: list[int] | None, search: str | None) -> Any:
        span = measured or shown
        if not span:
            return no_update
        address = Address.parse(search)
        try:
            pair = pair_of(workspace, address)
            steps = aligned_steps(address)
            return difference_panel(pair, steps, (span[0], span[-1]), is_measured=bool(measured))
        except TraceError:
            return no_update  # the page itself shows the error

    app.callback(
        Output("range-difference", "children"),
        Input("timeline-a", "range"),
        Input("timeline-a", "shown"),
        State("url", "search"),
    )(show)


def difference_panel(
    pair: Pair, steps: tuple[int | None, int | None], span: tuple[int, int], *, is_measured: bool
) -> list[Any]:
    """The panel for a range.

    Args:
        pair: The traces.
        steps: The step of each at which they are aligned; None for the first event.
        span: Start and end of the range, since the first event of the first trace.
        is_measured: Whether the user measured it; otherwise it is what is shown.
    """
    of_steps = [span_of_step(*each) for each in zip(pair, steps, strict=True)]
    zeros = [0 if known is None else known[0] for known in of_steps]
    start, end = (time - zeros[0] for time in span)
    ranges = [(start + zero, max(start + 1, end) + zero) for zero in zeros]
    head: list[Any] = [
        html.Header(
            [
                html.Span("measured range" if is_measured else "shown range", className="kind"),
                html.H2(time_text((end - start) / 1e3)),
            ]
        ),
        html.Dl(
            [
                *(html.Dt("From"), html.Dd(change_text(start / 1e3))),
                *(html.Dt("To"), html.Dd(change_text(end / 1e3))),
            ]
        ),
    ]
    if None not in steps:
        name = " and ".join(f"step {step}" for step in dict.fromkeys(steps))
        walls = [None if known is None else (known[1] - known[0]) / 1e3 for known in of_steps]
        head += [html.H3("Step time"), table(("", *_HEADS), [(name, *_texts(*walls))])]
    traces = list(zip(pair, ranges, strict=True))
    if not is_measured:
        most = max(events_inside(opened.timeline, *inside) for opened, inside in traces)
        if most > _MOST_EVENTS:
            return [*head, html.P(f"{most:,} events are shown. Zoom in, or measure a range.")]
    before, after = (summarize(opened.timeline, *inside) for opened, inside in traces)
    ranks = len(pair[0].trace.ranks), len(pair[1].trace.ranks)
    by_kind, by_name = differences(before, after, ranks)
    return [
        *head,
        html.H3("By kind"),
        html.P("Time inside of this range, mean over ranks. What is inside of others counts too."),
        table(
            ("", *_HEADS),
            [(row.kind, *_texts(row.before_ns / 1e3, row.after_ns / 1e3)) for row in by_kind],
        ),
        html.H3("By name"),
        _names(by_name),
    ]


def _texts(before: float | None, after: float | None) -> tuple[str, str, str]:
    change = None if before is None or after is None else after - before
    return (
        time_text(before),
        time_text(after),
        NOT_KNOWN if change is None else change_text(change),
    )


def _names(rows: list[RangeDifference]) -> Component:
    heads = ("name", *_HEADS, "kind")
    cells: list[list[tuple[float | str | None, str, str | None]]] = []
    for row in rows[:_MAX_NAMES]:
        name = row.name or row.kind
        times = (row.before_ns / 1e3, row.after_ns / 1e3, row.change_ns / 1e3)
        cells.append(
            [
                (name, printable(name), None),
                *((us, text, None) for us, text in zip(times, _texts(*times[:2]), strict=True)),
                (row.kind, row.kind, None),
            ]
        )
    if len(cells) > LONGEST_TABLE:
        columns = [GridColumn(head, "µs" if head in _HEADS else "") for head in heads]
        return grid("range-difference", columns, cells)
    return table(heads, [[text for _, text, _ in row] for row in cells])
