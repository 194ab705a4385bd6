"""The rows of a query as text: a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from ddltrace.analyzer.formatting.csv_cells import names_without_formulas, without_formulas
from ddltrace.analyzer.formatting.text_table import render, widths_of
from ddltrace.analyzer.formatting.units import escaped

_WIDEST: Final = 10_000
_BLOCK_ROWS: Final = 4096
_PLAN_COLUMNS: Final = ["explain_key", "explain_value"]


def rows_as_text(table: pa.Table, form: str) -> Iterator[str]:
    """Rows as text without terminal control sequences, some thousand rows at a time.

    Args:
        table: The rows, each column with a name of its own.
        form: ``table``, ``csv`` or ``json`` (a list of objects).

    Yields:
        Pieces of the text, each with its line ends.
    """
    if form == "json":
        return _json(table)
    if form == "csv":
        return _csv(table)
    if table.column_names == _PLAN_COLUMNS:
        return _plan(table)
    return _table(table)


def _json(table: pa.Table) -> Iterator[str]:
    before = "[\n "
    for rows in _blocks(table):
        objects = (dict(zip(table.column_names, row, strict=True)) for row in rows)
        # JSON writes the line ends of a text as \n, so these are its own.
        yield before + ",\n ".join(
            json.dumps(each, indent=1).replace("\n", "\n ") for each in objects
        )
        before = ",\n "
    yield "\n]\n" if table.num_rows else "[]\n"


def _csv(table: pa.Table) -> Iterator[str]:
    yield _csv_lines([names_without_formulas(table.column_names)])
    inert = pa.table(
        [without_formulas(column) for column in table.columns], names=table.column_names
    )
    for rows in _blocks(inert):
        yield _csv_lines(map(_texts, rows))


def _csv_lines(rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([escaped(cell) for cell in row] for row in rows)
    return text.getvalue()


def _plan(table: pa.Table) -> Iterator[str]:
    """A query plan: its drawing, which has many lines."""
    for value in table["explain_value"].to_pylist():
        yield "".join(escaped(line) + "\n" for line in str(value).splitlines())


def _table(table: pa.Table) -> Iterator[str]:
    header = table.column_names
    widths = widths_of([header])
    for rows in _blocks(table):
        widths = list(map(max, widths, widths_of(list(map(_texts, rows)))))
    yield "\n".join(render(header, [], _WIDEST, widths)) + "\n"
    for rows in _blocks(table):
        yield "\n".join(render(None, list(map(_texts, rows)), _WIDEST, widths)) + "\n"


def _blocks(table: pa.Table) -> Iterator[list[tuple[Any, ...]]]:
    """The rows as Python values, some at a time: they take far more memory than in Arrow."""
    for first in range(0, table.num_rows, _BLOCK_ROWS):
        block = table.slice(first, _BLOCK_ROWS)
        yield list(zip(*(map(_plain, column.to_pylist()) for column in block.columns), strict=True))


def _texts(row: Sequence[Any]) -> list[str]:
    return ["" if value is None else str(value) for value in row]


def _plain(value: Any) -> Any:
    """Converts a value to JSON: sums of integers are decimals, and JSON has no NaN."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | None) else str(value)
