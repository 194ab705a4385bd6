"""Runs SQL over a trace: DuckDB on its Arrow tables, read-only, in memory, without files or
network."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.joined.analyzed import Analyzed
from ddltrace.analyzer.query.result_tables import OF_ANALYSIS, OF_TRACE, TABLES, EventStream
from ddltrace.analyzer.query.statement_check import check_statement, refusal
from ddltrace.analyzer.trace.opened_trace import Trace
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.trace.arrow_arrays import strings

_SHOW_TABLES: Final = re.compile(r"\s*SHOW\s+(?:ALL\s+)?TABLES\s*;?\s*\Z", re.IGNORECASE)
_BATCH_ROWS: Final = 1 << 16
_INTERRUPT_EVERY_S: Final = 0.02
_SHUT_IN: Final[dict[str, str | bool | int | float | list[str]]] = {
    # DuckDB may always read and write its folder for temporary files: there is none.
    "temp_directory": "",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
}


@dataclass(frozen=True)
class QueryLimits:
    """Limits of a statement.

    Attributes:
        memory_bytes: Memory of DuckDB's operators, and of the rows that it returns. Nothing is
            spilled to disk.
        timeout_s: Seconds that the statement may run.
    """

    memory_bytes: int = 2_000_000_000
    timeout_s: float = 600.0


def run_query(
    trace: Trace,
    sql: str,
    limits: QueryLimits | None = None,
    analyzed: Callable[[], Analyzed] | None = None,
) -> pa.Table:
    """Runs one SELECT over the tables of a trace.

    Only tables whose names occur in the statement are made, and events are read a rank at a
    time, again for each time that the statement goes through them. The statement can read
    nothing else (no files, no network, no variables of this process) and write nothing.

    Args:
        trace: The trace.
        sql: A SELECT in DuckDB's dialect, or the EXPLAIN of one.
        limits: What the statement may use.
        analyzed: Gives the analysis of the trace where that is at hand; otherwise it is made.

    Returns:
        The rows. Columns keep their order; of columns with the same name all but the first get
        a number: ``n``, ``n_1``.

    Raises:
        UsageError: DuckDB does not accept the statement, it is no SELECT, or it reached a limit.
        MissingCapabilityError: DuckDB is not installed.
    """
    require_extra("query", "ddltrace query")
    import duckdb

    limits = limits or QueryLimits()
    check_statement(sql)
    if _SHOW_TABLES.match(sql):
        # DuckDB suggests only tables that were created.
        return pa.table({"name": strings(sorted(TABLES))})
    words = set(re.findall(r"\w+", sql.lower()))
    tables: dict[str, Any] = {"events": EventStream(trace)} if "events" in words else {}
    tables |= {name: make(trace) for name, make in OF_TRACE.items() if name in words}
    wanted = [name for name in OF_ANALYSIS if name in words]
    if wanted:
        found = analyze_in_full(trace) if analyzed is None else analyzed()
        tables |= {name: OF_ANALYSIS[name](found) for name in wanted}
    with duckdb.connect(config=_SHUT_IN) as connection:
        connection.execute(f"SET memory_limit = '{limits.memory_bytes}B'")
        for name, table in tables.items():
            connection.register(name, table)
        connection.execute("SET python_enable_replacements = false")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        try:
            return _rows(connection, sql, limits)
        except duckdb.BinderException as error:
            columns = [f"{name}: {', '.join(connection.table(name).columns)}" for name in tables]
            known = f"columns of {'; of '.join(columns)}" if columns else ""
            raise refusal(error, known) from error
        # Arrow passes on DuckDB's errors as errors of its own.
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise refusal(error) from error


def _rows(connection: Any, sql: str, limits: QueryLimits) -> pa.Table:
    """All rows of a statement, as long as they fit into the memory that it may use."""
    done, expired = threading.Event(), threading.Event()

    def watch() -> None:
        if not done.wait(limits.timeout_s):
            expired.set()
            # An interrupt between two parts of the work has no effect on the second one.
            while not done.wait(_INTERRUPT_EVERY_S):
                connection.interrupt()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    batches, size = [], 0
    try:
        result = connection.sql(sql)
        # The name before DuckDB 2.0 is the second one.
        read = getattr(result, "to_arrow_reader", None) or result.fetch_record_batch
        reader = read(_BATCH_ROWS)
        for batch in reader:
            batches.append(batch)
            size += batch.nbytes
            if size > limits.memory_bytes:
                raise _too_much_memory(limits)
    except Exception as error:
        if expired.is_set():
            raise UsageError(
                f"the statement ran for {limits.timeout_s:g} s and was stopped: "
                "ask for less, or give it more time with --timeout"
            ) from None
        if "Out of Memory" in str(error):
            raise _too_much_memory(limits) from None
        raise
    finally:
        done.set()
        watcher.join()
    table = pa.Table.from_batches(batches, reader.schema)
    return table.rename_columns(_unique(table.column_names))


def _too_much_memory(limits: QueryLimits) -> UsageError:
    return UsageError(
        f"the statement needs more memory than its limit of {limits.memory_bytes / 1e9:g} GB: "
        "ask for less, or raise the limit with --memory-limit"
    )


def _unique(names: Sequence[str]) -> list[str]:
    """Numbers all but the first of equal names, without taking a name that another column has."""
    taken, found = set(names), list[str]()
    seen: set[str] = set()
    for name in names:
        unique, number = name, 0
        while unique in seen or (number and unique in taken):
            number += 1
            unique = f"{name}_{number}"
        seen.add(unique)
        found.append(unique)
    return found
