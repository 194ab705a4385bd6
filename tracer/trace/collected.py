"""Gathers the directories that the nodes of one job wrote, from other places, into one trace."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.storage.location import PART_PREFIX, Location
from ddltrace.tracer.storage.plain_files import copy_plain
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import JOB_LABEL, PARTS_LABEL, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_files import RING_PATTERN, RUN_FILE, parts_of
from ddltrace.tracer.trace.trace_parts import check_one_job, check_same_time, merge

if TYPE_CHECKING:
    from ddltrace.tracer.storage.remote_path import RemotePath

_FILES: Final = (RUN_FILE, "rank-*", "counters-*", RING_PATTERN)


@dataclass
class Found:
    """The directories that can be read.

    Attributes:
        directories: Local directories with traces.
        named: How the user named each of them.
        missing: The others, and why each cannot be read.
    """

    directories: list[Path] = field(default_factory=list)
    named: list[Location] = field(default_factory=list)
    missing: dict[Location, TraceError] = field(default_factory=dict)

    def check_one_job(self) -> None:
        """Checks that all directories are of one job.

        Raises:
            UsageError: They are of several jobs, or one is given twice.
        """
        jobs: dict[str, Location] = {}
        for directory, name in zip(self.directories, self.named, strict=True):
            for job in _jobs_of(directory):
                jobs.setdefault(job, name)
        if len(jobs) > 1:
            (first, one), (second, other) = list(jobs.items())[:2]
            raise UsageError(
                f"{one} is of the job {first:.60}, {other} of the job {second:.60}: only "
                "directories of one job can be collected"
            )
        try:
            check_one_job(self.directories)
            check_same_time(self.directories)
        except UsageError as error:
            # The user knows the URLs, not the copies.
            text = str(error)
            for directory, source in zip(self.directories, self.named, strict=True):
                text = text.replace(str(directory), str(source))
            raise UsageError(text) from error


@contextlib.contextmanager
def fetched(sources: Sequence[Location]) -> Iterator[Found]:
    """Makes directories readable on this machine; those in a store are copied for the context.

    Args:
        sources: Trace directories, or directories that hold the traces of several nodes.

    Yields:
        What was found.
    """
    found = Found()
    with tempfile.TemporaryDirectory(prefix="ddltrace-") as name:
        for number, source in enumerate(sources):
            try:
                if isinstance(source, Path):
                    local = source
                else:
                    local = Path(name, f"{number:05d}-{source.name}")
                    _download(source, local)
                read_run(local)
            except TraceError as error:
                found.missing[source] = error
            else:
                found.directories.append(local)
                found.named.append(source)
        yield found


def collect(found: Found, output: Path) -> RunInfo:
    """Gathers the directories into one final trace.

    Args:
        found: The directories, of one job.
        output: An existing directory that holds no trace yet.

    Returns:
        The record of the whole run. A rank without files has a note.

    Raises:
        TraceError: A directory cannot be read any more.
        UsageError: The files cannot be copied.
    """
    run = merge(found.directories, output)
    if found.missing:
        # Their ranks have notes only if the world size says that there are more.
        run.notes += [f"{source} could not be collected" for source in found.missing]
        run.status = "partial"
        write_run(output, run)
    return run


def _download(source: RemotePath, target: Path) -> None:
    """Copies the files of a trace, and of its parts, from a store."""
    target.mkdir()
    try:
        for pattern in _FILES:
            for file in source.glob(pattern):
                copy_plain(file, target / file.name)
        if not target.name.startswith(PART_PREFIX):  # parts have no parts
            for part in parts_of(source):
                _download(part, target / part.name)
    except OSError as error:
        raise TraceError(f"{source} cannot be copied here: {error.strerror or error}") from error


def _jobs_of(directory: Path) -> set[str]:
    """The names that the launchers of a trace have for its job."""
    run = read_run(directory)
    runs = [run]
    if run.labels.get(PARTS_LABEL):
        runs = [read_run(part) for part in parts_of(directory)]
    return {str(run.labels[JOB_LABEL]) for run in runs if JOB_LABEL in run.labels}
