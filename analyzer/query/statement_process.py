"""The process that runs one statement, with a limit of its own memory.

It is a program for `ddltrace.analyzer.query.sql`, and imports nothing of ddltrace, so that it
starts in a fraction of a second. Standard input is a socket: it brings the statement, and for each
pass over a table a pipe with its rows. The rows of the statement go to standard output as an Arrow
stream, and what went wrong to the socket.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

_BATCH_ROWS: Final = 1 << 16
_ROOM_BYTES: Final = 64_000_000
"""Address space for what the process needs beside its statement, above what it has at the start."""

_PR_SET_PDEATHSIG: Final = 1
_SHUT_IN: Final[dict[str, str | bool | int | float | list[str]]] = {
    # DuckDB may always read and write its folder for temporary files: there is none.
    "temp_directory": "",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
    # Settings can be read: they shall not tell where this user's files are.
    "home_directory": "/",
    "secret_directory": "",
    "extension_directory": "",
}

_SPACE: Final = r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_EXPLAIN: Final = re.compile(
    rf"{_SPACE}EXPLAIN\b{_SPACE}(?:ANALYZE\b)?{_SPACE}", re.IGNORECASE | re.DOTALL
)
_OPTIONS: Final = re.compile(r"\([^()]*\)")
_END: Final = re.compile(rf";{_SPACE}\Z", re.DOTALL)
_OUT_OF_MEMORY: Final = re.compile("out of memory|bad_alloc|alloc of size|allocat", re.IGNORECASE)


class RefusedError(Exception):
    """The statement is not a SELECT."""


class _Tables:
    """Asks for passes over the tables of the trace."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()

    def open(self, name: str) -> Any:
        """A file with the rows of a table as an Arrow stream."""
        with self._lock:
            self._control.sendall(json.dumps({"scan": name}).encode() + b"\n")
            _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not descriptors:
            raise OSError("the table cannot be read")
        return os.fdopen(descriptors[0], "rb")


class _Table:
    """A table that any consumer of Arrow streams can read repeatedly."""

    def __init__(self, tables: _Tables, name: str, schema: Any) -> None:
        self._tables, self._name, self._schema = tables, name, schema

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        reader = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa

        # Opened with the first batch: DuckDB also asks for a stream to learn its schema.
        with self._tables.open(self._name) as file:
            yield from pa.ipc.open_stream(file)


def main() -> None:
    """Runs the statement that comes through standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    import duckdb

    control = socket.socket(fileno=0)
    with duckdb.connect(config=_SHUT_IN) as connection:
        control.sendall(b"{}\n")
        asked = _line(control)
        try:
            _run(connection, control, asked)
            answer = {}
        except RefusedError as error:
            answer = {"kind": "refused", "text": str(error)}
        except MemoryError:
            answer = {"kind": "memory", "text": ""}
        except Exception as error:  # noqa: BLE001 - told to the process that waits for the rows
            text = (str(error).strip() or "no answer").splitlines()[0][:200]
            kind = "memory" if _OUT_OF_MEMORY.search(str(error)) else type(error).__name__
            answer = {"kind": kind, "text": text}
        control.sendall(json.dumps(answer | {"done": True}).encode() + b"\n")
        os._exit(0)  # no worker of DuckDB is waited for


def _line(control: socket.socket) -> dict[str, Any]:
    """The request, which is one line."""
    received = bytearray()
    while not received.endswith(b"\n"):
        part = control.recv(1 << 16)
        if not part:
            sys.exit(1)  # whoever started this process has ended
        received += part
    found: dict[str, Any] = json.loads(received)
    return found


def _run(connection: Any, control: socket.socket, asked: dict[str, Any]) -> None:
    import pyarrow as pa

    _limit(asked["memory_bytes"])
    check_statement(asked["sql"])
    connection.execute(f"SET memory_limit = '{asked['memory_bytes']}B'")
    tables = _Tables(control)
    for name, schema in asked["tables"].items():
        found = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(schema)))
        connection.register(name, _Table(tables, name, found))
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    result = connection.sql(asked["sql"])
    # The name before DuckDB 2.0 is the second one.
    read = getattr(result, "to_arrow_reader", None) or result.fetch_record_batch
    reader = read(_BATCH_ROWS)
    with os.fdopen(1, "wb") as output, pa.ipc.new_stream(output, reader.schema) as stream:
        for batch in reader:
            stream.write_batch(batch)


def _limit(memory_bytes: int) -> None:
    """Limits what the process can allocate from here on, and forbids to write files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        most = now + memory_bytes + _ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def check_statement(sql: str) -> None:
    """Checks that there is one statement, and that it is a SELECT or the EXPLAIN of one.

    Statements that only return rows count as a SELECT, as in DuckDB: ``FROM messages``,
    ``VALUES``, ``PIVOT``, ``DESCRIBE``, and each of them after ``WITH``.

    Raises:
        RefusedError: It is anything else.
        duckdb.Error: It cannot be parsed.
    """
    import duckdb

    kinds = [statement.type.name for statement in duckdb.extract_statements(sql)]
    if kinds == ["EXPLAIN"]:
        explain = _EXPLAIN.match(sql)
        rest = sql[explain.end() :] if explain else ""
        # A parenthesis holds EXPLAIN's options, or is the SELECT itself.
        if not (_is_select(rest) or _is_select(_OPTIONS.sub("", rest, count=1))):
            raise RefusedError("EXPLAIN is for one SELECT only: other statements are refused")
    elif not _is_select(sql):
        raise RefusedError("write one SELECT (or EXPLAIN SELECT): other statements are refused")


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


if __name__ == "__main__":
    sys.path.extend(path for path in json.loads(sys.argv[1]) if path not in sys.path)
    main()
