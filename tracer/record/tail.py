"""The tail of a stream: what was recorded since its last batch, as it came.

To build a batch of `EVENTS` costs a busy machine a millisecond, most of it to get code and
columns into its caches, and a rank that is killed may lose a quarter of a second at most. So the
writer notes five times a second only what it took out of the recorder, which costs a seventh, and
makes batches of it later; a reader of what is left makes the last one itself, with the same code.
What no batch can be made of, on a full disk or for want of memory, is left here for good.

The tail is a sequence of notes, each of what was taken at one time: a header, rows of 64-bit
integers, and all else as JSON; see `_HEADER`. The first note also says how many batches the stream
had: a tail that is older than the stream's last batch is part of that. It is no Arrow stream: to
have one of those written took half of the time.
"""

from __future__ import annotations

import errno
import itertools
import json
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ddltrace.tracer.record.batches import BatchBuilder, Context, still_open
from ddltrace.tracer.record.recorder import (
    FLAT_CELLS,
    REPEAT_FIELDS,
    WAIT_CELLS,
    Message,
    Recorder,
    Site,
    Taken,
)
from ddltrace.tracer.trace.protected_file import OwnFile
from ddltrace.tracer.trace.schema import KINDS, STATUSES

_MAGIC: Final = b"ddltail5"
_HEADER: Final = struct.Struct("=8s7I")
"""The magic; cells of flat rows, of repeated messages, of waits, of changes of the step and of the
phase; bytes of JSON; CRC-32 of all these."""

_MAX_BYTES: Final = 256 << 20
_CELL_BYTES: Final = 8
_CELLS_OF_ROWS: Final = (FLAT_CELLS, len(REPEAT_FIELDS), WAIT_CELLS, 2, 2)
_EMPTY: Final = '{"sites": [], "patterns": [], "ended": [], "open": []}'
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
        recorder: Whose sites and patterns they are that are noted.
    """

    def __init__(self, path: Path, recorder: Recorder) -> None:
        self._path = path
        self._recorder = recorder
        self._file: OwnFile | None = None
        self._head: dict[str, Any] = {}
        self._told_sites: set[int] = set()
        self._told_patterns: set[int] = set()

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
        if self._file is not None:
            self.close()
            self._path.unlink(missing_ok=True)

    def append(self, taken: Taken) -> None:
        """Notes what was taken, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        sites, patterns = self._recorder.sites, self._recorder.patterns
        sites_of_taken = {*taken.flat[::FLAT_CELLS], *taken.waits[::WAIT_CELLS]}
        new_sites = sites_of_taken - self._told_sites
        new_patterns = set(taken.repeats[:: len(REPEAT_FIELDS)]) - self._told_patterns
        row: dict[str, Any] = {
            "sites": [[number, *sites[number]] for number in new_sites],
            "patterns": [[number, _row(patterns[number])] for number in new_patterns],
            "ended": [_row(message) for message in taken.ended],
            "open": [row for _, row in still_open(taken.open, _row)],
        }
        if self._file is None:
            self._file = OwnFile(self._path)
        if self._file.length == 0:
            row |= self._head
        # Most notes of a job in its stride have integers only.
        text = json.dumps(row).encode() if any(row.values()) else b""
        changes = (taken.step_changes, taken.phase_changes)
        integers = (taken.flat, taken.repeats, taken.waits, *changes)
        body = b"".join((*integers, text))
        note = _HEADER.pack(_MAGIC, *map(len, (*integers, text)), zlib.crc32(body)) + body
        if self._file.length + len(note) > _MAX_BYTES:
            raise OSError(errno.EFBIG, "the tail is longer than its readers allow")
        self._file.write(note)
        self._told_sites |= new_sites
        self._told_patterns |= new_patterns

    def close(self) -> None:
        """Lets go of the file as it is: in a forked child, whose parent goes on."""
        file, self._file = self._file, None
        self._told_sites, self._told_patterns = set(), set()
        if file is not None:
            file.close()


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
    if len(content) > _MAX_BYTES:
        raise ValueError("too long")
    taken, context = Taken(), None
    number_of_site: dict[int, int] = {}
    sites: list[Site] = []
    number_of_pattern: dict[int, int] = {}
    patterns: list[Message] = []
    read = 0
    for end, (flat, repeats, waits, steps, phases), text in _notes(content):
        read = end
        row = json.loads(text or _EMPTY)
        if context is None:
            if row["batches"] < batches:
                return None, 0
            context = _context(row, words)
        for number, kind, name, tensor in row["sites"]:
            if not 0 <= kind < len(KINDS) or not isinstance(name, str):
                raise ValueError("site")
            number_of_site[number] = len(sites)
            sites.append((kind, name, int(tensor)))
        for number, values in row["patterns"]:
            number_of_pattern[number] = len(patterns)
            patterns.append(_message(values))
        _renumber(flat, FLAT_CELLS, number_of_site)
        _renumber(waits, WAIT_CELLS, number_of_site)
        _renumber(repeats, len(REPEAT_FIELDS), number_of_pattern)
        taken.extend(
            Taken(
                flat,
                [_message(values) for values in row["ended"]],
                [_message(values) for values in row["open"]],
                waits,
                steps,
                phases,
                repeats,
            )
        )
    ended = {message.id for message in taken.ended}
    taken.open = [message for message in taken.open if message.id not in ended]
    made = BatchBuilder(sites, patterns, context).build(taken)
    if made is not None:
        made.validate(full=True)
    return made, len(content) - read


def _renumber(rows: array[int], cells: int, number_of: Mapping[int, int]) -> None:
    """Puts other numbers of sites, or of patterns, at the beginnings of rows."""
    rows[::cells] = array("q", [number_of[number] for number in rows[::cells]])


def _notes(content: bytes) -> Iterator[tuple[int, list[array[int]], bytes]]:
    """The whole notes of a tail: where each ends, its five sorts of integers, its JSON.

    What is behind the last whole one was being written when the rank died.
    """
    end = 0
    while len(content) - end >= _HEADER.size:
        magic, *counts, text_bytes, checksum = _HEADER.unpack_from(content, end)
        begin = end + _HEADER.size
        ends = [begin + _CELL_BYTES * cells for cells in itertools.accumulate(counts)]
        end = ends[-1] + text_bytes
        if magic != _MAGIC or end > len(content) or zlib.crc32(content[begin:end]) != checksum:
            return
        if any(cells % of_row for cells, of_row in zip(counts, _CELLS_OF_ROWS, strict=True)):
            raise ValueError("cells")
        pieces = [content[a:b] for a, b in itertools.pairwise((begin, *ends))]
        yield end, [array("q", piece) for piece in pieces], content[ends[-1] : end]


def _context(row: dict[str, Any], words: Mapping[str, Sequence[str]]) -> Context:
    steps, phases = row["context"]
    return Context(
        words,
        {int(ident): str(name) for ident, name in row["threads"]},
        [int(value) for value in steps],
        [int(value) for value in phases],
    )


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
