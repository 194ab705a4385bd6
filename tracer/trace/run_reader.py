"""Reads a run while it is recorded, after it ended, and after its launcher died."""

from __future__ import annotations

from typing import Final

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import PART_PREFIX, Location
from ddltrace.tracer.trace.completeness import (
    NOTHING_RECORDED,
    account_for,
    notes_on_lost_events,
    notes_on_missing_ranks,
)
from ddltrace.tracer.trace.liveness import has_died, is_gone
from ddltrace.tracer.trace.run_files import read_run_file, read_sidecars
from ddltrace.tracer.trace.run_info import PARTS_LABEL, GroupInfo, RunInfo, share_groups
from ddltrace.tracer.trace.trace_files import RUN_FILE, left_out, parts_of

LAUNCHER_GONE: Final = "the launcher was killed or could not write: it is unknown how the job ended"


def read_run(directory: Location) -> RunInfo:
    """Reads the record of a run, also while it runs or after its launcher died.

    Args:
        directory: The trace directory.

    Returns:
        The run; rank processes that are not in ``run.json`` yet are added from their own
        files.

    Raises:
        TraceError: The directory holds no trace that this version can read.
    """
    run = read_run_file(directory)
    not_read = [note for note in left_out(directory) if note not in run.notes]
    run.notes += not_read
    known_segments = {info.segment for info in run.ranks}
    for info in read_sidecars(directory, run.notes):
        if info.segment not in known_segments:
            run.ranks.append(info)
    if run.labels.get(PARTS_LABEL):
        if directory.name.startswith(PART_PREFIX):
            raise TraceError(f"{directory / RUN_FILE} is damaged: a part in parts")
        _add_parts(directory, run)
    elif run.status == "running":
        _account_without_launcher(directory, run)
    else:
        lost = [] if run.ranks else [NOTHING_RECORDED]
        lost += notes_on_lost_events(directory, run)
        lost = [note for note in lost if note not in run.notes]
        run.notes += lost
        run.status = "partial" if lost or not_read else run.status
    run.ranks.sort(key=lambda info: (info.rank, info.attempt, info.pid or 0))
    return run


def _add_parts(directory: Location, run: RunInfo) -> None:
    """Adds the parts of a trace, one directory per launcher of the job."""
    parts = []
    groups: dict[GroupInfo, GroupInfo] = {}
    for path in parts_of(directory):
        parts.append(read_run(path))
        for info in parts[-1].ranks:
            share_groups(info, groups)
    if not parts:
        return
    known: set[str] = set()
    is_partial = bool(run.notes) or any(part.status == "partial" for part in parts)
    for part in parts:
        run.ranks += [info for info in part.ranks if info.segment not in known]
        known |= {info.segment for info in part.ranks}
        run.notes += [note for note in part.notes if note not in run.notes]
    first = parts[0]
    run.command, run.level, run.version, run.source = (
        first.command,
        first.level,
        first.version,
        first.source,
    )
    run.created_unix_ns = min((p.created_unix_ns for p in parts if p.created_unix_ns), default=None)
    last = max(parts, key=lambda part: part.ended_unix_ns or 0)
    run.ended_unix_ns, run.host = last.ended_unix_ns, last.host
    run.exit_status = next((p.exit_status for p in parts if p.exit_status), first.exit_status)
    if any(part.status == "running" for part in parts):
        run.status = "running"
        return
    missing = notes_on_missing_ranks(run)
    run.notes += missing
    run.status = "partial" if is_partial or missing else "complete"


def _account_without_launcher(directory: Location, run: RunInfo) -> None:
    """Completes the record of a run whose launcher has ended, or that never had one."""
    for info in run.ranks:
        if info.status == "running" and has_died(directory, info):
            info.end()
    any_running = any(info.status == "running" for info in run.ranks)
    launcher_gone = run.launcher_pid is not None and is_gone(run.launcher_pid, run)
    if launcher_gone:
        run.notes.append(LAUNCHER_GONE)
    if not any_running and (run.ranks or launcher_gone or run.ended_unix_ns is not None):
        account_for(directory, run)
