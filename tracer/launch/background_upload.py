"""Uploads a trace while its job runs, in a thread of the launcher, and to the end after it."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import StoreError, UsageError
from ddltrace.tracer.storage.store_url import StoreUrl
from ddltrace.tracer.storage.upload import Upload
from ddltrace.tracer.trace.trace_files import RUN_FILE

WAIT_VARIABLE: Final = "DDLTRACE_UPLOAD_WAIT"
"""Environment variable: seconds for which to wait at the end for a store that is away."""
_WAIT_S: Final = 60.0
_CHECK_S: Final = 10.0
_JOIN_S: Final = 30.0
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
        self._stop = threading.Event()
        self._has_begun = threading.Event()
        self._is_stuck = False

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
        # In a thread, because a store may accept connections and not answer.
        answer: Future[None] = Future()
        threading.Thread(target=self._answer, args=(answer, force), daemon=True).start()
        try:
            answer.result(_CHECK_S)
        except (StoreError, TimeoutError, FuturesTimeoutError) as error:
            reason = str(error) or f"{self.url}: the store does not answer"
            warn(f"{reason}: the trace is written here and uploaded when the store is there")
        finally:
            # An answer that comes later must not delete anything.
            self._has_begun.set()

    def _answer(self, answer: Future[None], force: bool) -> None:
        try:
            self._check(force=force)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            answer.set_exception(error)
        else:
            answer.set_result(None)

    def _check(self, *, force: bool) -> None:
        if not self._upload.holds((self._own / RUN_FILE).as_posix()):
            return
        if not force:
            raise UsageError(f"{self.url} has a trace: choose another with -o, or add --force")
        if self._own == Path(".") and not self._has_begun.is_set():
            self._upload.clear()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Uploads in a thread, from the fork of the job's process to its end."""
        with contextlib.suppress(OSError):
            self._upload.remember()
        thread = threading.Thread(target=self._run, name="upload", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(max(_wait_s(), _JOIN_S))
            self._is_stuck = thread.is_alive()

    def finish(self) -> str | None:
        """Sends what is not in the store yet.

        Returns:
            None if everything is there; else why not.
        """
        if self._is_stuck:
            return f"{self.url}: the store does not answer"
        try:
            self._upload.finish(_wait_s())
        except (StoreError, OSError) as error:
            return str(error)
        except KeyboardInterrupt:
            return "interrupted"
        return None

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # per thread on Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        wait = _INTERVAL_S
        while not self._stop.wait(wait):
            try:
                self._upload.send_grown()
                wait = _INTERVAL_S
            except (StoreError, OSError):
                wait = min(2 * wait, _LONGEST_S)


def _wait_s() -> float:
    try:
        return float(os.environ.get(WAIT_VARIABLE) or _WAIT_S)
    except ValueError:
        return _WAIT_S


def new_upload(
    directory: Path, url: StoreUrl, is_own: Callable[[str], bool] = lambda name: True
) -> Upload:
    """The upload of a trace, to which ``run.json`` goes last; see `Upload`."""
    return Upload(directory, url, lambda name: name.rpartition("/")[2] == RUN_FILE, is_own)


def resume_command(directory: Path) -> str:
    """The command that uploads what is missing."""
    return f"ddltrace upload {shlex.quote(str(directory))}"
