"""Writes final event files, and verifies their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa

from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.storage.plain_files import create_like, open_plain
from ddltrace.tracer.trace.batch_facts import facts_metadata
from ddltrace.tracer.trace.run_info import RankInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_writer import buffered
from ddltrace.tracer.trace.trace_files import (
    FILE_SUFFIX,
    STREAM_SUFFIX,
    counters_path,
    event_path,
)

_ROWS_PER_BATCH: Final = 1 << 16
_BUFFER_BYTES: Final = 1 << 20


def write_events(
    directory: Path, segment: str, batches: Iterator[pa.RecordBatch]
) -> tuple[int, int]:
    """Writes a final event file from batches, in memory bounded by one written batch.

    Args:
        directory: The trace directory.
        segment: Base name of the process's files.
        batches: Batches of schema `EVENTS` whose dictionaries only grow.

    Returns:
        The number of rows written, and the file's CRC-32.
    """
    path = directory / (segment + FILE_SUFFIX)
    return write_batches(path, EVENTS, batches, facts_metadata)


def write_batches(
    path: Path,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    metadata: Callable[[pa.RecordBatch], dict[bytes, bytes]] | None = None,
) -> tuple[int, int]:
    """Writes a final file from batches, in memory bounded by one written batch.

    Args:
        path: The file to write. It has the permissions of the stream that it replaces.
        schema: The schema of the batches, whose dictionaries only grow.
        metadata: Gives the custom metadata of each written batch.

    Returns:
        The number of rows written, and the file's CRC-32.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    rows = 0
    try:
        with (
            create_like(path.with_suffix(STREAM_SUFFIX), temporary) as file,
            buffered(summed := _ChecksummedFile(file)) as sink,
            pa.ipc.new_file(sink, schema, options=options) as writer,
        ):
            for group in grouped(batches, _ROWS_PER_BATCH):
                table = pa.Table.from_batches(group, schema=schema).unify_dictionaries()
                for batch in table.combine_chunks().to_batches():
                    writer.write_batch(batch, None if metadata is None else metadata(batch))
                    rows += batch.num_rows
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return rows, summed.checksum


def checksum_of(path: Location) -> int:
    """Computes the CRC-32 of a file.

    Raises:
        OSError: The file is not a plain file or cannot be read.
    """
    found = 0
    with open_plain(path) as file:
        while piece := file.read(_BUFFER_BYTES):
            found = zlib.crc32(piece, found)
    return found


def matches_checksum(directory: Location, info: RankInfo) -> bool:
    """Whether a rank's final file has the checksum that ``run.json`` gives.

    True as well where there is nothing to verify: the file is still a stream, ``run.json`` gives
    no checksum, or the file cannot be read, which its reader reports. A file in a store is not
    read for this: a reader of all of it knows its checksum at the end.
    """
    return _matches(event_path(directory, info.segment), info.checksum)


def counters_match_checksum(directory: Location, info: RankInfo) -> bool:
    """Whether a rank's final counter file has the checksum that ``run.json`` gives."""
    return _matches(counters_path(directory, info.segment), info.counters_checksum)


def _matches(path: Location, checksum: int | None) -> bool:
    if checksum is None or path.suffix != FILE_SUFFIX or not isinstance(path, Path):
        return True
    try:
        return checksum_of(path) == checksum
    except OSError:
        return True


def grouped(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    """Groups consecutive batches so that each group has at least a given number of rows."""
    group: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        group.append(batch)
        count += batch.num_rows
        if count >= rows:
            yield group
            group, count = [], 0
    if group:
        yield group


class _ChecksummedFile:
    """A file that computes its checksum while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.checksum = 0
        self.close, self.flush, self.tell = file.close, file.flush, file.tell

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)
