"""The messages of a file or stream that is mapped into memory: all, or those of some batches."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.trace.batch_facts import BatchFacts, read_facts
from ddltrace.tracer.trace.stream_frames import Scan

_KEPT_BYTES: Final = 4 << 20
_HEADER_AT: Final = 8
"""Length of what precedes a header: a mark, and the length of the header."""

Content: TypeAlias = bytes | mmap.mmap


class MappedMessages:
    """The messages of a stream, as far as they are intact; none of their bytes are copied.

    Args:
        content: The file.
        start: Where the stream begins in it.
        scan: How far it is intact.

    Attributes:
        good: During and after an iteration over messages: offset after the last batch that
            precedes the message that was provided last.
    """

    def __init__(self, content: Content, start: int, scan: Scan) -> None:
        self._content = content
        self._data = memoryview(content)
        self._start = start
        self._scan = scan
        self.good = start

    def schema(self) -> memoryview:
        """The first message, which has the schema."""
        return self._data[self._start : self._scan.messages[0][0]]

    def facts(self) -> list[BatchFacts | None]:
        """The facts about each batch; all None if the file lacks any."""
        passed = ReleasedPages(self._content)
        found: list[BatchFacts | None] = []
        for begin, end, is_batch in self._places():
            if not is_batch:
                continue
            length = int.from_bytes(self._data[begin + 4 : begin + _HEADER_AT], "little")
            facts = read_facts(self._data[begin : begin + _HEADER_AT + length])
            if facts is None:
                return [None] * self._scan.batches
            found.append(facts)
            passed(end)
        return found

    def chosen(self, numbers: Collection[int]) -> Iterator[memoryview]:
        """Yields all messages except other batches; what was read of a file is released.

        Dictionaries that came with other batches are among them: later batches refer to them.

        Args:
            numbers: Numbers of the batches to yield.
        """
        passed, number = ReleasedPages(self._content), -1
        self.good = self._start
        for begin, end, is_batch in self._places():
            number += is_batch
            if not is_batch or number in numbers:
                passed(begin)
                yield self._data[begin:end]
            if is_batch or begin == self._start:
                self.good = end

    def _places(self) -> Iterator[tuple[int, int, bool]]:
        """Of each message: where it begins and ends, and whether it is a batch."""
        begin = self._start
        for end, is_batch in self._scan.messages:
            yield begin, end, is_batch
            begin = end


class ReleasedPages:
    """Releases pages of a mapped file after they were read; otherwise they count as used memory."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._done = 0

    def __call__(self, end: int) -> None:
        """Releases all pages before `end`, which can be read again."""
        done = end // mmap.PAGESIZE * mmap.PAGESIZE
        if isinstance(self._content, mmap.mmap) and done - self._done >= _KEPT_BYTES:
            self._content.madvise(mmap.MADV_DONTNEED, self._done, done - self._done)
            self._done = done


def map_file(path: Path) -> Content:
    """A file's content, mapped into memory.

    Raises:
        OSError: It is not a plain file, or cannot be opened.
    """
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
