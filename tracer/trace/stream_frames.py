"""Validates an Arrow IPC stream without decoding it, and finds the end of its intact part.

Arrow trusts the sizes that a stream declares. A few kilobytes can declare gigabytes (a buffer
declares its own uncompressed size), so before any byte is decoded, this module reads the messages'
headers, sums the memory that decoding would allocate, and returns how much of the stream is intact
and of plausible size. Format: "Encapsulated message format" and ``Message.fbs`` of
https://arrow.apache.org/docs/format/Columnar.html; flatbuffers are read in place, with every offset
checked against the header's bounds.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

FILE_MAGIC: Final = b"ARROW1"
"""First and last bytes of a file; a stream has none."""
FILE_START: Final = 8
"""Offset of the first message of a file: its magic bytes, padded."""

_CONTINUATION: Final = 0xFFFFFFFF
_DICTIONARY_BATCH: Final = 2
_RECORD_BATCH: Final = 3

_MAX_HEADER_BYTES: Final = 64 << 20
_MAX_BODY_BYTES: Final = 2 << 30
_FREE_BYTES: Final = 256 << 20
_MAX_RATIO: Final = 1000
"""Limit of the decoded size: a constant plus this many times the bytes read. Real events compress
by a factor of 5 to 20, identical rows by several hundred."""


@dataclass(frozen=True)
class Scan:
    """How far a stream can be decoded.

    Attributes:
        end: Offset after the last message that is intact and of plausible size.
        marked: Whether the end-of-stream mark follows.
        batches: Number of record batches before `end`.
        messages: Of each message before `end`: where it ends, and whether it is a record batch.
    """

    end: int
    marked: bool = False
    batches: int = 0
    messages: tuple[tuple[int, bool], ...] = ()


def scan_stream(
    data: memoryview, start: int, passed: Callable[[int], None] = lambda end: None
) -> Scan:
    """Walks the messages of a stream.

    Args:
        data: The file's bytes.
        start: Where the stream begins in them.
        passed: Called with the end of each message; bytes before it are not read again.
    """
    at, size, declared = start, len(data), 0
    messages: list[tuple[int, bool]] = []

    def scan(*, marked: bool = False) -> Scan:
        return Scan(at, marked, sum(is_batch for _, is_batch in messages), tuple(messages))

    while at < size:
        try:
            word = _u32(data, at)
            if word != _CONTINUATION:
                return scan()
            length = _u32(data, at + 4)
            if length == 0:
                return scan(marked=True)
            header = data[at + 8 : at + 8 + length]
            body_at = at + 8 + length
            kind, body_length, wanted = _message(header, data[body_at:])
            end = body_at + body_length
            if end > size:
                return scan()
        except (struct.error, IndexError, ValueError):
            return scan()
        declared += wanted
        if declared > _FREE_BYTES + _MAX_RATIO * (end - start):
            return scan()
        at = end
        messages.append((at, kind == _RECORD_BATCH))
        passed(at)
    return scan()


@dataclass(frozen=True)
class Block:
    """Where a message lies in a file, as the file's footer says.

    Attributes:
        begin: Offset of the message.
        header: Length of its header, with the eight bytes before it.
        body: Length of its body.
        is_batch: Whether it is a record batch; else a dictionary.
    """

    begin: int
    header: int
    body: int
    is_batch: bool

    @property
    def end(self) -> int:
        """Offset after the message."""
        return self.begin + self.header + self.body


def read_footer(footer: bytes, size: int) -> list[Block]:
    """The messages of an Arrow IPC file, in the order of the file, without its schema.

    Args:
        footer: The flatbuffer at the end of the file.
        size: Size of the file, in which all messages must lie.

    Raises:
        ValueError: The footer is damaged.
    """
    with _damage_of("footer"):
        table = _root(memoryview(footer))
        blocks = [
            Block(begin, header, body, is_batch)
            for field, is_batch in ((2, False), (3, True))
            for begin, header, body in table.blocks(field)
        ]
    blocks.sort(key=lambda block: block.begin)
    end = FILE_START
    for block in blocks:
        if block.begin < end or block.header < 8 or block.body < 0 or block.end > size:
            raise ValueError("footer")
        end = block.end
    return blocks


def message_length(data: bytes | bytearray) -> int | None:
    """The length of the message at the beginning of some bytes.

    Returns:
        The length, with the eight bytes before the header; 0 for the end-of-stream mark; None if
        more bytes are needed to tell.

    Raises:
        ValueError: No message begins there, or one of implausible size.
    """
    start = bytes(data[:8])
    if len(start) < 8:
        return None
    word, length = _u32(memoryview(start), 0), _u32(memoryview(start), 4)
    if word != _CONTINUATION or length > _MAX_HEADER_BYTES:
        raise ValueError("message")
    if length == 0:
        return 0
    header = memoryview(bytes(data[8 : 8 + length]))
    if len(header) < length:
        return None
    with _damage_of("message"):
        body = _root(header).i64(3)
    if not 0 <= body <= _MAX_BODY_BYTES:
        raise ValueError("message")
    return 8 + length + body


def buffers_of_batch(header: bytes) -> list[tuple[int, int]]:
    """Offset and length of each buffer in the body of a record batch.

    Args:
        header: The message's header, with the eight bytes before it.

    Raises:
        ValueError: The header is damaged.
    """
    with _damage_of("header"):
        return list(_root(memoryview(header)[8:]).table(2).pairs(2))


def metadata_of_message(header: bytes | memoryview) -> dict[bytes, bytes]:
    """The custom metadata of a message.

    Args:
        header: The message's header, with the eight bytes before it.

    Raises:
        ValueError: The header is damaged.
    """
    found, left = {}, len(header)
    with _damage_of("header"):
        for entry in _root(memoryview(header)[8:]).tables(4):
            name, value = entry.text(0), entry.text(1)
            # Entries that share their bytes could make this copy far more than the header.
            left -= len(name) + len(value)
            if left < 0:
                raise ValueError("metadata")
            found[name] = value
    return found


def _message(header: memoryview, body: memoryview) -> tuple[int, int, int]:
    """A message's kind, the length of its body, and the bytes that decoding it would allocate."""
    table = _root(header)
    kind = table.u8(1)
    body_length = table.i64(3)
    if not 0 <= body_length <= len(body):
        raise ValueError("body")
    batch = table.table(2)
    if kind == _DICTIONARY_BATCH:
        batch = batch.table(1)
    elif kind != _RECORD_BATCH:
        return kind, body_length, 0
    wanted = 0
    compressed = batch.has(3)
    for offset, length in batch.pairs(2):
        if offset < 0 or length < 0 or offset + length > body_length:
            raise ValueError("buffer")
        if compressed and length >= 8:
            # -1: this buffer was left uncompressed because compression did not pay.
            wanted += max(_i64(body, offset), length)
        else:
            wanted += length
    # The buffers of an all-null column may be absent.
    rows = batch.i64(0)
    if rows < 0 or rows > _MAX_RATIO * (wanted + _FREE_BYTES):
        raise ValueError("rows")
    return kind, body_length, wanted


class _Table:
    """A flatbuffers table."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        vtable = at - _i32(data, at)
        if vtable < 0:
            raise ValueError("vtable")
        self._vtable = vtable
        self._vtable_size = _u16(data, vtable)

    def _field(self, number: int) -> int:
        """Offset of a field; 0 if it has its default value."""
        slot = 4 + 2 * number
        if slot + 2 > self._vtable_size:
            return 0
        offset = _u16(self._data, self._vtable + slot)
        return self._at + offset if offset else 0

    def has(self, number: int) -> bool:
        return self._field(number) != 0

    def u8(self, number: int) -> int:
        at = self._field(number)
        return self._data[at] if at else 0

    def i64(self, number: int) -> int:
        at = self._field(number)
        return _i64(self._data, at) if at else 0

    def table(self, number: int) -> _Table:
        at = self._field(number)
        if not at:
            raise ValueError("table")
        return _Table(self._data, at + _u32(self._data, at))

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """A vector of structs of two 64-bit integers."""
        return self._structs(number, "<qq")

    def blocks(self, number: int) -> Iterator[tuple[int, int, int]]:
        """A vector of the structs `Block` of a footer."""
        return self._structs(number, "<qi4xq")

    def _structs(self, number: int, form: str) -> Iterator[Any]:
        at = self._field(number)
        if not at:
            return iter(())
        vector = at + _u32(self._data, at)
        length = struct.calcsize(form) * _u32(self._data, vector)
        raw = self._data[vector + 4 : vector + 4 + length]
        if len(raw) != length:
            raise ValueError("vector")
        return struct.iter_unpack(form, raw)

    def tables(self, number: int) -> list[_Table]:
        """A vector of tables."""
        at = self._field(number)
        if not at:
            return []
        vector = at + _u32(self._data, at)
        count = _u32(self._data, vector)
        if 4 * count > len(self._data):
            raise ValueError("vector")
        places = [vector + 4 + 4 * index for index in range(count)]
        return [_Table(self._data, place + _u32(self._data, place)) for place in places]

    def text(self, number: int) -> bytes:
        """A string; empty if there is none."""
        at = self._field(number)
        if not at:
            return b""
        at += _u32(self._data, at)
        return bytes(self._data[at + 4 : at + 4 + _u32(self._data, at)])


def _root(data: memoryview) -> _Table:
    """The table that a flatbuffer holds."""
    return _Table(data, _u32(data, 0))


@contextlib.contextmanager
def _damage_of(part: str) -> Iterator[None]:
    """Raises ValueError with the name of the part in place of errors of reading beyond its end."""
    try:
        yield
    except (struct.error, IndexError) as error:
        raise ValueError(part) from error


def _u16(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<H", data, at)[0])


def _u32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _i32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<i", data, at)[0])


def _i64(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<q", data, at)[0])
