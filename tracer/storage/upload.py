"""Uploads a directory to a store: resumable, and with the file that makes it complete at the end.

What was uploaded is recorded twice: in a hidden file of the directory, at most once a second, and
in the store at the end. An upload skips a file if a record has its size and checksum and the file
in the store has its size.

An upload ends with an error if it gets no further for some time. It gets further when the store
takes bytes of a file that it had not taken before, so trying again does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from pyarrow import fs

from ddltrace.tracer.errors import StoreError, UsageError
from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.storage.store_url import BUCKET_SCHEMES, StoreUrl, parse_url
from ddltrace.tracer.storage.stores import connect, path_in_store, reporting

RECORD_FILE: Final = ".ddltrace-upload.json"
"""The record in the directory; it also has the URL."""
MANIFEST_FILE: Final = "upload.json"
"""The record in the store."""

_PIECE_BYTES: Final = 4 << 20
_GROWTH: Final = 2
_LEAST_BYTES: Final = 1 << 20
_WAITS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
_LARGE_BYTES: Final = 8 << 20
_LARGE_AT_ONCE: Final = 4
"""Files of at least this size that are sent at the same time; of each, one piece is in memory."""
_RECORD_EVERY_S: Final = 1.0


def _never() -> bool:
    return False


class Uploaded(NamedTuple):
    """One uploaded file.

    Attributes:
        size: Its bytes.
        crc32: Its CRC-32.
    """

    size: int
    crc32: int


@dataclass(frozen=True)
class Progress:
    """How an upload went.

    Attributes:
        sent: Number of files that were sent.
        skipped: Number of files that were there already.
        bytes: Number of bytes sent.
    """

    sent: int
    skipped: int
    bytes: int


class Upload:
    """The upload of a directory. One thread may use it at a time.

    Args:
        url: Where its files go.
        is_last: Whether a file, by its path in the directory, makes the upload complete. These are
            sent when all others are there, those in subdirectories first.
        is_own: Whether a file, by its path, is part of this upload.
        is_foreign: Whether the content of such a last file here, and that in the store, show that
            the store has another upload's files.
        is_former: Whether a file in the store is an earlier form of one of some files here. Such a
            file is removed even if there is no record of it: the process that sent it was killed.

    Attributes:
        url: Where the files go.
        activity: Grows while the upload does something; another thread may read it.
    """

    def __init__(
        self,
        directory: Path,
        url: StoreUrl,
        is_last: Callable[[str], bool],
        is_own: Callable[[str], bool] = lambda name: True,
        *,
        is_foreign: Callable[[bytes, bytes], bool] = lambda own, stored: False,
        is_former: Callable[[str, Collection[str]], bool] = lambda stored, names: False,
    ) -> None:
        self.url = url
        self.activity = 0
        self._directory = directory
        self._is_last = is_last
        self._is_own = is_own
        self._is_foreign = is_foreign
        self._is_former = is_former
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}
        self._further_s = time.monotonic()
        self._recorded_s = 0.0
        self._is_unrecorded = False
        self._there: set[str] = set()
        record = read_record(directory)
        same = record[0] == str(url)
        self._done = {name: done for name, done in record[1].items() if same and is_own(name)}

    def remember(self) -> None:
        """Writes the URL into the directory, so that an upload can be resumed without it.

        Raises:
            OSError: The directory cannot be written.
        """
        with self._lock:
            value = {
                "url": str(self.url),
                "files": {name: done._asdict() for name, done in sorted(self._done.items())},
            }
            temporary = self._directory / f"{RECORD_FILE}.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(value), encoding="utf-8")
            temporary.replace(self._directory / RECORD_FILE)
            self._recorded_s = time.monotonic()
            self._is_unrecorded = False

    def missing(self) -> tuple[int, int]:
        """How many files the last `send_all` did not get into the store, and how many there are."""
        names = self._names()
        return sum(name not in self._there for name in names), len(names)

    def holds(self, name: str) -> bool:
        """Whether the store has a file.

        Raises:
            StoreError: The store cannot be asked.
        """
        with reporting(self.url):
            info = connect(self.url).get_file_info(self._target(name))
        return bool(info.type == fs.FileType.File)

    def clear(self, is_removed: Callable[[str], bool], folder: str = "") -> None:
        """Deletes files that the store has below the URL, or in a folder there.

        Args:
            is_removed: Whether a file is deleted, by its path below the URL or the folder.
            folder: The folder, with a slash at the end.

        Raises:
            UsageError: The URL is a whole bucket.
            StoreError: The store refuses.
        """
        place = f"{path_in_store(self.url)}/{folder}".rstrip("/")
        if not place or (self.url.scheme in BUCKET_SCHEMES and "/" not in place):
            raise UsageError(
                f"{self.url} is a whole bucket, which is not emptied: name a directory"
            )
        for name in self._sizes_in_store():
            own = name.removeprefix(folder)
            if name.startswith(folder) and (is_removed(own) or own == MANIFEST_FILE):
                with reporting(self.url):
                    connect(self.url).delete_file(self._target(name))
        self._done.clear()

    def send_grown(self, is_stopped: Callable[[], bool] = _never) -> None:
        """Sends the present state of files that have grown much since they were sent.

        A file is sent again when it has doubled, so in total at most twice its final size is
        sent. A file below 1 MB is sent again when it has another size.

        Args:
            is_stopped: Whether to return soon. Of a file that is being sent, the store then has the
                beginning.

        Raises:
            StoreError: The store cannot be written.
            OSError: A file cannot be read.
        """
        for name in self._names():
            if is_stopped():
                break
            with contextlib.suppress(FileNotFoundError):  # replaced by its final file
                size = (self._directory / name).stat().st_size
                before = self._done.get(name)
                limit = 0 if before is None else max(_GROWTH * before.size, _LEAST_BYTES)
                is_small = size < _LEAST_BYTES and before is not None and size != before.size
                if size >= limit or is_small:
                    self._send(name, is_stopped)
        if self._is_unrecorded:
            self.remember()

    def send_all(self, heard: Callable[[str], None] = lambda name: None) -> Progress:
        """Sends every file that is not in the store, and removes those that are gone here.

        Args:
            heard: Called with the name of each file before it is sent.

        Raises:
            StoreError: The store cannot be written; what was sent is remembered.
            UsageError: The store has the files of another upload, which are left as they are; or
                the directory has no last file, or not that which was sent before.
            OSError: A file cannot be read.
        """
        self._there.clear()
        try:
            return self._send_all(heard)
        finally:
            with contextlib.suppress(OSError):
                self.remember()

    def _send_all(self, heard: Callable[[str], None]) -> Progress:
        sizes = self._sizes_in_store()
        manifest = self._read_manifest(sizes)
        known = {**manifest, **self._done}
        # Other launchers of the job may have uploaded their parts to the same place.
        facts = {name: done for name, done in known.items() if not self._is_own(name)}
        names = self._names()
        lasts = sorted(filter(self._is_last, names), key=lambda name: -name.count("/"))
        gone = [name for name in self._done if self._is_last(name) and name not in lasts]
        if gone or not lasts:
            # Its disk may be gone: what was uploaded before may be all that is left.
            lost = (self._directory / gone[0]).parent if gone else self._directory
            raise UsageError(f"{lost} is gone: the store keeps what was uploaded before")
        self._check_own([name for name in lasts if name in sizes], manifest)
        is_large = {name: self._is_large(name) for name in names if name not in lasts}
        sent: list[int] = []

        def send(name: str) -> None:
            done = self._fact(name)
            if known.get(name) != done or sizes.get(name) != done.size:
                heard(name)
                done = self._send(name)
                sent.append(done.size)
            with self._lock:
                facts[name] = self._done[name] = done
                self._there.add(name)

        for name in [name for name, large in is_large.items() if not large]:
            send(name)
        _at_once(send, [name for name, large in is_large.items() if large])
        facts |= {last: self._fact(last) for last in lasts}
        if facts != known or MANIFEST_FILE not in sizes:
            self._write_manifest(facts)
        for name in lasts:
            send(name)
        former = [name for name in sizes if self._is_own(name) and self._is_former(name, names)]
        for name in {*self._done, *former}.difference(names):
            self._remove(name)
        return Progress(len(sent), len(names) - len(sent), sum(sent))

    def finish(self, wait_s: float, heard: Callable[[str], None] = lambda name: None) -> Progress:
        """Calls `send_all`, again and again if the store is away.

        Args:
            wait_s: Give up when the upload got no further for this time, in seconds.
            heard: See `send_all`.

        Raises:
            StoreError: The store was away to the end.
            UsageError: See `send_all`.
            OSError: A file cannot be read.
        """
        self._taken.clear()
        self._further_s = time.monotonic()
        for wait in _waits():
            try:
                return self.send_all(heard)
            except StoreError:
                if time.monotonic() + wait > self._further_s + wait_s:
                    raise
                time.sleep(wait)
        raise AssertionError("it waits without end")

    def _check_own(self, lasts: list[str], manifest: Mapping[str, Uploaded]) -> None:
        """Checks that the store does not have another upload's files.

        Raises:
            UsageError: It has. Files that only this upload has sent are removed.
        """
        for name in lasts:
            with open_plain(self._directory / name) as local:
                own = local.read()
            with reporting(self.url), connect(self.url).open_input_file(self._target(name)) as file:
                stored = file.read()
            self.activity += 1
            if own != stored and self._is_foreign(own, stored):
                mixed = [each for each in self._done if each not in manifest and each not in lasts]
                for each in mixed:
                    self._remove(each)
                raise UsageError(
                    f"{self.url} has the files of another run, which are left as they are: choose "
                    "another URL"
                )

    def _names(self) -> list[str]:
        """Paths of the files in the directory, without hidden ones."""
        found = []
        for folder, folders, files in os.walk(self._directory):
            folders[:] = sorted(name for name in folders if name[0] != ".")
            for name in sorted(files):
                path = Path(folder, name)
                own = path.relative_to(self._directory).as_posix()
                if name[0] != "." and path.is_file() and not path.is_symlink():
                    found.append(own)
        # In the top directory, the manifest's name belongs to the store.
        return [name for name in found if name != MANIFEST_FILE and self._is_own(name)]

    def _target(self, name: str) -> str:
        return f"{path_in_store(self.url)}/{name}"

    def _send(self, name: str, is_stopped: Callable[[], bool] = _never) -> Uploaded:
        store, target = connect(self.url), self._target(name)
        if self._is_last(name):
            is_stopped = _never  # the beginning of such a file has no meaning
        with open_plain(self._directory / name) as source, reporting(self.url):
            if self.url.scheme not in BUCKET_SCHEMES:
                store.create_dir(target.rpartition("/")[0], recursive=True)
            with store.open_output_stream(target) as sink:
                done = self._copy(name, source, sink, is_stopped)
            found = store.get_file_info(target).size
        if found != done.size:
            raise StoreError(f"{self.url}: {name} has {found} of {done.size} bytes in the store")
        self._note_taken(name, done.size + 1)
        with self._lock:
            self._done[name] = done
            self._is_unrecorded = True
            is_due = time.monotonic() > self._recorded_s + _RECORD_EVERY_S
        if is_due:
            self.remember()
        return done

    def _is_large(self, name: str) -> bool:
        return (self._directory / name).stat().st_size >= _LARGE_BYTES

    def _copy(
        self, name: str, source: BinaryIO, sink: Any, is_stopped: Callable[[], bool]
    ) -> Uploaded:
        """Copies as much of a file as there is now; it may grow meanwhile."""
        size = crc32 = 0
        left = os.fstat(source.fileno()).st_size
        while left and not is_stopped() and (piece := source.read(min(left, _PIECE_BYTES))):
            sink.write(piece)
            size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
            left -= len(piece)
            self._note_taken(name, size)
        return Uploaded(size, crc32)

    def _note_taken(self, name: str, size: int) -> None:
        """Notes that the store took bytes of a file."""
        with self._lock:
            self.activity += 1
            if size > self._taken.get(name, 0):
                self._taken[name] = size
                self._further_s = time.monotonic()

    def _fact(self, name: str) -> Uploaded:
        """Size and checksum of a file."""
        size = crc32 = 0
        with open_plain(self._directory / name) as file:
            while piece := file.read(_PIECE_BYTES):
                size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
                self.activity += 1
        return Uploaded(size, crc32)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(StoreError), reporting(self.url):
            connect(self.url).delete_file(self._target(name))
        self._done.pop(name, None)

    def _sizes_in_store(self) -> dict[str, int]:
        base = path_in_store(self.url)
        selector = fs.FileSelector(base, recursive=True, allow_not_found=True)
        with reporting(self.url):
            infos = connect(self.url).get_file_info(selector)
        prefix = base.strip("/") + "/"
        return {info.path.lstrip("/").removeprefix(prefix): info.size for info in infos}

    def _read_manifest(self, sizes: Mapping[str, int]) -> dict[str, Uploaded]:
        if MANIFEST_FILE not in sizes:
            return {}
        with (
            reporting(self.url),
            connect(self.url).open_input_file(self._target(MANIFEST_FILE)) as file,
        ):
            content = file.read()
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            return _files(json.loads(content))
        return {}

    def _write_manifest(self, files: Mapping[str, Uploaded]) -> None:
        value = {"files": {name: done._asdict() for name, done in sorted(files.items())}}
        with (
            reporting(self.url),
            connect(self.url).open_output_stream(self._target(MANIFEST_FILE)) as file,
        ):
            file.write(json.dumps(value, indent=1).encode())


def _at_once(send: Callable[[str], None], names: Sequence[str]) -> None:
    """Sends some files at the same time; begins no other after an error."""
    if not names:
        return
    with ThreadPoolExecutor(min(_LARGE_AT_ONCE, len(names))) as pool:
        futures = [pool.submit(send, name) for name in names]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def read_record(directory: Path) -> tuple[str | None, dict[str, Uploaded]]:
    """Reads the URL of a directory's upload, if there was one, and what was uploaded."""
    try:
        with open_plain(directory / RECORD_FILE) as file:
            value = json.loads(file.read())
        return str(value["url"]), _files(value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, {}


def url_of_upload(directory: Path, url: str | None) -> StoreUrl:
    """The URL to which a directory is uploaded: the given one, or that of an earlier upload.

    Raises:
        UsageError: There is neither, or the URL is not valid.
    """
    found = url or read_record(directory)[0]
    if found is None:
        raise UsageError(
            f"{directory} was not recorded for a store: name one: ddltrace upload {directory} URL"
        )
    return parse_url(found)


def _files(value: Any) -> dict[str, Uploaded]:
    return {
        str(name): Uploaded(int(done["size"]), int(done["crc32"]))
        for name, done in value["files"].items()
    }


def _waits() -> Iterator[float]:
    yield from _WAITS_S
    while True:
        yield _WAITS_S[-1]
