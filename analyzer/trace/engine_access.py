"""Puts the analysis of a trace on an engine, after a check that its workers can read the files."""

from __future__ import annotations

import hashlib

from ddltrace.analyzer.engine.engine import Engine
from ddltrace.analyzer.trace.opened_trace import Trace
from ddltrace.tracer.errors import EngineError, StoreError
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.trace_files import RUN_FILE


def use_engine(trace: Trace, engine: Engine) -> None:
    """Executes the tasks of a trace's analysis on an engine.

    Raises:
        EngineError: A worker does not see the files of the trace.
    """
    if trace.is_stored:
        path = trace.path.absolute()
        own = _digest(path)
        for worker, seen in engine.on_each_worker(_digest, path).items():
            if seen != own:
                problem = "does not see" if not seen else "sees other files in"
                raise EngineError(
                    f"Dask worker {worker} {problem} {path}: put the trace on a filesystem that "
                    "all workers mount at the same path"
                )
    trace.engine = engine


def _digest(path: Location) -> str:
    """A digest of the metadata of a trace; empty if they cannot be read."""
    try:
        return hashlib.sha256((path / RUN_FILE).read_bytes()).hexdigest()
    except (OSError, StoreError):
        return ""
