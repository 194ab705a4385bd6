"""Removes a trace, and only a trace, in place of which another is written."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import TraceError, UsageError, is_store_failure
from ddltrace.tracer.storage.location import PART_PREFIX, Location
from ddltrace.tracer.trace.json_files import read_json
from ddltrace.tracer.trace.liveness import START_TIME, is_gone, pid_namespace, stat_fields
from ddltrace.tracer.trace.run_files import read_run_file, read_sidecars
from ddltrace.tracer.trace.run_info import PARTS_LABEL, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import SCHEMA_FAMILY
from ddltrace.tracer.trace.trace_files import RUN_FILE, parts_of

_OWN_FILE: Final = re.compile(
    r"\.?(?:run\.json|(?:rank|counters)-\d{5,9}-\d+-\d+\.(?:json|arrows?|damaged))"
    r"(?:\.reserve|(?:\.\d+)?\.tmp)?"
    r"|nccl-(?:\d+|unknown)-\d+(?:-\d+)?\.ring"
    r"|\.ddltrace-marks(?:\.\d+\.tmp)?"
    r"|(?:untraced|refused)-\d+\.txt|\.claim|\.ddltrace-upload\.json(?:\.\d+\.tmp)?"
)
_SURELY_OVER_S: Final = 600.0
"""A job on another host is over when nothing was written for so long."""
_CLOCK_S: Final = 2.0


def is_file_of_trace(path: str) -> bool:
    """Whether a path below a trace is that of one of its files, or of its parts'."""
    folder, slash, name = path.rpartition("/")
    is_part = folder.startswith(PART_PREFIX) and "/" not in folder
    return (not slash or is_part) and _OWN_FILE.fullmatch(name) is not None


def is_trace(directory: Location) -> bool:
    """Whether a directory holds a trace, and not only a file of the name of `RUN_FILE`."""
    try:
        schema = read_json(directory / RUN_FILE).get("schema")
    except TraceError as error:
        if is_store_failure(error):
            raise
        return False
    return str(schema).startswith(SCHEMA_FAMILY)


def holds_no_events(directory: Path) -> bool:
    """Whether a directory holds the trace of a job that ended and recorded nothing."""
    with contextlib.suppress(TraceError, OSError):
        folders = [directory, *parts_of(directory)]
        runs = [read_run_file(folder) for folder in folders if is_trace(folder)]
        recorded = [path for folder in folders for path in folder.glob("rank-*")]
        return (
            len(runs) == len(folders)
            and not recorded
            and all(
                not run.ranks and (run.status != "running" or run.labels.get(PARTS_LABEL))
                for run in runs
            )
        )
    return False


def check_not_recorded(directory: Path) -> None:
    """Checks that no process writes into a trace any more.

    Raises:
        UsageError: One does, or may do so on another host.
    """
    for folder in _folders(directory):
        with contextlib.suppress(TraceError):  # of another version
            if (writer := _writer(folder, read_run_file(folder))) is not None:
                raise UsageError(f"{folder} is still being recorded: {writer}")


def _folders(directory: Path) -> list[Path]:
    """A trace and its parts."""
    return [directory, *(part for part in parts_of(directory) if is_trace(part))]


def remove_trace(directory: Path) -> None:
    """Removes the files of a trace and of its parts; other files stay.

    Raises:
        UsageError: A job is still being recorded there.
        OSError: A file cannot be removed.
    """
    check_not_recorded(directory)
    for folder in reversed(_folders(directory)):
        own = [path for path in folder.iterdir() if _OWN_FILE.fullmatch(path.name)]
        # The record goes last: without it, the rest would not be known to be a trace.
        for path in sorted(own, key=lambda path: path.name == RUN_FILE):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
        if folder != directory:
            with contextlib.suppress(OSError):  # other files stay in it
                folder.rmdir()


def _writer(directory: Path, run: RunInfo) -> str | None:
    """Names a process that may still write into a trace; None if there is none."""
    writers: list[tuple[str, int, RankInfo | RunInfo, Path]] = []
    if run.status == "running" and run.launcher_pid is not None:
        writers.append(("ddltrace run", run.launcher_pid, run, directory / RUN_FILE))
    for info in [*run.ranks, *read_sidecars(directory, [])]:
        if info.status == "running" and info.pid is not None:
            file = directory / f"{info.segment}.json"
            writers.append((f"rank {info.rank}", info.pid, info, file))
    for who, pid, of, file in writers:
        if pid == os.getpid() and _is_visible(of):
            continue
        if not is_gone(pid, of) and not _is_another(pid, of, file):
            where = "" if _is_visible(of) else f" on {of.host} or in another container"
            return f"{who} is process {pid}{where} (end it first, or choose another with -o)"
    return None


def _is_visible(of: RankInfo | RunInfo) -> bool:
    """Whether the processes of a host and PID namespace can be seen from here."""
    return of.host == platform.node() and of.pid_namespace in {"", pid_namespace()}


def _is_another(pid: int, of: RankInfo | RunInfo, written: Path) -> bool:
    """Whether a process is surely not the one that wrote a file, or has long ended.

    Args:
        pid: Its id.
        of: Names the host of the process that wrote it.
        written: The file.
    """
    try:
        if not _is_visible(of):
            newest = max(path.lstat().st_mtime for path in written.parent.iterdir())
            return time.time() - newest > _SURELY_OVER_S
        began_s = int(stat_fields(pid)[START_TIME]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
        # The id was used again if the process began after the file was written.
        return time.time() - age_s > written.stat().st_mtime + _CLOCK_S
    except (OSError, ValueError, IndexError, AttributeError):
        return False
