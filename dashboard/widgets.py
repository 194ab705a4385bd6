"""Building blocks of the pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import dash_ag_grid
from dash import dcc, html

from ddltrace.analyzer.formatting.units import printable
from ddltrace.dashboard.theme import GRAPH_CONFIG

if TYPE_CHECKING:
    from dash.development.base_component import Component


_OPEN_NOTES: Final = 4
_MAX_ASKED: Final = 12
LONGEST_TABLE: Final = 30
"""Rows of a table; more are a grid, which draws only the rows that are in view."""

_GRID_ROWS: Final = 14
_GRID_ROW_PX: Final = 30
_GRID_HEAD_PX: Final = 34
_CHARACTER_PX: Final = 8.5
_CELL_PX: Final = 40
_NARROWEST_PX: Final = 92
_WIDEST_PX: Final = 320
_LOOKED_AT: Final = 500
"""Rows by whose texts columns get their width."""


def card(title: str, *children: Any, hint: str = "", wide: bool = False) -> Component:
    """A titled box; `hint` explains in one line how to read it."""
    head: list[Any] = [html.H2(title)]
    if hint:
        head.append(html.P(hint, className="hint"))
    return html.Section([html.Header(head), *children], className="card wide" if wide else "card")


def graph(name: str, height: float) -> Component:
    """A placeholder for a figure, which the page's callback fills.

    Args:
        name: The name under which the callback finds it.
        height: Height in px, reserved so that the layout does not move.
    """
    return html.Div(
        [
            dcc.Loading(
                dcc.Graph(
                    id={"type": "figure", "name": name},
                    config=GRAPH_CONFIG,
                    figure={"data": [], "layout": {"height": height}},
                    style={"height": f"{height:.0f}px"},
                ),
                delay_show=300,
                custom_spinner=html.Div(className="spinner"),
            ),
            save_buttons(),
        ],
        className="graph",
        style={"minHeight": f"{height:.0f}px"},
    )


def step_field(name: str, label: str, step: int | None, *, placeholder: str) -> list[Component]:
    """A label and a field for the number of a step.

    Args:
        name: The id of the field, by which callbacks find it.
        label: The text of the label.
        step: The present value; None for an empty field.
        placeholder: The text in an empty field.
    """
    return [
        html.Label(label, htmlFor=name),
        dcc.Input(
            id=name,
            type="number",
            min=0,
            step=1,
            value=step,
            debounce=True,
            placeholder=placeholder,
        ),
    ]


def no_such_step(asked: str) -> Component:
    """Says that the trace does not have the step of an address."""
    return html.P(
        f"The trace has no step {printable(asked)[:_MAX_ASKED]}.", className="warning", role="alert"
    )


def save_buttons() -> Component:
    """The buttons that save the figure beside them; `assets/save.js` handles the clicks."""
    return html.Div([_save_figure("PNG"), _save_figure("SVG")], className="save-figures")


def _save_figure(kind: str) -> Component:
    described = {"data-format": kind.lower(), "aria-label": f"Save this figure as {kind}"}
    return html.Button(
        kind, className="save-figure", title=f"Save this figure as {kind}", **described
    )


def empty(title: str, *lines: Any) -> Component:
    """Shown in place of a page or card without content."""
    return html.Div([html.H2(title), *(html.P(line) for line in lines)], className="empty")


def failed(message: str) -> Component:
    """A page that failed, with the reason."""
    return html.Main(empty("This trace cannot be shown", message), className="page")


def notes_box(notes: Sequence[str], *, of: str = "") -> Component:
    """Limitations of the trace that affect a page's numbers; expanded if there are few.

    Args:
        notes: One or more.
        of: The trace they belong to, on pages that show more than one.
    """
    count = "1 thing to know" if len(notes) == 1 else f"{len(notes)} things to know"
    return html.Details(
        [
            html.Summary(f"{count} of {of}" if of else count),
            html.Ul([html.Li(note) for note in notes]),
        ],
        className="notes",
        open=len(notes) <= _OPEN_NOTES,
    )


def tiles(values: Sequence[tuple[str, str, str]]) -> Component:
    """Key numbers at the top of a page: name, value and meaning."""
    return html.Div(
        [
            html.Div([html.Span(name), html.Strong(value)], className="tile", title=hint)
            for name, value, hint in values
        ],
        className="tiles",
    )


def table(
    heads: Sequence[Any],
    rows: Sequence[Sequence[Any]],
    *,
    text_columns: int = 1,
    hidden: Collection[int] = (),
) -> Component:
    """A table.

    Args:
        heads: The head of each column.
        rows: The cells of each row.
        text_columns: How many columns at the left are text; the others are numbers.
        hidden: Numbers of columns that are not shown, but saved as CSV with the others.
    """

    def look(column: int) -> dict[str, Any]:
        kind = "text" if column < text_columns else "number"
        return {"className": kind, "hidden": True} if column in hidden else {"className": kind}

    shown = html.Div(
        html.Table(
            [
                html.Thead(html.Tr([html.Th(h, **look(i)) for i, h in enumerate(heads)])),
                html.Tbody(
                    [
                        html.Tr([html.Td(cell, **look(i)) for i, cell in enumerate(row)])
                        for row in rows
                    ]
                ),
            ]
        ),
        className="table",
        tabIndex="0",  # a table that is wider than the page is scrolled with the arrow keys
    )
    return html.Div([shown, _save_csv("table")], className="table-box")


def _save_csv(what: str) -> Component:
    """The button that saves the table or grid beside it; `assets/save.js` handles the click."""
    return html.Button(
        "CSV",
        className="save-csv",
        title=f"Save this {what} as CSV",
        **{"aria-label": "Save as CSV"},
    )


class GridColumn(NamedTuple):
    """A column of a grid.

    Attributes:
        title: Its heading.
        unit: The unit of the values, which filters take; empty for texts and plain numbers.
        is_linked: Whether its cells lead to an address.
    """

    title: str
    unit: str = ""
    is_linked: bool = False


GridRows = Sequence[Sequence[tuple[float | str | None, str, str | None]]]


def grid_data(rows: GridRows) -> list[dict[str, float | str]]:
    """The rows of a grid, as its property ``rowData``."""
    return [
        {
            key: part
            for place, cell in enumerate(row)
            for key, part in zip((f"v{place}", f"t{place}", f"h{place}"), cell, strict=True)
            if part is not None
        }
        for row in rows
    ]


def grid(
    name: str, columns: Sequence[GridColumn], rows: GridRows, *, key: int | None = None
) -> Component:
    """A table of many rows with sorting and filters, which draws the rows that are in view.

    Args:
        name: By which the browser finds it.
        rows: The cells of each row: the value by which rows are sorted and filtered, the text that
            is shown, and the address that it leads to.
        key: The column whose texts identify rows, if the rows are going to be replaced: those that
            remain stay where they are.
    """
    texts = [any(isinstance(row[place][0], str) for row in rows) for place in range(len(columns))]
    defined = [
        {
            "field": f"v{place}",
            "headerName": column.title,
            "headerTooltip": f"{column.title}; filters take {column.unit}" if column.unit else "",
            "valueFormatter": {"function": f"params.data.t{place}"},
            "filter": "agTextColumnFilter" if is_text else "agNumberColumnFilter",
            "sortingOrder": ["asc", "desc", None] if is_text else ["desc", "asc", None],
            "minWidth": _width_px([column.title, *(row[place][1] for row in rows[:_LOOKED_AT])]),
            "flex": 2 if is_text else 1,
            **({} if is_text else {"type": "rightAligned"}),
            **({"cellRenderer": "GridLink"} if column.is_linked else {}),
        }
        for place, (column, is_text) in enumerate(zip(columns, texts, strict=True))
    ]
    shown = dash_ag_grid.AgGrid(
        id=f"grid-{name}",
        rowData=grid_data(rows),
        columnDefs=defined,
        defaultColDef={"resizable": True, "floatingFilter": True, "suppressMovable": True},
        dashGridOptions={
            "rowHeight": _GRID_ROW_PX,
            "headerHeight": _GRID_HEAD_PX,
            "floatingFiltersHeight": _GRID_HEAD_PX,
            "tooltipShowDelay": 300,
            "enableCellTextSelection": True,
            "ensureDomOrder": True,
            "animateRows": False,
        },
        className="grid",
        **({} if key is None else {"getRowId": f"params.data.t{key}"}),
        style={"height": f"{2 * _GRID_HEAD_PX + _GRID_ROW_PX * min(len(rows), _GRID_ROWS)}px"},
    )
    return html.Div([shown, _save_csv("grid")], className="table-box")


def _width_px(texts: Sequence[str]) -> int:
    """The width that a column needs for its texts, which a very long one does not get."""
    wanted = round(_CHARACTER_PX * max(map(len, texts)) + _CELL_PX)
    return max(_NARROWEST_PX, min(wanted, _WIDEST_PX))
