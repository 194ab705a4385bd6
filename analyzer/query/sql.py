"""SQL over a trace: DuckDB on its Arrow tables, read-only and shut in."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from ddltrace.analyzer.formatting.text_table import render
from ddltrace.analyzer.query.result_tables import OF_ANALYSIS, EventStream
from ddltrace.analyzer.trace.opened_trace import Trace
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.optional_packages import require_extra

TABLES: Final = ("events", *OF_ANALYSIS)
"""What can be asked for."""

_WIDEST: Final = 10_000


def run_query(trace: Trace, sql: str) -> pa.Table:
    """Runs one statement over the tables of a trace.

    Only tables whose names occur in the statement are made, and events are read a rank at a
    time, again for each time that the statement goes through them. The statement can read nothing
    else: no files, no network, no variables of this process.

    Args:
        trace: The trace.
        sql: A statement in DuckDB's dialect.

    Raises:
        UsageError: DuckDB does not accept the statement, or it does more than ask.
        MissingCapabilityError: DuckDB is not installed.
    """
    require_extra("query", "ddltrace query")
    import duckdb

    _check_statement(sql)
    words = set(re.findall(r"\w+", sql.lower()))
    tables: dict[str, Any] = {"events": EventStream(trace)} if "events" in words else {}
    wanted = [name for name in OF_ANALYSIS if name in words]
    if wanted:
        analysis = trace.analyze()
        tables |= {name: OF_ANALYSIS[name](analysis) for name in wanted}
    with duckdb.connect() as connection:
        for name, table in tables.items():
            connection.register(name, table)
        connection.execute("SET python_enable_replacements = false")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        try:
            return connection.sql(sql).to_arrow_table()
        except duckdb.BinderException as error:
            columns = [f"{name}: {', '.join(connection.table(name).columns)}" for name in tables]
            known = f"columns of {'; of '.join(columns)}" if columns else ""
            raise _refusal(error, known) from error
        except duckdb.Error as error:
            raise _refusal(error) from error


def _check_statement(sql: str) -> None:
    """Sees to it that there is one statement, and that it only asks.

    Raises:
        UsageError: It is not so.
    """
    import duckdb

    try:
        kinds = [statement.type.name for statement in duckdb.extract_statements(sql)]
    except duckdb.Error as error:
        raise _refusal(error) from error
    # A PIVOT is several statements to DuckDB, the last of which asks.
    if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN", "MULTI"):
        raise UsageError("write one statement that asks for rows, a SELECT")


def _refusal(error: Exception, known: str = "") -> UsageError:
    """What DuckDB says, and what could have been meant: by default the tables."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else "no answer"
    return UsageError(f"{first:.200} ({known or 'tables: ' + ', '.join(TABLES)})")


def render_rows(table: pa.Table, form: str) -> str:
    """Rows as text in which nothing acts on a terminal.

    Args:
        table: The rows.
        form: ``table``, ``csv`` or ``json`` (a list of objects).
    """
    rows = [{name: _plain(value) for name, value in row.items()} for row in table.to_pylist()]
    if form == "json":
        return json.dumps(rows, indent=1)
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(_inert, table.column_names))
        writer.writerows([_inert(cell) for cell in row] for row in cells)
        return text.getvalue().rstrip("\n")
    return "\n".join(render(table.column_names, cells, _WIDEST))


def _plain(value: Any) -> Any:
    """A value as JSON has it: sums of integers come as decimals, and NaN is no JSON."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | None) else str(value)


def _inert(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
