"""Checks that a query is one SELECT, or the EXPLAIN of one."""

from __future__ import annotations

import re
from typing import Any, Final

from ddltrace.analyzer.query.result_tables import TABLES
from ddltrace.tracer.errors import UsageError

_SPACE: Final = r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_EXPLAIN: Final = re.compile(
    rf"{_SPACE}EXPLAIN\b{_SPACE}(?:ANALYZE\b)?{_SPACE}", re.IGNORECASE | re.DOTALL
)
_OPTIONS: Final = re.compile(r"\([^()]*\)")
_END: Final = re.compile(rf";{_SPACE}\Z", re.DOTALL)


def check_statement(sql: str) -> None:
    """Checks that there is one statement, and that it is a SELECT or the EXPLAIN of one.

    Statements that only return rows count as a SELECT, as in DuckDB: ``FROM messages``,
    ``VALUES``, ``PIVOT``, ``DESCRIBE``, and each of them after ``WITH``.

    Raises:
        UsageError: It is anything else.
    """
    import duckdb

    try:
        kinds = [statement.type.name for statement in duckdb.extract_statements(sql)]
    except duckdb.Error as error:
        raise refusal(error) from error
    if kinds == ["EXPLAIN"]:
        explain = _EXPLAIN.match(sql)
        rest = sql[explain.end() :] if explain else ""
        # A parenthesis holds EXPLAIN's options, or is the SELECT itself.
        if not (_is_select(rest) or _is_select(_OPTIONS.sub("", rest, count=1))):
            raise UsageError("EXPLAIN is for one SELECT only: other statements are refused")
    elif not _is_select(sql):
        raise UsageError("write one SELECT (or EXPLAIN SELECT): other statements are refused")


def _is_select(sql: str) -> bool:
    """Whether a text is one statement that returns rows and can stand in another one's FROM.

    DuckDB rewrites a PIVOT to several statements, and so a COPY or a CREATE TABLE that has a
    PIVOT in it; only the former can stand in a FROM.
    """
    import duckdb

    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error:
        return False
    return _is_one_query(statements) and any(
        _is_in_from(text) for text in (sql.rstrip().rstrip(";"), _END.sub("", sql))
    )


def _is_in_from(sql: str) -> bool:
    import duckdb

    try:
        return _is_one_query(duckdb.extract_statements(f"FROM (\n{sql}\n)"))
    except duckdb.Error:
        return False


def _is_one_query(statements: list[Any]) -> bool:
    return len(statements) == 1 and statements[0].type.name in ("SELECT", "MULTI")


def refusal(error: Exception, known: str = "") -> UsageError:
    """DuckDB's message with its suggestions, by default the names of the tables."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else "no answer"
    return UsageError(f"{first:.200} ({known or 'tables: ' + ', '.join(TABLES)})")
