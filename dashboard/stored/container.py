"""A file of one JSON document and the arrays that it refers to.

Little-endian: a header, the arrays, each at a multiple of 64 bytes, and the document. The header is
a magic number, two SHA-256 HMACs and, as uint64, the CRC-32 of all that follows the header, and
offset and size of the document. In the document an array is the list
``["array", dtype, shape, offset]``.

A reader maps the file into memory. Before it uses any content, it verifies the file: one that is
truncated, damaged, or not written by this user is rejected. If only this user can write to the
file, the CRC and the HMAC of the document and the CRC are enough, which takes a quarter of the
time; the CRC is verified again only if the file has changed. Otherwise, whoever can write to it
could choose arrays with the same CRC, so the HMAC of everything is verified.
"""

from __future__ import annotations

import hmac
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ddltrace.dashboard.stored.verified_files import VerifiedFiles
from ddltrace.tracer.owner_access import is_private

_MAGIC: Final = b"ddlcach2"
_HEADER: Final = struct.Struct("<8s32s32sQQQ")
_PLACES: Final = struct.Struct("<QQQ")
"""The end of the header: checksum, offset and size of the document."""
_ALIGNMENT: Final = 64
_CHUNK: Final = 1 << 18
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
        self._checksum = 0
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
        places = _PLACES.pack(self._checksum, offset, len(data))
        self._signature.update(places)
        self._file.seek(0)
        of_document = _signature_of_document(self._secret, data, places)
        self._file.write(_MAGIC + self._signature.digest() + of_document + places)
        self._file.flush()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._signature.update(data)
        self._checksum = isal_zlib.crc32(data, self._checksum)
        self._at += len(data)


class ArrayReader:
    """Reads a file of `ArrayWriter`, mapped into memory.

    Args:
        path: The file.
        secret: Key of the HMAC.
        verified: Knows the headers of files that were verified and have not changed.

    Attributes:
        document: The document.

    Raises:
        InvalidCacheError: The file is damaged or not written with this secret.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, secret: bytes, verified: VerifiedFiles) -> None:
        with open(path, "rb", buffering=0) as file:
            state = verified.state(path)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise InvalidCacheError("it is too short")
            magic, of_all, of_document, checksum, offset, size = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise InvalidCacheError("it has another format")
            if offset + size != os.fstat(file.fileno()).st_size:
                raise InvalidCacheError("it is truncated")
            places = header[-_PLACES.size :]
            document = os.pread(file.fileno(), size, offset)
            if is_private(os.fstat(file.fileno())):
                expected = _signature_of_document(secret, document, places)
                is_valid = hmac.compare_digest(expected, of_document)
                if is_valid and verified.known(path) != header.hex():
                    is_valid = _checksum_of(file) == checksum
                    if is_valid:
                        verified.learn(path, state, header.hex())
            else:
                is_valid = hmac.compare_digest(_signature_of_all(file, secret, places), of_all)
            if not is_valid:
                raise InvalidCacheError("it is damaged or not this user's")
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.document: Any = json.loads(document)

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


def _signature_of_document(secret: bytes, document: bytes, places: bytes) -> bytes:
    return hmac.digest(secret, b"document" + document + places, "sha256")


def _signature_of_all(file: RawIOBase, secret: bytes, places: bytes) -> bytes:
    signature = hmac.new(secret, digestmod="sha256")
    for chunk in _chunks(file):
        signature.update(chunk)
    signature.update(places)
    return signature.digest()


def _checksum_of(file: RawIOBase) -> int:
    checksum = 0
    for chunk in _chunks(file):
        checksum = isal_zlib.crc32(chunk, checksum)
    return checksum


def _chunks(file: RawIOBase) -> Iterator[memoryview]:
    """The rest of a file: read, not mapped, since mapped pages count as memory of this process."""
    buffer = memoryview(bytearray(_CHUNK))
    while count := file.readinto(buffer):
        yield buffer[:count]
