"""The tail of a stream: what was recorded since its last batch, as it came.

To build a batch of `EVENTS` costs a busy machine a millisecond, most of it to get code and
columns into its caches, and a rank that is killed may lose a quarter of a second at most. So the
writer notes five times a second only what it took out of the recorder, which costs a third, and
makes batches of it later; a reader of what is left makes the last one itself, with the same code.
What no batch can be made of, on a full disk or for want of memory, is left here for good.

The tail is an Arrow IPC stream of its own. A batch of it is what was taken at one time: the first
of its two values holds the flat rows as 64-bit integers, the second all else as JSON. The first
batch also says how many the stream had: a tail that is older than the stream's last batch is part
of that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ddltrace.tracer.batches import BatchBuilder, Context
from ddltrace.tracer.frames import scan_stream
from ddltrace.tracer.recorder import Message, Site, Taken
from ddltrace.tracer.schema import KINDS, STATUSES

_SCHEMA: Final = pa.schema(
    [pa.field("taken", pa.binary(), nullable=False)],
    metadata={b"ddltrace.schema": b"ddltrace.tail/1"},
)
_MAX_BYTES: Final = 256 << 20
_FRAME_BYTES: Final = 4096
_MESSAGE_FIELDS: Final = (
    *("id", "op", "group", "enqueue_ns", "start_ns", "end_ns", "name", "seq", "peer", "tag"),
    *("bytes", "out_bytes", "dtype", "status", "tensors", "step", "phase"),
)
_WORDS: Final = {"op", "group", "name", "dtype", "status"}
_NULLABLE: Final = {
    *("end_ns", "seq", "peer", "tag", "bytes", "out_bytes", "dtype", "tensors", "step"),
}
_DAMAGE: Final = (
    *(pa.ArrowException, OSError, MemoryError, OverflowError, RecursionError),
    *(ValueError, KeyError, TypeError, IndexError, AttributeError),
)


class TailWriter:
    """Writes the tail of one stream.

    Args:
        path: Where to.
        sites: The recorder's.
    """

    def __init__(self, path: Path, sites: Sequence[Site]) -> None:
        self._path = path
        self._sites = sites
        self._raw: Any = None
        self._writer: Any = None
        self._head: dict[str, Any] = {}
        self._told: set[int] = set()

    def begin(self, batches: int, context: Context) -> None:
        """Begins anew: all that was noted so far is in the stream.

        Args:
            batches: How many the stream has.
            context: What they leave for the next.
        """
        self._head = {
            "batches": batches,
            "threads": list(context.threads.items()),
            "context": [context.steps, context.phases],
        }
        if self._raw is not None:
            self.close()
            self._path.unlink(missing_ok=True)

    def append(self, taken: Taken) -> None:
        """Notes what was taken, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        cells = array("q", taken.flat)
        new = set(cells[::4]) - self._told
        self._told |= new
        row = {
            "sites": [[number, *self._sites[number]] for number in new],
            "ended": [_row(message) for message in taken.ended],
            "open": [_row(message) for message in taken.open],
            "waits": taken.waits,
            "steps": taken.step_changes,
            "phases": taken.phase_changes,
        }
        if self._raw is None:
            self._raw = pa.OSFile(str(self._path), "wb")
            options = pa.ipc.IpcWriteOptions(use_threads=False)
            self._writer = pa.ipc.new_stream(self._raw, _SCHEMA, options=options)
            row |= self._head
        values = _two_values(cells.tobytes(), json.dumps(row).encode())
        good = self._raw.tell()
        if good + values.nbytes > _MAX_BYTES - _FRAME_BYTES:
            raise OSError(errno.EFBIG, "the tail is longer than its readers allow")
        try:
            self._writer.write_batch(pa.RecordBatch.from_arrays([values], schema=_SCHEMA))
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(self._path, good)
            raise

    def close(self) -> None:
        """Lets go of the file as it is: in a forked child, whose parent goes on."""
        raw, self._raw, self._writer = self._raw, None, None
        self._told = set()
        if raw is not None:
            raw.close()


def read_tail(
    content: bytes, batches: int, words: Mapping[str, Sequence[str]]
) -> tuple[pa.RecordBatch | None, int]:
    """Makes the batch that the writer would have made.

    Args:
        content: What lay in the file before the stream was read.
        batches: How many batches the stream has.
        words: The dictionaries of its coded columns.

    Returns:
        A batch of schema `EVENTS`, None if there is nothing that the stream does not have; and
        how many bytes could not be read.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return _read(content, batches, words)
    except _DAMAGE as error:
        raise ValueError(f"the tail is damaged: {error!r:.120}") from error


def _read(
    content: bytes, batches: int, words: Mapping[str, Sequence[str]]
) -> tuple[pa.RecordBatch | None, int]:
    end = scan_stream(memoryview(content), 0).end
    lost = len(content) - end
    if end == 0:
        return None, lost
    if end > _MAX_BYTES:
        raise ValueError("too long")
    reader = pa.ipc.open_stream(pa.py_buffer(content[:end]))
    if not reader.schema.equals(_SCHEMA, check_metadata=True):
        raise ValueError("not a tail of this version")
    taken, context = Taken(), None
    numbers: dict[int, int] = {}
    sites: list[Site] = []
    for batch in reader:
        batch.validate(full=True)
        raw, text = batch["taken"].to_pylist()
        row = json.loads(text)
        if context is None:
            if row["batches"] < batches:
                return None, 0
            context = _context(row, words)
        for number, kind, name, tensor in row["sites"]:
            if not 0 <= kind < len(KINDS) or not isinstance(name, str):
                raise ValueError("site")
            numbers[number] = len(sites)
            sites.append((kind, name, int(tensor)))
        flat = _cells(raw)
        flat[::4] = [numbers[number] for number in flat[::4]]
        taken.extend(
            Taken(
                flat,
                [_message(values) for values in row["ended"]],
                [_message(values) for values in row["open"]],
                [(int(a), int(b), int(c), str(d), int(e)) for a, b, c, d, e in row["waits"]],
                [int(value) for value in row["steps"]],
                [int(value) for value in row["phases"]],
            )
        )
    ended = {message.id for message in taken.ended}
    taken.open = [message for message in taken.open if message.id not in ended]
    made = BatchBuilder(sites, context).build(taken)
    if made is not None:
        made.validate(full=True)
    return made, lost


def _context(row: dict[str, Any], words: Mapping[str, Sequence[str]]) -> Context:
    steps, phases = row["context"]
    return Context(
        words,
        {int(ident): str(name) for ident, name in row["threads"]},
        [int(value) for value in steps],
        [int(value) for value in phases],
    )


def _cells(raw: bytes) -> list[int]:
    cells = np.frombuffer(raw, np.int64)
    if len(cells) % 4:
        raise ValueError("cells")
    values: list[int] = cells.tolist()
    return values


def _row(message: Message) -> list[Any]:
    return [getattr(message, name) for name in _MESSAGE_FIELDS]


def _message(values: Sequence[Any]) -> Message:
    message = Message(0, "", "", 0)
    for name, value in zip(_MESSAGE_FIELDS, values, strict=True):
        if value is None:
            valid = name in _NULLABLE
        elif name == "tensors":
            valid = all(type(tensor) is int for tensor in value)
        else:
            valid = type(value) is (str if name in _WORDS else int)
        if not valid:
            raise ValueError(f"message {name}")
        setattr(message, name, value)
    if message.status not in STATUSES:
        raise ValueError("status")
    return message


def _two_values(first: bytes, second: bytes) -> pa.Array:
    """A column of two values, without `pa.array`; see `arrays`."""
    offsets = struct.pack("=3i", 0, len(first), len(first) + len(second))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(first + second)]
    return pa.Array.from_buffers(pa.binary(), 2, buffers)
