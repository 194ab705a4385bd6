"""Writes an imported trace as a trace directory."""

from __future__ import annotations

import time
from pathlib import Path

from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.tracer.launch.launcher import prepare_directory
from ddltrace.tracer.trace.event_file import write_events
from ddltrace.tracer.trace.run_files import write_run


def save(trace: ImportedTrace, directory: Path, *, force: bool) -> None:
    """Writes an imported trace.

    Args:
        directory: The directory to create.
        force: Whether an existing trace may be replaced.

    Raises:
        UsageError: The directory exists and must not be replaced.
    """
    from importlib.metadata import version

    prepare_directory(directory, force=force)
    for info in trace.run.ranks:
        batches = iter(trace.tables[info.segment].to_batches())
        info.events, info.checksum = write_events(directory, info.segment, batches)
    trace.run.version = version("ddltrace")
    trace.run.created_unix_ns = trace.run.created_unix_ns or time.time_ns()
    write_run(directory, trace.run)
