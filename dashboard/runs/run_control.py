"""Starts ``ddltrace experiment run`` as a child process, observes it, and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from ddltrace.experiments.harness.file_names import RESULTS_FILE
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.trace.trace_files import RUN_FILE

GRACE_SECONDS: Final = 30.0
"""Time that a run gets to write its traces between SIGTERM and SIGKILL."""

_LOG_BYTES: Final = 16_000
_SUPERVISED: Final = "ddltrace.dashboard.runs.supervised_run"


class RunInProgressError(DdltraceError):
    """Another run is in progress; concurrent runs would disturb each other's times."""


@dataclass(frozen=True)
class RunState:
    """The last started run.

    Attributes:
        directory: Directory of its results.
        arguments: Arguments of ``ddltrace experiment run``.
        status: ``running``, ``cancelling``, ``done``, ``failed`` or ``cancelled``.
        exit_status: Exit status of the process; None while it runs.
        log: The end of the process's own output.
        job_log: The end of the output of the current job, or of the last one.
    """

    directory: Path
    arguments: tuple[str, ...]
    status: str
    exit_status: int | None
    log: str
    job_log: str

    @property
    def is_running(self) -> bool:
        """Whether the process still runs."""
        return self.exit_status is None


class RunControl:
    """At most one running experiment.

    Attributes:
        folder: The folder in which each run gets a directory of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = folder
        self._arguments: tuple[str, ...] = ()
        self._cancelled = False
        self._watched: dict[int, psutil.Process] = {}
        self._canceller: threading.Thread | None = None
        self._closed = False

    def start(self, arguments: Sequence[str]) -> Path:
        """Starts ``ddltrace experiment run`` with these arguments.

        Returns:
            The directory of the results.

        Raises:
            RunInProgressError: A run is in progress.
            DdltraceError: The folder cannot be written, or the server is about to end.
        """
        with self._lock:
            if self._closed:
                raise DdltraceError("the dashboard is about to end")
            if self._process is not None and self._process.poll() is None:
                raise RunInProgressError(
                    f"an experiment runs already, into {self._directory}: "
                    "wait for its end or cancel it"
                )
            directory = self._new_directory()
            command = [
                *(sys.executable, "-m", _SUPERVISED, "experiment", "run"),
                *("-o", str(directory), *arguments),
            ]
            try:
                with _log_file(directory).open("wb") as output:
                    self._process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,  # open as long as this process lives
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches it once, through `close`
                    )
            except OSError as error:
                raise DdltraceError(f"the run cannot be started: {error}") from error
            self._directory, self._arguments = directory, tuple(arguments)
            self._cancelled, self._watched = False, {}
            return directory

    def state(self) -> RunState | None:
        """The last started run; None before the first."""
        with self._lock:
            process = self._process
            if process is None:
                return None
            status = process.poll()
            if status is None:
                self._watch(process)
                name = "cancelling" if self._cancelled else "running"
            else:
                name = "cancelled" if self._cancelled else "failed" if status else "done"
            return RunState(
                directory=self._directory,
                arguments=self._arguments,
                status=name,
                exit_status=status,
                log=_tail(_log_file(self._directory)),
                job_log=_tail(_newest_log(self._directory)),
            )

    def cancel(self) -> bool:
        """Ends the run in the background; kills remaining processes after `GRACE_SECONDS`.

        Returns:
            Whether a run was in progress.
        """
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                return False
            if not self._cancelled:
                self._cancelled = True
                self._canceller = threading.Thread(
                    target=self._end, args=(process,), name="cancel-run", daemon=True
                )
                self._canceller.start()
            return True

    def close(self) -> None:
        """Ends the run, if there is one, and waits for all its processes."""
        with self._lock:
            self._closed = True
        self.cancel()
        if self._canceller is not None:
            self._canceller.join()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM, on which the run ends its job and writes its results; then SIGKILL."""
        with self._lock:
            self._watch(process)
        # SIGTERM goes to the run alone: it passes the signal on to the job, which saves its trace.
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            try:
                process.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                with self._lock:
                    self._watch(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        left = [one for one in self._watched.values() if one.is_running()]
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=5)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Collects the descendant processes of the run: the job's ranks have their own sessions,
        and cannot be found once their parents have ended."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                self._watched.setdefault(child.pid, child)

    def _new_directory(self) -> Path:
        stamp = time.strftime("experiment-%Y%m%d-%H%M%S")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DdltraceError(f"{self.folder} cannot be written: {error.strerror}") from error
        number, directory = 1, self.folder / stamp
        while directory.exists() or _log_file(directory).exists():
            number += 1
            directory = self.folder / f"{stamp}-{number}"
        return directory


def results_folder(paths: Sequence[Path]) -> Path:
    """The folder for the runs of a dashboard.

    Args:
        paths: The arguments of the dashboard.

    Returns:
        The first path that is a folder of traces and experiments; without one, ``experiments`` in
        the working directory.
    """
    for path in paths:
        kept = any((path / name).exists() for name in (RESULTS_FILE, RUN_FILE))
        if path.is_dir() and not kept and os.access(path, os.W_OK):
            return path.resolve()
    return Path("experiments").resolve()


def _log_file(directory: Path) -> Path:
    """The run's own output; beside its directory, which must be empty when the run starts."""
    return directory.with_name(f"{directory.name}.log")


def _newest_log(directory: Path) -> Path | None:
    logs: list[tuple[int, Path]] = []
    for path in directory.glob("*.log"):
        with contextlib.suppress(OSError):
            logs.append((path.stat().st_mtime_ns, path))
    return max(logs)[1] if logs else None


def _tail(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        with open_plain(path) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
