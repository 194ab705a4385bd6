"""Uploads a directory to a store: resumable, and with the file that makes it complete at the end.

What was uploaded is recorded twice: in a hidden file of the directory, after each file, and in the
store at the end. An upload skips a file if a record has its size and checksum and the file in the
store has its size.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from pyarrow import fs

from ddltrace.tracer.errors import StoreError, UsageError
from ddltrace.tracer.storage.store_url import StoreUrl, parse_url
from ddltrace.tracer.storage.stores import connect, path_in_store, reporting

RECORD_FILE: Final = ".ddltrace-upload.json"
"""The record in the directory; it also has the URL."""
MANIFEST_FILE: Final = "upload.json"
"""The record in the store."""

_PIECE_BYTES: Final = 4 << 20
_GROWTH: Final = 2
_LEAST_BYTES: Final = 1 << 20
_WAITS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
_FLAT: Final = ("s3", "gs", "gcs")
"""Stores without directories, in which none has to be created."""


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
        directory: The directory.
        url: Where its files go.
        is_last: Whether a file, by its path in the directory, makes the upload complete. These are
            sent when all others are there, those in subdirectories first.
        is_own: Whether a file, by its path, is part of this upload.

    """

    def __init__(
        self,
        directory: Path,
        url: StoreUrl,
        is_last: Callable[[str], bool],
        is_own: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.url = url
        self._directory = directory
        self._is_last = is_last
        self._is_own = is_own
        record = read_record(directory)
        same = record[0] == str(url)
        self._done = {name: done for name, done in record[1].items() if same and is_own(name)}

    def remember(self) -> None:
        """Writes the URL into the directory, so that an upload can be resumed without it.

        Raises:
            OSError: The directory cannot be written.
        """
        value = {
            "url": str(self.url),
            "files": {name: done._asdict() for name, done in sorted(self._done.items())},
        }
        temporary = self._directory / f"{RECORD_FILE}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(self._directory / RECORD_FILE)

    def holds(self, name: str) -> bool:
        """Whether the store has a file.

        Raises:
            StoreError: The store cannot be asked.
        """
        with reporting(self.url):
            info = connect(self.url).get_file_info(self._target(name))
        return bool(info.type == fs.FileType.File)

    def clear(self) -> None:
        """Deletes what the store has below the URL.

        Raises:
            StoreError: The store refuses.
        """
        with reporting(self.url):
            connect(self.url).delete_dir_contents(path_in_store(self.url), missing_dir_ok=True)
        self._done.clear()

    def send_grown(self) -> None:
        """Sends the present state of files that have grown much since they were sent.

        A file is sent again when it has doubled, so in total at most twice its final size is
        sent. A file below 1 MB is sent again when it has another size.

        Raises:
            StoreError: The store cannot be written.
            OSError: A file cannot be read.
        """
        for name in self._names():
            size = (self._directory / name).stat().st_size
            before = self._done.get(name)
            limit = 0 if before is None else max(_GROWTH * before.size, _LEAST_BYTES)
            is_small = size < _LEAST_BYTES and before is not None and size != before.size
            if size >= limit or is_small:
                with contextlib.suppress(FileNotFoundError):  # replaced by its final file
                    self._send(name)

    def send_all(self, heard: Callable[[str], None] = lambda name: None) -> Progress:
        """Sends every file that is not in the store, and removes those that are gone here.

        Args:
            heard: Called with the name of each file before it is sent.

        Raises:
            StoreError: The store cannot be written; what was sent is remembered.
            OSError: A file cannot be read.
        """
        sizes = self._sizes_in_store()
        known = {**self._read_manifest(sizes), **self._done}
        # Other launchers of the job may have uploaded their parts to the same place.
        facts = {name: done for name, done in known.items() if not self._is_own(name)}
        names = self._names()
        lasts = sorted(filter(self._is_last, names), key=lambda name: -name.count("/"))
        firsts = [name for name in names if name not in lasts]
        sent = size = 0
        for name in [*firsts, MANIFEST_FILE, *lasts]:
            if name == MANIFEST_FILE:
                facts |= {last: _fact(self._directory / last) for last in lasts}
                if facts != known or MANIFEST_FILE not in sizes:
                    self._write_manifest(facts)
                continue
            done = _fact(self._directory / name)
            if known.get(name) != done or sizes.get(name) != done.size:
                heard(name)
                done = self._send(name)
                sent, size = sent + 1, size + done.size
            facts[name] = self._done[name] = done
        for name in [name for name in self._done if name not in names]:
            self._remove(name)
        self.remember()
        return Progress(sent, len(names) - sent, size)

    def finish(self, wait_s: float, heard: Callable[[str], None] = lambda name: None) -> Progress:
        """Calls `send_all`, again and again for some time if the store is away.

        Args:
            wait_s: Give up after this time, in seconds.
            heard: See `send_all`.

        Raises:
            StoreError: The store was away to the end.
            OSError: A file cannot be read.
        """
        deadline = time.monotonic() + wait_s
        for wait in _waits():
            try:
                return self.send_all(heard)
            except StoreError:
                if time.monotonic() + wait > deadline:
                    raise
                time.sleep(wait)
        raise AssertionError("it waits without end")

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

    def _send(self, name: str) -> Uploaded:
        store, target = connect(self.url), self._target(name)
        with (self._directory / name).open("rb") as source, reporting(self.url):
            if self.url.scheme not in _FLAT:
                store.create_dir(target.rpartition("/")[0], recursive=True)
            done = _copy(source, store.open_output_stream(target))
            found = store.get_file_info(target).size
        if found != done.size:
            raise StoreError(f"{self.url}: {name} has {found} of {done.size} bytes in the store")
        self._done[name] = done
        self.remember()
        return done

    def _remove(self, name: str) -> None:
        with contextlib.suppress(StoreError), reporting(self.url):
            connect(self.url).delete_file(self._target(name))
        del self._done[name]

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


def read_record(directory: Path) -> tuple[str | None, dict[str, Uploaded]]:
    """Reads the URL of a directory's upload, if there was one, and what was uploaded."""
    try:
        value = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))
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


def _fact(path: Path) -> Uploaded:
    """Size and checksum of a file."""
    size = crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
    return Uploaded(size, crc32)


def _copy(source: BinaryIO, sink: Any) -> Uploaded:
    """Copies as much of a file as there is now; it may grow meanwhile."""
    size = crc32 = 0
    left = os.fstat(source.fileno()).st_size
    with sink:
        while left and (piece := source.read(min(left, _PIECE_BYTES))):
            sink.write(piece)
            size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
            left -= len(piece)
    return Uploaded(size, crc32)


def _waits() -> Iterator[float]:
    yield from _WAITS_S
    while True:
        yield _WAITS_S[-1]
