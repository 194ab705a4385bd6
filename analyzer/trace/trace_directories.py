"""Opens several directories of one job, or several files of its ranks, as one trace."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ddltrace.analyzer.engine.engine import Engine
from ddltrace.analyzer.trace.opened_trace import Trace, open_files, open_trace
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.storage.location import Location, location_of
from ddltrace.tracer.trace.trace_files import RUN_FILE
from ddltrace.tracer.trace.trace_parts import check_same_time, joined


@contextlib.contextmanager
def open_as_one(paths: Sequence[Location], engine: Engine | None = None) -> Iterator[Trace]:
    """Opens one trace, or several directories or files of one job as one, without copying.

    Args:
        paths: One of anything that `open_trace` takes, or several directories written by
            ``ddltrace run``, or several importable files or folders.
        engine: See `open_trace`.

    Yields:
        The trace, to be read before the end of the context.

    Raises:
        UsageError: They are not of one job.
        TraceError: One of them cannot be read.
    """
    if len(paths) == 1:
        yield open_trace(paths[0], engine)
        return
    local = [path for path in paths if isinstance(path, Path)]
    if len(local) < len(paths):
        raise UsageError(
            "only directories of this machine can be analyzed as one: gather these into one "
            f"trace with: {collect_command(paths)}"
        )
    for path in local:
        if not path.exists():
            raise TraceError(f"{path} does not exist")
    imported = [path for path in local if _is_imported(path)]
    if len(imported) == len(local):
        yield open_files(local, engine)
        return
    if imported:
        raise UsageError(
            f"{imported[0]} is not a trace of ddltrace run, as others are: they cannot be analyzed "
            "as one"
        )
    check_same_time(local)
    with joined(local) as whole:
        yield open_trace(whole, engine)


_OPENED: Final = contextlib.ExitStack()
"""What `open_until_exit` has opened."""
atexit.register(_OPENED.close)


def open_until_exit(paths: Sequence[str | os.PathLike[str]]) -> Trace:
    """As `open_as_one`, for a trace that may be read until the interpreter exits.

    Raises:
        TypeError: An argument is not a path, or `paths` no list.
        UsageError: See `open_as_one`; or there are no paths.
        TraceError: See `open_as_one`.
    """
    if not isinstance(paths, Sequence) or not all(
        isinstance(path, str | os.PathLike) for path in paths
    ):
        raise TypeError(f"a trace is opened by a path or a list of paths, not by {paths!r:.80}")
    if not paths:
        raise UsageError("the list of paths is empty: give at least one")
    return _OPENED.enter_context(open_as_one([location_of(path) for path in paths]))


def _is_imported(path: Path) -> bool:
    """Whether a path is a file, or a folder of files, of a format that can be imported."""
    from ddltrace.analyzer.importers import formats

    return not (path / RUN_FILE).is_file() and formats.recognizes(path)


def collect_command(paths: Sequence[Location]) -> str:
    """Returns the command that gathers several directories of one job into one trace."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    return f"ddltrace collect {named} -o whole"


def dashboard_command(paths: Sequence[Location]) -> str:
    """Returns the command that shows the trace in the browser; merges several directories."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    if len(paths) == 1:
        return f"ddltrace dashboard {named}"
    gather = "merge" if all((path / RUN_FILE).is_file() for path in paths) else "import"
    return f"ddltrace {gather} {named} -o whole && ddltrace dashboard whole"
