"""Uploads a trace while its job runs, in a thread of the launcher, and to the end after it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FuturesTimeoutError
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.errors import DdltraceError, StoreError, UsageError
from ddltrace.tracer.storage.remote_path import RemotePath
from ddltrace.tracer.storage.store_threads import begin_in_store_thread, start_store_thread
from ddltrace.tracer.storage.store_url import StoreUrl
from ddltrace.tracer.storage.upload import Upload
from ddltrace.tracer.trace.removal import is_file_of_trace, is_trace
from ddltrace.tracer.trace.run_info import PARTS_LABEL
from ddltrace.tracer.trace.trace_files import FILE_SUFFIX, RUN_FILE, SIDECAR_SUFFIX, STREAM_SUFFIX

WAIT_VARIABLE: Final = "DDLTRACE_UPLOAD_WAIT"
"""Environment variable: seconds without progress after which the upload is given up at the end."""
_WAIT_S: Final = 60.0
_ANSWER_S: Final = 5.0
"""A request that is under way after that time may take so much longer."""
_POLL_S: Final = 0.1
_CHECK_S: Final = 10.0
_INTERVAL_S: Final = 5.0
_LONGEST_S: Final = 60.0
_LOWEST_PRIORITY: Final = 19


class BackgroundUpload:
    """The upload of the trace of one launcher.

    While the job runs, the present state of the files goes to the store now and then, so that a
    lost node does not lose all of its trace.

    Args:
        whole: The local directory.
        own: The directory that this launcher writes: `whole`, or a part in it.
        url: Where the files of `whole` go.
    """

    def __init__(self, whole: Path, own: Path, url: StoreUrl) -> None:
        self._whole = whole
        self._own = own.relative_to(whole)
        folder = "" if self._own == Path(".") else f"{self._own.as_posix()}/"
        self._upload = new_upload(
            whole, url, lambda name: name == RUN_FILE or name.startswith(folder)
        )
        self._folder = folder
        self._is_forced = False
        self._stop = threading.Event()
        self._has_begun = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> StoreUrl:
        """Where the files go."""
        return self._upload.url

    @property
    def resume_command(self) -> str:
        """The command that uploads what is missing."""
        return resume_command(self._whole)

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
        if not self._upload.holds((self._own / RUN_FILE).as_posix()):
            return
        if not force:
            raise UsageError(f"{self.url} has a trace: choose another with -o, or add --force")
        place = RemotePath(str(self.url))
        if not is_trace(place / self._folder if self._folder else place):
            raise UsageError(f"{self.url} is not a trace: --force overwrites only traces")
        if not self._has_begun.is_set():
            self._upload.clear(is_file_of_trace, self._folder)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Uploads in a thread, from the fork of the job's process to its end."""
        with contextlib.suppress(OSError):
            self._upload.remember()
        self._thread = start_store_thread(self._run)
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
        answer = begin_in_store_thread(self._send_rest)
        try:
            reason = self._reason(answer)
        except KeyboardInterrupt:
            reason = "interrupted"
        if reason is None:
            return None
        missing, files = self._upload.missing()
        if not files:
            return reason
        return f"{missing} of {files} files are not in the store ({reason})" if missing else None

    def _reason(self, answer: Future[None]) -> str | None:
        """Waits for the end of the upload, or for a time without progress; says why it failed."""
        wait_s = _wait_s()
        activity, since_s = -1, 0.0
        while not wait([answer], _POLL_S).done:
            if activity != self._upload.activity:
                activity, since_s = self._upload.activity, time.monotonic()
            elif time.monotonic() > since_s + wait_s + _ANSWER_S:
                return f"{self.url}: the store does not answer"
        error = answer.exception()
        if error is None or isinstance(error, (DdltraceError, OSError)):
            return None if error is None else str(error)
        return f"{type(error).__name__}: {error}"

    def _send_rest(self) -> None:
        if self._thread is not None:
            self._thread.join()
        try:
            self._upload.finish(_wait_s())
        except UsageError:
            if not self._is_forced:
                raise
            # The store, which has another run, was away when it was checked.
            self._upload.clear(is_file_of_trace, self._folder)
            self._upload.finish(_wait_s())

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # per thread on Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        pause_s = 0.0  # at once, so that other runs with this URL see it
        while not self._stop.wait(pause_s):
            try:
                self._upload.send_grown(self._stop.is_set)
                pause_s = _INTERVAL_S
            except (StoreError, OSError):
                pause_s = min(max(2 * pause_s, _INTERVAL_S), _LONGEST_S)


def _wait_s() -> float:
    with contextlib.suppress(ValueError):
        wait_s = float(os.environ.get(WAIT_VARIABLE, ""))
        if math.isfinite(wait_s):
            return max(wait_s, 0.0)
    return _WAIT_S


def new_upload(
    directory: Path, url: StoreUrl, is_own: Callable[[str], bool] = lambda name: True
) -> Upload:
    """The upload of a trace, to which ``run.json`` goes last; see `Upload`."""
    return Upload(
        directory,
        url,
        lambda name: name.rpartition("/")[2] == RUN_FILE,
        is_own,
        is_foreign=_is_of_another_run,
        is_former=_is_of_running_process,
    )


def _is_of_running_process(stored: str, names: Collection[str]) -> bool:
    """Whether a file is the stream or the sidecar of a process whose final file is among some."""
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


def resume_command(directory: Path) -> str:
    """The command that uploads what is missing."""
    return f"ddltrace upload {shlex.quote(str(directory))}"
