"""The SQL page: one SELECT over a trace's tables, shown as a table and a plot, saved as CSV."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.csv as arrow_csv
from dash import dcc, html

from ddltrace.analyzer.formatting.csv_cells import names_without_formulas, without_formulas
from ddltrace.analyzer.formatting.units import printable
from ddltrace.analyzer.query.result_tables import TABLES
from ddltrace.analyzer.report.figures import base_figure, label
from ddltrace.dashboard.widgets import LONGEST_TABLE, GridColumn, card, graph, grid, table
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.workspace import OpenTrace

PATH: Final = "/sql"
_MAX_ROWS: Final = 10_000
_MAX_BARS: Final = 200
_MAX_TEXT: Final = 200
_LARGE: Final = 1e15

_NUMBERS: Final = (
    *(pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
    *(pa.types.is_date, pa.types.is_time, pa.types.is_timestamp),
)

EXAMPLES: Final = (
    (
        "Time of each operation",
        "SELECT op, count(*) AS messages, sum(wait_us) AS wait_us, "
        "sum(transfer_us) AS transfer_us\nFROM messages GROUP BY op ORDER BY wait_us DESC",
    ),
    (
        "Ranks that arrive last",
        "SELECT last_rank, count(*) AS collectives, median(lateness_us) AS lateness_us\n"
        "FROM collectives GROUP BY last_rank ORDER BY collectives DESC",
    ),
    ("Slowest steps", "SELECT step, wall_us FROM steps ORDER BY wall_us DESC LIMIT 20"),
    (
        "Most exposed tensors",
        "SELECT name, bytes, exposed_us FROM tensors ORDER BY exposed_us DESC LIMIT 20",
    ),
    (
        "Critical path by category",
        "SELECT category, sum(end_ns - start_ns) / 1e3 AS us\n"
        "FROM critical_path GROUP BY category ORDER BY us DESC",
    ),
    (
        "Peak memory of each rank",
        "SELECT rank, max(value) / 1e6 AS MB FROM counters\n"
        "WHERE name = 'process_memory' GROUP BY rank ORDER BY rank",
    ),
    (
        "Events by kind",
        "SELECT kind, count(*) AS events FROM events GROUP BY kind ORDER BY events DESC",
    ),
)


def plot(result: pa.Table) -> go.Figure | None:
    """Draws bars of the first numeric column after the first column, for at most 200 rows.

    Args:
        result: The rows; the first column gives the categories.

    Returns:
        None if there are no rows or no such column.
    """
    if not len(result) or result.num_columns < 2:
        return None
    numeric = next(
        (
            name
            for name in result.column_names[1:]
            if pa.types.is_integer(kind := result.schema.field(name).type)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
        ),
        None,
    )
    if numeric is None:
        return None
    shown = result.slice(0, _MAX_BARS)
    figure = base_figure(height=300)
    names = [label(value) for value in shown.column(0).to_pylist()]
    values = [None if v is None else float(v) for v in shown.column(numeric).to_pylist()]
    figure.add_bar(x=names, y=values, meta={"role": "series-0"}, name=label(numeric))
    figure.update_xaxes(title=label(result.column_names[0]), type="category")
    figure.update_yaxes(title=label(numeric))
    figure.update_layout(showlegend=False)
    return figure


def _plot_of_address(opened: OpenTrace, address: Address) -> go.Figure | None:
    statement = address.text("q")
    if not opened.was_asked(statement):
        return None
    try:
        return plot(opened.query(statement))
    except DdltraceError:
        return None  # the page itself shows the error


FIGURES: Final[dict[str, Callable[[OpenTrace, Address], go.Figure | None]]] = {
    "sql-plot": _plot_of_address
}


def sql_page(opened: OpenTrace, address: Address) -> Component:
    """The page for one trace. The address (key ``q``) fills in the statement.

    Whoever makes somebody open an address shall not make the server work: the page shows the rows
    of a statement that was run from the page before, and of another one only after a click.
    """
    statement = address.text("q")
    return html.Main(
        [
            html.Section(
                [
                    html.H1("Query the trace with SQL"),
                    html.P(
                        "One SELECT in DuckDB's dialect. It reads this trace only and writes "
                        "nothing.",
                        className="lead",
                    ),
                ],
                className="headline",
            ),
            html.Div(
                [
                    html.Div(
                        [
                            html.Label("Statement", htmlFor="sql-text", className="quiet"),
                            dcc.Textarea(
                                id="sql-text", value=statement or EXAMPLES[0][1], spellCheck=False
                            ),
                            html.Div(
                                [
                                    html.Button(
                                        "Run",
                                        id="sql-run",
                                        className="action",
                                        title="Run the statement (Ctrl+Enter)",
                                    ),
                                    html.Button(
                                        "Save CSV", id="sql-csv", className="action second"
                                    ),
                                    dcc.Download(id="sql-file"),
                                    *(
                                        dcc.Link(
                                            title,
                                            href=address.link(PATH, q=text),
                                            className="filter",
                                        )
                                        for title, text in EXAMPLES
                                    ),
                                ],
                                className="actions",
                            ),
                            html.Div(rows_of(opened, statement), id="sql-result"),
                        ]
                    ),
                    card("Tables", _schema(opened), hint="A click shows the columns."),
                ],
                className="sql",
            ),
        ],
        className="page",
    )


def as_csv(result: pa.Table) -> str:
    """The whole result as CSV, with a header line."""
    sink = io.BytesIO()
    names = names_without_formulas(result.column_names)
    arrow_csv.write_csv(pa.table([_plain(column) for column in result.columns], names), sink)
    return sink.getvalue().decode()


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """A column as CSV has it: lists, intervals and bytes, among others, as text."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if any(holds(kind) for holds in _NUMBERS):
        return column
    if not pa.types.is_string(kind):
        values = [None if value is None else str(value) for value in column.to_pylist()]
        column = pa.chunked_array([pa.array(values, pa.string())])
    return without_formulas(column)


def rows_of(opened: OpenTrace, statement: str) -> list[Any]:
    """The rows of a statement that was run from the page; else nothing."""
    if not opened.was_asked(statement):
        return []
    try:
        result = opened.query(statement)
    except DdltraceError as error:
        return [html.P(printable(str(error)), className="warning", role="alert")]
    shown = [list(row.values()) for row in result.slice(0, _MAX_ROWS).to_pylist()]
    count = counted(len(result), "row")
    more = f", the first {_MAX_ROWS:,} shown" if len(result) > _MAX_ROWS else ""
    parts: list[Any] = []
    figure = plot(result)
    if figure is not None:
        parts.append(card("Plot", graph("sql-plot", figure.layout.height)))
    heads = [printable(name) for name in result.column_names]
    if len(shown) > LONGEST_TABLE:
        rows = [[(_value(value), _cell(value), None) for value in row] for row in shown]
        body = grid("sql", [GridColumn(head) for head in heads], rows)
    else:
        body = table(heads, [[_cell(value) for value in row] for row in shown])
    parts.append(card("Result", body, hint=count + more))
    return parts


def _value(value: object) -> float | str | None:
    """A value by which the grid sorts: numbers as numbers, all else as it is shown."""
    if isinstance(value, int | float | Decimal) and math.isfinite(value):
        return float(value)
    return None if value is None else _cell(value)


def _cell(value: object) -> str:
    if value is None:
        return "null"
    text = _number(value) if isinstance(value, float) else printable(str(value))
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _number(value: float) -> str:
    """A number in full if that is readable, else with an exponent."""
    large = abs(value) >= _LARGE
    return f"{value:.6g}" if large or 0 < abs(value) < 1 else f"{value:.3f}".rstrip("0").rstrip(".")


def _schema(opened: OpenTrace) -> Component:
    return html.Div(
        [
            html.Details(
                [
                    html.Summary(name),
                    html.Ul([html.Li(column) for column in opened.columns_of(name)]),
                ]
            )
            for name in TABLES
        ],
        className="schema",
    )
