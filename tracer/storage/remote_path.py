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
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast

from ddltrace.tracer.errors import NotStoredError, StoreError
from ddltrace.tracer.storage.store_url import StoreUrl, parse_url
from ddltrace.tracer.storage.stores import connect, path_in_store, reporting

if TYPE_CHECKING:
    from pyarrow import fs

_KEPT_BYTES: Final = 256 << 20
_MOST_OPEN: Final = 64
_MOST_COPIED: Final = 4
"""Paths of so many stores share the listings of their copies."""
_AT_ONCE: Final = 8
_PIECE_BYTES: Final = 8 << 20


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

    Raises:
        UsageError: The URL holds credentials or unknown parameters.
    """

    def __init__(self, url: str) -> None:
        self._url = parse_url(url)
        self._store = _Store(self._url, _Listings(uuid.uuid4().hex))

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

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (str(self), self._store.listings.key)

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
        return found is not None and not found.is_directory

    def is_dir(self) -> bool:
        """Whether it is a directory.

        Raises:
            StoreError: The store cannot be asked.
        """
        found = self._found()
        return found is not None and found.is_directory

    def stat(self) -> Stat:
        """Size and age of a file.

        Raises:
            NotStoredError: It is not there.
        """
        found = self._found()
        if found is None:
            raise NotStoredError(f"{self}: not there")
        return Stat(found.size, found.modified_s)

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

    def read_bytes(self) -> bytes:
        """The whole content of a file.

        Raises:
            StoreError: It cannot be read.
        """
        return self.read_ranges([(0, self.stat().st_size)])[0]

    def read_text(self, encoding: str = "utf-8") -> str:
        """The whole content of a text file.

        Raises:
            StoreError: It cannot be read.
            UnicodeDecodeError: It is not text.
        """
        return self.read_bytes().decode(encoding)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Reads some parts of a file, at the same time.

        Args:
            ranges: First byte and the byte after the last, of each part.

        Raises:
            StoreError: It cannot be read, or ends before.
        """
        return self._store.read(self._url, ranges)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the file for reading from its beginning to its end, in large pieces.

        Raises:
            StoreError: It is not there.
        """
        assert mode == "rb", "a store's files are read only"
        return cast("BinaryIO", io.BufferedReader(_Sequential(self)))

    def _found(self) -> _Entry | None:
        if self._url == self._store.root:
            return self._store.root_entry()
        return self._store.entries(self.parent._url).get(self.name)


class _Entry(NamedTuple):
    """One file or directory of a listing."""

    is_directory: bool
    size: int
    modified_s: float


class _Listings:
    """Listings of directories.

    Attributes:
        key: Equal for the listings of all copies of a path, in all processes.
        lock: Held while a directory is listed.
        entries: Place of a directory -> name -> file or directory.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.entries: dict[str, dict[str, _Entry]] = {}


@lru_cache(maxsize=_MOST_COPIED)
def _copied_listings(key: str) -> _Listings:
    """The listings that the copies of a path share in this process."""
    return _Listings(key)


def _unpickled(url: str, key: str) -> RemotePath:
    """A copy of a path."""
    made = RemotePath(url)
    made._store.listings = _copied_listings(key)
    return made


class _Store:
    """What the paths below one URL share: the connection, listings, open files, bytes read."""

    def __init__(self, root: StoreUrl, listings: _Listings) -> None:
        self.root = root
        self.listings = listings
        self._lock = threading.RLock()
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._kept_bytes = 0

    def root_entry(self) -> _Entry | None:
        """The file or directory at the root."""
        from pyarrow import fs

        with reporting(self.root):
            info = connect(self.root).get_file_info(path_in_store(self.root))
        return None if info.type == fs.FileType.NotFound else _entry(info)

    def entries(self, directory: StoreUrl) -> dict[str, _Entry]:
        """Name -> file or directory, of a directory, which may be missing."""
        from pyarrow import fs

        known = self.listings.entries
        with self.listings.lock:
            if directory.place not in known:
                selector = fs.FileSelector(path_in_store(directory), allow_not_found=True)
                with reporting(directory):
                    infos = connect(directory).get_file_info(selector)
                known[directory.place] = {info.base_name: _entry(info) for info in infos}
            return known[directory.place]

    def read(self, url: StoreUrl, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of a file; see `RemotePath.read_ranges`."""
        keys = [(url.place, begin, end) for begin, end in ranges]
        with self._lock:
            known = {key: self._kept[key] for key in keys if key in self._kept}
        missing = [key for key in dict.fromkeys(keys) if key not in known]
        if missing:
            with reporting(url):
                file = self._open(url)
                if len(missing) == 1:
                    fetched = [_read_at(file, url, *missing[0][1:])]
                else:
                    with ThreadPoolExecutor(min(_AT_ONCE, len(missing))) as pool:
                        fetched = list(pool.map(lambda key: _read_at(file, url, *key[1:]), missing))
            known.update(zip(missing, fetched, strict=True))
            self._keep(dict(zip(missing, fetched, strict=True)))
        return [known[key] for key in keys]

    def _open(self, url: StoreUrl) -> Any:
        with self._lock:
            if url.place not in self._files:
                self._files[url.place] = connect(url).open_input_file(path_in_store(url))
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


def _entry(info: fs.FileInfo) -> _Entry:
    from pyarrow import fs

    modified = (info.mtime_ns or 0) / 1e9
    return _Entry(info.type == fs.FileType.Directory, info.size or 0, modified)


def _read_at(file: Any, url: StoreUrl, begin: int, end: int) -> bytes:
    content = bytes(file.read_at(end - begin, begin)) if end > begin else b""
    if len(content) != end - begin:
        raise StoreError(f"{url}: it changed while it was read")
    return content


class _Sequential(io.RawIOBase):
    """Reads a file in the order of its bytes."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._size, self._at = path, path.stat().st_size, 0
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not len(self._piece) and self._at < self._size:
            end = min(self._at + _PIECE_BYTES, self._size)
            self._piece = memoryview(self._path.read_ranges([(self._at, end)])[0])
            self._at = end
        count = min(len(target), len(self._piece))
        target[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count
