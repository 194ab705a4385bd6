"""The critical path page: the parts that determine each step's length, and possible savings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from dash import Input, Output, State, dcc, html, no_update

from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, share_text, time_text
from ddltrace.analyzer.report import figures
from ddltrace.analyzer.report.sentences import where_text
from ddltrace.dashboard import charts
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.pages.figure_cards import Draw, figure_cards
from ddltrace.dashboard.pages.sorted_table import Column, sorted_table, time_column
from ddltrace.dashboard.timeline.links import timeline_link
from ddltrace.dashboard.widgets import card, empty, no_such_step, notes_box, table
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    import dash
    from dash.development.base_component import Component

    from ddltrace.analyzer.joined.critical_path import PathPiece
    from ddltrace.analyzer.measures.path_parts import PathPart
    from ddltrace.analyzer.measures.step_rows import StepRow
    from ddltrace.analyzer.model import Analysis
    from ddltrace.analyzer.slack import SlackRow
    from ddltrace.dashboard.workspace import OpenTrace, Workspace

PATH: Final = "/critical-path"
_MAX_RANKS: Final = 16
_MAX_PIECES: Final = 10_000

HEAT_MAP: Final = "path-ranks"
FIGURES: Final[dict[str, Draw]] = {
    "path-steps": lambda opened, _: figures.step_times(opened.analysis),
    "path-parts": lambda opened, _: figures.critical_parts(opened.analysis),
    HEAT_MAP: lambda opened, address: charts.ranks_by_step(opened.analyzed, _heat(address)),
}

_PART_COLUMNS: Final[tuple[Column[PathPart], ...]] = (
    Column("category", "category", lambda row: row.category, lambda row: row.category),
    Column("name", "layer, tensor or operation", lambda row: _name(row.name), lambda row: row.name),
    Column("rank", "rank", lambda row: str(row.rank), lambda row: row.rank),
    time_column("us", "time a step", lambda row: row.us),
    Column("share", "share", lambda row: share_text(row.share), lambda row: row.share, "0 to 1"),
    time_column("alone", "saves at most", lambda row: row.alone_us),
)

# Keys of their own, since both tables of the page are sorted by the same key of the address.
_SLACK_COLUMNS: Final[tuple[Column[SlackRow], ...]] = (
    Column("slack-kind", "kind", lambda row: row.kind, lambda row: row.kind),
    Column("slack-name", "name", lambda row: _name(row.name), lambda row: row.name),
    Column("slack-rank", "rank", lambda row: str(row.rank), lambda row: row.rank),
    time_column("slack-us", "time a step", lambda row: row.us),
    time_column("slack", "slack", lambda row: row.slack_us, least_first=True),
    time_column("slack-smallest", "smallest slack", lambda row: row.smallest_us, least_first=True),
)

_CARDS: Final = (
    ("path-steps", "Steps", "Each bar is a step's wall time, split along its critical path."),
    ("path-parts", "Largest parts over the run", "Mean per steady step, largest first."),
)


def critical_path_page(opened: OpenTrace, address: Address) -> Component:
    """The page for one trace, or for one step of it (key ``step`` of the address).

    Raises:
        TraceError: The trace cannot be analyzed.
    """
    analysis = opened.analysis
    if not analysis.steps:
        return html.Main(
            empty("No step was seen", "A critical path belongs to a step; this trace has none."),
            className="page",
        )
    step = next((row for row in analysis.steps if row.step == address.number("step", -1)), None)
    cards: list[Any] = []
    if step is not None:
        cards.append(_one_step(opened, step, address))
    cards += figure_cards(opened, address, FIGURES, _CARDS)
    cards += _heat_map(opened, address)
    parts = list(analysis.critical_path)
    cards += [
        card(
            "Slowest steps",
            _steps(analysis, address),
            hint="A click shows the pieces of the step's path in order.",
        ),
        card(
            "By category and rank",
            _by_category(analysis),
            hint="On the critical path, means per steady step; they sum to the mean step.",
        ),
        card(
            "Largest parts",
            sorted_table(parts, _PART_COLUMNS, address, PATH, name="parts", text_columns=2),
            hint="Saves at most: how much shorter a step could get if this part took no time on "
            "this rank only. Then another rank, or another part, holds the step up.",
        ),
    ]
    cards.append(
        card(
            "Slack",
            _slack(opened, address),
            hint="How much later it could end in a step without a later end of the step; a "
            "lower bound. Without slack, each delay makes the step longer.",
        )
    )
    head: list[Any] = [
        html.H1("Critical path over all ranks"),
        html.P(where_text(analysis), className="lead"),
        html.P(
            "Only a part on the critical path shortens a step when it gets faster. The parts of "
            "a step sum to its wall time.",
            className="quiet",
        ),
    ]
    if step is None and address.text("step"):
        head.append(no_such_step(address.text("step")))
    if opened.notes:
        head.append(notes_box(opened.notes))
    return html.Main([html.Section(head, className="headline"), *cards], className="page")


def _heat(address: Address) -> str:
    return address.choice("heat", tuple(charts.HEAT))


def _heat_map(opened: OpenTrace, address: Address) -> list[Component]:
    """The map of ranks and steps, with links that choose what it shows."""
    cards = figure_cards(
        opened,
        address,
        FIGURES,
        [(HEAT_MAP, "Ranks and steps", "A click on a cell opens the timeline there.")],
    )
    links = [
        dcc.Link(
            title,
            href=address.link(PATH, heat=name),
            className="filter here" if name == _heat(address) else "filter",
        )
        for name, (_, title) in charts.HEAT.items()
    ]
    for each in cards:
        each.children.insert(1, html.Div([html.Span("shown"), *links], className="filters"))
    return cards


def _slack(opened: OpenTrace, address: Address) -> Component:
    """The table of slack; of a large trace it may come after the page, from `add_callbacks`."""
    rows = opened.slack_if_soon
    if rows is not None:
        return slack_table(rows, address)
    return dcc.Loading(
        html.Div(
            [html.P("Slack needs all events.", className="quiet"), dcc.Store(id="slack-wanted")],
            id="slack",
        ),
        custom_spinner=html.Div(
            [
                html.Div(className="spinner"),
                html.P("Reading all events once more to find slack …", className="quiet"),
            ],
            className="spinner-line",
        ),
        target_components={"slack": "children"},
    )


def slack_table(rows: Sequence[SlackRow], address: Address) -> Component:
    """The table of slack, in the order of the address."""
    if not rows:
        return html.P("No event of the steady steps has a known slack.", className="quiet")
    return sorted_table(rows, _SLACK_COLUMNS, address, PATH, name="slack", text_columns=2)


def add_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    """Adds the callback that shows the slack of a large trace once it has been found."""

    def show(_: object, search: str | None) -> Any:
        address = Address.parse(search)
        try:
            return slack_table(workspace.get(address.trace).slack, address)
        except TraceError as error:
            return html.P(printable(str(error)), className="warning", role="alert")

    def open_cell(clicked: dict[str, Any] | None, search: str | None) -> Any:
        address = Address.parse(search)
        try:
            return _timeline_of_cell(workspace.get(address.trace), clicked)
        except TraceError:
            return no_update

    app.callback(
        Output("go", "data", allow_duplicate=True),
        Input({"type": "figure", "name": HEAT_MAP}, "clickData"),
        State("url", "search"),
        prevent_initial_call=True,
    )(open_cell)

    app.callback(
        Output("slack", "children"), Input("slack-wanted", "data"), State("url", "search")
    )(show)


def _timeline_of_cell(opened: OpenTrace, clicked: dict[str, Any] | None) -> Any:
    """The address of the timeline at a cell of the map; no update if there is no such cell."""
    points = (clicked or {}).get("points")
    point = points[0] if isinstance(points, list) and points else None
    if not isinstance(point, dict):
        return no_update
    rank, step = point.get("y"), point.get("x")
    if not isinstance(rank, int) or not isinstance(step, int):
        return no_update
    of = opened.analysis.rank_steps
    found = (of["rank"] == rank) & (of["step"] == step)
    places = np.flatnonzero(found)
    if not len(places):
        return no_update
    start_ns = int(of["start_ns"][places[0]]) - opened.trace.origin_ns
    end_ns = start_ns + round(float(of["wall_ns"][places[0]]))
    return timeline_link(opened.number, start_ns, end_ns, pinned=int(of["rank"][places[0]]))


def _by_category(analysis: Analysis) -> Component:
    sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in analysis.critical_path_by_rank:
        sums[row.category][row.rank] += row.us
    everyone = sorted({row.rank for row in analysis.critical_path_by_rank})
    ranks, others = everyone[:_MAX_RANKS], everyone[_MAX_RANKS:]
    rows = [
        (
            category,
            time_text(sum(by_rank.values())),
            *(time_text(by_rank.get(rank, 0.0)) for rank in ranks),
            *([time_text(sum(by_rank.get(rank, 0.0) for rank in others))] if others else []),
        )
        for category, by_rank in sorted(sums.items(), key=lambda item: -sum(item[1].values()))
    ]
    rest = [counted(len(others), "other rank")] if others else []
    return table(("category", "all ranks", *(f"rank {rank}" for rank in ranks), *rest), rows)


def _steps(analysis: Analysis, address: Address) -> Component:
    slow = sorted(analysis.steps, key=lambda row: row.wall_us, reverse=True)[:12]
    return table(
        ("step", "wall time", ""),
        [
            (
                dcc.Link(f"step {row.step}", href=address.link(PATH, step=row.step)),
                time_text(row.wall_us),
                "" if row.steady else "warm-up",
            )
            for row in slow
        ],
    )


def _one_step(opened: OpenTrace, step: StepRow, address: Address) -> Component:
    """The pieces of one step's path in order, with links to the previous and the next step."""
    path = opened.analyzed.paths[step.step]
    origin = opened.trace.origin_ns
    numbers = [row.step for row in opened.analysis.steps]
    at = numbers.index(step.step)
    links = [
        dcc.Link(text, href=address.link(PATH, step=numbers[other]), className="filter")
        for text, other in (("previous step", at - 1), ("next step", at + 1))
        if 0 <= other < len(numbers)
    ]
    start_ns = origin + round(step.start_us * 1e3)
    columns: list[Column[PathPiece]] = [
        Column("piece-kind", "category", lambda row: row.category, lambda row: row.category),
        Column(
            "piece-name",
            "layer, tensor or operation",
            lambda row: _name(row.name),
            lambda row: row.name,
            href=lambda row: timeline_link(
                opened.number, row.start_ns - origin, row.end_ns - origin
            ),
        ),
        Column("piece-rank", "rank", lambda row: str(row.rank), lambda row: row.rank),
        time_column("piece-from", "from", lambda row: (row.start_ns - start_ns) / 1e3),
        time_column("piece-length", "length", lambda row: (row.end_ns - row.start_ns) / 1e3),
    ]
    pieces = list(islice(path, _MAX_PIECES))
    return card(
        f"Step {step.step}: {time_text(step.wall_us)}",
        html.Div(
            [*links, dcc.Link("close", href=address.link(PATH, step=None))], className="filters"
        ),
        sorted_table(
            pieces, columns, address, PATH, name="pieces", text_columns=2, total=len(path)
        ),
        hint="Pieces in order of time; from: since the start of the step. A click on a name opens "
        "the timeline there.",
    )


def _name(name: str | None) -> str:
    return NOT_KNOWN if name is None else printable(name)
