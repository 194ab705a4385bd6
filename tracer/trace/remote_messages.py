"""Reads the messages of an Arrow file or stream in a store: all, or only what is needed of them.

A reader of all columns and batches gets the file in large pieces, in order. A reader of some
columns or batches gets the footer first, then the headers of all messages, and then only the
buffers of these columns in these batches. Message by message, `stream_frames` checks what is
decoded; the footer only says what to fetch.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from ddltrace.tracer.trace.batch_facts import BatchFacts, read_facts
from ddltrace.tracer.trace.stream_frames import (
    FILE_MAGIC,
    FILE_START,
    Block,
    buffers_of_batch,
    message_length,
    read_footer,
    scan_stream,
)
from ddltrace.tracer.trace.trace_files import FILE_SUFFIX

if TYPE_CHECKING:
    from ddltrace.tracer.storage.remote_path import RemotePath

_TAIL_BYTES: Final = 32 << 10
_FOOTER_END: Final = 10
"""Length of the footer, and the magic bytes after it."""
_PIECE_BYTES: Final = 8 << 20
_BLOCKS_AHEAD: Final = 8
_START_BYTES: Final = 4 << 10


class Outline(NamedTuple):
    """The messages of a file.

    Attributes:
        blocks: Where each dictionary and batch lies, in the order of the file.
        headers: The header of each, with the eight bytes before it.
        schema: The first message, with the schema.
    """

    blocks: list[Block]
    headers: list[bytes]
    schema: bytes

    def known_facts(self) -> list[BatchFacts | None]:
        """The facts about each batch; None where the file lacks them."""
        return [
            read_facts(header)
            for block, header in zip(self.blocks, self.headers, strict=True)
            if block.is_batch
        ]

    def facts(self) -> list[BatchFacts] | None:
        """The facts about every batch; None if the file lacks any."""
        found = self.known_facts()
        known = [facts for facts in found if facts is not None]
        return known if len(known) == len(found) else None


class RemoteMessages:
    """The messages of one file or stream in a store.

    Args:
        path: The file.

    Attributes:
        lost_bytes: After the iteration: bytes that could not be read.
        checksum: After the iteration over all messages of a file: the CRC-32 of the file.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._start = FILE_START if path.suffix == FILE_SUFFIX else 0
        self.lost_bytes = 0
        self.checksum: int | None = None

    def outline(self) -> Outline | None:
        """Reads the footer and the headers; None if it is a stream or the footer is damaged.

        Raises:
            StoreError: The store cannot be read.
        """
        if not self._start or self._size < FILE_START + _FOOTER_END:
            return None
        first = max(self._size - _TAIL_BYTES, 0)
        start, tail = self._path.read_ranges(
            [(0, min(_START_BYTES, self._size)), (first, self._size)]
        )
        length = int.from_bytes(tail[-_FOOTER_END:-6], "little")
        begin = self._size - _FOOTER_END - length
        if tail[-6:] != FILE_MAGIC or start[:6] != FILE_MAGIC or begin < FILE_START:
            return None
        if begin < first:
            tail, first = self._path.read_ranges([(begin, self._size)])[0], begin
        try:
            blocks = read_footer(tail[begin - first : -_FOOTER_END], begin)
            end = blocks[0].begin if blocks else begin
            schema = start[FILE_START:end]
            if end > len(start):
                schema = self._path.read_ranges([(FILE_START, end)])[0]
            length = message_length(schema) or len(schema)
            # Of a dictionary, everything is needed.
            ranges = [
                (block.begin, block.begin + block.header if block.is_batch else block.end)
                for block in blocks
            ]
            return Outline(blocks, self._path.read_ranges(ranges), schema[:length])
        except ValueError:
            return None

    def chosen(
        self,
        outline: Outline,
        fields: Sequence[int] | None,
        schema: pa.Schema,
        numbers: Collection[int],
    ) -> Iterator[bytes]:
        """Yields messages of which bytes that are not needed were not fetched, but are zero.

        Args:
            outline: The messages of the file.
            fields: Numbers of the columns that are needed; None for all.
            schema: The columns of the file.
            numbers: Numbers of the batches that are needed.

        Raises:
            StoreError: The store cannot be read.
        """
        self.lost_bytes, number = 0, -1
        wanted: list[tuple[Block, bytes]] = []
        for block, header in zip(outline.blocks, outline.headers, strict=True):
            if block.is_batch:
                number += 1
                if number not in numbers:
                    continue
            wanted.append((block, header))
        for begin in range(0, len(wanted), _BLOCKS_AHEAD):
            yield from self._fetched(wanted[begin : begin + _BLOCKS_AHEAD], fields, schema)
            if self.lost_bytes:
                return

    def _fetched(
        self, wanted: list[tuple[Block, bytes]], fields: Sequence[int] | None, schema: pa.Schema
    ) -> Iterator[bytes]:
        ranges: list[tuple[int, int]] = []
        owners: list[int] = []
        for index, (block, header) in enumerate(wanted):
            if not block.is_batch:
                continue
            for begin, end in _needed(block, header, fields, schema):
                ranges.append((begin, end))
                owners.append(index)
        pieces = zip(owners, ranges, self._path.read_ranges(ranges), strict=True)
        of_block = {
            owner: list(group) for owner, group in itertools.groupby(pieces, lambda piece: piece[0])
        }
        for index, (block, header) in enumerate(wanted):
            message = bytearray(block.end - block.begin)
            message[: len(header)] = header
            for _, (begin, end), content in of_block.get(index, ()):
                message[begin - block.begin : end - block.begin] = content
            if not _is_whole(message):
                self.lost_bytes = self._size - block.begin
                return
            yield bytes(message)

    def all(self) -> Iterator[bytes]:
        """Yields every message, as far as they are intact.

        Raises:
            StoreError: The store cannot be read.
        """
        self.lost_bytes, self.checksum = 0, None
        checksum, held, at = 0, bytearray(), 0
        pieces = self._pieces()
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
            held += piece
            if not at and self._start:
                if bytes(held[:6]) != FILE_MAGIC:
                    self.lost_bytes = max(1, self._size)
                    return
                del held[: self._start]
                at = self._start
            while (length := _length_or_none(held)) is not None and length <= len(held):
                if length == 0:  # the end-of-stream mark; a file's footer follows
                    self._finish(pieces, checksum)
                    return
                message = bytes(held[:length])
                if not _is_whole(message):
                    self.lost_bytes = self._size - at
                    return
                del held[:length]
                at += length
                yield message
        self.lost_bytes = self._size - at
        if self._start:
            self.lost_bytes = max(1, self.lost_bytes)

    def _finish(self, pieces: Iterator[bytes], checksum: int) -> None:
        if self._start:
            for piece in pieces:
                checksum = zlib.crc32(piece, checksum)
            self.checksum = checksum

    def _pieces(self) -> Iterator[bytes]:
        for begin in range(0, self._size, _PIECE_BYTES):
            yield self._path.read_ranges([(begin, min(begin + _PIECE_BYTES, self._size))])[0]


def _length_or_none(data: bytearray) -> int | None:
    """The length of the first message; None if it is not complete, or damaged."""
    try:
        return message_length(data)
    except ValueError:
        return None


def _is_whole(message: bytes | bytearray) -> bool:
    """Whether a message is intact and of plausible size."""
    return scan_stream(memoryview(message), 0).end == len(message)


def _needed(
    block: Block, header: bytes, fields: Sequence[int] | None, schema: pa.Schema
) -> list[tuple[int, int]]:
    """The bytes of a batch's body that hold some columns."""
    body = block.begin + block.header
    if fields is None:
        return [(body, block.end)]
    try:
        buffers = buffers_of_batch(header)
    except ValueError:
        return [(body, block.end)]
    counts = [_number_of_buffers(field.type) for field in schema]
    firsts = list(itertools.accumulate(counts, initial=0))
    if firsts[-1] != len(buffers):
        return [(body, block.end)]
    needed = []
    for field in fields:
        for offset, length in buffers[firsts[field] : firsts[field + 1]]:
            if length > 0 and offset >= 0 and offset + length <= block.body:
                needed.append((body + offset, body + offset + length))
    return needed


def _number_of_buffers(kind: pa.DataType) -> int:
    if pa.types.is_list(kind):
        return 2 + _number_of_buffers(kind.value_type)
    return 3 if pa.types.is_string(kind) else 2
