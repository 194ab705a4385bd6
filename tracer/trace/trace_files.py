"""Names of the files of a trace.

A trace is a directory::

    run.json                     what ran, on which hosts and ranks, what was lost
    rank-00003-0-4711.arrows     while rank 3 (attempt 0, process 4711) runs: an IPC stream
    rank-00003-0-4711.json       the process's own record: tensors, groups, clock
    rank-00003-0-4711.arrow      after the job has ended: an IPC file that replaces the stream
    counters-00003-0-4711.arrows the process's resource counters while it runs: an IPC stream
    counters-00003-0-4711.arrow  after the job has ended: the same as an IPC file
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Final, overload

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import Location

RUN_FILE: Final = "run.json"
STREAM_SUFFIX: Final = ".arrows"
FILE_SUFFIX: Final = ".arrow"
SIDECAR_SUFFIX: Final = ".json"
COUNTERS_PREFIX: Final = "counters-"
PART_PREFIX: Final = "part-"
"""Prefix of directories in a trace that several launchers of one job wrote; see `trace_parts`."""

_SEGMENT_NAME = re.compile(r"rank-\d{5,9}-\d+-\d+\Z")


def segment_name(*, rank: int, attempt: int, pid: int) -> str:
    """Base name of one rank process's files."""
    return f"rank-{rank:05d}-{attempt}-{pid}"


def is_segment_name(text: str) -> bool:
    """Whether a text has the form of `segment_name`, so that it cannot refer to another
    directory."""
    return _SEGMENT_NAME.match(text) is not None


@overload
def event_path(directory: Path, segment: str) -> Path: ...


@overload
def event_path(directory: Location, segment: str) -> Location: ...


def event_path(directory: Location, segment: str) -> Location:
    """Where the events of one rank process are: its final file, else its stream."""
    if not _SEGMENT_NAME.match(segment):
        raise TraceError(f"{segment!r:.80} is no name of a rank's files")
    return _stored(directory, segment)


def counters_name(segment: str) -> str:
    """Base name of a rank process's counter file."""
    if not _SEGMENT_NAME.match(segment):
        raise TraceError(f"{segment!r:.80} is no name of a rank's files")
    return COUNTERS_PREFIX + segment.removeprefix("rank-")


@overload
def counters_path(directory: Path, segment: str) -> Path: ...


@overload
def counters_path(directory: Location, segment: str) -> Location: ...


def counters_path(directory: Location, segment: str) -> Location:
    """Where the counters of one rank process are: the final file, else the stream."""
    return _stored(directory, counters_name(segment))


def counter_files(directory: Location) -> set[str]:
    """Base names of all counter files in a trace and its parts, from one listing."""
    found: set[str] = set()
    for folder in ("", f"{PART_PREFIX}*/"):
        for path in directory.glob(f"{folder}{COUNTERS_PREFIX}*"):
            found.add(path.name.removesuffix(path.suffix))
    return found


def _stored(directory: Location, stem: str) -> Location:
    """The final file with a base name, else the stream, in the trace or one of its parts."""
    # The parts last: for every rank, they are listed as a whole.
    for suffix in (FILE_SUFFIX, STREAM_SUFFIX):
        if (path := directory / (stem + suffix)).exists():
            return path
    for suffix in (FILE_SUFFIX, STREAM_SUFFIX):
        for path in directory.glob(f"{PART_PREFIX}*/{stem}{suffix}"):
            return path
    return directory / (stem + STREAM_SUFFIX)


def require_regular_file(path: Location) -> None:
    """Rejects anything but a plain file: a link can leave the trace, and a pipe never ends.

    Raises:
        OSError: It is not a plain file.
    """
    if not isinstance(path, Path):  # a store has neither
        return
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("not a plain file")
