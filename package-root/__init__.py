"""ddltrace: see where a distributed PyTorch job spends its time.

The packages below (tracer, analyzer, experiments, dashboard) load on first use, so that
``import ddltrace`` in a training script costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from os import PathLike

    from ddltrace.analyzer.open_trace import Trace

__version__ = "0.1.0"
__all__ = ["__version__", "annotate", "open"]


def open(path: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Trace:
    """Opens a trace.

    Args:
        path: A directory written by ``ddltrace run``, or an importable file or folder; on this
            machine, or the URL of one in a store. A list of several of this machine is opened as
            one job, as ``ddltrace analyze`` does.

    Returns:
        The trace, with aligned clocks. Its events load on demand.

    Raises:
        ddltrace.tracer.errors.TraceError: The trace is missing, corrupt, or has an unsupported
            schema version.
        ddltrace.tracer.errors.UsageError: Several paths are not of one job, or lie in a store; a
            URL has credentials or unknown parameters.
        TypeError: `path` is neither a path nor a list of paths.
    """
    from os import PathLike

    from ddltrace.analyzer.open_trace import open_trace, open_until_exit

    if isinstance(path, str | PathLike):
        return open_trace(path)
    return open_until_exit(path)


def annotate(name: str) -> AbstractContextManager[None]:
    """Marks a region of the training script; costs nothing when the job is not traced.

    Args:
        name: The region's label in the timeline.

    Returns:
        A context manager that encloses the region.
    """
    from ddltrace.tracer.annotate import annotate as annotate_in_job

    return annotate_in_job(name)
