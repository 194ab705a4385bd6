"""Reads streams of a trace that are still being written, each batch once."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.trace.counters import COUNTERS
from ddltrace.tracer.trace.schema import SCHEMA_NAME
from ddltrace.tracer.trace.stream_frames import scan_stream

_CHUNK_BYTES: Final = 8 << 20
_MAX_CHUNK_BYTES: Final = 256 << 20


class StreamTail:
    """Some columns of one rank's stream, from its start on.

    The file stays open, so its last batches can be read after the job's end, when the launcher
    replaces the stream by the final file.

    Args:
        path: The stream.
        schema: The schema of the stream.
        columns: Names of the columns to read.

    Raises:
        OSError: The stream cannot be opened.
    """

    def __init__(self, path: Path, schema: pa.Schema, columns: Sequence[str]) -> None:
        self._path = path
        self._schema = schema
        self._columns = columns
        self._file = open_plain(path)
        self._offset = 0
        self._chunk_bytes = _CHUNK_BYTES
        self._feed = _Feed()
        self._reader: Any = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The batches that were completed since the previous call.

        Raises:
            TraceError: The stream is not of this version's schema, or a batch is damaged.
        """
        while True:
            piece = os.pread(self._file.fileno(), self._chunk_bytes, self._offset)
            scan = scan_stream(memoryview(piece), 0)
            if scan.end == 0:
                if len(piece) < self._chunk_bytes or self._chunk_bytes >= _MAX_CHUNK_BYTES:
                    return
                self._chunk_bytes *= 2  # one message is longer than the chunk
                continue
            self._offset += scan.end
            self._feed.append(piece[: scan.end])
            try:
                if self._reader is None:
                    self._reader = self._open(piece[: scan.end])
                for _ in range(scan.batches):
                    batch = self._reader.read_next_batch()
                    batch.validate(full=True)
                    yield batch
            except (pa.ArrowException, OSError, StopIteration) as error:
                raise TraceError(f"{self._path.name} is damaged: {error!s:.120}") from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _open(self, start: bytes) -> Any:
        """A reader of the chosen columns.

        Args:
            start: The start of the stream, with its schema.
        """
        schema = pa.ipc.read_schema(pa.py_buffer(start))
        found = (schema.metadata or {}).get(b"ddltrace.schema", b"").decode("utf-8", "replace")
        wanted = [schema.get_field_index(name) for name in self._columns]
        if found != SCHEMA_NAME or any(
            index < 0 or not schema.field(index).equals(self._schema.field(name))
            for index, name in zip(wanted, self._columns, strict=True)
        ):
            raise TraceError(f"{self._path.name}: schema {found!r:.80} is not {SCHEMA_NAME!r}")
        options = pa.ipc.IpcReadOptions(included_fields=sorted(wanted), use_threads=False)
        return pa.ipc.open_stream(pa.PythonFile(self._feed, "r"), options=options)


class _Feed(io.RawIOBase):
    """Bytes for Arrow's reader, which are added piece by piece and released when read."""

    def __init__(self) -> None:
        super().__init__()
        self._data = b""
        self._at = 0

    def append(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data
        self._at = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._data) if size is None or size < 0 else self._at + size
        piece = self._data[self._at : end]
        self._at += len(piece)
        return piece


class CounterTail:
    """Follows one counter stream.

    Args:
        path: The stream.

    Attributes:
        last: Counter of the process or host -> its newest value.

    Raises:
        OSError: The stream cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._tail = StreamTail(path, COUNTERS, COUNTERS.names)
        self.last: dict[str, float] = {}

    def read(self) -> None:
        """Reads what was written since the previous call.

        Raises:
            TraceError: The stream is damaged.
        """
        for batch in self._tail.batches():
            for name, instance, value in zip(
                batch["name"].to_pylist(),
                batch["instance"].to_pylist(),
                batch["value"].to_pylist(),
                strict=True,
            ):
                if instance is None:
                    self.last[name] = value

    def close(self) -> None:
        """Closes the stream."""
        self._tail.close()
