"""Names of the files of a trace.

A trace is a directory::

    run.json                     what ran, on which hosts and ranks, what was lost
    rank-00003-0-4711.arrows     while rank 3 (attempt 0, process 4711) runs: an IPC stream
    rank-00003-0-4711.json       the process's own record: tensors, groups, clock
    rank-00003-0-4711.arrow      after the job has ended: an IPC file that replaces the stream
    counters-00003-0-4711.arrows the process's resource counters while it runs: an IPC stream
    counters-00003-0-4711.arrow  after the job has ended: the same as an IPC file
    nccl-3-4711.ring             events of NCCL in the process (``ddltrace run --nccl``)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PosixPath
from typing import Any, Final

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import PART_PREFIX, Location, Place, matches
from ddltrace.tracer.storage.plain_files import kind_of

RUN_FILE: Final = "run.json"
STREAM_SUFFIX: Final = ".arrows"
FILE_SUFFIX: Final = ".arrow"
SIDECAR_SUFFIX: Final = ".json"
COUNTERS_PREFIX: Final = "counters-"
RING_PATTERN: Final = "nccl-*.ring"
"""Names of the files in which NCCL's profiler plugin records."""

_READ_PREFIXES: Final = ("rank-", COUNTERS_PREFIX, PART_PREFIX, "nccl-")
SEGMENT_NAME: Final = r"\Arank-\d{5,9}-\d+-\d+\Z"
"""The form of `segment_name`, which cannot refer to another directory."""


def segment_name(*, rank: int, attempt: int, pid: int) -> str:
    """Base name of one rank process's files."""
    return f"rank-{rank:05d}-{attempt}-{pid}"


def event_path(directory: Place, segment: str) -> Place:
    """Where the events of one rank process are: its final file, else its stream."""
    if not re.match(SEGMENT_NAME, segment):
        raise TraceError(f"{segment!r:.80} is not a name of a rank's files")
    return _stored(directory, segment)


def counters_name(segment: str) -> str:
    """Base name of a rank process's counter file."""
    if not re.match(SEGMENT_NAME, segment):
        raise TraceError(f"{segment!r:.80} is not a name of a rank's files")
    return COUNTERS_PREFIX + segment.removeprefix("rank-")


def counters_path(directory: Place, segment: str) -> Place:
    """Where the counters of one rank process are: the final file, else the stream."""
    return _stored(directory, counters_name(segment))


def counter_files(directory: Location) -> set[str]:
    """Base names of all counter files in a trace and its parts, from one listing."""
    return {
        path.name.removesuffix(path.suffix)
        for folder in (directory, *_part_folders(directory))
        for path in folder.glob(f"{COUNTERS_PREFIX}*")
    }


def _stored(directory: Place, stem: str) -> Place:
    """The final file with a base name, else the stream, in the trace or one of its parts."""
    # The parts last: for every rank, they are listed as a whole.
    for suffix in (FILE_SUFFIX, STREAM_SUFFIX):
        if (path := directory / (stem + suffix)).exists():
            return path
    parts = _part_folders(directory)
    for suffix in (FILE_SUFFIX, STREAM_SUFFIX):
        for part in parts:
            if (path := part / (stem + suffix)).exists():
                return path
    return directory / (stem + STREAM_SUFFIX)


class JoinedDirectory(PosixPath):
    """A directory of traces that lie elsewhere and are presented as one trace in parts.

    Attributes:
        members: The directories of the parts.
    """

    members: tuple[Path, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Keeps the members in copies."""
        return joined_directory, (Path(self), self.members)


def joined_directory(path: Path, members: Iterable[Path]) -> JoinedDirectory:
    """Returns the directory with its members."""
    made = JoinedDirectory(path)
    made.members = tuple(members)
    return made


def parts_of(directory: Place) -> Sequence[Place]:
    """The traces of the launchers in a trace that several launchers wrote, sorted.

    Links to directories are left out.
    """
    return [path for path in _part_folders(directory) if (path / RUN_FILE).exists()]


def _part_folders(directory: Place) -> Sequence[Place]:
    """The directories of `parts_of`, without asking whether they hold a trace."""
    if isinstance(directory, JoinedDirectory):
        return directory.members
    return [
        path
        for path in matches(directory, f"{PART_PREFIX}*")
        if path.is_dir() and not (isinstance(path, Path) and path.is_symlink())
    ]


def left_out(directory: Location) -> list[str]:
    """A note for each entry of a trace or part that is not a file or directory, so not read."""
    if not isinstance(directory, Path):
        return []
    with os.scandir(directory) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if entry.name.startswith(_READ_PREFIXES)
            and not entry.name.endswith(SIDECAR_SUFFIX)  # `read_sidecars` reports them
            and not entry.is_file(follow_symlinks=False)
            and not entry.is_dir(follow_symlinks=False)
        )
    return [f"{name!r:.80} is left out: it is {kind_of(directory / name)}" for name in names]
