"""The tensors page: the times of every parameter's gradient, from ready to updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dash import dcc, html

from ddltrace.analyzer.formatting.units import NOT_KNOWN, bytes_text, printable, time_text
from ddltrace.analyzer.report.figures import base_figure, distinct, label
from ddltrace.analyzer.report.sentences import tensors_text
from ddltrace.dashboard.pages.sorted_table import Column, sort_rows, sorted_table, time_column
from ddltrace.dashboard.pages.tensor_messages import messages_of, usual_step
from ddltrace.dashboard.timeline.links import timeline_link
from ddltrace.dashboard.widgets import (
    card,
    empty,
    graph,
    no_such_step,
    notes_box,
    step_field,
    table,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.analyzer.measures.tensors import TensorRow
    from ddltrace.analyzer.model import Analysis
    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.workspace import OpenTrace

PATH: Final = "/tensors"
_MAX_BARS: Final = 60
_US_PER_MS: Final = 1e3

# Interval -> the times at its ends, its title and its color.
_PARTS: Final = (
    ("ready_us", "enqueue_us", "waits for its bucket", "muted"),
    ("enqueue_us", "start_us", "waits in the queue", "wait"),
    ("start_us", "complete_us", "in flight", "collective"),
    ("complete_us", "waited_us", "complete, the host waits for others", "idle"),
    ("waited_us", "updated_us", "until the update has ended", "update"),
)

_COLUMNS: Final[tuple[Column[TensorRow], ...]] = (
    Column("name", "tensor", lambda row: printable(row.name), lambda row: row.name),
    Column("size", "size", lambda row: bytes_text(row.bytes), lambda row: row.bytes, "bytes"),
    time_column("ready", "ready", lambda row: row.ready_us),
    time_column("enqueued", "enqueued", lambda row: row.enqueue_us),
    time_column("started", "started", lambda row: row.start_us),
    time_column("complete", "complete", lambda row: row.complete_us),
    time_column("waited", "waited for", lambda row: row.waited_us),
    time_column("updated", "updated", lambda row: row.updated_us),
    time_column("exposed", "exposed", lambda row: row.exposed_us),
    Column(
        "bucket",
        "tensors in its message",
        lambda row: NOT_KNOWN if row.bucket is None else str(row.bucket),
        lambda row: row.bucket,
    ),
)


_ORDERS: Final = (("ready", "ready"), ("size", "size"), ("exposed", "exposed"), ("name", "name"))


def backward_order(rows: Sequence[TensorRow]) -> list[TensorRow]:
    """Tensors in the order in which their gradients become ready; unknown ones last."""
    known = [row for row in rows if row.ready_us is not None]
    return sorted(known, key=lambda row: row.ready_us or 0.0) + [
        row for row in rows if row.ready_us is None
    ]


def tensor_times(rows: Sequence[TensorRow], step: int | None = None) -> go.Figure | None:
    """One bar per tensor from ready to updated (ms from the start of the step).

    Args:
        rows: The rows in drawing order, from the top.
        step: The step that they are of; None for medians of the steady steps.

    Returns:
        The figure of the first 60 rows; None if no times are known.
    """
    rows = [row for row in rows if _is_known(row)][:_MAX_BARS]
    if not rows:
        return None
    figure = base_figure(height=110 + 20 * len(rows))
    names = distinct([label(row.name) for row in rows])
    for first, last, title, role in _PARTS:
        starts, lengths = [], []
        for row in rows:
            start, end = getattr(row, first), getattr(row, last)
            known = start is not None and end is not None and end >= start
            starts.append(start / _US_PER_MS if known else None)
            lengths.append((end - start) / _US_PER_MS if known else None)
        figure.add_bar(
            base=starts,
            x=lengths,
            y=names,
            orientation="h",
            name=title,
            meta={"role": role},
            hovertemplate="%{y}<br>" + title + " for %{x:.3f} ms<extra></extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.25)
    of = "median of the steady steps" if step is None else f"step {step}"
    figure.update_xaxes(title=f"ms from the start of the step, {of}")
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


FIGURES: Final[dict[str, Callable[[OpenTrace, Address], go.Figure | None]]] = {
    "tensor-lives": lambda opened, address: tensor_times(
        _ordered(opened, address), chosen_step(opened, address)
    ),
}


def chosen_step(opened: OpenTrace, address: Address) -> int | None:
    """The step that the page shows (key ``step`` of the address); None for all steady steps.

    None also for a step that the trace does not have.
    """
    wanted = address.number("step", -1)
    return wanted if any(row.step == wanted for row in opened.analysis.steps) else None


def tensors_page(opened: OpenTrace, address: Address) -> Component:
    """The page for one trace, or for one tensor of it (key ``tensor`` of the address).

    Raises:
        TraceError: The trace cannot be analyzed.
    """
    analysis = opened.analysis
    if not analysis.tensors:
        return html.Main(
            empty(
                "No tensor was seen",
                "Tensors are named when a job trains under DistributedDataParallel or FSDP. "
                "Record one with: ddltrace run -- torchrun train.py",
            ),
            className="page",
        )
    step = chosen_step(opened, address)
    rows = opened.tensors_of(step)
    chosen = next((row for row in rows if row.name == address.text("tensor")), None)
    ordered = _ordered(opened, address)
    cards: list[Any] = []
    if chosen is not None:
        cards.append(_one_tensor(opened, chosen, address))
    figure = tensor_times(ordered, step)
    if figure is not None:
        hint = "From gradient ready to the end of the update."
        if len(ordered) > _MAX_BARS:
            hint += f" The first {_MAX_BARS} of {len(ordered):,} tensors."
        order = address.text("sort") or "ready"
        links = [
            dcc.Link(
                title,
                href=address.link(PATH, sort=key),
                className="filter here" if key == order else "filter",
            )
            for key, title in _ORDERS
        ]
        cards.append(
            card(
                "Lives",
                html.Div([html.Span("ordered by"), *links], className="filters"),
                graph("tensor-lives", figure.layout.height),
                hint=hint,
            )
        )
    name = replace(_COLUMNS[0], href=lambda row: address.link(PATH, tensor=row.name))
    columns = (name, *_COLUMNS[1:])
    cards.append(
        card(
            "All tensors",
            sorted_table(ordered, columns, address, PATH, name="tensors"),
            hint=(
                "Medians over ranks and steady steps, from the start of the step."
                if step is None
                else f"Step {step}: medians over ranks, from the start of the step."
            ),
        )
    )
    head: list[Any] = [
        html.H1(f"{len(analysis.tensors):,} tensors"),
        html.P(tensors_text(analysis), className="lead"),
        html.P(
            "Each row is one parameter's gradient: ready, handed to a message, in flight, "
            "complete, waited for by the host, updated by the optimizer. Exposed is its share of "
            "the communication that compute does not hide.",
            className="quiet",
        ),
        _step_choice(analysis, address, step),
    ]
    if not analysis.steps:
        head.append(html.P("Their times are not known: no step was completed.", className="lead"))
    elif step is None and address.text("step"):
        head.append(no_such_step(address.text("step")))
    if opened.notes:
        head.append(notes_box(opened.notes))
    return html.Main([html.Section(head, className="headline"), *cards], className="page")


def _step_choice(analysis: Analysis, address: Address, step: int | None) -> Component:
    """The field for the step, links to the steps beside it, and one back to the medians."""
    numbers = [row.step for row in analysis.steps]
    beside: list[Component] = []
    if step is not None:
        for title, other in (
            ("Previous step", max((n for n in numbers if n < step), default=None)),
            ("Next step", min((n for n in numbers if n > step), default=None)),
        ):
            if other is not None:
                beside.append(dcc.Link(title, href=address.link(PATH, step=other)))
        beside.append(dcc.Link("Median of the steady steps", href=address.link(PATH, step=None)))
    return html.Div(
        [
            *step_field("tensor-step", "Step", step, placeholder="median"),
            *beside,
        ],
        className="step-choice",
    )


def _ordered(opened: OpenTrace, address: Address) -> list[TensorRow]:
    rows = backward_order(opened.tensors_of(chosen_step(opened, address)))
    column = next((c for c in _COLUMNS if c.key == address.text("sort")), None)
    return sort_rows(rows, column) if column and column.key != "ready" else rows


def _is_known(row: TensorRow) -> bool:
    return any(
        getattr(row, first) is not None and getattr(row, last) is not None
        for first, last, _, _ in _PARTS
    )


def _one_tensor(opened: OpenTrace, row: TensorRow, address: Address) -> Component:
    """The message that carried one tensor in the median step, on every rank."""
    step = chosen_step(opened, address)
    step = usual_step(opened.analysis) if step is None else step
    found = [] if step is None else messages_of(opened, row.name, step)
    name = printable(row.name)
    if not found:
        body: list[Any] = [html.P("No message of the step names this tensor.")]
    else:
        body = [
            table(
                ("message", "rank", "enqueued", "start", "length", "size", ""),
                [
                    (
                        printable(message.title),
                        str(message.rank),
                        time_text(message.enqueue_us),
                        time_text(message.start_us),
                        time_text(message.length_us),
                        bytes_text(message.bytes),
                        dcc.Link(
                            "timeline",
                            href=timeline_link(opened.number, message.start_ns, message.end_ns),
                        ),
                    )
                    for message in found
                ],
            )
        ]
        others = sorted({other for message in found for other in message.others})
        if others:
            body += [
                html.H3(f"In the same messages: {len(others):,} further tensors"),
                html.P(
                    printable(", ".join(others[:_MAX_BARS]))
                    + (", …" if len(others) > _MAX_BARS else ""),
                    className="quiet",
                ),
            ]
    return card(
        name,
        *body,
        dcc.Link("Close", href=address.link(PATH, tensor=None), className="quiet"),
        hint="" if step is None else f"Step {step}; times from the start of the step on its rank.",
    )
