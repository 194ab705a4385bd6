"""The live page: the state of a running job, and the rank that is dead or delays the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import dash
import numpy as np
import plotly.graph_objects as go
from dash import Input, Output, State, dcc, html, no_update

from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bytes_text,
    printable,
    share_text,
    time_text,
)
from ddltrace.analyzer.report.figures import base_figure
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.callbacks import was_triggered_by
from ddltrace.dashboard.theme import GRAPH_CONFIG, dress, parse_theme
from ddltrace.dashboard.widgets import (
    LONGEST_TABLE,
    GridColumn,
    card,
    empty,
    grid,
    grid_data,
    notes_box,
    save_buttons,
    table,
    tiles,
)
from ddltrace.tracer.config import LEVELS
from ddltrace.tracer.errors import DdltraceError, TraceError
from ddltrace.tracer.exit_status import status_text
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.switch_orders import give_order, ranges_text, sockets_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ddltrace.analyzer.live.live_state import LiveRow, LiveState
    from ddltrace.dashboard.workspace import OpenTrace, Workspace

PATH: Final = "/live"
_REFRESH_MS: Final = 1000
_RECENT_STEPS: Final = 20
_LANE_HEIGHT: Final = 26
_STEPS_HEIGHT: Final = 260
_SWITCHED_STEPS: Final = 50
_COLUMNS: Final = (
    GridColumn("rank"),
    GridColumn("step"),
    GridColumn("step time", "µs"),
    GridColumn("overlap", "0 to 1"),
    GridColumn("last to collectives", "0 to 1"),
    GridColumn("late by", "µs"),
    GridColumn("processor", "cores"),
    GridColumn("memory", "bytes"),
    GridColumn("last event", "s"),
)
_GRID: Final = "live-ranks"
_WITH_GRID: Final = "with-grid"


def live_page(workspace: Workspace, address: Address) -> Component:
    """The page of one trace; it polls for the state of the job every second.

    Raises:
        TraceError: The trace was not recorded by ddltrace, or cannot be read.
    """
    state = workspace.live(address.trace).state()
    if state.status != "running" and not state.rows:
        # The job had ended before this page was opened: there is nothing to follow.
        return html.Main(
            html.Section(headline(workspace, state, address), className="headline"),
            className="page",
        )
    return html.Main(
        [
            html.Section(
                html.Div(headline(workspace, state, address), id="live-status", role="status"),
                className="headline",
            ),
            html.Div(summary(state), id="live-tiles"),
            html.Div(
                [
                    _switch(workspace, address),
                    card(
                        "Step time",
                        _graph("live-steps", _STEPS_HEIGHT),
                        hint="Wall time of the last steps, from the first rank's start to the "
                        "last rank's end.",
                        wide=True,
                    ),
                    card(
                        "The last steps",
                        _graph("live-lanes", 200),
                        hint="Compute, communication, and the time in which the host is blocked "
                        "on a message, of each rank.",
                        wide=True,
                    ),
                    card(
                        "Ranks",
                        html.Div(ranks(state), id="live-ranks", className=_look(state)),
                        hint="Medians and shares are of the last 15 s.",
                        wide=True,
                    ),
                ],
                className="cards",
            ),
            dcc.Interval(id="live-tick", interval=_REFRESH_MS),
        ],
        className="page",
    )


def _switch(workspace: Workspace, address: Address) -> Component | None:
    """The buttons that switch recording; None if no rank of this host takes orders."""
    if next(sockets_of(str(workspace.live(address.trace).directory)), None) is None:
        return None
    return card(
        "Recording",
        html.Div(
            [
                html.Label("Steps", htmlFor="switch-steps"),
                dcc.Input(id="switch-steps", type="number", min=1, step=1, value=_SWITCHED_STEPS),
                html.Label("Level of detail", htmlFor="switch-level"),
                dcc.Dropdown(
                    [{"label": level, "value": level} for level in LEVELS],
                    id="switch-level",
                    placeholder="as started",
                    searchable=False,
                    className="chooser",
                ),
                html.Button("Record", id="switch-on", className="action"),
                html.Button("Stop recording", id="switch-off", className="action second"),
            ],
            className="actions",
        ),
        dcc.Loading(html.P(id="switch-answer", role="status"), delay_show=300),
        hint="All ranks change with the same step. Without a number of steps, the job is recorded "
        "until you stop it.",
        wide=True,
    )


def add_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    """Adds the callback that updates the page."""

    def update(_: int | None, search: str | None, theme: str | None, look: str | None) -> Any:
        address = Address.parse(search)
        try:
            state = workspace.live(address.trace).state()
        except TraceError as error:
            gone = html.P(printable(str(error)), className="warning")
            return (gone, *[no_update] * 6)
        figures = [
            dress(figure, parse_theme(theme)) for figure in (steps_figure(state), lanes(state))
        ]
        ended = state.status != "running"
        if look == _WITH_GRID:
            # Its sorting, filters and scroll position are the user's: only its rows are replaced.
            dash.set_props(f"grid-{_GRID}", {"rowData": grid_data(_rows(state))})
            of_ranks = no_update, no_update
        else:
            of_ranks = ranks(state), _look(state)
        return (headline(workspace, state, address), summary(state), *of_ranks, *figures, ended)

    def switch(
        on: int | None, off: int | None, steps: int | None, level: str | None, search: str | None
    ) -> Any:
        if not on and not off:
            return no_update
        action = "on" if was_triggered_by("switch-on") else "off"
        if level not in (None, *LEVELS) or (steps is not None and steps < 1):
            return "The number of steps is at least 1."
        order: dict[str, Any] = {"action": action, "ranks": None}
        if action == "on":
            order |= {"steps": steps, "level": level}
        try:
            path = workspace.live(Address.parse(search).trace).directory
            return _answer_text(give_order(str(path), order), action, steps)
        except DdltraceError as error:
            return printable(str(error))

    app.callback(
        Output("switch-answer", "children"),
        Input("switch-on", "n_clicks"),
        Input("switch-off", "n_clicks"),
        State("switch-steps", "value"),
        State("switch-level", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )(switch)

    app.callback(
        Output("live-status", "children"),
        Output("live-tiles", "children"),
        Output("live-ranks", "children"),
        Output("live-ranks", "className"),
        Output("live-steps", "figure"),
        Output("live-lanes", "figure"),
        Output("live-tick", "disabled"),
        Input("live-tick", "n_intervals"),
        State("url", "search"),
        State("theme", "data"),
        State("live-ranks", "className"),
    )(update)


def _answer_text(answer: dict[str, Any], action: str, steps: int | None) -> str:
    """What the ranks do after an order, in one sentence or two."""
    said = []
    if answer["ranks"]:
        ranks = ranges_text(answer["ranks"])
        first = answer["step"] or 0
        until = f"steps {first} to {first + steps - 1}" if steps else f"from step {first} on"
        done = f"record {until}" if action == "on" else f"do not record from step {first} on"
        said.append(f"Ranks {ranks} {done}.")
    said += [
        f"Rank {rank} cannot follow: {printable(str(answer['reasons'][str(rank)]))}."
        for rank in answer["missing"]
    ]
    return " ".join(said)


def headline(workspace: Workspace, state: LiveState, address: Address) -> list[Any]:
    """The state of the job in one sentence, and its alerts."""
    parts: list[Any] = [html.H1(_sentence(state))]
    parts += [
        html.P(
            alert.text,
            className="alert",
            **{"data-alert": alert.kind, "data-ranks": ",".join(map(str, alert.ranks))},
        )
        for alert in state.alerts
    ]
    if state.notes:
        parts.append(notes_box([printable(note) for note in state.notes]))
    if state.status != "running":
        link = dcc.Link("Overview of the whole run", href=address.link("/"))
        # `ddltrace run --dashboard` ends this server with the job.
        later = ["; when this server has ended: ", html.Code(workspace.command)]
        parts.append(html.P([link, *later], className="next"))
    return parts


def _sentence(state: LiveState) -> str:
    steps = counted(state.num_steps, "step")
    if state.status == "running":
        if not state.rows:
            return "The job has been started; no rank has recorded anything yet"
        count, dead = len(state.rows), len(_dead(state))
        on = f"{count - dead} of {counted(count, 'rank')}" if dead else counted(count, "rank")
        if len(state.off) == count:
            return f"The job is running and is not recorded now: {steps} recorded on {on}"
        off = f", {len(state.off)} of which are not recorded now" if state.off else ""
        return f"The job is running: {steps} so far on {on}{off}"
    return f"{_end(state)}, after {steps}" if state.rows else _end(state)


def _dead(state: LiveState) -> set[int]:
    """The ranks whose processes have ended without success."""
    return {rank for alert in state.alerts if alert.kind == "dead" for rank in alert.ranks}


def _end(state: LiveState) -> str:
    """How the job has ended."""
    how = "" if state.exit_status is None else f": {status_text(state.exit_status)}"
    return f"The job has {'failed' if state.exit_status or _dead(state) else 'ended'}{how}"


def summary(state: LiveState) -> Component:
    """Key numbers of the last steps."""
    recent = np.array(state.step_us[-_RECENT_STEPS:])
    overlaps = [row.overlap_ratio for row in state.rows if row.overlap_ratio is not None]
    late = max(
        (row for row in state.rows if row.late_share),
        key=lambda row: row.late_share or 0,
        default=None,
    )
    return tiles(
        (
            (
                "step time",
                time_text(float(np.median(recent))) if len(recent) else NOT_KNOWN,
                f"Median wall time of the last {_RECENT_STEPS} steps",
            ),
            (
                "overlap",
                share_text(float(np.mean(overlaps))) if overlaps else NOT_KNOWN,
                "Share of communication that compute hides, mean over ranks",
            ),
            (
                "most often last",
                NOT_KNOWN
                if late is None
                else f"rank {late.rank} ({share_text(late.late_share or 0.0)})",
                "The rank that was last to enter most collectives, and to what share of them",
            ),
            ("steps", str(state.num_steps), "Steps that all ranks have completed"),
            (
                "ranks",
                f"{len({row.rank for row in state.rows} - _dead(state))} of {state.world_size}",
                "Ranks that record"
                if state.status == "running"
                else "Ranks that have recorded, and not ended with an error",
            ),
        )
    )


def ranks(state: LiveState) -> Component:
    """One row per rank."""
    if not state.rows:
        return empty("No rank has recorded anything yet")
    if _look(state):
        return grid(_GRID, _COLUMNS, _rows(state), key=0)
    heads = [column.title for column in _COLUMNS]
    return table(heads, [[text for _, text, _ in row] for row in _rows(state)])


def _look(state: LiveState) -> str:
    """The class of the box of the ranks, which tells whether it holds a grid."""
    return _WITH_GRID if len(state.rows) > LONGEST_TABLE else ""


def _rows(state: LiveState) -> list[list[tuple[float | None, str, None]]]:
    return [_cells(row) for row in state.rows]


def _cells(row: LiveRow) -> list[tuple[float | None, str, None]]:
    def cell(value: float | None, form: Any) -> tuple[float | None, str, None]:
        return value, NOT_KNOWN if value is None else str(form(value)), None

    return [
        cell(row.rank, lambda rank: f"rank {rank}"),
        cell(row.step, int),
        cell(row.step_us, time_text),
        cell(row.overlap_ratio, share_text),
        cell(row.late_share, share_text),
        cell(row.lateness_us, time_text),
        cell(row.cpu_cores, lambda cores: f"{cores:.2f} cores"),
        cell(row.memory_bytes, bytes_text),
        cell(row.silent_s, lambda seconds: f"{seconds:.1f} s ago"),
    ]


def steps_figure(state: LiveState) -> go.Figure:
    """Wall time of the last steps (ms)."""
    figure = base_figure(height=_STEPS_HEIGHT)
    figure.add_scatter(
        x=list(state.steps),
        y=[us / 1e3 for us in state.step_us],
        mode="lines+markers" if len(state.steps) < 40 else "lines",
        meta={"role": "compute"},
        name="step",
        hovertemplate="step %{x}: %{y:.2f} ms<extra></extra>",
    )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="ms", rangemode="tozero")
    figure.update_layout(showlegend=False)
    return figure


def lanes(state: LiveState) -> go.Figure:
    """The last steps of each rank as intervals (ms since the first of them began)."""
    figure = base_figure(height=110 + _LANE_HEIGHT * 3 * max(1, len(state.lanes)))
    for kind in ("compute", "communication", "waiting"):
        names, starts, lengths = [], [], []
        for lane in state.lanes:
            spans = getattr(lane, kind)
            names += [f"rank {lane.rank} {kind}"] * len(spans.start)
            starts += (spans.start / 1e6).tolist()
            lengths += ((spans.end - spans.start) / 1e6).tolist()
        figure.add_bar(
            y=names,
            x=lengths,
            base=starts,
            orientation="h",
            name=kind,
            meta={"role": {"communication": "transfer", "waiting": "wait"}.get(kind, kind)},
            hovertemplate="%{y}: %{x:.3f} ms<extra></extra>",
        )
    order = [
        f"rank {lane.rank} {kind}"
        for lane in state.lanes
        for kind in ("compute", "communication", "waiting")
    ]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1])
    title = "ms"
    if state.lane_steps is not None:
        title = f"ms since the start of step {state.lane_steps[0]}, to step {state.lane_steps[1]}"
    figure.update_xaxes(title=title)
    figure.update_layout(barmode="overlay")
    return figure


def running_banner(workspace: Workspace, opened: OpenTrace) -> Component | None:
    """A banner above pages of a trace that was still being written when it was opened."""
    if opened.trace.run.status != "running":
        return None
    try:
        state = workspace.live(opened.number).state()
    except TraceError:
        return None
    steps = counted(state.num_steps, "step")
    if state.status == "running":
        text = f"This trace is still being written, {steps} so far."
    else:
        text = f"{_end(state)}, after {steps}."
    return html.Div(
        [
            html.Span(f"{text} The page shows what was written when it was opened."),
            html.Button("Refresh", id={"type": "reload", "trace": opened.number}),
            dcc.Link("Live", href=f"{PATH}?trace={opened.number}"),
        ],
        className="running",
        role="status",
    )


def _graph(name: str, height: int) -> Component:
    return html.Div(
        [
            dcc.Graph(
                id=name,
                config=GRAPH_CONFIG,
                figure={"data": [], "layout": {"height": height}},
                style={"minHeight": f"{height}px"},
            ),
            save_buttons(),
        ],
        className="graph",
    )
