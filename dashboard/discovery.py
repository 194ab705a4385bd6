"""Finds the traces and experiments in the paths that a dashboard is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ddltrace.experiments.harness.file_names import RESULTS_FILE
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import Location, location_of
from ddltrace.tracer.trace.trace_files import RUN_FILE

_MAX_DEPTH: Final = 3
_MAX_FOUND: Final = 200


@dataclass
class Found:
    """The contents of a dashboard.

    Attributes:
        traces: Traces, or files and folders of a format that can be imported; also in a store.
        experiments: Directories of experiments.
    """

    traces: list[Location] = field(default_factory=list)
    experiments: list[Path] = field(default_factory=list)


def discover(paths: Sequence[str]) -> Found:
    """Sorts paths into traces and experiments; folders of these are searched.

    A folder that is neither, and has no trace or experiment below it, counts as a trace, which may
    be of an importable format. A URL names one trace.

    Raises:
        TraceError: A path does not exist.
    """
    found = Found()
    for path in map(location_of, paths):
        if not isinstance(path, Path):
            found.traces.append(path)
            continue
        if not path.exists():
            raise TraceError(f"{path} does not exist")
        before = len(found.traces) + len(found.experiments)
        _search(path, found, _MAX_DEPTH)
        if len(found.traces) + len(found.experiments) == before:
            found.traces.append(path)
    return found


def _search(path: Path, found: Found, depth: int) -> None:
    """Adds the contents of a folder; the traces of an experiment belong to the experiment."""
    if len(found.traces) + len(found.experiments) >= _MAX_FOUND or not path.is_dir():
        return
    if (path / RESULTS_FILE).is_file():
        found.experiments.append(path)
    elif (path / RUN_FILE).is_file():
        found.traces.append(path)
    elif depth:
        for child in sorted(path.iterdir()):
            # A link could lead out of the folder or form a cycle.
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                _search(child, found, depth - 1)
