"""Runs SQL over a trace: DuckDB on its Arrow tables, read-only, in memory, without files or
network.

A statement runs in a process of its own (`statement_process.py`): functions of DuckDB such as
``list_sum(range(900000000))`` neither keep to its memory limit nor can be interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.model import Analyzed
from ddltrace.analyzer.query.result_tables import OF_ANALYSIS, OF_TRACE, TABLES, EventStream
from ddltrace.analyzer.trace.opened_trace import Trace
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.trace.arrow_arrays import strings

_SHOW_TABLES: Final = re.compile(r"\s*SHOW\s+(?:ALL\s+)?TABLES\s*;?\s*\Z", re.IGNORECASE)
_PROGRAM: Final = Path(__file__).with_name("statement_process.py")
_BINDER: Final = "BinderException"


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
        sql: A SELECT in DuckDB's dialect, or the EXPLAIN of one.
        limits: What the statement may use.
        analyzed: Gives the analysis of the trace where that is at hand; otherwise it is made.

    Returns:
        The rows. Columns keep their order; of columns with the same name all but the first get
        a number: ``n``, ``n_1``.

    Raises:
        UsageError: DuckDB does not accept the statement, it is not a SELECT, or it reached a limit.
        MissingCapabilityError: DuckDB is not installed.
    """
    require_extra("query", "ddltrace query", by_import=False)
    limits = limits or QueryLimits()
    if _SHOW_TABLES.match(sql):
        # DuckDB suggests only tables that were created.
        return pa.table({"name": strings(sorted(TABLES))})
    with _StatementProcess(limits) as process:  # it starts while the tables are made
        words = set(re.findall(r"\w+", sql.lower()))
        tables: dict[str, Any] = {"events": EventStream(trace)} if "events" in words else {}
        tables |= {name: make(trace) for name, make in OF_TRACE.items() if name in words}
        wanted = [name for name in OF_ANALYSIS if name in words]
        if wanted:
            found = analyze_in_full(trace) if analyzed is None else analyzed()
            tables |= {name: OF_ANALYSIS[name](found) for name in wanted}
        return process.rows(sql, tables)


class _StatementProcess:
    """Runs one statement in a process of its own, for the duration of a context.

    Args:
        limits: What the statement may use. Its time begins when the process is ready.
    """

    def __init__(self, limits: QueryLimits) -> None:
        self._limits = limits
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", *_program()],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
            )
        self._lines = self._control.makefile("rb")
        self._is_late = False
        self._answer: dict[str, Any] | None = None
        self._failure: Exception | None = None
        self._unread: Exception | None = None

    def __enter__(self) -> _StatementProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._lines.close()
        self._control.close()

    def rows(self, sql: str, tables: Mapping[str, Any]) -> pa.Table:
        """All rows of a statement, as long as they fit into the memory that it may use.

        Raises:
            UsageError: See `run_query`.
        """
        schemas = {name: table.schema.serialize().hex().decode() for name, table in tables.items()}
        asked = {"sql": sql, "memory_bytes": self._limits.memory_bytes, "tables": schemas}
        serving = threading.Thread(target=self._serve, args=(tables,), daemon=True)
        deadline = threading.Timer(self._limits.timeout_s, self._expire)
        try:
            self._lines.readline()  # ready
            deadline.start()
            with contextlib.suppress(BrokenPipeError):
                self._control.sendall(json.dumps(asked).encode() + b"\n")
            serving.start()
            batches, schema = self._read()
            serving.join()
            status = self._process.wait()
        finally:
            deadline.cancel()
        if self._failure is not None:
            raise self._failure
        if self._is_late:
            raise UsageError(
                f"the statement ran for {self._limits.timeout_s:g} s and was stopped: "
                "ask for less, or give it more time with --timeout"
            )
        self._raise_error(status, tables)
        if self._unread is not None:
            raise UsageError(f"the rows cannot be read: {self._unread}") from self._unread
        table = pa.Table.from_batches(batches, schema)
        return table.rename_columns(_unique(table.column_names))

    def _read(self) -> tuple[list[pa.RecordBatch], pa.Schema | None]:
        """The rows that the process sends until it ends; also a part of them."""
        batches: list[pa.RecordBatch] = []
        schema, size = None, 0
        try:
            with pa.ipc.open_stream(self._process.stdout) as reader:
                schema = reader.schema
                for batch in reader:
                    batches.append(batch)
                    size += batch.nbytes
                    if size > self._limits.memory_bytes:
                        raise _too_much_memory(self._limits)
        except (pa.ArrowException, OSError) as error:
            self._unread = error
        return batches, schema

    def _raise_error(self, status: int, tables: Mapping[str, Any]) -> None:
        answer = self._answer
        if answer is None:
            ended = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise UsageError(
                f"the statement ended its process ({ended}): it may need more memory than its "
                f"limit of {self._limits.memory_bytes / 1e9:g} GB; ask for less, or raise the "
                "limit with --memory-limit"
            )
        kind = answer.get("kind")
        if kind == "memory":
            raise _too_much_memory(self._limits)
        if kind == "refused":
            raise UsageError(answer["text"])
        if kind is not None:
            columns = [f"{name}: {', '.join(table.schema.names)}" for name, table in tables.items()]
            known = f"columns of {'; of '.join(columns)}" if kind == _BINDER and columns else ""
            raise UsageError(f"{answer['text']} ({known or 'tables: ' + ', '.join(TABLES)})")

    def _expire(self) -> None:
        self._is_late = True
        self._process.kill()

    def _serve(self, tables: Mapping[str, Any]) -> None:
        """Answers the process until it ends: each pass over a table gets a pipe and a thread."""
        try:
            for line in self._lines:
                message = json.loads(line)
                if "scan" not in message:
                    self._answer = message
                    return
                reading, writing = os.pipe()
                with os.fdopen(reading):
                    socket.send_fds(self._control, [b"."], [reading])
                threading.Thread(
                    target=self._send, args=(tables[message["scan"]], writing), daemon=True
                ).start()
        except (OSError, ValueError) as error:
            # Else the process was ended meanwhile.
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                self._failure = UsageError("the statement reads its tables too often at once")
            self._process.kill()

    def _send(self, table: Any, descriptor: int) -> None:
        """Writes the rows of a table to a pipe, as far as they are read."""
        try:
            with os.fdopen(descriptor, "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
                for batch in table.to_batches():
                    out.write_batch(batch)
        except BrokenPipeError:
            pass
        except Exception as error:  # noqa: BLE001 - raised by `rows`
            self._failure = error
            self._process.kill()


def _program() -> list[str]:
    """The program and what it needs to find DuckDB."""
    paths = [path for path in sys.path if os.path.isabs(path)]
    return [str(_PROGRAM), json.dumps(paths)]


def _environment() -> dict[str, str]:
    """What the process needs of this one's environment."""
    kept = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
    # Each arena of the C library takes address space, which is limited.
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "MALLOC_ARENA_MAX": "1"
    }


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
