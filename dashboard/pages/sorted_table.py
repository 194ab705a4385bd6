"""A table with links that sort its columns; the order is part of the address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dash import dcc, html

from ddltrace.dashboard.widgets import table

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
        cell: Content of a row's cell.
        order: Sort key of a row: numbers sort largest first, texts alphabetically. Rows without a
            key come last.
    """

    key: str
    title: str
    cell: Callable[[T], Any]
    order: Callable[[T], float | str | None]


def sort_rows(rows: Sequence[T], column: Column[T]) -> list[T]:
    """Rows by a column: numbers largest first, texts alphabetically, unknown values last."""
    known = [row for row in rows if column.order(row) is not None]
    is_text = any(isinstance(column.order(row), str) for row in known)
    ordered = sorted(known, key=column.order, reverse=not is_text)  # type: ignore[arg-type]
    return ordered + [row for row in rows if column.order(row) is None]


def sorted_table(
    rows: Sequence[T],
    columns: Sequence[Column[T]],
    address: Address,
    path: str,
    *,
    limit: int,
    text_columns: int = 1,
    total: int | None = None,
) -> Component:
    """Draws the table in the order of the address (key ``sort``).

    Args:
        rows: All rows.
        columns: The columns; without a ``sort`` in the address, rows keep their order.
        address: The page's address.
        path: The page's path.
        limit: Maximum number of rows; the number of further rows is shown below.
        text_columns: Number of text columns at the left.
        total: Number of all rows, if `rows` are the first of them in the order of the address.
    """
    chosen = next((c for c in columns if c.key == address.text("sort")), None)
    ordered = sort_rows(rows, chosen) if chosen and total is None else list(rows)
    heads = [
        dcc.Link(
            f"{column.title} ▾" if column is chosen else column.title,
            href=address.link(path, sort=column.key),
            className="sort here" if column is chosen else "sort",
            title=f"Sort by {column.title}",
        )
        for column in columns
    ]
    shown = [[column.cell(row) for column in columns] for row in ordered[:limit]]
    parts: list[Any] = [table(heads, shown, text_columns=text_columns)]
    more = (len(ordered) if total is None else total) - len(shown)
    if more:
        parts.append(html.P(f"{more:,} more rows are not shown.", className="quiet"))
    return html.Div(parts)
