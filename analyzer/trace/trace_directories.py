"""Opens several directories of one job, one per node's ``ddltrace run``, as one trace."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from ddltrace.analyzer.trace.opened_trace import Trace, open_trace
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_parts import joined

_CLOCKS_DIFFER_S: Final = 60
"""Wall clocks of hosts may differ by so much; launchers of one job run at the same time."""


@contextlib.contextmanager
def open_as_one(paths: Sequence[Location]) -> Iterator[Trace]:
    """Opens one trace, or several directories of one job as one, without copying.

    Args:
        paths: One of anything that `open_trace` takes, or several directories written by
            ``ddltrace run``.

    Yields:
        The trace, to be read before the end of the context.

    Raises:
        UsageError: They are not of one job.
        TraceError: One of them cannot be read.
    """
    if len(paths) == 1:
        yield open_trace(paths[0])
        return
    local = [path for path in paths if isinstance(path, Path)]
    if len(local) < len(paths):
        raise UsageError(
            "only directories of this machine can be analyzed as one: gather these into one "
            f"trace with: {collect_command(paths)}"
        )
    _check_same_time(local)
    with joined(local) as whole:
        yield open_trace(whole)


def collect_command(paths: Sequence[Location]) -> str:
    """Returns the command that gathers several directories of one job into one trace."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    return f"ddltrace collect {named} -o whole"


def dashboard_command(paths: Sequence[Location]) -> str:
    """Returns the command that shows the trace in the browser; merges several directories."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    if len(paths) == 1:
        return f"ddltrace dashboard {named}"
    return f"{collect_command(paths)} && ddltrace dashboard whole"


def _check_same_time(paths: Sequence[Path]) -> None:
    """Raises if a directory's job had ended long before another's began."""
    times = []
    for path in paths:
        run = read_run(path)
        if run.created_unix_ns is not None:
            times.append((run.created_unix_ns, run.ended_unix_ns, path))
    for (_, ended, first), (began, _, second) in pairwise(sorted(times, key=lambda one: one[0])):
        if ended is not None and began - ended > _CLOCKS_DIFFER_S * 1e9:
            raise UsageError(
                f"{first} ended {(began - ended) / 1e9:.0f} s before {second} began: only "
                "directories of one job can be analyzed as one (if just their clocks differ, "
                "use ddltrace merge)"
            )
