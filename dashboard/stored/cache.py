"""The cache of a large trace: Arrow files that can be deleted at any time.

They lie in the folder `FOLDER` of the trace or, where that cannot be written, in the user's cache.
Only their owner can read them. A file is named ``KIND-USER-KEY-CRC.arrow``:

- ``USER`` tells users of one trace apart, so that none removes files of another.
- ``KEY`` is a digest of the trace's files, `FORMAT`, ddltrace's version and a secret of the user: a
  trace is data of strangers, who cannot name a file that would be read.
- ``CRC`` is the CRC-32 of the whole file, which is verified before anything in it is used.

So a file that is damaged, of another user, version or content of the trace is never read; it is
built again. A file appears when it is complete, and several processes may read and build the same.

The file has one column of bytes. Its last batch is a JSON document, the others hold arrays. In the
document an array is the list ``["array", dtype, shape, batch, offset]``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal import isal_zlib

from ddltrace.tracer.owner_access import is_private, make_private_folder, user_folder
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.trace.trace_files import RUN_FILE, event_path

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

FOLDER: Final = ".ddltrace-cache"
FORMAT: Final = 8
"""Version of the files and of the records in them."""

_PIECE: Final = 1 << 18
_BATCH: Final = 1 << 20
"""Bytes of a batch of several arrays."""

_ALIGNMENT: Final = 64
_KINDS: Final = frozenset("biuf")
_SCHEMA: Final = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])


class ArrayWriter:
    """Writes arrays as they come, then the document.

    Args:
        file: An empty file, open for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = pa.ipc.new_file(file, _SCHEMA)
        self._batches = 0
        self._pending = bytearray()

    def add(self, array: npt.NDArray[Any]) -> list[Any]:
        """Writes an array of numbers; returns the document's reference to it."""
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of {array.dtype} are not stored")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(self._pending) + len(data) > _BATCH:
            self._flush()
        place = [self._batches, len(self._pending)]
        if len(data) > _BATCH:
            self._write(data)
        else:
            self._pending += data.data
            self._pending += bytes(-len(self._pending) % _ALIGNMENT)
        return ["array", array.dtype.str, list(array.shape), *place]

    def finish(self, document: Any) -> None:
        """Writes the document."""
        self._flush()
        self._write(np.frombuffer(json.dumps(document, separators=(",", ":")).encode(), np.uint8))
        self._file.close()

    def _flush(self) -> None:
        if self._pending:
            self._write(np.frombuffer(self._pending, np.uint8))
            self._pending = bytearray()

    def _write(self, data: npt.NDArray[np.uint8]) -> None:
        self._file.write_batch(pa.record_batch([pa.array(data)], schema=_SCHEMA))
        self._batches += 1


class ArrayReader:
    """Reads a file of `ArrayWriter`, mapped into memory.

    Args:
        path: The file; its name ends with its CRC-32.

    Attributes:
        document: The document.

    Raises:
        ValueError: The file is damaged, or another user can have written it.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with open_plain(path) as file:
            if not is_private(os.fstat(file.fileno())):
                raise ValueError("other users can have written it")
            # Read, not mapped: mapped pages count as memory of this process.
            if _crc_of(file) != int(path.stem.rpartition("-")[2], 16):
                raise ValueError("it is damaged")
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        batches = pa.ipc.open_file(pa.py_buffer(self._content))
        numbers = range(batches.num_record_batches)
        self._batches = [batches.get_batch(number).column(0).buffers()[1] for number in numbers]
        self.document: Any = json.loads(self._batches[-1].to_pybytes())

    def release(self) -> None:
        """Releases the pages read so far from this process's memory; they can be read again."""
        self._content.madvise(mmap.MADV_DONTNEED)

    def array(self, reference: list[Any]) -> npt.NDArray[Any]:
        """The array of a reference: read-only, and in memory only where it is used."""
        _, dtype, shape, batch, offset = reference
        flat: npt.NDArray[Any] = np.frombuffer(
            self._batches[batch], np.dtype(dtype), count=math.prod(shape), offset=offset
        )
        shaped: npt.NDArray[Any] = flat.reshape(shape)
        return shaped


class Cache:
    """The files of the current content of a trace, each of one kind.

    Raises:
        OSError: The trace's files cannot be read, or the user's cache cannot be written.
    """

    def __init__(self, trace: Trace) -> None:
        secret = _user_secret()
        beside = [trace.path / FOLDER] if isinstance(trace.path, Path) else []
        self._folders = [*beside, folder_of_user(trace)]
        self._user = hashlib.sha256(secret).hexdigest()[:12]
        self._key = _key_of(trace, secret)

    def has(self, kind: str) -> bool:
        """Whether there is a file of a kind, valid or not."""
        return any(True for _ in self._files(kind))

    def read(self, kind: str) -> ArrayReader | None:
        """The file of a kind; None if it has to be built."""
        for path in self._files(kind):
            with contextlib.suppress(OSError, ValueError):
                return ArrayReader(path)
        return None

    @contextlib.contextmanager
    def writing(self, kind: str) -> Iterator[ArrayWriter]:
        """Writes the file of a kind in the first writable folder.

        Raises:
            OSError: No folder can be written.
        """
        handle, temporary = self._temporary_file()
        try:
            with os.fdopen(handle, "w+b") as file:
                yield ArrayWriter(file)
                file.seek(0)
                name = f"{kind}-{self._user}-{self._key}-{_crc_of(file):08x}.arrow"
            temporary.replace(temporary.with_name(name))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove_others(self) -> None:
        """Removes this user's files of other contents of the trace, and of other versions."""
        for folder in self._folders:
            for path in folder.glob(f"*-{self._user}*"):
                if self._key not in path.name:
                    with contextlib.suppress(OSError):
                        path.unlink()

    def _files(self, kind: str) -> Iterator[Path]:
        for folder in self._folders:
            yield from folder.glob(f"{kind}-{self._user}-{self._key}-*.arrow")

    def _temporary_file(self) -> tuple[int, Path]:
        failure: OSError | None = None
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if folder.is_symlink():  # it could lead out of an untrusted trace
                    raise NotADirectoryError(f"{folder} is a symbolic link")
                handle, name = tempfile.mkstemp(dir=folder, prefix=".building-")
                if is_private(os.fstat(handle)):
                    return handle, Path(name)
                os.close(handle)
                os.unlink(name)
                raise PermissionError(f"files in {folder} cannot be kept from other users")
            except OSError as error:
                failure = error
        assert failure is not None
        raise failure


def folder_of_user(trace: Trace) -> Path:
    """The folder in the user's cache that belongs to a trace."""
    own = hashlib.sha256(str(trace.path.resolve()).encode()).hexdigest()[:32]
    return user_folder() / "traces" / own


def _user_secret() -> bytes:
    path = user_folder() / "cache.key"
    make_private_folder(path.parent)
    if not path.exists():
        # Linked into place: a concurrent process sees a whole secret or none.
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
        finally:
            os.unlink(name)
    with open_plain(path) as file:
        if not is_private(os.fstat(file.fileno())):  # some file systems know no owners
            raise PermissionError(f"other users can write {path}")
        return file.read()


def _key_of(trace: Trace, secret: bytes) -> str:
    files = [trace.path / RUN_FILE]
    files += [event_path(trace.path, info.segment) for info in trace.run.ranks]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        states = pool.map(_state_of, files)
    parts = [secret.hex(), str(FORMAT), metadata.version("ddltrace"), *states]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _state_of(path: Location) -> str:
    """The name and the content of a file; of a large one in a store what the store says of it.

    Reading all of a store's files would cost as much as building again; ``run.json``, which is
    read, has their checksums.
    """
    if not isinstance(path, Path) and path.name != RUN_FILE:
        return f"{path.name} {path.stat()}"
    with open_plain(path) as file:
        return f"{path.name} {_crc_of(file):08x}"


def _crc_of(file: BinaryIO) -> int:
    """The CRC-32 of the rest of a file."""
    crc = 0
    while piece := file.read(_PIECE):
        crc = isal_zlib.crc32(piece, crc)
    return crc
