"""Writes the events or counters of a running process to an Arrow IPC stream.

Batches are appended without a buffer in user space that outlives a call, so every complete batch
survives any death of the process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ddltrace.tracer.trace.protected_file import ProtectedFile
from ddltrace.tracer.trace.schema import EVENTS

_BUFFER_BYTES: Final = 1 << 20


def buffered(file: Any) -> pa.NativeFile:
    """Wraps a Python file in a buffer; otherwise Arrow calls it for every piece of a batch."""
    return pa.BufferedOutputStream(pa.PythonFile(file, "w"), _BUFFER_BYTES)


class StreamWriter:
    """Appends batches to an IPC stream; each batch has been passed to the kernel on return."""

    def __init__(self, path: Path, schema: pa.Schema = EVENTS) -> None:
        self._path = path
        self._file = ProtectedFile(path)
        # Uses little processor time: the fastest codec (the final file is compressed better), and
        # no threads, which would not survive the job's forks.
        self._buffer = buffered(self._file)
        options = pa.ipc.IpcWriteOptions(
            compression="lz4", emit_dictionary_deltas=True, use_threads=False
        )
        self._writer = pa.ipc.new_stream(self._buffer, schema, options=options)
        self._buffer.flush()
        self._good = self._file.length
        self._is_cut = False

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends one batch.

        Raises:
            OSError: The disk is full or gone.
        """
        self._writer.write_batch(batch)
        self._buffer.flush()
        self._good = self._file.length

    def cut(self) -> None:
        """After a failed write: removes the incomplete batch."""
        self._is_cut = True
        with contextlib.suppress(OSError):
            os.truncate(self._path, self._good)

    def close(self) -> None:
        """Writes the end-of-stream mark; the stream is also readable without it."""
        try:
            if not self._is_cut:
                self._writer.close()
                self._buffer.flush()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Drops the stream without writing, in a forked child, whose parent continues."""
        self._file.close()
