"""Checks that the workers of an engine see a file as this process does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from ddltrace.analyzer.engine.engine import Engine
from ddltrace.tracer.errors import DdltraceError, EngineError
from ddltrace.tracer.storage.location import Location

_HEAD_BYTES: Final = 1 << 20


def check_shared(engine: Engine, file: Location) -> None:
    """Checks a file that is typical of those that the tasks will read.

    Raises:
        EngineError: A worker does not see the file, or sees another one.
    """
    own = _digest(file.absolute())
    for worker, seen in engine.on_each_worker(_digest, file.absolute()).items():
        if seen != own:
            problem = "does not see" if not seen else "sees another file at"
            remedy = (
                "put the files on a filesystem that all workers mount at the same path"
                if isinstance(file, Path)
                else "start the workers with the store's endpoint and credentials"
            )
            raise EngineError(f"Dask worker {worker} {problem} {file.absolute()}: {remedy}")


def _digest(file: Location) -> str:
    """A digest of the beginning of a file; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.sha256(opened.read(_HEAD_BYTES)).hexdigest()
    except (OSError, DdltraceError):
        return ""
