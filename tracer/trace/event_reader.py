"""Reads the events of one rank process from its stream or its final file.

The file may come from a stranger or from a process that died while it wrote: every batch is
validated, and bytes that cannot be read are counted.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.arrow_arrays import integers, strings
from ddltrace.tracer.trace.schema import ADDED, EVENTS, SCHEMA_NAME
from ddltrace.tracer.trace.stream_frames import Scan, scan_stream
from ddltrace.tracer.trace.trace_files import (
    FILE_SUFFIX,
    event_path,
    require_regular_file,
)

_KEPT_BYTES: Final = 4 << 20
_FILE_MAGIC: Final = b"ARROW1"
_Content: TypeAlias = bytes | mmap.mmap
_DECODING_ERRORS: Final = (pa.ArrowException, OSError, MemoryError, OverflowError)


def read_events(directory: Path, segment: str) -> tuple[pa.Table, int]:
    """Reads the events of one rank process, as much as can be read.

    Args:
        directory: The trace directory.
        segment: Base name of the process's files.

    Returns:
        The events in the order they were recorded, and how many bytes at the end of the
        file could not be read.

    Raises:
        TraceError: There is no event file, or nothing in it can be read.
    """
    return read_table(EventReader(directory, segment), EVENTS)


def read_table(reader: ArrowReader, schema: pa.Schema) -> tuple[pa.Table, int]:
    """Reads all batches of one file or stream as a table.

    Args:
        reader: Iterates over the batches.
        schema: The columns of the batches.

    Returns:
        The rows in the order in which they were written, and how many bytes at the end of the
        file could not be read.

    Raises:
        TraceError: The file has other columns, or cannot be opened.
    """
    table = pa.Table.from_batches(list(reader), schema=schema)
    return table.unify_dictionaries(), reader.lost_bytes


class ArrowReader:
    """Iterates over the batches of one file or stream of a trace, stopping at the first damage.

    Args:
        path: The file or stream.
        schema: The columns that it must have.
        added: Columns that older files lack; they are read as nulls.
        columns: Read only these, which is several times faster; all by default.
        most: Read at most this many batches, evenly spread over the file; all by default.

    Attributes:
        lost_bytes: After the iteration: bytes that could not be read.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        added: Collection[str] = (),
        columns: Collection[str] | None = None,
        most: int | None = None,
    ) -> None:
        self._most = most
        self.lost_bytes = 0
        self._path = path
        self._schema = schema
        self._added = frozenset(added)
        self._columns = [name for name in schema.names if columns is None or name in columns]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self.lost_bytes = 0
        is_file = self._path.suffix == FILE_SUFFIX
        try:
            require_regular_file(self._path)
            content = _map(self._path)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be opened: {error}") from error
        size = len(content)
        # After its magic bytes, a file is a stream. Reading it as a stream avoids trusting the
        # footer.
        start = 8 if is_file else 0
        if is_file and content[:6] != _FILE_MAGIC:
            self.lost_bytes += max(1, size)
            return
        scan = scan_stream(memoryview(content), start, _ReleasedPages(content))
        if is_file and not scan.marked:
            self.lost_bytes += max(1, size - scan.end)
        elif not scan.marked:
            # A stream that ends between two messages has no known loss.
            self.lost_bytes += size - scan.end
        if scan.end > start:
            if self._most is not None and scan.batches > self._most:
                content = _some_batches(content, start, scan, self._most)
                yield from self._read_stream(content, 0, len(content))
            else:
                yield from self._read_stream(content, start, scan.end)

    def _read_stream(self, content: _Content, start: int, end: int) -> Iterator[pa.RecordBatch]:
        data = pa.py_buffer(content).slice(start, end - start)
        source = pa.BufferReader(data)
        good, passed = 0, _ReleasedPages(content)
        try:
            names = self._checked_names(pa.ipc.read_schema(data))
            stored = [number for number, name in enumerate(names) if name in self._columns]
            missing = [name for name in self._columns if name not in names]
            options = pa.ipc.IpcReadOptions(included_fields=stored)
            reader = pa.ipc.open_stream(source, options=options)
            while True:
                good = source.tell()
                batch = reader.read_next_batch()
                batch.validate(full=True)
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if column.null_count and not self._schema.field(name).nullable:
                        raise pa.ArrowInvalid("null where none may be")
                yield self._complete(batch) if missing else batch
                passed(start + source.tell())
        except StopIteration:
            return
        except _DECODING_ERRORS:
            self.lost_bytes += max(1, data.size - good)

    def _checked_names(self, schema: pa.Schema) -> list[str]:
        """The columns of the file.

        Raises:
            TraceError: They are not those of this version or of an older, supported version.
        """
        found = (schema.metadata or {}).get(b"ddltrace.schema", b"").decode("utf-8", "replace")
        try:
            names = list(schema.names)
        except UnicodeDecodeError:  # damaged
            names = []
        expected = [
            field for field in self._schema if field.name in names or field.name not in self._added
        ]
        if found != SCHEMA_NAME or not schema.equals(pa.schema(expected)):
            raise TraceError(
                f"{self._path}: schema {found!r:.80} is not {SCHEMA_NAME!r}; "
                "read it with the version of ddltrace that wrote it"
            )
        return names

    def _complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Adds null columns for those that the file lacks."""
        columns = [
            batch.column(name) if name in batch.schema.names else _nulls(name, batch.num_rows)
            for name in self._columns
        ]
        fields = [self._schema.field(name) for name in self._columns]
        schema = pa.schema(fields, self._schema.metadata)
        return pa.RecordBatch.from_arrays(columns, schema=schema)


class EventReader(ArrowReader):
    """Iterates over the batches of one event file or stream, stopping at the first damage.

    Args:
        directory: The trace directory.
        segment: Base name of the process's files.
        columns: Read only these, which is several times faster; all by default.
        most: Read at most this many batches, evenly spread over the file; all by default.

    Attributes:
        lost_bytes: After the iteration: bytes that could not be read.
    """

    def __init__(
        self,
        directory: Path,
        segment: str,
        columns: Collection[str] | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(event_path(directory, segment), EVENTS, ADDED, columns, most)


def _some_batches(content: _Content, start: int, scan: Scan, most: int) -> bytes:
    """The stream with some of its record batches, the first and the last one among them."""
    kept = set(np.unique(np.linspace(0, scan.batches - 1, most).round().astype(int)).tolist())
    parts, number, begin = [], 0, start
    for end, is_batch in scan.messages:
        if not is_batch or number in kept:
            parts.append(content[begin:end])
        number += is_batch
        begin = end
    return b"".join(parts)


def _nulls(name: str, rows: int) -> pa.Array:
    """A column of text without values."""
    kind = EVENTS.field(name).type
    codes = integers(np.zeros(rows, np.int64), np.ones(rows, bool), kind.index_type)
    return pa.DictionaryArray.from_arrays(codes, strings([]))


class _ReleasedPages:
    """Releases pages of a mapped file after they were read; otherwise they count as used memory."""

    def __init__(self, content: _Content) -> None:
        self._content = content
        self._done = 0

    def __call__(self, end: int) -> None:
        """Releases all pages before `end`, which can be read again."""
        done = end // mmap.PAGESIZE * mmap.PAGESIZE
        if isinstance(self._content, mmap.mmap) and done - self._done >= _KEPT_BYTES:
            self._content.madvise(mmap.MADV_DONTNEED, self._done, done - self._done)
            self._done = done


def _map(path: Path) -> _Content:
    """A file's content, mapped into memory.

    Raises:
        OSError: It cannot be opened.
    """
    with open(path, "rb") as file:
        if path.stat().st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
