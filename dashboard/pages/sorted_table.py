"""Tables that are sorted: by links if they are short, as a grid if they are long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dash import dcc, html

from ddltrace.analyzer.formatting.units import time_text
from ddltrace.dashboard.widgets import LONGEST_TABLE, GridColumn, grid, table
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ddltrace.dashboard.address import Address

T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column.

    Attributes:
        key: Its name in the address.
        title: Its heading.
        text: What a row's cell shows, safe to print.
        value: By which rows are sorted and filtered, a number or a text; None if it is unknown.
        unit: The unit of the values, which filters take.
        least_first: Whether numbers are sorted in ascending order at first.
        href: The address that a cell leads to.
        hint: What a cell says when it is pointed at; empty for nothing.
    """

    key: str
    title: str
    text: Callable[[T], str]
    value: Callable[[T], float | str | None]
    unit: str = ""
    least_first: bool = False
    href: Callable[[T], str] | None = None
    hint: Callable[[T], str] | None = None


def time_column(
    key: str, title: str, value: Callable[[T], float | None], *, least_first: bool = False
) -> Column[T]:
    """A column of times, which `value` gives in microseconds."""
    return Column(
        key, title, lambda row: time_text(value(row)), value, unit="µs", least_first=least_first
    )


def sort_rows(rows: Sequence[T], column: Column[T]) -> list[T]:
    """Rows by a column: numbers largest first, texts alphabetically, unknown values last."""
    known = [row for row in rows if column.value(row) is not None]
    is_text = any(isinstance(column.value(row), str) for row in known)
    largest_first = not (is_text or column.least_first)
    ordered = sorted(known, key=column.value, reverse=largest_first)  # type: ignore[arg-type]
    return ordered + [row for row in rows if column.value(row) is None]


def sorted_table(
    rows: Sequence[T],
    columns: Sequence[Column[T]],
    address: Address,
    path: str,
    *,
    name: str,
    text_columns: int = 1,
    total: int | None = None,
) -> Component:
    """Draws rows in the order of the address (key ``sort``): up to 30 as a table, more as a grid.

    Args:
        rows: All rows that can be shown.
        columns: The columns; without a ``sort`` in the address, rows keep their order.
        address: The page's address.
        path: The page's path.
        name: Of the grid, by which the page is told apart from others.
        text_columns: Number of text columns at the left.
        total: Number of all rows, if `rows` are the first of them in the order of the address.
    """
    chosen = next((c for c in columns if c.key == address.text("sort")), None)
    ordered = sort_rows(rows, chosen) if chosen and total is None else list(rows)
    parts: list[Any] = []
    if len(ordered) > LONGEST_TABLE:
        parts.append(
            grid(
                name,
                [GridColumn(c.title, c.unit, c.href is not None) for c in columns],
                [
                    [(c.value(row), c.text(row), c.href(row) if c.href else None) for c in columns]
                    for row in ordered
                ],
            )
        )
    else:
        heads = [
            dcc.Link(
                f"{column.title} ▾" if column is chosen else column.title,
                href=address.link(path, sort=column.key),
                className="sort here" if column is chosen else "sort",
                title=f"Sort by {column.title}",
            )
            for column in columns
        ]
        cells = [[_cell(column, row) for column in columns] for row in ordered]
        parts.append(table(heads, cells, text_columns=text_columns))
    more = 0 if total is None else total - len(ordered)
    if more:
        parts.append(html.P(f"{counted(more, 'more row', 'is')} not shown.", className="quiet"))
    return html.Div(parts)


def _cell(column: Column[T], row: T) -> Any:
    text = column.text(row)
    hint = column.hint(row) if column.hint else ""
    shown: Any = html.Span(text, title=hint, className="loss") if hint else text
    return shown if column.href is None else dcc.Link(shown, href=column.href(row), title=text)
