"""Finalizes a trace after the job: converts streams to event files and completes ``run.json``."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from ddltrace.tracer.connections.requests import remove_socket
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.trace.completeness import account_for, listed
from ddltrace.tracer.trace.counters import COUNTERS
from ddltrace.tracer.trace.event_file import checksum_of, write_batches, write_events
from ddltrace.tracer.trace.event_reader import ArrowReader, EventReader
from ddltrace.tracer.trace.json_files import release_space
from ddltrace.tracer.trace.liveness import is_gone, is_running, processes_of
from ddltrace.tracer.trace.run_files import read_run_file, read_sidecars, write_run
from ddltrace.tracer.trace.run_info import PARTS_LABEL, RankInfo, RunInfo
from ddltrace.tracer.trace.run_reader import LAUNCHER_GONE
from ddltrace.tracer.trace.trace_files import (
    FILE_SUFFIX,
    RUN_FILE,
    SIDECAR_SUFFIX,
    STREAM_SUFFIX,
    counters_name,
    parts_of,
)

_MOST_AT_ONCE: Final = 4
_SURELY_OVER_S: Final = 2.0


def finalize(
    directory: Path, run: RunInfo, ends: Mapping[str, tuple[int, int | None]] | None = None
) -> RunInfo:
    """Finalizes the files of all ranks and writes ``run.json``.

    Args:
        directory: The trace directory.
        run: The launcher's record; its `ranks` are replaced by the ranks' own records.
        ends: Time and status of the end of each observed process, by segment.

    Returns:
        The run as written. If the command ended before its ranks, this is the current state; later
        readers see how the ranks ended.
    """
    run.ranks = read_sidecars(directory, run.notes)
    run.ranks.sort(key=lambda info: (info.rank, info.attempt, info.pid or 0))
    for info in run.ranks:
        if ends and info.segment in ends:
            info.ended_ns, info.exit_status = ends[info.segment]
    left = _after_grace(partial(_still_recording, directory, run))
    others = [] if run.ranks else _after_grace(partial(processes_of, directory))
    if left or others:
        # The job is not observed any more, so its end will not be known.
        write_run(directory, replace(run, ranks=[], launcher_pid=None, ended_unix_ns=None))
        release_space(directory / RUN_FILE)
        who = (
            f"rank {listed(left)} still runs and is recorded"
            if left
            else f"process {listed(others)} still runs and is recorded if it joins a process group"
        )
        run.notes.append(
            f"the command ended, but {who}: what there is of the trace can be read at any time"
        )
        return run
    finalize_ranks(directory, run)
    # run.json now contains the sidecars, and two copies could differ.
    for info in run.ranks:
        with contextlib.suppress(OSError):
            (directory / (info.segment + SIDECAR_SUFFIX)).unlink(missing_ok=True)
    return run


def finalize_abandoned(directory: Path) -> None:
    """Finalizes a trace, or its parts, whose launcher was killed on this host.

    Raises:
        UsageError: A launcher or a rank of the job still runs.
        TraceError: The directory is not a trace.
    """
    for folder in (directory, *parts_of(directory)):
        run = read_run_file(folder)
        if run.status != "running" or run.labels.get(PARTS_LABEL) or run.launcher_pid is None:
            continue
        if not is_gone(run.launcher_pid, run):
            if run.host == os.uname().nodename:
                raise UsageError(f"{folder} belongs to a job that still runs")
            continue
        run.notes.append(LAUNCHER_GONE)
        if finalize(folder, run).status == "running":
            raise UsageError(f"{folder}: {run.notes[-1]}; upload it when they have ended")


def finalize_ranks(directory: Path, run: RunInfo) -> RunInfo:
    """Writes the final files of a run's ranks, and ``run.json``."""
    for info in run.ranks:
        release_space(directory / (info.segment + SIDECAR_SUFFIX))
    with ThreadPoolExecutor(_ranks_at_once(directory, run)) as pool:
        for _ in pool.map(partial(finalize_rank, directory), run.ranks):
            pass
    account_for(directory, run)
    write_run(directory, run)
    release_space(directory / RUN_FILE)
    return run


def finalize_rank(directory: Path, info: RankInfo) -> None:
    """Turns one rank's stream into a final file with a checksum, and counts the lost bytes.

    A rank that has a final file without a checksum, from an older version, gets the checksum.
    Damage raises no error: a stream that cannot be converted stays a stream, which readers accept.
    """
    stream = directory / (info.segment + STREAM_SUFFIX)
    info.end()
    if info.control and info.pid is not None and is_gone(info.pid, info):
        remove_socket(info.control, info.pid)  # it was killed
    info.control = ""
    _finalize_counters(directory, info)
    if not stream.exists():
        if info.checksum is None:
            # `account_for` adds a note if there is no final file either.
            with contextlib.suppress(OSError):
                info.checksum = checksum_of(directory / (info.segment + FILE_SUFFIX))
        return
    reader = EventReader(directory, info.segment)
    try:
        info.events, info.checksum = write_events(directory, info.segment, iter(reader))
    except (TraceError, pa.ArrowException, OSError) as error:
        info.errors.append(f"the stream could not be finalized: {error!r:.200}")
        return
    info.lost_bytes = reader.lost_bytes
    if reader.lost_bytes == 0:
        stream.unlink()
    else:
        # Kept under a name that no reader opens, for manual recovery.
        stream.replace(stream.with_suffix(".damaged"))


def _finalize_counters(directory: Path, info: RankInfo) -> None:
    """Turns one rank's stream of counters into a final file; damage is noted, not raised."""
    stream = directory / (counters_name(info.segment) + STREAM_SUFFIX)
    if not stream.exists():
        return
    reader = ArrowReader(stream, COUNTERS)
    try:
        info.counters, info.counters_checksum = write_batches(
            stream.with_suffix(FILE_SUFFIX), COUNTERS, iter(reader)
        )
    except (TraceError, pa.ArrowException, OSError) as error:
        info.errors.append(f"the counters could not be finalized: {error!r:.200}")
        return
    if reader.lost_bytes:
        lost = counted(reader.lost_bytes, "byte", "is")
        info.errors.append(f"of the counters, the last {lost} unreadable")
    stream.unlink()


def _still_recording(directory: Path, run: RunInfo) -> list[int]:
    """Ranks that still run although the command has ended."""
    return sorted(
        {
            info.rank
            for info in run.ranks
            if info.status == "running" and is_running(directory, info)
        }
    )


def _after_grace(find: Callable[[], list[int]]) -> list[int]:
    """What is still found when processes that are ending have ended."""
    deadline = time.monotonic() + _SURELY_OVER_S
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _ranks_at_once(directory: Path, run: RunInfo) -> int:
    """Number of streams to finalize at once: one per core, or one if the disk has little free
    space."""
    most, sizes = min(os.cpu_count() or 1, _MOST_AT_ONCE), []
    for info in run.ranks:
        with contextlib.suppress(OSError):
            sizes.append((directory / (info.segment + STREAM_SUFFIX)).stat().st_size)
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return 1
    # A final file is smaller than its stream.
    return most if free > sum(sorted(sizes)[-most:]) else 1
