"""A file of one JSON document and the arrays that it refers to.

Little-endian: a header (magic, SHA-256 HMAC of all that follows it, offset and size of the
document as uint64), the arrays, each at a multiple of 64 bytes, and the document. In the document
an array is the list ``["array", dtype, shape, offset]``. A reader maps the file into memory and
verifies the HMAC of the whole file before it uses any content: a file that is truncated, damaged,
or not written by this user is rejected.
"""

from __future__ import annotations

import hmac
import json
import math
import mmap
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

_MAGIC: Final = b"ddlcach1"
_HEADER: Final = struct.Struct("<8s32sQQ")
_SIGNED_FROM: Final = 40
_ALIGNMENT: Final = 64
_CHUNK: Final = 1 << 20
_KINDS: Final = frozenset("biuf")


class InvalidCacheError(Exception):
    """A file cannot be used as a cache."""


class ArrayWriter:
    """Writes arrays as they come, then the document.

    Args:
        file: An empty file, open for writing.
        secret: Key of the HMAC.
    """

    def __init__(self, file: BinaryIO, secret: bytes) -> None:
        self._file = file
        self._secret = secret
        self._signature = hmac.new(secret, digestmod="sha256")
        self._at = _HEADER.size
        self._file.write(bytes(_HEADER.size))

    def add(self, array: npt.NDArray[Any]) -> list[Any]:
        """Writes an array of numbers; returns the document's reference to it."""
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of {array.dtype} are not stored")
        array = np.ascontiguousarray(array)
        self._write(bytes(-self._at % _ALIGNMENT))
        reference = ["array", array.dtype.str, list(array.shape), self._at]
        if array.nbytes:
            self._write(array.reshape(-1).view(np.uint8).data)
        return reference

    def finish(self, document: Any) -> None:
        """Writes the document and the header."""
        data = json.dumps(document, separators=(",", ":")).encode()
        offset = self._at
        self._write(data)
        places = struct.pack("<QQ", offset, len(data))
        self._signature.update(places)
        self._file.seek(0)
        self._file.write(_MAGIC + self._signature.digest() + places)
        self._file.flush()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._signature.update(data)
        self._at += len(data)


class ArrayReader:
    """Reads a file of `ArrayWriter`, mapped into memory.

    Args:
        path: The file.
        secret: Key of the HMAC.

    Attributes:
        document: The document.

    Raises:
        InvalidCacheError: The file is damaged or not written with this secret.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise InvalidCacheError("it is too short")
            magic, digest, offset, size = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise InvalidCacheError("it has another format")
            signature = hmac.new(secret, digestmod="sha256")
            # Read, not mapped: pages that were mapped count as memory of this process.
            while chunk := file.read(_CHUNK):
                signature.update(chunk)
            signature.update(header[_SIGNED_FROM:])
            if not hmac.compare_digest(signature.digest(), digest):
                raise InvalidCacheError("it is damaged or not this user's")
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.document: Any = json.loads(self._content[offset : offset + size])

    def release(self) -> None:
        """Releases the pages read so far from this process's memory; they can be read again."""
        self._content.madvise(mmap.MADV_DONTNEED)

    def array(self, reference: list[Any]) -> npt.NDArray[Any]:
        """The array of a reference: read-only, and in memory only where it is used."""
        _, dtype, shape, offset = reference
        kind = np.dtype(dtype)
        count = math.prod(shape)
        flat: npt.NDArray[Any] = np.frombuffer(self._content, kind, count=count, offset=offset)
        shaped: npt.NDArray[Any] = flat.reshape(shape)
        return shaped
