"""Writes the events or counters of a running process to an Arrow IPC stream.

Batches are appended without a buffer in user space that outlives a call, so every complete batch
survives any death of the process.
"""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from ddltrace.tracer.trace.protected_file import ProtectedFile
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_frames import scan_stream

_BUFFER_BYTES: Final = 1 << 20
_MOST_WAITING_BYTES: Final = 4 << 20


def buffered(file: Any) -> pa.NativeFile:
    """Wraps a Python file in a buffer; otherwise Arrow calls it for every piece of a batch."""
    return pa.BufferedOutputStream(pa.PythonFile(file, "w"), _BUFFER_BYTES)


class _Encoded(NamedTuple):
    """Messages of a stream, with the number of their rows."""

    data: bytes
    rows: int


class StreamWriter:
    """Appends batches to an IPC stream; each batch has been passed to the kernel on return.

    Batches that the disk does not take are kept, up to a limit, and written when it does again. Of
    batches beyond the limit only the dictionaries are kept, on which later batches build.

    Attributes:
        missing: Rows that are not in the file: those that wait, and those that were dropped.
    """

    def __init__(self, path: Path, schema: pa.Schema = EVENTS) -> None:
        self._file = ProtectedFile(path)
        self._sink = _Sink()
        # Uses little processor time: the fastest codec (the final file is compressed better), and
        # no threads, which would not survive the job's forks.
        self._buffer = buffered(self._sink)
        options = pa.ipc.IpcWriteOptions(
            compression="lz4", emit_dictionary_deltas=True, use_threads=False
        )
        self._writer = pa.ipc.new_stream(self._buffer, schema, options=options)
        self._buffer.flush()
        self._waiting = deque([_Encoded(self._sink.take(), 0)])
        self._is_damaged = False
        self._is_reported = False
        self.missing = 0
        with contextlib.suppress(OSError):
            self._write_waiting()

    def write(self, batch: pa.RecordBatch | None) -> None:
        """Appends what waits, and a batch.

        Raises:
            OSError: The disk is full or gone; later calls write what waits.
        """
        if batch is not None:
            self.missing += batch.num_rows
            self._waiting.append(_Encoded(self._encode(batch), batch.num_rows))
        try:
            self._write_waiting()
        except OSError:
            self._limit_waiting()
            raise
        self._is_reported = False

    def is_to_be_reported(self, *, last: bool) -> bool:
        """Whether a failed write is to be reported: when rows are lost, once until a write works.

        Args:
            last: Whether there are no later calls, which could write what waits.
        """
        is_new = not self._is_reported and (last or self.is_losing())
        self._is_reported = self._is_reported or is_new
        return is_new

    def is_losing(self) -> bool:
        """Whether rows have been dropped."""
        return self.missing > sum(encoded.rows for encoded in self._waiting)

    def _encode(self, batch: pa.RecordBatch) -> bytes:
        if self._is_damaged:
            raise OSError("an earlier batch could not be encoded")
        self._is_damaged = True  # if there is no memory for it, for example
        self._writer.write_batch(batch)
        self._buffer.flush()
        self._is_damaged = False
        return self._sink.take()

    def _write_waiting(self) -> None:
        while self._waiting:
            data, rows = self._waiting[0]
            self._file.write(data)
            self._waiting.popleft()
            self.missing -= rows

    def _limit_waiting(self) -> None:
        if sum(len(encoded.data) for encoded in self._waiting) > _MOST_WAITING_BYTES:
            kept = _without_batches(self._waiting.pop().data)
            if kept:
                self._waiting.append(_Encoded(kept, 0))

    def close(self) -> None:
        """Writes the end-of-stream mark; the stream is also readable without it."""
        try:
            if not self._waiting and not self._is_damaged:
                self._writer.close()
                self._buffer.flush()
                self._file.write(self._sink.take())
        except OSError:
            pass  # the disk is full
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Drops the stream without writing, in a forked child, whose parent continues."""
        self._file.close()


def _without_batches(data: bytes) -> bytes:
    """The messages of a stream that are not record batches: the schema and dictionaries."""
    begin, kept = 0, []
    for end, is_batch in scan_stream(memoryview(data), 0).messages:
        if not is_batch:
            kept.append(data[begin:end])
        begin = end
    return b"".join(kept)


class _Sink:
    """Collects what is written, for `pa.PythonFile`."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        self._length += len(data)
        return len(data)

    def take(self) -> bytes:
        """What was written since the last call."""
        taken, self._pieces = b"".join(self._pieces), []
        return taken

    def tell(self) -> int:
        return self._length

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
