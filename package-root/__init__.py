"""ddltrace: see where a distributed PyTorch job spends its time.

This package is the face only; the rooms behind it load when they are used, so that
``import ddltrace`` inside a training job costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from os import PathLike

    from ddltrace.analyzer.trace.opened_trace import Trace

__version__ = "0.1.0"
__all__ = ["__version__", "annotate", "open"]


def open(path: str | PathLike[str]) -> Trace:
    """Opens a trace directory, or a file or folder of a format that can be imported.

    Args:
        path: A directory written by ``ddltrace run``, or an importable file or folder.

    Returns:
        The trace, its clocks aligned; events load when asked for.

    Raises:
        ddltrace.tracer.errors.TraceError: The trace is missing, corrupt, or of another
            schema version.
    """
    from ddltrace.analyzer.trace.opened_trace import open_trace

    return open_trace(path)


def annotate(name: str) -> AbstractContextManager[None]:
    """Marks a region of the job in its trace; free when the job is not traced.

    Args:
        name: What the timeline shows for the region.

    Returns:
        A context manager to wrap the region in.
    """
    from ddltrace.tracer.annotate import annotate as annotate_in_job

    return annotate_in_job(name)
