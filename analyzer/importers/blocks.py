"""Reads a file that may be compressed, block by block."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from isal import igzip_lib, isal_zlib

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.plain_files import open_given

BLOCK_BYTES: Final = 1 << 17
_COMPRESSED_BYTES: Final = 1 << 14
"""Bytes of a compressed file that are read at a time."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_WBITS: Final = 31


class Blocks:
    """Iterates over a file's content, decompressed where it begins like a gzip file.

    A truncated or damaged compressed file yields the content before the damage.

    Attributes:
        damage: After the iteration: why the content is incomplete; None if it is complete.
        read_bytes: Bytes of content that the iteration has yielded so far.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.damage: str | None = None
        self.read_bytes = 0
        self._path = path
        self._block_bytes = block_bytes

    def __iter__(self) -> Iterator[bytes]:
        for block in self._content():
            self.read_bytes += len(block)
            yield block

    def head(self, size: int) -> bytes:
        """The first bytes of the content, at most `size`."""
        head = b""
        for block in Blocks(self._path, min(size, self._block_bytes)):
            head += block
            if len(head) >= size:
                break
        return head[:size]

    def _content(self) -> Iterator[bytes]:
        try:
            with open_given(self._path) as file:
                compressed = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                if not compressed:
                    while block := file.read(self._block_bytes):
                        yield block
                    return
                yield from self._decompressed(file)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be read: {error.strerror or error}") from error

    def _decompressed(self, file: object) -> Iterator[bytes]:
        read = file.read  # type: ignore[attr-defined]
        machine = isal_zlib.decompressobj(_GZIP_WBITS)
        pending = b""
        try:
            while True:
                if machine.eof:
                    # A gzip file may consist of several members, one after the other.
                    pending = machine.unused_data
                    if len(pending) < len(_GZIP_MAGIC):
                        pending += read(_COMPRESSED_BYTES)
                    if not pending.startswith(_GZIP_MAGIC):
                        return
                    machine = isal_zlib.decompressobj(_GZIP_WBITS)
                elif not pending:
                    pending = read(_COMPRESSED_BYTES)
                    if not pending:
                        self.damage = "the compressed file is cut off"
                        return
                block = machine.decompress(pending, self._block_bytes)
                pending = machine.unconsumed_tail
                if block:
                    yield block
        # isal does not declare that its error is an exception.
        except (igzip_lib.IsalError, zlib.error, EOFError) as error:  # type: ignore[misc]
            self.damage = f"the compressed file is damaged ({error!s:.60})"
