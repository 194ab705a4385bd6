"""Reads the events of one rank process from its stream or its final file.

The file may come from a stranger or from a process that died while it wrote: every batch is
validated, and bytes that cannot be read are counted.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.batch_facts import BatchChoice, BatchFacts
from ddltrace.tracer.trace.mapped_messages import (
    Content,
    MappedMessages,
    ReleasedPages,
    map_file,
)
from ddltrace.tracer.trace.message_feed import MessageFeed
from ddltrace.tracer.trace.schema import ADDED, EVENTS, SCHEMA_NAME
from ddltrace.tracer.trace.stream_frames import FILE_MAGIC, FILE_START, Scan, scan_stream
from ddltrace.tracer.trace.trace_files import (
    FILE_SUFFIX,
    event_path,
)

if TYPE_CHECKING:
    from ddltrace.tracer.storage.remote_path import RemotePath

_DECODING_ERRORS: Final = (pa.ArrowException, OSError, MemoryError, OverflowError)


def read_events(directory: Location, segment: str) -> tuple[pa.Table, int]:
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


def read_batch_facts(directory: Location, segment: str) -> list[BatchFacts] | None:
    """Reads the facts about each batch of a process's file in a store, without its events.

    Returns:
        The facts; None if the file lacks them, as a stream and a file of an older version do.

    Raises:
        TraceError: The store cannot be read.
    """
    from ddltrace.tracer.trace.remote_messages import RemoteMessages

    path = event_path(directory, segment)
    outline = None if isinstance(path, Path) else RemoteMessages(path).outline()
    return None if outline is None else outline.facts()


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
        steps: If the file has facts about its batches, do not decode those without events of these
            steps. Batches after them that have events of no step are read as well. What is damaged
            in the other batches is not noticed.
        later_stepless: Whether batches with events of no step are read up to the end of the file;
            else only those before the first batch whose steps are all later than `steps`.

    Attributes:
        lost_bytes: After the iteration: bytes that could not be read.
        checksum: After the iteration over all of a file in a store: the file's CRC-32.
    """

    def __init__(
        self,
        path: Location,
        schema: pa.Schema,
        added: Collection[str] = (),
        columns: Collection[str] | None = None,
        *,
        most: int | None = None,
        steps: range | None = None,
        later_stepless: bool = True,
    ) -> None:
        self._choice = BatchChoice(most, steps, later_stepless)
        self.lost_bytes = 0
        self.checksum: int | None = None
        self._path = path
        self._schema = schema
        self._added = frozenset(added)
        self._columns = [name for name in schema.names if columns is None or name in columns]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if isinstance(self._path, Path):
            yield from self._read_local(self._path)
        else:
            yield from self._read_remote(self._path)

    def _read_local(self, path: Path) -> Iterator[pa.RecordBatch]:
        self.lost_bytes = 0
        is_file = path.suffix == FILE_SUFFIX
        try:
            content = map_file(path)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be opened: {error}") from error
        size = len(content)
        # After its magic bytes, a file is a stream. Reading it as a stream avoids trusting the
        # footer.
        start = FILE_START if is_file else 0
        if is_file and content[:6] != FILE_MAGIC:
            self.lost_bytes += max(1, size)
            return
        scan = scan_stream(memoryview(content), start, ReleasedPages(content))
        if is_file and not scan.marked:
            self.lost_bytes += max(1, size - scan.end)
        elif not scan.marked:
            # A stream that ends between two messages has no known loss.
            self.lost_bytes += size - scan.end
        if scan.end > start:
            yield from self._read_mapped(content, start, scan)

    def _read_mapped(self, content: Content, start: int, scan: Scan) -> Iterator[pa.RecordBatch]:
        """Reads the chosen batches of the intact part of a file."""
        messages = MappedMessages(content, start, scan)
        needs_facts = self._choice.steps is not None
        facts = messages.facts() if needs_facts else [None] * scan.batches
        try:
            names = self._checked_names(pa.ipc.read_schema(pa.py_buffer(messages.schema())))
            yield from self._decoded(messages.chosen(self._choice.numbers(facts)), names)
        except _DECODING_ERRORS:
            self.lost_bytes += max(1, scan.end - messages.good)

    def _read_remote(self, path: RemotePath) -> Iterator[pa.RecordBatch]:
        """Reads a file in a store: what is needed, if the file says where it is; else all."""
        # Imported here: few traces lie in a store.
        from ddltrace.tracer.trace.remote_messages import RemoteMessages

        self.lost_bytes, self.checksum = 0, None
        source = RemoteMessages(path)
        is_part = len(self._columns) < len(self._schema) or self._choice.is_part
        outline = source.outline() if is_part else None
        messages = source.all() if outline is None else iter([outline.schema])
        first = next(messages, None)
        try:
            if first is not None:
                schema = pa.ipc.read_schema(pa.py_buffer(first))
                names = self._checked_names(schema)
                if outline is not None:
                    fields = [n for n, name in enumerate(names) if name in self._columns]
                    needs_all = len(fields) == len(names)
                    numbers = self._choice.numbers(outline.known_facts())
                    wanted = None if needs_all else fields
                    messages = source.chosen(outline, wanted, schema, numbers)
                yield from self._decoded(itertools.chain([first], messages), names)
        except _DECODING_ERRORS:
            self.lost_bytes += max(1, source.lost_bytes)
        self.lost_bytes = max(self.lost_bytes, source.lost_bytes)
        self.checksum = source.checksum

    def _decoded(
        self, messages: Iterable[bytes | memoryview], names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Decodes messages, the first of which is the schema with the columns of these names."""
        source = pa.PythonFile(MessageFeed(messages), "r")
        reader = pa.ipc.open_stream(source, options=self._options(names))
        with contextlib.suppress(StopIteration):
            while True:
                yield self._next_batch(reader)

    def _options(self, names: Sequence[str]) -> pa.ipc.IpcReadOptions:
        """Decodes the wanted ones of a file's columns only."""
        stored = [number for number, name in enumerate(names) if name in self._columns]
        return pa.ipc.IpcReadOptions(included_fields=stored)

    def _next_batch(self, reader: pa.RecordBatchReader) -> pa.RecordBatch:
        batch = reader.read_next_batch()
        batch.validate(full=True)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count and not self._schema.field(name).nullable:
                raise pa.ArrowInvalid("null where none may be")
        return batch if len(batch.columns) == len(self._columns) else self._complete(batch)

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
            batch.column(name)
            if name in batch.schema.names
            else pa.nulls(batch.num_rows, EVENTS.field(name).type)
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
        steps: Leave out batches without events of these steps, as the process counts them; see
            `ArrowReader`.
        later_stepless: Whether batches with events of no step are read up to the end of the file;
            see `ArrowReader`.

    Attributes:
        lost_bytes: After the iteration: bytes that could not be read.
    """

    def __init__(
        self,
        directory: Location,
        segment: str,
        columns: Collection[str] | None = None,
        most: int | None = None,
        steps: range | None = None,
        *,
        later_stepless: bool = True,
    ) -> None:
        super().__init__(
            event_path(directory, segment),
            EVENTS,
            ADDED,
            columns,
            most=most,
            steps=steps,
            later_stepless=later_stepless,
        )
