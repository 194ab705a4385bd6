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
__all__ = ["__version__", "annotate", "arm", "open"]


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


def arm(directory: str | PathLike[str] | None = None, *, level: str = "layer") -> bool:
    """Lets ``ddltrace on DIRECTORY`` record this process; until then, nothing is recorded.

    Call it in every rank of a job that is not started by ``ddltrace run``, best before
    ``torch.distributed.init_process_group``; messages sent before the call are never recorded.

    Args:
        directory: The trace directory, the same for all ranks of a host; created if it is
            missing. By default the value of the environment variable ``DDLTRACE_OUTPUT``.
        level: ``comm`` or ``layer``: the level of detail if ``ddltrace on`` names none.

    Returns:
        Whether the process can be recorded; False if no directory is given.

    Raises:
        ddltrace.tracer.errors.UsageError: The level does not exist, or the directory holds
            other files.
    """
    from ddltrace.tracer import install

    return install(directory, level=level, off=True)


def annotate(name: str) -> AbstractContextManager[None]:
    """Marks a region of the training script; costs nothing when the job is not traced.

    Args:
        name: The region's label in the timeline.

    Returns:
        A context manager that encloses the region.
    """
    from ddltrace.tracer.annotate import annotate as annotate_in_job

    return annotate_in_job(name)
