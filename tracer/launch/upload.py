"""Uploads a trace to a store: while its job runs, to the end after it, or from an interruption on.

``run.json`` makes a trace complete, so it goes last. What was uploaded is recorded twice: in a
hidden file of the directory, at most once a second, and in the store at the end. An upload skips a
file if a record has its size and checksum and the file in the store has its size.

An upload is given up if it gets no further for some time. It gets further when the store takes
bytes of a file that it had not taken before, or when a file is first read to compare it with what
is recorded, so trying again does not count.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FuturesTimeoutError
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from pyarrow import fs

from ddltrace.tracer.errors import DdltraceError, StoreError, UsageError
from ddltrace.tracer.number_text import agreeing
from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.storage.remote_path import RemotePath
from ddltrace.tracer.storage.store_threads import begin_in_store_thread
from ddltrace.tracer.storage.stores import BUCKET_SCHEMES, StoreUrl, connected, parse_url
from ddltrace.tracer.trace.removal import is_file_of_trace, is_trace
from ddltrace.tracer.trace.run_info import PARTS_LABEL
from ddltrace.tracer.trace.trace_files import FILE_SUFFIX, RUN_FILE, SIDECAR_SUFFIX, STREAM_SUFFIX

RECORD_FILE: Final = ".ddltrace-upload.json"
"""The record in the directory; it also has the URL."""
MANIFEST_FILE: Final = "upload.json"
"""The record in the store."""
WAIT_VARIABLE: Final = "DDLTRACE_UPLOAD_WAIT"
"""Environment variable: seconds without progress after which the upload is given up at the end."""

_WAIT_S: Final = 60.0
_ANSWER_S: Final = 5.0
"""A request that is under way after that time may take so much longer."""
_POLL_S: Final = 0.1
_CHECK_S: Final = 10.0
_INTERVAL_S: Final = 5.0
_LONGEST_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 8.0
_RECORD_EVERY_S: Final = 1.0
_LOWEST_PRIORITY: Final = 19
_PIECE_BYTES: Final = 4 << 20
_GROWTH: Final = 2
_LEAST_BYTES: Final = 1 << 20
_LARGE_BYTES: Final = 8 << 20
_LARGE_AT_ONCE: Final = 4
"""Files of at least this size that are sent at the same time; of each, one piece is in memory."""


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


class Progress(NamedTuple):
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
    """The upload of a trace. One thread may use it at a time.

    Args:
        directory: The trace directory.
        url: Where its files go.
        folder: With a slash at the end: besides ``run.json``, only the files in this folder are
            part of this upload. Other launchers of the job upload theirs to the same place.

    Attributes:
        url: Where the files go.
    """

    def __init__(self, directory: Path, url: StoreUrl, folder: str = "") -> None:
        self.url = url
        self._directory = directory
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], int] = {}
        self._further_s = time.monotonic()
        self._recorded_s = 0.0
        self._is_unrecorded = False
        self._there: set[str] = set()
        of_url, done = read_record(directory)
        self._done = {n: fact for n, fact in done.items() if of_url == str(url) and self._is_own(n)}

    @property
    def resume_command(self) -> str:
        """The command that uploads what is missing."""
        return f"ddltrace upload {shlex.quote(str(self._directory))}"

    def remember(self) -> None:
        """Writes the URL into the directory, so that an upload can be resumed without it.

        Raises:
            OSError: The directory cannot be written.
        """
        with self._lock:
            value = {"url": str(self.url), **_files_to_json(self._done)}
            temporary = self._directory / f"{RECORD_FILE}.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(value), encoding="utf-8")
            temporary.replace(self._directory / RECORD_FILE)
            self._recorded_s = time.monotonic()
            self._is_unrecorded = False

    def clear(self) -> None:
        """Deletes the files of a trace that the store has at the URL, or in the folder there.

        Raises:
            UsageError: The URL is a whole bucket.
            StoreError: The store refuses.
        """
        place = self._target(self._folder).rstrip("/")
        if not place or (self.url.scheme in BUCKET_SCHEMES and "/" not in place):
            raise UsageError(
                f"{self.url} is a whole bucket, which is not emptied: name a directory"
            )
        for name in self._sizes_in_store():
            own = name.removeprefix(self._folder)
            if name.startswith(self._folder) and (is_file_of_trace(own) or own == MANIFEST_FILE):
                with connected(self.url) as store:
                    store.delete_file(self._target(name))
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
            UsageError: The store has the files of another run, which are left as they are; or the
                directory has no ``run.json``, or lacks one that was sent before.
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
        lasts = sorted(filter(_is_last, names), key=lambda name: -name.count("/"))
        gone = [name for name in self._done if _is_last(name) and name not in lasts]
        if gone or not lasts:
            # Its disk may be gone: what was uploaded before may be all that is left.
            lost = (self._directory / gone[0]).parent if gone else self._directory
            raise UsageError(f"{lost} is gone: the store keeps what was uploaded before")
        self._check_own([name for name in lasts if name in sizes], manifest)
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

        large = []
        for name in names:
            if name in lasts:
                continue
            if (self._directory / name).stat().st_size >= _LARGE_BYTES:
                large.append(name)
            else:
                send(name)
        _at_once(send, large)
        facts |= {last: self._fact(last) for last in lasts}
        if facts != known or MANIFEST_FILE not in sizes:
            text = json.dumps(_files_to_json(facts), indent=1)
            with (
                connected(self.url) as store,
                store.open_output_stream(self._target(MANIFEST_FILE)) as file,
            ):
                file.write(text.encode())
        for name in lasts:
            send(name)
        former = [name for name in sizes if self._is_own(name) and _is_former(name, names)]
        for name in {*self._done, *former}.difference(names):
            self._remove(name)
        return Progress(len(sent), len(names) - len(sent), sum(sent))

    def _check_own(self, lasts: list[str], manifest: Mapping[str, Uploaded]) -> None:
        """Checks that the store does not have another run's files.

        Raises:
            UsageError: It has. Files that only this upload has sent are removed.
        """
        for name in lasts:
            with open_plain(self._directory / name) as local:
                own = local.read()
            stored = self._stored(name)
            if own != stored and _is_of_another_run(own, stored):
                mixed = [each for each in self._done if each not in manifest and each not in lasts]
                for each in mixed:
                    self._remove(each)
                raise UsageError(
                    f"{self.url} has the files of another run, which are left as they are: choose "
                    "another URL"
                )

    def _is_own(self, name: str) -> bool:
        """Whether a file, by its path, is part of this upload."""
        return name == RUN_FILE or name.startswith(self._folder)

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
        return f"{self.url.path}/{name}"

    def _send(self, name: str, is_stopped: Callable[[], bool] = _never) -> Uploaded:
        target = self._target(name)
        if _is_last(name):
            is_stopped = _never  # the beginning of such a file has no meaning
        with open_plain(self._directory / name) as source, connected(self.url) as store:
            if self.url.scheme not in BUCKET_SCHEMES:
                store.create_dir(target.rpartition("/")[0], recursive=True)
            with store.open_output_stream(target) as sink:
                done = self._copy(name, source, sink, is_stopped)
            found = store.get_file_info(target).size
        if found != done.size:
            raise StoreError(f"{self.url}: {name} has {found} of {done.size} bytes in the store")
        self._note_progress("taken", name, done.size + 1)
        with self._lock:
            self._done[name] = done
            self._is_unrecorded = True
            is_due = time.monotonic() > self._recorded_s + _RECORD_EVERY_S
        if is_due:
            self.remember()
        return done

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
            self._note_progress("taken", name, size)
        return Uploaded(size, crc32)

    def _fact(self, name: str) -> Uploaded:
        """Size and checksum of a file."""
        size = crc32 = 0
        with open_plain(self._directory / name) as file:
            while piece := file.read(_PIECE_BYTES):
                size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
                self._note_progress("read", name, size)
        return Uploaded(size, crc32)

    def _note_progress(self, what: str, name: str, size: int) -> None:
        """Notes that bytes of a file were taken by the store, or read to compare them with it."""
        with self._lock:
            if size > self._seen.get((what, name), 0):
                self._seen[what, name] = size
                self._further_s = time.monotonic()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(StoreError), connected(self.url) as store:
            store.delete_file(self._target(name))
        self._done.pop(name, None)

    def _sizes_in_store(self) -> dict[str, int]:
        base = self.url.path
        with connected(self.url) as store:
            infos = store.get_file_info(fs.FileSelector(base, True, True))
        prefix = base.strip("/") + "/"
        return {info.path.lstrip("/").removeprefix(prefix): info.size for info in infos}

    def _stored(self, name: str) -> bytes:
        """The content of a file in the store."""
        with connected(self.url) as store, store.open_input_file(self._target(name)) as file:
            return bytes(file.read())

    def _read_manifest(self, sizes: Mapping[str, int]) -> dict[str, Uploaded]:
        content = self._stored(MANIFEST_FILE) if MANIFEST_FILE in sizes else b""
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            return _files_from_json(json.loads(content))
        return {}


class BackgroundUpload(Upload):
    """The upload of what one launcher writes, beside its job and after it.

    While the job runs, the present state of the files goes to the store now and then, so that a
    lost node does not lose all of its trace.

    Args:
        whole: The local directory.
        own: The directory that this launcher writes: `whole`, or a part in it.
        url: Where the files of `whole` go.
    """

    def __init__(self, whole: Path, own: Path, url: StoreUrl) -> None:
        super().__init__(whole, url, "" if own == whole else f"{own.relative_to(whole)}/")
        self._is_forced = False
        self._stop = threading.Event()
        self._has_begun = threading.Event()
        self._running: Future[None] | None = None

    def check(self, warn: Callable[[str], None], *, force: bool) -> None:
        """Checks before the job that the store has no such trace; one that is away may have.

        Raises:
            UsageError: The store has one, and it must not be replaced; or the protocol of the URL
                is not known.
            MissingCapabilityError: A package is missing.
        """
        self._is_forced = force
        # In a thread, because a store may accept connections and not answer.
        answer = begin_in_store_thread(lambda: self._check(force=force))
        try:
            answer.result(_CHECK_S)
        except (StoreError, TimeoutError, FuturesTimeoutError) as error:
            reason = str(error) or f"{self.url}: the store does not answer"
            warn(f"{reason}: the trace is written here and uploaded when the store is there")
        finally:
            # An answer that comes later must not delete anything.
            self._has_begun.set()

    def _check(self, *, force: bool) -> None:
        with connected(self.url) as store:
            info = store.get_file_info(self._target(self._folder + RUN_FILE))
        if info.type != fs.FileType.File:
            return
        if not force:
            raise UsageError(f"{self.url} has a trace: choose another with -o, or add --force")
        if not is_trace(RemotePath(str(self.url.at(self._target(self._folder).rstrip("/"))))):
            raise UsageError(f"{self.url} is not a trace: --force overwrites only traces")
        if not self._has_begun.is_set():
            self.clear()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Uploads in a thread, from the fork of the job's process to its end."""
        with contextlib.suppress(OSError):
            self.remember()
        self._running = begin_in_store_thread(self._run)
        try:
            yield
        finally:
            # `finish` waits for the thread: before, the trace is finalized.
            self._stop.set()

    def finish(self) -> str | None:
        """Sends what is not in the store yet; gives up when there is no progress for some time.

        A thread that waits for the store is then left behind.

        Returns:
            None if everything is there; else what is not, and why.
        """
        self._stop.set()
        self._seen.clear()
        self._further_s = time.monotonic()
        try:
            reason = self._reason(begin_in_store_thread(self._send_rest))
        except KeyboardInterrupt:
            reason = "interrupted"
        names = self._names()
        if reason is None or not names:
            return reason
        if not (missing := sum(name not in self._there for name in names)):
            return None
        are = agreeing(missing, "is")
        return f"{missing} of {len(names)} files {are} not in the store ({reason})"

    def _reason(self, answer: Future[None]) -> str | None:
        """Waits for the end of the upload, or for a time without progress; says why it failed."""
        wait_s = _wait_s()
        while not wait([answer], _POLL_S).done:
            if time.monotonic() > self._further_s + wait_s + _ANSWER_S:
                return f"{self.url}: the store does not answer"
        error = answer.exception()
        if error is None or isinstance(error, (DdltraceError, OSError)):
            return None if error is None else str(error)
        return f"{type(error).__name__}: {error}"

    def _send_rest(self) -> None:
        if self._running is not None:
            wait([self._running])
        try:
            self._send_again_and_again()
        except UsageError:
            if not self._is_forced:
                raise
            # The store, which has another run, was away when it was checked.
            self.clear()
            self._send_again_and_again()

    def _send_again_and_again(self) -> None:
        """Calls `send_all`, also after a store that was away, until there is no progress."""
        pause_s, wait_s = _FIRST_PAUSE_S, _wait_s()
        while True:
            try:
                self.send_all()
            except StoreError:
                if time.monotonic() + pause_s > self._further_s + wait_s:
                    raise
            else:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # per thread on Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        pause_s = 0.0  # at once, so that other runs with this URL see it
        while not self._stop.wait(pause_s):
            try:
                self.send_grown(self._stop.is_set)
                pause_s = _INTERVAL_S
            except (StoreError, OSError):
                pause_s = min(max(2 * pause_s, _INTERVAL_S), _LONGEST_S)


def _wait_s() -> float:
    with contextlib.suppress(ValueError):
        wait_s = float(os.environ.get(WAIT_VARIABLE, ""))
        if math.isfinite(wait_s):
            return max(wait_s, 0.0)
    return _WAIT_S


def _at_once(send: Callable[[str], None], names: Sequence[str]) -> None:
    """Sends some files at the same time; begins no other after an error."""
    with ThreadPoolExecutor(_LARGE_AT_ONCE) as pool:
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
        return str(value["url"]), _files_from_json(value)
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


def _files_to_json(files: Mapping[str, Uploaded]) -> dict[str, Any]:
    return {"files": {name: done._asdict() for name, done in sorted(files.items())}}


def _files_from_json(value: Any) -> dict[str, Uploaded]:
    return {
        str(name): Uploaded(int(done["size"]), int(done["crc32"]))
        for name, done in value["files"].items()
    }


def _is_last(name: str) -> bool:
    """Whether a file, by its path, makes a trace or a part complete; those of parts go first."""
    return name.rpartition("/")[2] == RUN_FILE


def _is_former(stored: str, names: Collection[str]) -> bool:
    """Whether a file is the stream or the sidecar of a process whose final file is among some.

    Such a file is removed from the store even if there is no record of it: the launcher that sent
    it was killed.
    """
    return any(
        stored.endswith(suffix) and stored.removesuffix(suffix) + FILE_SUFFIX in names
        for suffix in (STREAM_SUFFIX, SIDECAR_SUFFIX)
    )


def _is_of_another_run(own: bytes, stored: bytes) -> bool:
    """Whether two files `RUN_FILE` are of different runs; false if that cannot be determined."""
    try:
        one, other = _identity(json.loads(own)), _identity(json.loads(stored))
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    return one != other


def _identity(run: dict[str, Any]) -> object:
    """What two states of the record of one run have in common, and those of others do not."""
    if run["labels"].get(PARTS_LABEL):
        # Each launcher of a job may have created it.
        return PARTS_LABEL
    return [run.get(name) for name in ("created_unix_ns", "host", "source", "command")]
