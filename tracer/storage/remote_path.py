"""Files and directories in a store, read with the methods of `pathlib.Path` that traces need.

A directory is listed once, and bytes that were read are kept in a bounded cache, because an
analysis reads a rank's events several times.
"""

from __future__ import annotations

import fnmatch
import io
import posixpath
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, BinaryIO, Final, NamedTuple, cast

from pyarrow import fs

from ddltrace.tracer.errors import NotStoredError, StoreError
from ddltrace.tracer.storage.stores import StoreUrl, connected, parse_url

_KEPT_BYTES: Final = 256 << 20
_MOST_OPEN: Final = 64
_MOST_COPIED: Final = 16
"""So many paths share their listings with their copies."""
_AT_ONCE: Final = 8
_PIECE_BYTES: Final = 8 << 20
_HOLE_BYTES: Final = 8 << 10
"""Parts that are closer than this are read at once: a request costs more than such a hole."""


class Stat(NamedTuple):
    """Size and age of a file.

    Attributes:
        st_size: Bytes.
        st_mtime: Seconds since 1970.
    """

    st_size: int
    st_mtime: float


class RemotePath:
    """A file or directory in a store.

    What was listed or read is remembered: a new `RemotePath` of the same URL sees changes. Copies
    by pickle share the listings of a process, because each task of an engine has a copy.

    Args:
        listings: Key of the listings to share; by default those of no other path.

    Raises:
        UsageError: The URL holds credentials or unknown parameters.
    """

    def __init__(self, url: str, listings: str | None = None) -> None:
        self._url = parse_url(url)
        self._store = _Store(self._url, listings or uuid.uuid4().hex)

    def _at(self, place: str) -> RemotePath:
        made = object.__new__(RemotePath)
        made._url, made._store = self._url.at(place), self._store
        return made

    def __str__(self) -> str:
        return str(self._url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(posixpath.join(self._url.place, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePath, (str(self), self._store.key)

    @property
    def url(self) -> StoreUrl:
        """Its URL."""
        return self._url

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self._url.place)

    @property
    def suffix(self) -> str:
        """The file's extension, with its dot."""
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> RemotePath:
        """The directory that holds it."""
        return self._at(posixpath.dirname(self._url.place))

    def absolute(self) -> RemotePath:
        """The path itself: a URL is absolute."""
        return self

    def resolve(self) -> RemotePath:
        """The path itself: a store has no links."""
        return self

    def exists(self) -> bool:
        """Whether there is a file, or a directory with files.

        Raises:
            StoreError: The store cannot be asked.
        """
        return self._found() is not None

    def is_file(self) -> bool:
        """Whether it is a file.

        Raises:
            StoreError: The store cannot be asked.
        """
        found = self._found()
        return found is not None and found.is_file

    def is_dir(self) -> bool:
        """Whether it is a directory.

        Raises:
            StoreError: The store cannot be asked.
        """
        found = self._found()
        return found is not None and not found.is_file

    def stat(self) -> Stat:
        """Size and age of a file.

        Raises:
            NotStoredError: It is not there.
        """
        found = self._found()
        if found is None:
            raise NotStoredError(f"{self}: not there")
        return Stat(found.size or 0, (found.mtime_ns or 0) / 1e9)

    def iterdir(self) -> Iterator[RemotePath]:
        """Files and directories of a directory, by name.

        Raises:
            StoreError: The store cannot be asked.
        """
        return (self / name for name in sorted(self._store.entries(self._url)))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Files and directories that match a pattern, such as ``part-*/run.json``.

        Raises:
            StoreError: The store cannot be asked.
        """
        first, slash, rest = pattern.partition("/")
        for path in self.iterdir():
            if not fnmatch.fnmatchcase(path.name, first):
                continue
            if not slash:
                yield path
            elif path.is_dir():
                yield from path.glob(rest)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Reads some parts of a file with few requests, at the same time.

        Args:
            ranges: First byte and the byte after the last, of each part.

        Raises:
            StoreError: It cannot be read, or ends before.
        """
        merged: list[tuple[int, int]] = []
        place: dict[tuple[int, int], int] = {}
        for begin, end in sorted(set(ranges)):
            if merged and begin <= merged[-1][1] + _HOLE_BYTES:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
            place[begin, end] = len(merged) - 1
        contents = self._store.read(self._url, merged)
        parts = []
        for begin, end in ranges:
            number = place[begin, end]
            first = merged[number][0]
            parts.append(contents[number][begin - first : end - first])
        return parts

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the file for reading from its beginning to its end, in large pieces.

        Raises:
            StoreError: It is not there.
        """
        assert mode == "rb", "a store's files are read only"
        return cast("BinaryIO", io.BufferedReader(_Sequential(self), _PIECE_BYTES))

    def _found(self) -> fs.FileInfo | None:
        if self._url == self._store.root:
            # It is asked for alone: what holds it may be large, or closed to this user.
            with connected(self._url) as store:
                info = store.get_file_info(self._url.path)
            return None if info.type == fs.FileType.NotFound else info
        return self._store.entries(self.parent._url).get(self.name)


@lru_cache(maxsize=_MOST_COPIED)
def _listings(key: str) -> tuple[threading.Lock, dict[str, dict[str, fs.FileInfo]]]:
    """Place of a directory -> name -> file or directory, and a lock to hold while listing one."""
    return threading.Lock(), {}


class _Store:
    """What the paths below one URL share: the connection, listings, open files, bytes read."""

    def __init__(self, root: StoreUrl, key: str) -> None:
        self.root = root
        self.key = key
        self._listing, self._listed = _listings(key)
        self._lock = threading.RLock()
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._kept_bytes = 0

    def entries(self, directory: StoreUrl) -> dict[str, fs.FileInfo]:
        """Name -> file or directory, of a directory, which may be missing."""
        with self._listing:
            if directory.place not in self._listed:
                selector = fs.FileSelector(directory.path, allow_not_found=True)
                with connected(directory) as store:
                    infos = store.get_file_info(selector)
                self._listed[directory.place] = {info.base_name: info for info in infos}
            return self._listed[directory.place]

    def read(self, url: StoreUrl, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of a file that differ, each with a request unless its bytes are kept."""
        keys = [(url.place, begin, end) for begin, end in ranges]
        with self._lock:
            known = {key: self._kept[key] for key in keys if key in self._kept}
        missing = [key for key in keys if key not in known]
        if missing:
            pool = ThreadPoolExecutor(min(_AT_ONCE, len(missing)))
            with connected(url) as store, pool:
                file = self._open(store, url)
                contents = pool.map(lambda key: _read_at(file, url, *key[1:]), missing)
                fetched = dict(zip(missing, contents, strict=True))
            known |= fetched
            self._keep(fetched)
        return [known[key] for key in keys]

    def _open(self, store: fs.FileSystem, url: StoreUrl) -> Any:
        with self._lock:
            if url.place not in self._files:
                self._files[url.place] = store.open_input_file(url.path)
            self._files.move_to_end(url.place)
            while len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)
            return self._files[url.place]

    def _keep(self, fetched: dict[tuple[str, int, int], bytes]) -> None:
        with self._lock:
            for key, content in fetched.items():
                if key not in self._kept:
                    self._kept[key] = content
                    self._kept_bytes += len(content)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])


def _read_at(file: Any, url: StoreUrl, begin: int, end: int) -> bytes:
    content = bytes(file.read_at(end - begin, begin)) if end > begin else b""
    if len(content) != end - begin:
        raise StoreError(f"{url}: it changed while it was read")
    return content


class _Sequential(io.RawIOBase):
    """Reads a file in the order of its bytes."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._size, self._at = path, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        content = self._next(len(target))
        target[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return self._next(self._size)

    def _next(self, count: int) -> bytes:
        end = min(self._at + count, self._size)
        [content] = self._path.read_ranges([(self._at, end)])
        self._at = end
        return content
